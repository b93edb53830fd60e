"""Where a model is cut, what its tail is, and what is read there."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fedup.errors import CutError, DataError
from fedup.models.cut import find_cut, logits_of, tail_of
from fedup.models.features import FEATURE_BATCH, FeatureReader
from fedup.tasks.models import build_model

IMAGES = (1, 28, 28)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Net(nn.Module):
    """A body, what its forward does before the head, and what it does after it."""

    def __init__(self, body, before=lambda h: h, after=lambda logits: logits):
        super().__init__()
        self.body, self.before, self.after = body, before, after
        self.head = nn.LazyLinear(3)

    def forward(self, x):
        return self.after(self.head(self.before(self.body(x))))


def _net(body, before=lambda h: h, after=lambda logits: logits, shape=(8,)):
    torch.manual_seed(0)
    net = Net(body, before, after)
    net(torch.zeros(2, *shape))  # the lazy head takes its width
    return net


def _read(model, cut, x, **options):
    return FeatureReader(model, cut).read(x, torch.arange(len(x)), **options)


def _lenet():
    torch.manual_seed(0)
    return build_model("lenet5", IMAGES, 10).eval()


def test_the_default_cut_is_the_last_linear_layer():
    assert find_cut(_lenet()) == "head"
    assert find_cut(build_model("resnet18", (3, 32, 32), 10)) == "head"
    assert find_cut(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.ReLU())) == "1.1"


def test_a_named_cut_is_taken_and_an_unknown_one_refused():
    assert find_cut(_lenet(), "pool2") == "pool2"
    with pytest.raises(CutError, match=r"no module 'fc9'.*fc1"):
        find_cut(_lenet(), "fc9")


def test_a_model_without_linear_layer_has_no_default_cut():
    with pytest.raises(CutError, match="cut='head'"):
        find_cut(nn.Sequential(nn.Conv2d(1, 4, 28), nn.Flatten()))


@pytest.mark.parametrize("cut", ["relu1", "conv2", "pool2", "flatten", "fc1", "relu3", "fc2", "head"])
def test_the_tail_of_a_sequential_completes_the_model_bit_for_bit(cut):
    model, x, seen = _lenet(), torch.randn(4, *IMAGES), []
    handle = model.get_submodule(cut).register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    expected = model(x)
    handle.remove()
    assert torch.equal(tail_of(model, cut)(seen[0]), expected)
    torch.testing.assert_close(_read(model, cut, x).values, seen[0].flatten(1))


def test_a_model_may_bring_a_tail_of_its_own():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.tail(x, cut="first")

        def tail(self, features, cut):
            return self.second(self.first(features).relu() if cut == "first" else features)

    x = torch.randn(4, 8)
    assert torch.equal(_read(Own(), "first", x).values, x)
    assert _read(Own(), "second", x).values.shape == (4, 6)


def test_log_softmax_after_the_head_is_accepted():
    net, x = _net(nn.Linear(8, 6), after=lambda logits: logits.log_softmax(1)), torch.randn(4, 8)
    torch.testing.assert_close(_read(net, "head", x).values, net.body(x))


@pytest.mark.parametrize(
    "after",
    [lambda logits: logits.relu(), lambda logits: logits * 2, lambda logits: logits.softmax(1), lambda logits: -logits],
    ids=["relu", "scaled", "softmax", "negated"],
)
def test_a_head_that_is_followed_by_more_is_refused(after):
    with pytest.raises(CutError, match="more than that module"):
        _read(_net(nn.Linear(8, 6), after=after), "head", torch.randn(4, 8))


def test_a_module_followed_by_other_layers_is_refused():
    nested = nn.Sequential(nn.Sequential(nn.Linear(8, 6), nn.ReLU()), nn.Linear(6, 3))
    with pytest.raises(CutError, match="more than that module"):
        _read(nested, "0.0", torch.randn(4, 8))


def test_a_last_linear_layer_that_is_not_the_head_is_refused():
    class HeadFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.hidden = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.head(self.hidden(x).relu())

    model = HeadFirst()
    with pytest.raises(CutError, match="more than that module"):
        _read(model, find_cut(model), torch.randn(4, 8))


@pytest.mark.parametrize("times", [0, 2])
def test_a_module_that_does_not_run_exactly_once_is_refused(times):
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            for _ in range(times):
                x = self.last(x)
            return x

    with pytest.raises(CutError, match=f"ran {times} times"):
        _read(Repeated(), "last", torch.randn(4, 8))


def test_logits_are_found_in_transformers_outputs_and_nothing_else():
    logits = torch.zeros(2, 3)
    assert logits_of(SimpleNamespace(logits=logits)) is logits
    with pytest.raises(CutError, match="tensor of logits"):
        logits_of((logits,))


@pytest.mark.parametrize(
    ("body", "before"),
    [
        (nn.Linear(8, 6), functional.relu),
        (nn.Sequential(nn.Linear(8, 6), nn.ReLU()), lambda h: h),
        (nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Dropout()), lambda h: h),
        (nn.Linear(8, 6), torch.sigmoid),
        (nn.Linear(8, 6), lambda h: h.relu().unsqueeze(1).transpose(1, 2).flatten(1)),
    ],
    ids=["functional relu", "nn.ReLU", "dropout after relu", "sigmoid", "reshaped"],
)
def test_features_that_cannot_be_negative_are_recognised(body, before):
    assert _read(_net(body, before), "head", torch.randn(4, 8)).nonnegative


@pytest.mark.parametrize("pool", [nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(2)])
def test_pooling_and_flattening_keep_what_relu_guarantees(pool):
    convolved = nn.Conv2d(1, 4, 3)
    with_relu = _net(nn.Sequential(convolved, nn.ReLU(), pool, nn.Flatten()), shape=(1, 8, 8))
    without = _net(nn.Sequential(convolved, pool, nn.Flatten()), shape=(1, 8, 8))
    x = torch.randn(4, 1, 8, 8)
    assert _read(with_relu, "head", x).nonnegative
    assert not _read(without, "head", x).nonnegative


@pytest.mark.parametrize(
    "body",
    [
        nn.Linear(8, 6),
        nn.Sequential(nn.Linear(8, 6), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.LayerNorm(6)),
        nn.Sequential(nn.Linear(8, 6), nn.GELU()),
        nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6)),
        nn.Sequential(nn.Linear(8, 6), nn.LogSoftmax(1)),
        nn.Identity(),
    ],
    ids=["linear", "tanh", "layer norm", "gelu", "linear after relu", "log-softmax", "the input itself"],
)
def test_features_that_may_be_negative_are_not_called_nonnegative(body):
    assert not _read(_net(body), "head", torch.randn(4, 8)).nonnegative


def test_values_that_happen_to_be_positive_prove_nothing():
    net = _net(nn.Linear(8, 6))
    with torch.no_grad():
        for weight in net.body.parameters():
            weight.abs_()
    features = _read(net, "head", torch.rand(20, 8))
    assert features.values.min() > 0
    assert not features.nonnegative


def test_relu_features_that_are_all_zero_are_nonnegative():
    net = _net(nn.Sequential(nn.Linear(8, 6), nn.ReLU()))
    nn.init.constant_(net.body[0].bias, -1e6)
    features = _read(net, "head", torch.randn(4, 8))
    assert features.values.max() == 0
    assert features.nonnegative


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_sign_is_recognised_whatever_gradient_mode_the_caller_is_in(mode):
    net, x = _net(nn.Sequential(nn.Linear(8, 6), nn.ReLU())).requires_grad_(False), torch.randn(4, 8)
    with mode():
        assert _read(net, "head", x).nonnegative


@pytest.mark.parametrize("batch_size", [3, 256])
def test_rows_that_are_not_wanted_are_never_read(batch_size):
    net, x = _net(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU())), torch.randn(10, 8)
    wanted = torch.tensor([False] * 4 + [True, False] * 3)
    whole = _read(net, "head", x, batch_size=batch_size).values
    x[~wanted] = torch.nan
    some = _read(net, "head", x, wanted=wanted, batch_size=batch_size).values
    assert torch.equal(some, whole[wanted])


def test_when_no_row_is_wanted_no_row_of_the_right_width_comes_back():
    net = _net(nn.Sequential(nn.Linear(8, 6), nn.ReLU()))
    features = _read(net, "head", torch.full((5, 8), torch.nan), wanted=torch.zeros(5, dtype=torch.bool))
    assert features.values.shape == (0, 6)
    assert features.nonnegative


def test_a_row_with_nan_features_is_named():
    x = torch.randn(10, 8)
    x[7, 2] = torch.nan
    with pytest.raises(DataError, match=r"1 of 10 rows.*row 7"):
        _read(_net(nn.Linear(8, 6)), "head", x)
    with pytest.raises(DataError, match=r"1 of 4 rows.*row 7"):
        _read(_net(nn.Linear(8, 6)), "head", x, wanted=torch.arange(10) > 5)


# --- one reader, up to the cut and no further


class Calls(nn.Module):
    """Counts the passes and the rows that come by."""

    def __init__(self):
        super().__init__()
        self.seen = {"passes": 0, "rows": 0}

    def __deepcopy__(self, memo):  # a view's counts are ours
        return self

    def forward(self, x):
        self.seen["passes"] += 1
        self.seen["rows"] += len(x)
        return x


def _hooked(model, cut, x, rows, batch_size=FEATURE_BATCH):
    """What a plain forward hook sees, over the same batches."""
    seen = []
    handle = model.get_submodule(cut).register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with torch.no_grad():
        for batch in rows.split(batch_size):
            model(x[batch])
    handle.remove()
    return torch.cat(seen).flatten(1)


@pytest.mark.parametrize("cut", ["conv1", "pool2", "fc1", "relu3", "head"])
@pytest.mark.parametrize("count", [1, 255, 256, 257, 600])
def test_features_have_the_bits_that_a_plain_hook_sees(cut, count):
    model, x, rows = _lenet(), torch.randn(300, *IMAGES), torch.randint(300, (count,))
    assert torch.equal(FeatureReader(model, cut).read(x, rows).values, _hooked(model, cut, x, rows))


def test_features_of_a_model_in_half_precision_are_its_own_in_single_precision():
    model, x = _net(nn.Sequential(nn.Linear(8, 6), nn.ReLU())).to(torch.bfloat16), torch.randn(10, 8).bfloat16()
    found = _read(model, "head", x).values
    assert found.dtype == torch.float32
    assert torch.equal(found, _hooked(model, "head", x, torch.arange(10)).float())


@pytest.mark.parametrize("behind", ["at the cut", "after it"])
def test_nothing_behind_the_cut_runs_but_for_the_first_look_however_many_rows_there_are(behind):
    before, after = Calls(), Calls()
    at_cut = [nn.Sequential(after, nn.Linear(6, 3))] if behind == "at the cut" else [nn.Linear(6, 3), after]
    model = nn.Sequential(nn.Linear(8, 6), before, *at_cut)
    passes = []
    for count in (1, 100, 1000):
        before.seen.update(rows=0), after.seen.update(passes=0, rows=0)
        _read(model, "2", torch.randn(count, 8), batch_size=64)
        passes.append((after.seen["passes"], after.seen["rows"]))
        assert before.seen["rows"] <= count + 3  # and nothing before it runs twice
    assert passes[0] == passes[1] == passes[2]
    assert passes[0][1] <= 3


def test_a_reader_looks_at_the_model_once_for_all_clients():
    behind = Calls()
    reader = FeatureReader(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3), behind), "1")
    x = torch.randn(50, 8)
    reader.read(x, torch.arange(5))
    looked = dict(behind.seen)
    for rows in torch.arange(50).split(7):
        reader.read(x, rows)
    assert behind.seen == looked


def test_one_reader_for_several_clients_gives_the_bits_of_one_each():
    model, x = _lenet(), torch.randn(60, *IMAGES)
    clients = [torch.arange(7), torch.arange(7, 40), torch.arange(0), torch.arange(40, 60).flip(0)]
    shared = FeatureReader(model, "fc1")
    for rows in [*clients, *reversed(clients)]:
        wanted = rows % 3 != 0
        for each in (None, wanted):
            assert torch.equal(
                shared.read(x, rows, wanted=each).values, FeatureReader(model, "fc1").read(x, rows, wanted=each).values
            )


@pytest.mark.parametrize("first", ["nothing", "something"])
def test_what_is_read_first_does_not_matter_to_what_is_read_next(first):
    net, x = _net(nn.Sequential(nn.Linear(8, 6), nn.ReLU())), torch.randn(10, 8)
    reader = FeatureReader(net, "head")
    reader.read(x, torch.arange(0 if first == "nothing" else 10))
    nothing, some = reader.read(x, torch.arange(0)), reader.read(x, torch.arange(10))
    assert nothing.values.shape == (0, 6)
    assert nothing.nonnegative and some.nonnegative
    assert nothing.shape == some.shape == (6,)
    assert torch.equal(some.values, _hooked(net, "head", x, torch.arange(10)))


def test_features_that_were_read_stay_when_more_is_read():
    net, x = _net(nn.Linear(8, 6)), torch.randn(10, 8)
    reader = FeatureReader(net, "head")
    first = reader.read(x, torch.arange(4)).values
    kept = first.clone()
    reader.read(x, torch.arange(4, 10))
    assert torch.equal(first, kept)


class Careful(nn.Module):
    """Catches what goes wrong in its layers, and answers all the same."""

    def __init__(self, catches):
        super().__init__()
        self.body, self.head, self.catches = nn.Linear(8, 6), nn.Linear(6, 3), catches

    def forward(self, x):
        try:
            return self.head(self.body(x))
        except self.catches:
            return torch.zeros(len(x), 3)


@pytest.mark.parametrize("catches", [Exception, BaseException])
def test_a_model_that_catches_every_exception_is_read_like_others(catches):
    model, x = Careful(catches), torch.randn(300, 8)
    assert torch.equal(_read(model, "head", x).values, _hooked(model, "head", x, torch.arange(300)))


def test_a_model_that_fails_before_the_cut_fails_and_can_be_read_afterwards():
    def picky(h):
        if not h.isfinite().all():
            raise ValueError("not finite")
        return h

    net, x = _net(nn.Linear(8, 6), picky), torch.randn(10, 8)
    x[9] = torch.nan
    reader = FeatureReader(net, "head")
    with pytest.raises(ValueError, match="not finite"):
        reader.read(x, torch.arange(10))
    assert torch.equal(reader.read(x, torch.arange(9)).values, _hooked(net, "head", x, torch.arange(9)))
    assert len(reader.check_tail(x[:3])) == 3  # whole passes are whole again


def test_a_reader_follows_weights_written_in_place_and_leaves_no_hook_behind():
    net, x = _net(nn.Linear(8, 6)), torch.randn(10, 8)
    reader = FeatureReader(net, "head")
    before = reader.read(x, torch.arange(10)).values
    nn.init.normal_(net.body.weight)
    after = reader.read(x, torch.arange(10)).values
    assert not torch.equal(after, before)
    assert torch.equal(after, _hooked(net, "head", x, torch.arange(10)))
    assert not any(module._forward_pre_hooks for module in net.modules())


class Finite(nn.Module):
    """Does not even want to see what is not finite."""

    def forward(self, x):
        assert x.isfinite().all()
        return x


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), max_size=20), st.integers(1, 9), st.randoms(use_true_random=False))
def test_any_rows_and_any_of_them_wanted_give_the_bits_of_whole_batches(wanted, batch_size, random):
    body = nn.Sequential(Finite(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU())
    net, x = _net(body).eval(), torch.randn(30, 8)
    rows = torch.tensor(random.sample(range(30), len(wanted)), dtype=torch.long)
    mask = torch.tensor(wanted, dtype=torch.bool)
    whole = _hooked(net, "head", x, rows, batch_size) if len(rows) else torch.empty(0, 6)
    poisoned = torch.full_like(x, torch.nan)
    poisoned[rows[mask]] = x[rows[mask]]
    some = FeatureReader(net, "head").read(poisoned, rows, wanted=mask, batch_size=batch_size).values
    assert torch.equal(some, whole[mask])
    assert torch.equal(FeatureReader(net, "head").read(x, rows, batch_size=batch_size).values, whole)


class InPieces(nn.Module):
    """Its head runs once for one row and twice for more."""

    def __init__(self, first):
        super().__init__()
        self.body, self.head, self.first = nn.Linear(8, 6), nn.Linear(6, 3), first

    def forward(self, x):
        h = self.body(x)
        if len(h) == 1:
            return self.head(h)
        return torch.cat([self.head(h[: self.first]), self.head(h[self.first :])])


@pytest.mark.parametrize("first", [1, 5])
@pytest.mark.parametrize("all_wanted", [True, False])
def test_a_module_that_runs_more_than_once_for_more_rows_is_refused(first, all_wanted):
    wanted = None if all_wanted else torch.arange(10) > 3
    with pytest.raises(CutError, match="'head'"):
        _read(InPieces(first), "head", torch.randn(10, 8), wanted=wanted)

"""Features at one cut or several: the bits a hook sees, no row read that is not wanted, the model left alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedup import Federation, Forget, MomentConfig, collect, fingerprint
from fedup.errors import CutError, DataError
from fedup.federation import Client
from fedup.models.features import FEATURE_BATCH, FeatureReader
from fedup.tasks.models import build_model
from fedup.tasks.progress import ClientsShown

pytestmark = pytest.mark.usefixtures("seeded")

IMAGES = (1, 28, 28)
CUTS = ["conv2", "pool2", "fc1", "relu3", "head"]


def _lenet():
    return build_model("lenet5", IMAGES, 10).eval()


def _at(model, cuts, x, rows=None, **options):
    """All batches of each cut, one after the other."""
    batches = list(FeatureReader(model, *cuts).batches(x, torch.arange(len(x)) if rows is None else rows, **options))
    return {cut: torch.cat([batch[cut] for batch in batches]) for cut in cuts}


def _read(model, cut, x, **options):
    return FeatureReader(model, cut).read(x, torch.arange(len(x)), **options)


class Net(nn.Module):
    """A body, what its forward does before the head, and a head."""

    def __init__(self, body, before=lambda h: h):
        super().__init__()
        self.body, self.before, self.head = body, before, nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.before(self.body(x)))


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


class Wired(nn.Module):
    """A body and a head; `wire` says how a forward pass uses them."""

    def __init__(self, wire):
        super().__init__()
        self.body, self.head, self.wire = nn.Linear(8, 6), nn.Linear(6, 6), wire

    def forward(self, x):
        return self.wire(self, x)


def _hooked(model, cut, x, rows, batch_size=FEATURE_BATCH):
    """What a plain forward hook sees, over the same batches."""
    seen = []
    handle = model.get_submodule(cut).register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with torch.no_grad():
        for batch in rows.split(batch_size):
            model(x[batch])
    handle.remove()
    return torch.cat(seen).flatten(1)


@pytest.mark.parametrize("count", [1, FEATURE_BATCH + 1])
def test_features_at_several_cuts_and_at_each_alone_have_the_bits_that_a_plain_hook_sees(count):
    model, x, rows = _lenet(), torch.randn(300, *IMAGES), torch.randint(300, (count,))
    found = _at(model, CUTS, x, rows)
    assert list(found) == CUTS
    for cut in CUTS:
        alone, expected = FeatureReader(model, cut).read(x, rows), _hooked(model, cut, x, rows)
        assert found[cut].shape == (count, *alone.shape)
        assert torch.equal(found[cut].flatten(1), expected) and torch.equal(alone.values, expected)


def test_all_cuts_are_read_in_one_pass():
    calls = Calls()
    model = nn.Sequential(calls, nn.Linear(8, 6), nn.Linear(6, 5), nn.Linear(5, 3))
    x, rows = torch.randn(20, 8), torch.randint(20, (17,))
    first = _at(model, ["1", "2", "3"], x, rows, batch_size=5)["1"]
    assert calls.seen == {"passes": 4, "rows": 17} and torch.equal(first, x[rows])


@pytest.mark.parametrize("training", [True, False])
def test_the_model_keeps_its_mode_its_bits_and_gets_no_hook_nor_gradient(training):
    body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout())
    model, x = nn.Sequential(body, nn.Linear(6, 3)).train(training), torch.randn(20, 8, requires_grad=True)
    before = fingerprint(model)
    first, second = _at(model, ["1"], x)["1"], _at(model, ["1"], x)["1"]
    assert torch.equal(first, second), "features are those of eval mode"
    assert not first.requires_grad
    assert fingerprint(model) == before and all(module.training == training for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize(
    "wire",
    [
        lambda net, x: net.head(net.head(net.body(x))),
        lambda net, x: torch.cat([net.head(half) for half in net.body(x).chunk(2)]),
        lambda net, x: net.head(net.body(x)[:1]),
        lambda net, x: net.body(x),
    ],
    ids=["twice", "in pieces", "a part of the batch", "never"],
)
def test_a_module_that_does_not_see_each_batch_once_and_whole_is_refused(wire):
    for read in (lambda x: _at(Wired(wire), ["head"], x), lambda x: _read(Wired(wire), "head", x)):
        with pytest.raises(CutError, match=r"'head'.*once and whole"):
            read(torch.randn(4, 8))


def test_a_module_that_gets_no_tensor_first_is_refused():
    with pytest.raises(CutError, match="'head' gets no tensor"):
        _at(Wired(lambda net, x: net.head(input=net.body(x))), ["head"], torch.randn(4, 8))


def test_features_that_are_not_finite_are_refused_by_cut_and_row():
    for bad in (float("nan"), float("inf")):
        x, net = torch.randn(10, 8), Net(nn.Linear(8, 6))
        x[7, 2] = bad
        with pytest.raises(DataError, match=r"1 of 10 rows.*'head'.*row 7"):
            _at(net, ["head"], x)
        assert len(_at(net, ["head"], x, torch.arange(7))["head"]) == 7
        with pytest.raises(DataError, match=r"1 of 4 rows.*row 7"):
            _read(net, "head", x, wanted=torch.arange(10) > 5)


def test_modules_that_work_in_place_do_not_change_what_was_read():
    model, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), torch.randn(20, 8)
    found = _at(model, ["1", "2"], x)
    torch.testing.assert_close(found["1"], model[0](x))
    assert found["1"].min() < 0, "premise: the module at the cut would have changed it"
    assert torch.equal(found["2"], found["1"].relu())


def test_features_of_a_model_in_half_precision_come_in_single_precision():
    model, x = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)).bfloat16(), torch.randn(10, 8).bfloat16()
    for found in (_at(model, ["1"], x)["1"], _read(model, "1", x).values):
        assert found.dtype == torch.float32 and torch.equal(found, model[0](x).float())


def test_the_callers_autocast_and_gradient_mode_change_no_bit_and_stay():
    model, x = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)), torch.randn(10, 8)
    expected = _at(model, ["1"], x)["1"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(_at(model, ["1"], x)["1"], expected)
        assert torch.is_autocast_enabled("cpu")
    assert all(torch.is_grad_enabled() for _ in FeatureReader(model, "1").batches(x, torch.arange(10), 2))


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
    assert passes[0] == passes[1] == passes[2] and passes[0][1] <= 3


def test_one_reader_for_several_clients_looks_at_the_model_once_and_gives_the_bits_of_one_each():
    behind = Calls()
    model, x = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3), behind), torch.randn(60, 8)
    clients = [torch.arange(7), torch.arange(7, 40), torch.arange(0), torch.arange(40, 60).flip(0)]
    shared = FeatureReader(model, "1")
    kept = shared.read(x, clients[0]).values
    looked, first = dict(behind.seen), kept.clone()
    found = [shared.read(x, rows, wanted=rows % 3 != 0).values for rows in [*clients, *reversed(clients)]]
    assert behind.seen == looked
    assert torch.equal(kept, first)  # what was read stays when more is read
    alone = [FeatureReader(model, "1").read(x, rows, wanted=rows % 3 != 0).values for rows in clients]
    assert all(map(torch.equal, found, [*alone, *reversed(alone)]))


def test_collecting_moments_passes_each_row_through_the_model_once_though_a_finer_grid_is_asked_for():
    before, x = Calls(), torch.rand(400, 8) / 64
    model = nn.Sequential(nn.Linear(8, 6, bias=False), before, nn.ReLU(), nn.Linear(6, 3))
    clients = tuple(Client(i, own, own[:0], own[:0]) for i, own in enumerate(torch.arange(400).chunk(4)))
    federation, usual = Federation(x, torch.arange(400) % 3, clients, 3), MomentConfig()
    store = collect(model, federation, statistics=usual)
    assert store.config.step < usual.step, "premise: all were asked again"
    assert 400 <= before.seen["rows"] <= 400 + 8  # some are looked at to know the model
    assert store.total == collect(model, federation, statistics=store.config).total
    shown = list[tuple[int, int]]()
    contact = ClientsShown(federation, model, lambda _, done, of: shown.append((done, of)), "", moments=True)
    collect(model, contact, statistics=usual, forget=[Forget.clients([2])])
    assert len(shown) > 4 and shown == [(0, 4), *[(1, 3), (2, 3), (3, 3)] * (len(shown) // 3)]


@pytest.mark.parametrize("first", [0, 10])
def test_what_is_read_first_does_not_matter_to_what_is_read_next(first):
    net, x = Net(nn.Sequential(nn.Linear(8, 6), nn.ReLU())), torch.randn(10, 8)
    reader = FeatureReader(net, "head")
    reader.read(x, torch.arange(first))
    nothing, some = reader.read(x, torch.arange(0)), reader.read(x, torch.arange(10))
    assert nothing.values.shape == (0, 6)
    assert nothing.nonnegative and some.nonnegative
    assert nothing.shape == some.shape == (6,)
    assert torch.equal(some.values, _hooked(net, "head", x, torch.arange(10)))


def test_a_reader_follows_weights_written_in_place_and_leaves_no_hook_behind():
    net, x = Net(nn.Linear(8, 6)), torch.randn(10, 8)
    reader = FeatureReader(net, "head")
    before = reader.read(x, torch.arange(10)).values
    nn.init.normal_(net.body.weight)
    after = reader.read(x, torch.arange(10)).values
    assert not torch.equal(after, before) and torch.equal(after, _hooked(net, "head", x, torch.arange(10)))
    assert not any(module._forward_pre_hooks for module in net.modules())


class Finite(nn.Module):
    """Does not even want to see what is not finite."""

    def forward(self, x):
        assert x.isfinite().all()
        return x


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), max_size=20), st.integers(1, 9), st.randoms(use_true_random=False))
def test_any_rows_and_any_of_them_wanted_give_the_bits_of_whole_batches(wanted, batch_size, random):
    body = nn.Sequential(Finite(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU())
    net, x = Net(body).eval(), torch.randn(30, 8)
    rows = torch.tensor(random.sample(range(30), len(wanted)), dtype=torch.long)
    mask = torch.tensor(wanted, dtype=torch.bool)
    whole = _hooked(net, "head", x, rows, batch_size) if len(rows) else torch.empty(0, 6)
    poisoned = torch.full_like(x, torch.nan)
    poisoned[rows[mask]] = x[rows[mask]]
    some = FeatureReader(net, "head").read(poisoned, rows, wanted=mask, batch_size=batch_size).values
    assert torch.equal(some, whole[mask])
    assert torch.equal(FeatureReader(net, "head").read(x, rows, batch_size=batch_size).values, whole)

"""Where a model is cut, what its tail is, and what is read there."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedup.errors import CutError
from fedup.models.cut import find_cut, logits_of, tail_of
from fedup.models.features import FeatureReader
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


def test_the_cut_is_the_module_named_or_the_last_linear_layer():
    assert find_cut(_lenet()) == "head"
    assert find_cut(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.ReLU())) == "1.1"
    assert find_cut(_lenet(), "pool2") == "pool2"
    with pytest.raises(CutError, match=r"no module 'fc9'.*fc1"):
        find_cut(_lenet(), "fc9")
    with pytest.raises(CutError, match="cut='head'"):
        find_cut(nn.Sequential(nn.Conv2d(1, 4, 28), nn.Flatten()))


@pytest.mark.parametrize("cut", ["relu1", "pool2", "fc1", "head"])
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


class HeadFirst(nn.Module):
    """Its last linear layer by name is not the last that runs."""

    def __init__(self):
        super().__init__()
        self.head, self.hidden = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.hidden(x).relu())


def test_a_module_that_is_followed_by_more_is_refused():
    followed = [
        (_net(nn.Linear(8, 6), after=after), "head")
        for after in (torch.relu, lambda logits: logits * 2, lambda logits: logits.softmax(1), torch.neg)
    ]
    nested = nn.Sequential(nn.Sequential(nn.Linear(8, 6), nn.ReLU()), nn.Linear(6, 3))
    for model, cut in (*followed, (nested, "0.0"), (HeadFirst(), find_cut(HeadFirst()))):
        with pytest.raises(CutError, match="more than that module"):
            _read(model, cut, torch.randn(4, 8))


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


def test_features_that_cannot_be_negative_are_recognised_by_operations():
    for body, before in (
        (nn.Linear(8, 6), functional.relu),
        (nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Dropout()), lambda h: h),
        (nn.Linear(8, 6), torch.sigmoid),
        (nn.Linear(8, 6), lambda h: h.relu().unsqueeze(1).transpose(1, 2).flatten(1)),
    ):
        assert _read(_net(body, before), "head", torch.randn(4, 8)).nonnegative
    for layers in (
        [],
        [nn.Tanh()],
        [nn.ReLU(), nn.LayerNorm(6)],
        [nn.GELU()],
        [nn.ReLU(), nn.Linear(6, 6)],
        [nn.LogSoftmax(1)],
    ):
        assert not _read(_net(nn.Sequential(nn.Linear(8, 6), *layers)), "head", torch.randn(4, 8)).nonnegative
    assert not _read(_net(nn.Identity()), "head", torch.rand(4, 8)).nonnegative  # the input itself


@pytest.mark.parametrize("pool", [nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(2)])
def test_pooling_and_flattening_keep_what_relu_guarantees(pool):
    x = torch.randn(4, 1, 8, 8)
    for layers, nonnegative in (([nn.ReLU()], True), ([], False)):
        net = _net(nn.Sequential(nn.Conv2d(1, 4, 3), *layers, pool, nn.Flatten()), shape=(1, 8, 8))
        assert _read(net, "head", x).nonnegative is nonnegative


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

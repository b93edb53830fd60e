"""Features at several cuts in one pass: the same as of one cut at a time, and the model is left alone."""

import pytest
import torch
from torch import nn

from fedup import fingerprint
from fedup.errors import CutError, DataError
from fedup.models.features import FEATURE_BATCH, FeatureReader
from fedup.tasks.models import build_model

IMAGES = (1, 28, 28)
CUTS = ["conv2", "pool2", "fc1", "relu3", "head"]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def _lenet():
    return build_model("lenet5", IMAGES, 10).eval()


def _read(model, cuts, x, rows=None, **options):
    """All batches of each cut, one after the other."""
    batches = list(FeatureReader(model, *cuts).batches(x, torch.arange(len(x)) if rows is None else rows, **options))
    return {cut: torch.cat([batch[cut] for batch in batches]) for cut in cuts}


class Wired(nn.Module):
    """A body and a head; `wire` says how a forward pass uses them."""

    def __init__(self, wire):
        super().__init__()
        self.body, self.head, self.wire = nn.Linear(8, 6), nn.Linear(6, 6), wire

    def forward(self, x):
        return self.wire(self, x)


@pytest.mark.parametrize("count", [1, FEATURE_BATCH, FEATURE_BATCH + 1, 600])
def test_features_at_several_cuts_are_those_of_each_cut_alone(count):
    model, x, rows = _lenet(), torch.randn(300, *IMAGES), torch.randint(300, (count,))
    found = _read(model, CUTS, x, rows)
    assert list(found) == CUTS
    for cut in CUTS:
        alone = FeatureReader(model, cut).read(x, rows)
        assert found[cut].shape == (count, *alone.shape)
        assert torch.equal(found[cut].flatten(1), alone.values)


def test_batches_come_in_the_order_of_the_rows_and_share_them_out():
    model, x, rows = _lenet(), torch.randn(10, *IMAGES), torch.tensor([7, 2, 9, 2, 0])
    batches = list(FeatureReader(model, "conv1").batches(x, rows, batch_size=2))
    assert [len(batch["conv1"]) for batch in batches] == [2, 2, 1]
    assert torch.equal(torch.cat([batch["conv1"] for batch in batches]), x[rows])


def test_all_cuts_are_read_in_one_pass():
    class Calls(nn.Module):
        passes = 0

        def forward(self, x):
            type(self).passes += 1
            return x

    model = nn.Sequential(Calls(), nn.Linear(8, 6), nn.Linear(6, 5), nn.Linear(5, 3))
    _read(model, ["1", "2", "3"], torch.randn(20, 8), batch_size=5)
    assert Calls.passes == 4


@pytest.mark.parametrize("training", [True, False])
def test_the_model_keeps_its_mode_its_bits_and_gets_no_hook_nor_gradient(training):
    body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout())
    model, x = nn.Sequential(body, nn.Linear(6, 3)).train(training), torch.randn(20, 8)
    before = fingerprint(model)
    first, second = _read(model, ["1"], x)["1"], _read(model, ["1"], x)["1"]
    assert torch.equal(first, second), "features are those of eval mode"
    assert not first.requires_grad
    assert fingerprint(model) == before
    assert all(module.training == training for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


def test_the_callers_gradient_mode_is_as_before_between_batches():
    modes = [
        torch.is_grad_enabled()
        for _ in FeatureReader(_lenet(), "head").batches(torch.randn(6, *IMAGES), torch.arange(6), 2)
    ]
    assert modes == [True] * 3


def test_rows_that_are_not_asked_for_are_not_read():
    model, x = _lenet(), torch.randn(10, *IMAGES)
    expected = _read(model, CUTS, x, torch.tensor([1, 3]))
    x[[0, 2, *range(4, 10)]] = torch.nan
    found = _read(model, CUTS, x, torch.tensor([1, 3]))
    assert all(torch.equal(found[cut], expected[cut]) for cut in CUTS)


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
    with pytest.raises(CutError, match=r"'head'.*once and whole"):
        _read(Wired(wire), ["head"], torch.randn(4, 8))


class Second(nn.Module):
    def forward(self, first, x):
        return x


@pytest.mark.parametrize(
    ("cut", "wire"),
    [
        ("head", lambda net, x: net.head(input=net.body(x))),
        ("second", lambda net, x: net.second(None, net.body(x))),
    ],
    ids=["by keyword", "something else first"],
)
def test_a_module_that_gets_no_tensor_first_is_refused(cut, wire):
    net = Wired(wire)
    net.second = Second()
    with pytest.raises(CutError, match=f"{cut!r} gets no tensor"):
        _read(net, [cut], torch.randn(4, 8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_refused_and_the_cut_is_named(bad):
    x = torch.randn(10, 8)
    x[7, 2] = bad
    net = Wired(lambda net, x: net.head(net.body(x)))
    with pytest.raises(DataError, match="'head'"):
        _read(net, ["head"], x)
    assert len(_read(net, ["head"], x, torch.arange(7))["head"]) == 7


@pytest.mark.parametrize("inplace", [False, True])
def test_modules_that_work_in_place_do_not_change_what_was_read(inplace):
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=inplace), nn.Linear(6, 3))
    x = torch.randn(20, 8)
    found = _read(model, ["1", "2"], x)
    torch.testing.assert_close(found["1"], model[0](x))
    assert found["1"].min() < 0, "premise: the module at the cut would have changed it"
    assert torch.equal(found["2"], found["1"].relu())


def test_features_of_a_model_in_half_precision_come_in_single_precision():
    model, x = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)).bfloat16(), torch.randn(10, 8).bfloat16()
    found = _read(model, ["1"], x)["1"]
    assert found.dtype == torch.float32
    assert torch.equal(found, model[0](x).float())


def test_the_callers_autocast_changes_no_bit():
    model, x = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)), torch.randn(10, 8)
    expected = _read(model, ["1"], x)["1"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(_read(model, ["1"], x)["1"], expected)
        assert torch.is_autocast_enabled("cpu")


def test_features_of_rows_that_take_gradients_take_none():
    model, x = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)), torch.randn(10, 8, requires_grad=True)
    assert not _read(model, ["1"], x)["1"].requires_grad

"""Forgotten rows are compared with rows like them anywhere in the federation: what others hold too is not erased."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedup import Federation, FilterConfig, Forget, collect, plug, unlearn
from fedup.clients.in_process import InProcess
from fedup.federation import Client
from fedup.statistics.eraser_statistics import SKETCH_GROUPS, SKETCH_SIZE, shortened
from fedup.statistics.mixture import mixture, robust_mixture
from fedup.unlearning.eraser_builder import LEAST_SIGNAL, EraserBuilder
from fedup.unlearning.report import Report

CLASSES, WIDTH, CUT = 4, 8, "2"
few = settings(max_examples=10, deadline=None)
seeds = st.integers(0, 10**6)
NONE = torch.empty(0, dtype=torch.long)


def _source(seed):
    return torch.Generator().manual_seed(seed)


def _model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, CLASSES)).eval()


MODEL = _model()


def _federation(labels_by_client, seed, shift=0.0, shifted=()):
    """Clients with rows of these labels; some rows may be moved in one channel."""
    y = torch.cat([torch.as_tensor(labels) for labels in labels_by_client])
    x = torch.randn(len(y), WIDTH, generator=_source(seed)) + 3 * torch.eye(WIDTH)[y]
    edges = torch.tensor([len(labels) for labels in labels_by_client]).cumsum(0)[:-1]
    for i in shifted:
        x[i, WIDTH - 1] += shift
    parts = torch.arange(len(y)).tensor_split(edges)
    return Federation(x, y, tuple(Client(i, rows, NONE, NONE) for i, rows in enumerate(parts)), CLASSES)


class Alone(InProcess):
    """Only one client can be asked: what an eraser was made of before."""

    @property
    def clients(self):
        return [0]


def _erasure(federation, request, *, contact=InProcess, kind="auto"):
    report = Report(frozenset([request]))
    erasing = EraserBuilder(MODEL, CUT, FilterConfig(filter=kind), contact(federation, MODEL), report)
    return erasing.erasure_for([request], request, None, None), report


def test_a_class_that_the_touched_client_holds_no_more_but_others_do_is_not_erased():
    everything = [label for label in range(CLASSES) for _ in range(40)]
    federation = _federation([everything, everything, everything], seed=0)
    own = federation.clients[0].train
    request = Forget.samples({0: own[federation.y[own] == 2]})
    found, report = _erasure(federation, request)
    assert found is None
    assert "no more than by chance" in report.notes[0]
    compared_with_its_own_rows, _ = _erasure(federation, request, contact=Alone)
    assert compared_with_its_own_rows is not None, "premise: it would have been erased for everybody"
    rows = range(2 * 40, 3 * 40)
    marked = _federation([everything, everything, everything], seed=0, shift=5.0, shifted=rows)
    found, _ = _erasure(marked, Forget.samples({0: rows}))  # with a mark that nobody else has
    assert found.about["rows"] == 40
    assert set(found.about["compared_with"]) <= {0, 1, 2}
    assert found.about["place"]["signal"] > LEAST_SIGNAL


def test_rows_like_a_mixture_of_other_clients_rows_differ_from_it_by_chance_alone():
    """Whatever the mixture, and though their own client holds nothing else."""
    signals = []
    for seed in range(20):
        source = _source(seed)
        shares = torch.rand(CLASSES, generator=source) ** 3 + 0.01
        own = torch.multinomial(shares, int(torch.randint(20, 150, (), generator=source)), True, generator=source)
        others = [
            torch.arange(CLASSES).repeat_interleave(torch.randint(10, 60, (CLASSES,), generator=source))
            for _ in range(4)
        ]
        federation = _federation([own, *others], seed)
        request = Forget.samples({0: range(len(own))})
        found, _ = _erasure(federation, request, kind="erasure")  # asked for, so that it says how strong it was
        assert 0 not in found.about["compared_with"]
        signals.append(found.about["place"]["signal"])
    signals = torch.tensor(signals)
    assert float((signals >= LEAST_SIGNAL).double().mean()) <= 0.05
    assert 0.05 < float(signals.mean()) < 1.5  # of what chance gives; what the mixture can follow is taken off


# --- sketches


@pytest.mark.parametrize("shape", [(1, 16), (1, 2000), (64, 8), (196, 32)], ids=str)
def test_sketches_are_short_and_keep_distances_on_average(shape):
    one, other = torch.randn(2, 200, *shape, generator=_source(0)).double()
    sketches = torch.stack([shortened(mean) for mean in one - other])
    assert sketches[0].numel() <= SKETCH_SIZE
    ratio = sketches.square().sum((1, 2)) / (one - other).square().sum((1, 2))
    assert float(ratio.mean()) == pytest.approx(1, abs=0.08)


@few
@given(seeds, st.integers(1, 200), st.integers(1, 40))
def test_a_sketch_is_linear_and_keeps_apart_what_lies_apart(seed, positions, channels):
    one, other = torch.randn(2, positions, channels, generator=_source(seed)).double()
    torch.testing.assert_close(shortened(one + 2 * other), shortened(one) + 2 * shortened(other))
    moved = one.clone()
    at = seed % positions
    moved[at] += 1 + torch.rand(channels, generator=_source(seed))
    changed = (shortened(moved) - shortened(one)).abs().sum(1) > 1e-9
    groups = min(positions, SKETCH_GROUPS)
    assert changed.nonzero().flatten().tolist() in ([at * groups // positions], [])


# --- mixtures that a trigger does not choose


def _case(seed, many, groups=32, size=12):
    references = torch.randn(many, groups, size, generator=_source(seed)).double()
    weights = torch.rand(many, generator=_source(seed + 1)).double() ** 2 + 0.01
    weights /= weights.sum()
    noise = 0.02 * torch.randn(groups, size, generator=_source(seed + 2)).double()
    return references, weights, torch.einsum("k,kgs->gs", weights, references) + noise


@few
@given(seeds, st.integers(2, 8), st.integers(0, 4), st.floats(1, 8))
def test_a_large_shift_in_a_few_groups_does_not_choose_the_mixture(seed, many, shifted, shift):
    references, weights, mean = _case(seed, many)
    mean[:shifted] += shift * torch.randn(shifted, mean.shape[1], generator=_source(seed + 3)).double()
    found = robust_mixture(mean, list(references))
    assert float(found.min()) >= 0
    assert float(found.sum()) == pytest.approx(1)
    torch.testing.assert_close(found, weights, atol=0.05, rtol=0)
    if shifted == 4 and shift > 7.9:  # premise: the plain mixture is drawn
        assert (mixture(mean, list(references)) - weights).abs().max() > (found - weights).abs().max()


# --- models without a linear last layer


class Convolutional(nn.Module):
    """Has no linear layer at all; says itself what comes after its cut."""

    def __init__(self):
        super().__init__()
        self.first, self.h = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 3, 1)

    def forward(self, x):
        return self.tail(self.first(x).relu(), "h")

    def tail(self, features, cut):
        assert cut == "h"
        return self.h(features).mean((2, 3))


@pytest.mark.parametrize("kind", ["auto", "both"])
def test_a_model_without_a_linear_layer_forgets_at_the_cut_it_was_plugged_at(kind):
    y = torch.arange(360) % 3
    x = 0.3 * torch.randn(360, 1, 6, 6, generator=_source(0))
    x[torch.arange(360), 0, y] += 3
    x[:40, 0, 5, 4:] += 4  # samples with a mark
    clients = [Client(i, own[:90], NONE, own[90:]) for i, own in enumerate(torch.arange(360).view(3, 120))]
    torch.manual_seed(0)
    federation, model = Federation(x, y, tuple(clients), 3), Convolutional().eval()
    original, config = model(federation.x), FilterConfig(rank=6, steps=30, filter=kind)
    for request in (Forget.classes([1]), Forget.clients([2]), Forget.samples({0: range(40)})):
        plugged, store = plug(model, cut="h"), collect(model, federation, cut="h")
        report = unlearn(plugged, store, request, clients=federation, config=config, force=True)
        assert plugged.requests == {request}
        assert report.verdicts[request.digest].finding != "not measured"
        answers = plugged(federation.x)
        assert not torch.allclose(answers, original)
        with plugged.restored():
            assert torch.equal(plugged(federation.x), original)
        assert plugged.served.erasure is None or plugged.served.erasure.cut == "h"
        if request.class_ids:
            assert not (answers.argmax(1) == 1).any()

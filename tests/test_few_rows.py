"""Classes of which every client has too few rows to report: nobody asked to forget them, so they stay."""

import copy
from dataclasses import replace

import pytest
import torch
from tests._digits import TrainedDigits
from tests._marked import trained
from torch import nn

from fedup import Federation, Forget, collect, load_filter, plug, save_filter, unlearn
from fedup.errors import CutError
from fedup.federation import Client


@pytest.fixture(scope="module")
def digits():
    return TrainedDigits()


@pytest.fixture(scope="module")
def scattered(digits):
    """Forty clients with at most four rows of class 9 each; only six have other rows."""
    rare, others = (digits.y == 9).nonzero().flatten(), (digits.y != 9).nonzero().flatten()
    parts = [torch.cat([rare[i::40], others[i::6] if i < 6 else others[:0]]) for i in range(40)]
    return Federation.split(digits.x, digits.y, parts, num_classes=10)


def test_they_are_answered_as_before_until_they_are_forgotten(digits, scattered, tmp_path):
    store, plugged = collect(digits.model, scattered, statistics="moments"), plug(digits.model)
    assert store.few.keys() == {9}, "premise"
    with torch.no_grad():
        answered = digits.model(digits.test_x).argmax(1) == 9
    liars = Forget.clients([0], reason="poison"), Forget.clients(range(6, 40), reason="poison")  # so there is no delta
    for request in (*liars, Forget.classes([4])):
        report = unlearn(plugged, store, request, clients=scattered)
        answers = plugged(digits.test_x).argmax(1)
        assert bool((answers[answered] == 9).all()), "every input that was answered 9 is"
        assert any("class 9" in note for note in report.notes)
    save_filter(plugged, tmp_path / "filter.safetensors")
    again = plug(digits.model)
    load_filter(again, tmp_path / "filter.safetensors")
    assert torch.equal(again(digits.test_x), plugged(digits.test_x))
    unlearn(plugged, store, Forget.classes([9]), clients=scattered)
    assert 9 not in plugged(digits.test_x).argmax(1)


def test_the_estimate_of_recall_knows_that_they_are_kept(digits):
    rare, others = (digits.y == 9).nonzero().flatten(), (digits.y != 9).nonzero().flatten()
    rows = [
        torch.cat([rare[14 + i :: 40] if i else rare[:14], others[i::6] if i < 6 else others[:0]]) for i in range(40)
    ]
    store, plugged = (
        collect(digits.model, Federation.split(digits.x, digits.y, rows, num_classes=10)),
        plug(digits.model),
    )
    assert 0 < store.rows_by_class()[9] < 20 and 9 in store.few, "premise"
    report = unlearn(plugged, store, Forget.clients([2]))
    assert report.class_recall[9].after >= report.class_recall[9].before
    assert not any("another one answers" in note for note in report.notes)


def test_where_half_precision_cannot_keep_them_nothing_is_served(digits, scattered):
    half = copy.deepcopy(digits.model).half()
    plugged, store = plug(half), collect(half, replace(scattered, x=scattered.x.half()))
    with pytest.raises(CutError, match="too few rows of class 9"):
        unlearn(plugged, store, Forget.clients([0]))
    assert plugged.served is None


def test_those_of_forgotten_clients_alone_do_not_stay(digits, scattered):
    store, plugged = collect(digits.model, scattered, statistics="moments"), plug(digits.model)
    holders = store.few[9]
    store.few[9] = {0, *range(6, 40)} & holders  # the others have none, say
    unlearn(plugged, store, Forget.clients([0, *range(6, 40)]))
    assert 9 not in plugged(digits.test_x).argmax(1)


def test_a_dropped_class_is_answered_to_no_input_beside_a_kept_one(digits, scattered):
    store, plugged = collect(digits.model, scattered, statistics="moments"), plug(digits.model)
    unlearn(plugged, store, Forget.classes([4]), clients=scattered)
    fitted, head = plugged.served.filter, digits.model.get_submodule(plugged.cut)
    features = (50 * torch.randn(200, fitted.width, generator=torch.Generator().manual_seed(0))).requires_grad_()
    optimizer = torch.optim.Adam([features], lr=5.0)
    for _ in range(60):  # towards class 4, as the original and as the filter see it
        scores = head(fitted(features)).log_softmax(1)[:, 4] + head(features).log_softmax(1)[:, 4]
        optimizer.zero_grad()
        (-scores.sum()).backward()
        optimizer.step()
        with torch.no_grad():
            assert 4 not in head(fitted(features)).argmax(1)


def test_a_cell_that_few_samples_took_out_counts_again_when_more_samples_bring_it_back():
    """Forgetting 12 of its 60 rows leaves more of the class than forgetting 2 did."""
    torch.manual_seed(0)
    y = torch.tensor([0] * 60 + [1, 2] * 60 + [0] * 25 + [1, 2] * 60)
    x = 0.3 * torch.randn(len(y), 6) + 3 * torch.eye(6)[y]
    model, owners = trained(x, y, nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.arange(len(y)).split([180, 145])
    clients = [Client(i, rows, rows[:0], rows[:0]) for i, rows in enumerate(owners)]
    federation, plugged = Federation(x, y, clients, 3), plug(model)
    store = collect(model, federation)
    for rows, left in ((range(2), 25), (range(2, 12), 73)):
        unlearn(plugged, store, Forget.samples({0: [*rows]}), clients=federation)
        assert store.rows_by_class()[0] == left

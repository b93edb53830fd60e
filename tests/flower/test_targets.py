"""Models with labels or values over Flower: the store and the filter are those of the same clients in process."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from flwr.clientapp import ClientApp
from tests.flower._contact import spoiling
from tests.flower._grid import FIRST, LocalGrid, changed
from torch import nn

import fedup
from fedup import Federation, Forget, Terms, plug
from fedup.clients.in_process import InProcess
from fedup.clients.model_facts import ModelFacts
from fedup.clients.moments import MomentsQuestion
from fedup.errors import ContactError, DataError
from fedup.flower import GridContact, mount
from fedup.statistics.integer_moments import MomentConfig
from fedup.targets import checked_as

ROWS, WIDTH = 240, 5


def net(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, outputs)).eval().requires_grad_(False)


def federation_of(targets: str) -> Federation:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    y = x @ torch.randn(WIDTH, 2, generator=torch.Generator().manual_seed(2))
    return Federation.split(
        x, y if targets == "values" else (y > 0), [torch.arange(first, ROWS, 4) for first in range(4)]
    )


def grid_of(federation: Federation, *, as_items: bool) -> LocalGrid:
    apps = {}
    for client in federation.ids:
        own, app = federation.client(client), ClientApp()
        unseen = torch.cat([own.validation, own.heldout])
        parts = [(federation.x[rows], federation.y[rows]) for rows in (own.train, unseen)]
        data, held_out = ([list(zip(*part, strict=True)) for part in parts]) if as_items else parts
        mount(
            app,
            data=lambda context, data=data: data,
            held_out=lambda context, held_out=held_out: held_out,
            ids=lambda context, own=own: own.train.tolist(),
            model=lambda: net(2),
        )
        apps[FIRST + client] = app
    return LocalGrid(apps)


@pytest.mark.parametrize("targets", ["labels", "values"])
def test_labels_and_values_are_forgotten_over_flower_as_in_process(targets):
    federation, model = federation_of(targets), net(2)
    contact = GridContact(
        grid_of(federation, as_items=targets == "values"), model, example=federation.x[:1], num_classes=2
    )
    with pytest.raises(ContactError, match=r"set contact\.targets at the server"):  # nothing is taken for classes
        fedup.collect(model, contact)
    contact.targets = targets
    near = InProcess(federation, model)
    samples = Forget.samples({1: federation.client(1).train[:25].tolist()})
    served = []
    for clients in (contact, near):
        store, plugged = fedup.collect(model, clients), plug(model)
        reports = [
            fedup.unlearn(plugged, store, request, clients=clients, force=True, terms=Terms(measure=True))
            for request in (Forget.clients([0]), samples)
        ]
        served.append((store.total, plugged(federation.x), [report.verdicts for report in reports]))
        fedup.restore(plugged, store, [Forget.clients([0]), samples], clients=clients)
        assert torch.equal(plugged.unplug()(federation.x), model(federation.x))
    assert served[0][0] == served[1][0] and torch.equal(served[0][1], served[1][1]) and served[0][2] == served[1][2]
    assert not torch.equal(served[0][1], model(federation.x))


@pytest.mark.parametrize("measure", [False, True])
def test_a_label_that_the_model_was_trained_without_is_not_learned_again_by_a_later_filter(measure):
    federation, model = federation_of("labels"), net(2)
    contact = GridContact(grid_of(federation, as_items=False), model, example=federation.x[:1], num_classes=2)
    contact.targets = "labels"
    store, plugged = fedup.collect(model, contact, forget=[Forget.classes([1])]), plug(model)
    store.collected_for, store.finished = frozenset(), Forget.classes([1])  # as after `RunServer.put_retrained`
    report = fedup.unlearn(
        plugged, store, Forget.clients([0]), clients=contact, force=True, terms=Terms(measure=measure)
    )
    said = plugged(federation.x) > 0
    assert said[:, 0].any() and not said[:, 1].any()
    assert report.class_recall.keys() == {0}


def test_targets_of_another_kind_are_refused_without_a_word_of_them():
    for y, targets in ((torch.tensor([[0.0, 7.0]]), "labels"), (torch.tensor([[0.0, float("nan")]]), "values")):
        with pytest.raises(DataError, match=f"^The targets here are no {targets} of 2 outputs.$"):
            checked_as(y, targets, 2)
    assert checked_as(torch.tensor([[0, 7]]), "values", 2).dtype == torch.float32
    assert checked_as(torch.tensor([[0.0, 1.0]]), "labels", 2).dtype == torch.bool


@pytest.mark.parametrize("targets", ["labels", "values"])
def test_no_lie_of_one_node_about_labels_or_values_ends_a_collection(targets):
    federation, model = federation_of(targets), net(2)
    config = MomentConfig(targets=targets, outputs=2)
    lies = [{"clipped": 2**52}, {"clipped": 42}, {"shortened": 42}, {"rows": [[2, config.most_rows]]}]
    for lie in ({}, *lies):
        grid = grid_of(federation, as_items=False)
        grid.spoil = spoiling(lambda reply, lie=lie: changed(reply, lie), kind="integer moments")
        contact = GridContact(grid, model, example=federation.x[:1], num_classes=2)
        contact.targets = targets
        store = fedup.collect(model, contact)
        assert set(store.clients) >= {0, 1, 3} and (store.how.bound, store.how.value_bound) == (256.0, 256.0), lie


def test_a_label_counts_once_for_each_row():
    """Features may be thousands of steps long, so that a sum of labels as long would pass for one of rows."""
    federation = federation_of("labels")
    contact = GridContact(grid_of(federation, as_items=False), net(2), example=federation.x[:1], num_classes=2)
    contact.targets = "labels"
    question = MomentsQuestion("2", MomentConfig(targets="labels", outputs=2))
    ((_, own),) = contact.ask({1: question})
    inputs, more = own.moments.width - 2, own.moments.sums.clone()
    facts = ModelFacts(net(2), federation.x[:1], 2)
    facts.targets = "labels"
    more[:, inputs:] += 1
    for moments, fits in ((own.moments, True), (replace(own.moments, sums=more), False)):
        details, arrays = question.answer_message(replace(own, moments=moments, by_class={}))
        with nullcontext() if fits else pytest.raises(DataError):
            question.read({**details, "client": 1}, arrays, facts)

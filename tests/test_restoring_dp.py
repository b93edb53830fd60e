"""Requests under differential privacy are taken back: bit for bit, and paid only where clients are asked again."""

import pytest
import torch
from tests._forced import restore, unlearn
from tests._marked import state_of
from tests._private_requests import CLASSES, CLIENTS, SETTING, Unreachable, bits_of, payers_of

from fedup import (
    load_centroids,
    purge,
    save_centroids,
)
from fedup.errors import ContactError
from fedup.unlearning.plan import Terms


@pytest.mark.parametrize("name", ["class", "client", "sample"])
def test_restoring_gives_the_original_answers_bit_for_bit(name):
    with torch.no_grad():
        original = SETTING.base(SETTING.x)
    plugged, store = SETTING.serving(name)
    assert not torch.equal(plugged(SETTING.x), original)
    with plugged.restored():
        assert torch.equal(plugged(SETTING.x), original)
    before = state_of(store)
    restore(plugged, store, SETTING.requests[name], clients=Unreachable(store))
    assert state_of(store) == before
    with torch.no_grad():
        assert torch.equal(plugged.unplug()(SETTING.x), original)


@pytest.mark.parametrize(("back", "stays"), [("class", "client"), ("client", "class"), ("sample", "class")])
def test_taking_one_request_back_gives_the_bits_of_the_other_alone(back, stays):
    plugged, store = SETTING.serving(back, stays)
    restore(plugged, store, SETTING.requests[back], clients=SETTING.federation)
    assert torch.equal(bits_of(plugged), bits_of(SETTING.serving(stays)[0]))
    assert payers_of(store) == ([1, 1] if back == "sample" else [])  # without sealed originals asked and paid again


def test_sealed_originals_are_put_back_without_contact_or_charge():
    plugged, store = SETTING.serving("sample", terms=Terms(keep_sealed=True))
    assert set(store.sealed) == {(1, label) for label in range(CLASSES)}
    unlearn(plugged, store, SETTING.requests["class"])
    restore(plugged, store, SETTING.requests["sample"], clients=Unreachable(store))
    assert payers_of(store) == [1]
    assert torch.equal(store.vectors, SETTING.collected.vectors)
    assert (store.sealed, store.excluded) == ({}, {})
    assert torch.equal(bits_of(plugged), bits_of(SETTING.serving("class")[0]))


def test_sealed_originals_go_where_more_is_left_out():
    plugged, store = SETTING.serving("sample", terms=Terms(keep_sealed=True))
    unlearn(plugged, store, SETTING.requests["other samples"], clients=SETTING.federation)
    assert store.sealed == {}  # they hold the other samples
    assert payers_of(store) == [1, 1]


def test_purged_cells_are_gone_and_asked_for_again_where_they_are_needed():
    plugged, store = SETTING.serving("client", "class")
    gone = [cell.name for cell in store.cells if cell.client == 3 or cell.label == 2]
    assert purge(plugged, store) == gone
    assert not any(store.vectors[store.cell(name).slot].any() for name in gone)
    with pytest.raises(ContactError, match="purged"):
        restore(plugged, store, SETTING.requests["class"])
    assert payers_of(store) == []
    restore(plugged, store, SETTING.requests["class"], clients=SETTING.federation)
    assert payers_of(store) == [0, 1, 2]  # the forgotten one is not asked
    assert torch.equal(bits_of(plugged), bits_of(SETTING.serving("client")[0]))


def test_what_was_purged_stays_away_when_samples_are_forgotten():
    plugged, store = SETTING.serving("class")
    purge(plugged, store)
    unlearn(plugged, store, SETTING.requests["sample"], clients=SETTING.federation)
    assert store.purged == {(client, 2) for client in range(CLIENTS)}
    assert not store.vectors[[cell.start for cell in store.cells if cell.label == 2]].any()


# --- files


def test_requests_go_on_after_a_store_was_saved_and_loaded(tmp_path):
    plugged, store = SETTING.serving("sample", terms=Terms(keep_sealed=True))
    save_centroids(store, tmp_path / "centroids")
    back = load_centroids(tmp_path / "centroids")
    assert {**state_of(back), "traffic": None} == {**state_of(store), "traffic": None}
    unlearn(plugged, back, SETTING.requests["class"])
    assert torch.equal(bits_of(plugged), bits_of(SETTING.serving("sample", "class")[0]))

"""Phase 2 in one call, from the arrays that Flower's strategies give."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from tests.flower._grid import FIRST, World, digits
from torch import nn

from fedup import Forget, collect, fingerprint
from fedup.errors import ContactError, DataError
from fedup.flower import collect as collect_over
from fedup.privacy import DP


@pytest.fixture(scope="module")
def world() -> World:
    return digits()


def arrays_of(model: nn.Module) -> ArrayRecord:
    return ArrayRecord(model.state_dict())  # as Flower itself makes them


def ask(world: World, arrays: ArrayRecord, model: nn.Module | None = None, **how):
    grid = how.pop("grid", None) or world.grid()
    return collect_over(grid, arrays, model=model or world.blank(), example=world.example, num_classes=10, **how)


def assert_same(one, other) -> None:
    assert torch.equal(one.vectors, other.vectors)
    assert torch.equal(one.counts, other.counts)
    for name in ("cells", "clients", "how", "cut", "base", "collected_for", "excluded", "sample_labels"):
        assert getattr(one, name) == getattr(other, name), name


@pytest.mark.parametrize(
    "how",
    [{}, {"ratio": 0.3, "seed": 2}, {"cut": "fc2", "sigma": 0.1}, {"privacy": DP(4.0, clip=4.0, replay_seed=1)}],
    ids=["usual", "ratio", "cut and noise", "DP"],
)
def test_the_store_is_that_of_collect_in_process(world, how):
    assert_same(ask(world, arrays_of(world.model), **how), collect(world.model, world.federation, **how))


@pytest.mark.parametrize("preset", ["default", "paper"])
@pytest.mark.parametrize("kind", ["client", "class", "sample"])
def test_with_a_request_nodes_leave_out_what_it_names(world, kind, preset):
    request = {
        "client": Forget.clients([1]),
        "class": Forget.classes([3]),
        "sample": Forget.samples({2: world.rows(2)[:20].tolist()}),
    }[kind]
    store = ask(world, arrays_of(world.model), request=request, preset=preset)
    assert_same(store, collect(world.model, world.federation, forget=[request], preset=preset))
    assert store.collected_for == {request}


def test_the_model_takes_the_arrays_and_is_ready_to_be_plugged(world):
    model = world.blank().train()
    store = ask(world, arrays_of(world.model), model)
    assert fingerprint(model) == store.base == fingerprint(world.model)
    assert not model.training


def test_settings_of_the_contact_are_passed_on(world):
    lost = world.grid(lambda node, reply: None if node == FIRST + 2 else reply)
    settings = {"timeout": 0.01, "retries": 0, "least_fraction": 0.5}
    assert ask(world, arrays_of(world.model), grid=lost, contact=settings).clients == (0, 1, 3)
    with pytest.raises(ContactError, match="3 of 4"):
        ask(world, arrays_of(world.model), grid=lost, contact={**settings, "least_fraction": 1.0})


def _changed(world: World, change: str) -> ArrayRecord:
    state = dict(world.model.state_dict())
    name = next(iter(state))
    if change == "a name too few":
        del state[name]
    elif change == "a name too many":
        state["more.weight"] = torch.zeros(2)
    elif change == "another shape":
        state[name] = torch.zeros(2, 2)
    elif change == "other names":
        state = {f"model.{name}": tensor for name, tensor in state.items()}
    elif change == "no name at all":
        state = {}
    record = ArrayRecord(state)
    if change == "no array":
        record[name] = Array("float32", (1,), "numpy.ndarray", b"nothing")
    if change == "another type":
        record[name] = Array(np.array(["a"]))
    return record


@pytest.mark.parametrize(
    "change",
    [
        "a name too few",
        "a name too many",
        "another shape",
        "other names",
        "no name at all",
        "no array",
        "another type",
    ],
)
def test_arrays_of_another_model_are_refused_before_anybody_is_asked(world, change):
    grid = world.grid()
    with pytest.raises(DataError):
        ask(world, _changed(world, change), grid=grid)
    assert grid.sent == []

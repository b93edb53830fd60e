"""Models take the arrays that Flower's strategies give."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from tests.flower._grid import World, digits

from fedup import fingerprint
from fedup.errors import DataError
from fedup.flower import load_arrays


@pytest.fixture(scope="module")
def world() -> World:
    return digits()


def test_the_model_takes_the_arrays_and_is_ready_to_be_plugged(world):
    model = load_arrays(world.blank().train(), ArrayRecord(world.model.state_dict()))  # as Flower itself makes them
    assert fingerprint(model) == fingerprint(world.model)
    assert not model.training


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
def test_arrays_of_another_model_are_refused(world, change):
    with pytest.raises(DataError):
        load_arrays(world.blank(), _changed(world, change))

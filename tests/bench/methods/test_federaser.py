"""FedEraser: stored lengths and fresh directions, against a plain re-implementation of the paper's loop; nothing of the
target; every message, step and stored byte counted."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.bench.methods._worlds import TARGET, World, message
from tests.engines._federations import train_locally
from torch import nn
from torch.nn.functional import cosine_similarity

from fedup import federate, fingerprint
from fedup.bench.history import History
from fedup.bench.methods.federaser import Method, calibrated
from fedup.errors import DataError
from fedup.rng import seed_for

PARAMETERS = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("own"), rounds=7, epochs=3)


@pytest.fixture(scope="module")
def few_clients(tmp_path_factory) -> World:
    """Two clients a round."""
    return World(tmp_path_factory.mktemp("own"), clients_per_round=2, rounds=8)


def length(tensors) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def by_hand(world: World, gone, *, every=2, ratio=0.5, norm="whole") -> dict[str, torch.Tensor]:
    """FedEraser as the paper tells it, in double precision between trainings."""
    federation, recipe, seen = world.federation, world.recipe, world.seen
    sizes = {client.id: len(client.train) for client in federation.clients}
    rounds = list(range(0, recipe.rounds, every))
    local = replace(recipe.local, epochs=math.ceil(ratio * recipe.epochs))

    def mean(weights):  # {client: state}
        total = sum(sizes[client] for client in weights)
        return {
            name: sum(sizes[client] / total * state[name].double() for client, state in weights.items()).float()
            if tensor.is_floating_point()
            else torch.stack([state[name] for state in weights.values()]).amax(0)
            for name, tensor in world.start.state_dict().items()
        }

    cohort = seen.cohort(rounds[0], gone)
    current = (
        mean({client: seen.uploads[rounds[0], client] for client in cohort}) if cohort else world.start.state_dict()
    )
    for number in rounds[1:]:
        uploads = {}
        for client in seen.cohort(number, gone):
            own = copy.deepcopy(world.start)
            own.load_state_dict(current)
            seed = seed_for(recipe.seed, "round", number, "client", client)
            train_locally(own, federation.x, federation.y, federation.client(client).train, local=local, seed=seed)
            state = own.state_dict()
            fresh = {name: state[name].double() - current[name].double() for name in PARAMETERS}
            stored = {name: seen.uploads[number, client][name] - seen.before[number][name] for name in PARAMETERS}
            for name in PARAMETERS:
                new, old = ([each[name]] if norm == "layer" else each.values() for each in (fresh, stored))
                factor = length(old) / length(new) if length(new) else 0.0  # a bias ahead of BatchNorm may not move
                state[name] = current[name].double() + factor * fresh[name]
            uploads[client] = state
        current = mean(uploads) if uploads else current
    return current


def assert_close(model: nn.Module, expected) -> None:
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(
            tensor, expected[name], atol=2e-5, rtol=1e-4, msg=lambda said, name=name: f"{name}: {said}"
        )


# --- calibration


def updates(scale: float, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (5, 3), "bias": (5,), "scale": ()}
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


scales = st.floats(1e-6, 1e6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(scales, scales, st.integers(0, 99), st.booleans())
def test_a_calibrated_update_has_the_stored_length_and_the_fresh_direction(new, old, seed, by_layer):
    fresh, stored = updates(new, seed), updates(old, seed + 100)
    found = calibrated(fresh, stored, by_layer=by_layer)
    assert list(found) == list(fresh)
    for names in [[name] for name in found] if by_layer else [list(found)]:
        assert length([found[n] for n in names]) == pytest.approx(length([stored[n] for n in names]), rel=1e-5)
        flat, towards = (torch.cat([each[n].double().flatten() for n in names]) for each in (found, fresh))
        assert float(cosine_similarity(flat, towards, dim=0)) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("by_layer", [False, True])
def test_an_update_that_does_not_move_stays_zero_and_a_tiny_one_is_finite(by_layer):
    still = {name: torch.zeros_like(tensor) for name, tensor in updates(1.0, 0).items()}
    for fresh, stored in ((still, updates(7.0, 1)), (updates(1.0, 1), still)):
        assert not any(bool(tensor.any()) for tensor in calibrated(fresh, stored, by_layer=by_layer).values())
    fresh, stored = updates(1.0, 0) | {"weight": still["weight"]}, updates(7.0, 1)
    found = calibrated(fresh, stored, by_layer=by_layer)
    assert not bool(found["weight"].any())
    if by_layer:
        assert length([found["bias"]]) == pytest.approx(length([stored["bias"]]), rel=1e-5)
    tiny = calibrated({"bias": torch.full((2,), 1e-42)}, {"bias": torch.ones(2)}, by_layer=by_layer)
    assert bool(tiny["bias"].isfinite().all())


# --- the whole of it


@pytest.mark.parametrize(("norm", "every"), [("whole", 1), ("layer", 2), ("whole", 100)])
def test_a_run_equals_a_plain_loop_over_the_stored_rounds(world, norm, every):
    found = Method(every=every, norm=norm).unlearn(world.task())
    assert found.about["stored_rounds"] == list(range(0, 7, every))
    assert_close(found.model, by_hand(world, {TARGET}, every=every, norm=norm))


@pytest.mark.parametrize(("ratio", "epochs"), [(1 / 3, 1), (0.34, 2), (1.0, 3)])
def test_clients_train_for_a_ratio_of_their_epochs_rounded_up(world, ratio, epochs):
    found = Method(every=3, ratio=ratio).unlearn(world.task())
    assert_close(found.model, by_hand(world, {TARGET}, every=3, ratio=epochs / 3))
    assert found.cost.local_steps == 2 * epochs * world.steps(0, 1, 3)  # rounds 3 and 6; nobody trains for round 0


@pytest.mark.parametrize(("every", "gone"), [(1, {0, 1}), (2, {1, 2, 3}), (3, {2})], ids=str)
def test_cohorts_are_those_of_the_training_less_the_forgotten(few_clients, every, gone):
    found = Method(every=every).unlearn(few_clients.task(*gone))
    assert_close(found.model, by_hand(few_clients, gone, every=every))
    stored = range(0, 8, every)
    asked = [client for number in stored[1:] for client in few_clients.seen.cohort(number, gone)]
    assert found.cost.clients == set(asked)
    state = few_clients.start.state_dict()
    assert found.cost.bytes_up == len(asked) * message(state)
    floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    assert found.cost.storage_bytes == len(stored) * 2 * message(floats)


def test_a_first_round_of_the_forgotten_alone_leaves_the_first_weights(few_clients):
    found = Method(every=100).unlearn(few_clients.task(*few_clients.seen.cohort(0)))
    assert fingerprint(found.model) == fingerprint(few_clients.start)


def test_it_starts_from_the_first_weights_and_rounds_after_are_plain_fedavg_on_what_is_retained(world):
    lost = copy.deepcopy(world.start)
    with torch.no_grad():
        for tensor in lost.state_dict().values():
            tensor.zero_()
    task = world.task(model=lost)
    without, with_rounds = Method().unlearn(world.task()), Method(post_rounds=2).unlearn(task)
    after = federate(without.model, task.retained, rounds=[7, 8], local=world.recipe.local, seed=world.recipe.seed)
    assert fingerprint(with_rounds.model) == fingerprint(after.model)


# --- nothing of the target


def spoil(tensors):
    return {
        name: torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else torch.full_like(tensor, 2**40)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(("norm", "clients_per_round"), [("whole", None), ("layer", 3)])
def test_the_targets_stored_updates_and_rows_are_never_used(tmp_path, norm, clients_per_round):
    world = World(tmp_path, tmp_path / "history", clients_per_round=clients_per_round)
    method = Method(every=1, norm=norm, post_rounds=1)
    expected = method.unlearn(world.task())
    spoilt = sorted((tmp_path / "history").glob(f"*-client-{TARGET}.safetensors"))
    assert len(spoilt) >= 2
    for path in spoilt:
        save_file(spoil(load_file(path)), path)
    x, target = world.federation.x.clone(), world.federation.client(TARGET)
    x[torch.cat([target.train, target.validation, target.heldout])] = torch.nan
    task = world.task(federation=replace(world.federation, x=x), history=History(tmp_path / "history"))
    found = method.unlearn(task)
    assert fingerprint(found.model) == fingerprint(expected.model)
    assert (found.cost.bytes_up, found.cost.local_steps) == (expected.cost.bytes_up, expected.cost.local_steps)
    assert found.cost.clients == {0, 1, 3}
    one = next(path for path in sorted((tmp_path / "history").glob("000[123]-client-[013].safetensors")))
    save_file(spoil(load_file(one)), one)  # proof that those of one who stays are used
    with pytest.raises(DataError, match="not finite"):
        method.unlearn(task)


# --- what it costs, and what it needs


@pytest.mark.parametrize(("every", "post_rounds"), [(1, 0), (3, 2), (7, 0)])
def test_costs_are_those_of_a_hand_count(world, every, post_rounds):
    found = Method(every=every, post_rounds=post_rounds).unlearn(world.task())
    cost, stored, state = found.cost, len(range(0, 7, every)), world.start.state_dict()
    rounds = stored - 1 + post_rounds  # the first stored round needs nobody
    floats = message({name: one for name, one in state.items() if one.is_floating_point()})
    epochs = 2 * (stored - 1) + 3 * post_rounds  # ⌈0.5 · 3⌉ while calibrating
    assert (cost.bytes_up, cost.bytes_down) == (rounds * 3 * message(state), rounds * 3 * message(state))
    assert cost.local_steps == epochs * world.steps(0, 1, 3)
    assert cost.clients == ({0, 1, 3} if rounds else set())
    assert cost.storage_bytes == stored * 4 * floats  # the target's updates too: nobody knew who would go
    assert (cost.ahead_bytes_up, cost.ahead_time_s) == (0, 0.0)
    assert len(cost.path) == rounds
    assert json.loads(json.dumps(dict(found.about), allow_nan=False)) == found.about
    assert found.restore is None


@pytest.mark.parametrize("history", [None, History()])
def test_a_federation_that_never_trained_is_said(world, history):
    with pytest.raises(DataError, match="history"):
        Method().unlearn(world.task(recipe=replace(world.recipe, rounds=0), history=history))

"""FedEraser: stored lengths and fresh directions, against a plain re-implementation of the paper's loop; nothing of the
target; every message, step and stored byte counted."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from tests.engines._federations import train_locally
from torch import nn
from torch.nn.functional import cosine_similarity

from fedup import Federation, Forget, Observer, federate, fingerprint
from fedup.bench.history import History
from fedup.bench.methods.federaser import CalibratedAverage, Method, apply_without, calibrated
from fedup.bench.task import Task
from fedup.errors import DataError, SettingError
from fedup.rng import seed_for
from fedup.tasks.recipe import Recipe
from fedup.training.averaging import RunningAverage

few = settings(max_examples=40, deadline=None, derandomize=True)
SIZES = (30, 21, 40, 26)
TARGET = 2
RECIPE = Recipe("digits", "lenet5", rounds=7, clients=4, epochs=3, batch_size=8, lr=0.05, seed=3)
PARAMETERS = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
MEAN, VARIANCE, COUNTER = "1.running_mean", "1.running_var", "1.num_batches_tracked"


class Seen(Observer):
    """Copies of all uploads, by round and client: what the re-implementation works on."""

    def __init__(self):
        self.before, self.uploads, self.shares = {}, {}, {}

    def on_update(self, round_index, client, *, before, after, weight):
        self.before[round_index] = {name: tensor.clone() for name, tensor in before.items()}
        self.uploads[round_index, client] = {name: tensor.clone() for name, tensor in after.items()}
        self.shares[round_index, client] = weight

    def cohort(self, number, gone=()):
        return [client for one, client in self.uploads if one == number and client not in gone]


def make_federation() -> Federation:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(sum(SIZES)) % 3
    x = torch.randn(len(y), 6, generator=generator) + 2 * nn.functional.one_hot(y, 6)
    return Federation.split(x, y, torch.arange(len(y)).split(SIZES), num_classes=3)


def make_start() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()


class World:
    """A federation trained while a server and an independent observer watched."""

    def __init__(self, folder: Path | None = None, **chosen) -> None:
        self.recipe = replace(RECIPE, **chosen)
        self.federation, self.start, self.history, self.seen = make_federation(), make_start(), History(folder), Seen()
        observers = [self.history, self.seen]
        self.model = self.recipe.train(self.start, self.federation, observers=observers).model

    def task(self, gone=(TARGET,), **other) -> Task:
        request = Forget.clients(gone)
        task = Task(
            self.federation,
            request,
            self.model,
            self.start,
            self.recipe,
            lambda model: {},
            lambda *_: None,
            self.history,
        )
        return replace(task, **other)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def few_clients() -> World:
    """Two clients a round."""
    return World(clients_per_round=2, rounds=8, epochs=1)


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
        made = {}
        for client in seen.cohort(number, gone):
            own = copy.deepcopy(world.start)
            own.load_state_dict(current)
            seed = seed_for(recipe.seed, "round", number, "client", client)
            rows = federation.client(client).train
            train_locally(own, federation.x, federation.y, rows, local=local, seed=seed)
            state = own.state_dict()
            fresh = {name: state[name].double() - current[name].double() for name in PARAMETERS}
            stored = {name: seen.uploads[number, client][name] - seen.before[number][name] for name in PARAMETERS}
            for name in PARAMETERS:
                new, old = ([each[name]] if norm == "layer" else each.values() for each in (fresh, stored))
                factor = length(old) / length(new) if length(new) else 0.0  # a bias ahead of BatchNorm may not move
                state[name] = current[name].double() + factor * fresh[name]
            made[client] = state
        current = mean(made) if made else current
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


@few
@given(scales, scales, st.integers(0, 99))
def test_a_calibrated_update_has_the_stored_length_and_the_fresh_direction(new, old, seed):
    fresh, stored = updates(new, seed), updates(old, seed + 100)
    found = calibrated(fresh, stored, by_layer=False)
    assert list(found) == list(fresh)
    assert length(found.values()) == pytest.approx(length(stored.values()), rel=1e-5)
    flat, towards = (torch.cat([one.double().flatten() for one in each.values()]) for each in (found, fresh))
    assert float(cosine_similarity(flat, towards, dim=0)) == pytest.approx(1, abs=1e-6)


@few
@given(scales, scales, st.integers(0, 99))
def test_by_layer_each_tensor_has_the_stored_length_and_the_fresh_direction(new, old, seed):
    fresh, stored = updates(new, seed), updates(old, seed + 100)
    found = calibrated(fresh, stored, by_layer=True)
    for name, tensor in found.items():
        assert length([tensor]) == pytest.approx(length([stored[name]]), rel=1e-5)
        cosine = cosine_similarity(tensor.double().flatten(), fresh[name].double().flatten(), dim=0)
        assert float(cosine) == pytest.approx(1, abs=1e-6)


def test_whole_vectors_and_layers_are_two_things():
    fresh, stored = (
        {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])},
        {"a": torch.tensor([8.0]), "b": torch.tensor([-6.0])},
    )
    assert calibrated(fresh, stored, by_layer=False) == {"a": 6.0, "b": 8.0}
    assert calibrated(fresh, stored, by_layer=True) == {"a": 8.0, "b": 6.0}


@few
@given(scales, st.integers(0, 99))
@pytest.mark.parametrize("by_layer", [False, True])
def test_an_update_that_does_not_move_stays_zero_whatever_was_stored(by_layer, old, seed):
    fresh = {name: torch.zeros_like(tensor) for name, tensor in updates(1.0, 0).items()}
    found = calibrated(fresh, updates(old, seed), by_layer=by_layer)
    assert all(torch.equal(found[name], fresh[name]) for name in fresh)


@pytest.mark.parametrize("by_layer", [False, True])
def test_nothing_stored_gives_no_step(by_layer):
    stored = {name: torch.zeros_like(tensor) for name, tensor in updates(1.0, 0).items()}
    found = calibrated(updates(1.0, 1), stored, by_layer=by_layer)
    assert all(not bool(tensor.any()) for tensor in found.values())


def test_a_layer_that_does_not_move_is_left_and_the_others_are_calibrated():
    fresh, stored = updates(1.0, 0), updates(7.0, 1)
    fresh["weight"] = torch.zeros_like(fresh["weight"])
    found = calibrated(fresh, stored, by_layer=True)
    assert not bool(found["weight"].any())
    assert length([found["bias"]]) == pytest.approx(length([stored["bias"]]), rel=1e-5)


def test_a_step_that_is_hardly_one_still_gives_a_finite_update():
    found = calibrated({"bias": torch.full((2,), 1e-42)}, {"bias": torch.ones(2)}, by_layer=True)
    assert bool(found["bias"].isfinite().all())


def test_an_average_rescales_parameters_and_takes_buffers_as_they_come(world):
    start = world.start.state_dict()
    average = CalibratedAverage(start, history=world.history, parameters=PARAMETERS, by_layer=False)
    usual = RunningAverage(start)
    generator = torch.Generator().manual_seed(5)
    steps = {}
    for client, share in ((0, 0.25), (3, 0.75)):
        after = {
            name: tensor + torch.randn(tensor.shape, generator=generator)
            if tensor.is_floating_point()
            else tensor + client
            for name, tensor in start.items()
        }
        fresh = {name: (after[name] - start[name]).double() for name in PARAMETERS}
        stored = {name: world.seen.uploads[4, client][name] - world.seen.before[4][name] for name in PARAMETERS}
        steps[client] = {
            name: share * one * length(stored.values()) / length(fresh.values()) for name, one in fresh.items()
        }
        kept = {name: tensor.clone() for name, tensor in after.items()}
        for each in (average, usual):
            each.add(after, share, round_index=4, client=client)
        assert all(torch.equal(after[name], tensor) for name, tensor in kept.items())  # clients' weights are only read
    for each in (average, usual):
        each.finish()
    for name in (MEAN, VARIANCE, COUNTER):
        assert torch.equal(average.current[name], usual.current[name])
    for name in PARAMETERS:
        expected = start[name].double() + steps[0][name] + steps[3][name]
        torch.testing.assert_close(average.current[name], expected.float())
        assert not torch.allclose(average.current[name], usual.current[name])


# --- the whole of it


@pytest.mark.parametrize("norm", ["whole", "layer"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_run_equals_a_plain_loop_over_the_stored_rounds(world, norm, every):
    found = Method(every=every, norm=norm).unlearn(world.task())
    assert found.about["stored_rounds"] == list(range(0, 7, every))
    assert_close(found.model, by_hand(world, {TARGET}, every=every, norm=norm))


@pytest.mark.parametrize(("ratio", "epochs"), [(0.1, 1), (1 / 3, 1), (0.34, 2), (0.5, 2), (0.67, 3), (1.0, 3)])
def test_clients_train_for_a_ratio_of_their_epochs_rounded_up(world, ratio, epochs):
    found = Method(every=3, ratio=ratio).unlearn(world.task())
    assert_close(found.model, by_hand(world, {TARGET}, every=3, ratio=epochs / 3))
    steps = sum(-(-len(world.federation.client(client).train) // 8) for client in (0, 1, 3))
    assert found.cost.local_steps == 2 * epochs * steps  # rounds 3 and 6; nobody trains for round 0


def test_several_clients_are_forgotten_at_once(world):
    found = Method().unlearn(world.task((0, 3)))
    assert_close(found.model, by_hand(world, {0, 3}))
    assert found.cost.clients == {1, 2}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("gone", [{0}, {1}, {2}, {3}, {0, 1}, {1, 2, 3}], ids=str)
def test_cohorts_are_those_of_the_training_less_the_forgotten(few_clients, every, gone):
    found = Method(every=every).unlearn(few_clients.task(gone))
    assert_close(found.model, by_hand(few_clients, gone, every=every))
    stored = range(0, 8, every)
    asked = [client for number in stored[1:] for client in few_clients.seen.cohort(number, gone)]
    assert found.cost.clients == set(asked)
    assert found.cost.bytes_up == len(asked) * message(few_clients.start.state_dict())


def test_a_first_round_of_the_forgotten_alone_leaves_the_first_weights(few_clients):
    gone = set(few_clients.seen.cohort(0))
    found = Method(every=100).unlearn(few_clients.task(gone))
    assert fingerprint(found.model) == fingerprint(few_clients.start)


def test_the_first_stored_round_is_applied_as_it_was(world):
    """Only one round is stored, so that nothing follows."""
    found = Method(every=100).unlearn(world.task()).model.state_dict()
    sizes = {client: len(world.federation.client(client).train) for client in (0, 1, 3)}
    for name, tensor in found.items():
        uploads = {client: world.seen.uploads[0, client][name] for client in sizes}
        if tensor.is_floating_point():
            mean = sum(size / sum(sizes.values()) * uploads[client].double() for client, size in sizes.items())
            torch.testing.assert_close(tensor, mean.float(), atol=1e-6, rtol=1e-5)
        else:
            assert torch.equal(tensor, torch.stack(list(uploads.values())).amax(0))


def test_a_round_is_applied_without_those_who_go_and_other_rounds_do_not_matter(world):
    model = make_start()
    apply_without(model, world.history, 3, [0, 1, TARGET])
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, world.seen.uploads[3, 3][name])


def test_what_was_learned_after_the_first_weights_is_not_what_it_starts_from(world):
    lost = make_start()
    with torch.no_grad():
        for tensor in lost.state_dict().values():
            tensor.zero_()
    found = Method().unlearn(world.task(model=lost))
    assert fingerprint(found.model) == fingerprint(Method().unlearn(world.task()).model)


def test_rounds_after_are_plain_fedavg_on_what_is_retained(world):
    task = world.task()
    without, with_rounds = Method().unlearn(task), Method(post_rounds=2).unlearn(task)
    retained = world.federation.without(task.request)
    after = federate(without.model, retained, rounds=[7, 8], local=RECIPE.local, seed=RECIPE.seed)
    assert fingerprint(with_rounds.model) == fingerprint(after.model)
    steps = sum(-(-len(world.federation.client(client).train) // 8) for client in (0, 1, 3))
    assert with_rounds.cost.local_steps - without.cost.local_steps == 2 * 3 * steps  # three epochs each
    assert with_rounds.cost.storage_bytes == without.cost.storage_bytes


# --- nothing of the target


def spoil(tensors):
    return {
        name: torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else torch.full_like(tensor, 2**40)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("clients_per_round", [None, 3])
@pytest.mark.parametrize("norm", ["whole", "layer"])
def test_the_targets_stored_updates_and_rows_are_never_used(tmp_path, norm, clients_per_round):
    world = World(tmp_path / "history", rounds=4, epochs=1, clients_per_round=clients_per_round)
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


def test_updates_of_one_who_stays_are_used(tmp_path):
    """Proof that the test above would see it."""
    world = World(tmp_path / "history", rounds=2, epochs=1)
    for path in (tmp_path / "history").glob("0001-client-1.safetensors"):
        save_file(spoil(load_file(path)), path)
    with pytest.raises(DataError, match="not finite"):
        Method(every=1).unlearn(world.task())


# --- what it costs


def message(tensors) -> int:
    """Bytes of a message with these tensors."""
    return len(
        save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"fedup": json.dumps({})})
    )


@pytest.mark.parametrize("post_rounds", [0, 2])
@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_costs_are_those_of_a_hand_count(world, every, post_rounds):
    found = Method(every=every, post_rounds=post_rounds).unlearn(world.task())
    cost, stored = found.cost, len(range(0, 7, every))
    rounds = stored - 1 + post_rounds  # the first stored round needs nobody
    whole = message(world.start.state_dict())
    floats = message({name: one for name, one in world.start.state_dict().items() if one.is_floating_point()})
    an_epoch = sum(-(-len(world.federation.client(client).train) // 8) for client in (0, 1, 3))
    epochs = 2 * (stored - 1) + 3 * post_rounds  # ⌈0.5 · 3⌉ while calibrating
    assert (cost.bytes_up, cost.bytes_down) == (rounds * 3 * whole, rounds * 3 * whole)
    assert cost.local_steps == epochs * an_epoch
    assert cost.clients == ({0, 1, 3} if rounds else set())
    assert cost.storage_bytes == stored * 4 * floats  # the target's updates too: nobody knew who would go
    assert (cost.ahead_bytes_up, cost.ahead_time_s) == (0, 0.0)
    assert len(cost.path) == rounds
    assert json.loads(json.dumps(dict(found.about), allow_nan=False)) == found.about
    assert found.restore is None


def test_storage_counts_the_clients_that_took_part(few_clients):
    floats = message({name: one for name, one in few_clients.start.state_dict().items() if one.is_floating_point()})
    assert Method(every=3).unlearn(few_clients.task()).cost.storage_bytes == 3 * 2 * floats


# --- settings and requests


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0},
        {"every": -2},
        {"ratio": 0.0},
        {"ratio": -0.5},
        {"ratio": 1.01},
        {"ratio": math.nan},
        {"post_rounds": -1},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        Method(**wrong)


def test_an_unknown_norm_is_refused():
    with pytest.raises(SettingError, match="norm"):
        Method(norm="both")


def test_a_federation_that_never_trained_is_said(world):
    recipe = replace(RECIPE, rounds=0)
    with pytest.raises(DataError):
        Method().unlearn(world.task(recipe=recipe, history=History()))

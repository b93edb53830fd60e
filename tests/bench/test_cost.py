"""What an answer takes: probes stop the clock, rounds are counted to the step and the byte."""

import json
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedup import Federation, Forget, LocalTraining, Rounds, dirichlet, federate
from fedup.bench import cost as cost_module
from fedup.bench.cost import Cost, Meter
from fedup.bench.task import Task
from fedup.tasks.recipe import Recipe

MODEL = nn.Linear(1, 1)


class Clock:
    """A clock that goes on only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(cost_module, "_now", made)
    return made


def probing(clock: Clock, seconds: float):
    """A probe that takes so long."""

    def probe(model: nn.Module) -> dict[str, float]:
        clock.passes(seconds)
        return {"r_a": 0.5}

    return probe


def test_a_stage_takes_as_long_as_its_block_and_a_second_one_of_its_name_adds(clock):
    cost = Cost()
    for seconds in (2.0, 3.0):
        with cost.stage("fit"):
            clock.passes(seconds)
    with cost.stage("swap"):
        clock.passes(0.5)
    assert cost.time_s == {"fit": 5.0, "swap": 0.5}
    assert cost.total_time_s == 5.5


def test_a_stage_that_fails_is_counted_too(clock):
    cost = Cost()
    with pytest.raises(RuntimeError), cost.stage("fit"):
        clock.passes(2.0)
        raise RuntimeError
    assert cost.time_s == {"fit": 2.0}


def test_probes_stop_the_clock_of_a_stage_and_of_the_path(clock):
    cost, probe = Cost(), probing(clock, 50.0)
    with cost.stage("contact"):
        clock.passes(4.0)
    with cost.stage("train"):
        for _ in range(3):
            clock.passes(2.0)
            cost.probe(probe, MODEL)
        clock.passes(1.0)
    assert cost.time_s == {"contact": 4.0, "train": 7.0}
    assert cost.path == [{"time_s": moment, "r_a": 0.5} for moment in (6.0, 8.0, 10.0)]


def test_probes_of_an_earlier_stage_do_not_turn_the_clock_back(clock):
    """A method may train twice: on the way in the second training, the probes of the first are over and done with."""
    cost, probe = Cost(), probing(clock, 50.0)
    for _ in range(2):
        with cost.stage("train"):
            clock.passes(2.0)
            cost.probe(probe, MODEL)
    assert cost.time_s == {"train": 4.0}
    assert [moment["time_s"] for moment in cost.path] == [2.0, 4.0]


def from_json(value):
    plain = json.loads(json.dumps(value))
    return Cost(**{**plain, "clients": set(plain["clients"])})


@given(
    st.builds(
        Cost,
        time_s=st.dictionaries(st.text(max_size=5), st.floats(0, 1e6)),
        bytes_up=st.integers(0),
        bytes_down=st.integers(0),
        clients=st.sets(st.integers(0, 1000)),
        local_steps=st.integers(0),
        ahead_time_s=st.floats(0, 1e6),
        ahead_bytes_up=st.integers(0),
        storage_bytes=st.integers(0),
        path=st.lists(st.fixed_dictionaries({"time_s": st.floats(0, 1e6), "r_a": st.floats(0, 1)})),
    )
)
def test_a_cost_comes_back_from_json(cost):
    assert from_json(cost.to_json()) == cost


def test_a_cost_with_probes_on_its_way_comes_back_from_json(clock):
    cost = Cost()
    with cost.stage("train"):
        cost.probe(probing(clock, 1.0), MODEL)
    assert from_json(cost.to_json()) == cost


# --- a real federation


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Five clients of unequal size; the last has a single row to train on."""
    source = torch.Generator().manual_seed(0)
    y = torch.arange(150) % 3
    x = torch.randn(150, 6, generator=source)
    *parts, last = dirichlet(y[:149], 4, seed=1)
    return Federation.split(x, y, [*parts, last, torch.tensor([149])], heldout=0.2)


def small_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def steps():
    """Steps that optimizers take, counted by torch."""
    taken: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: taken.append(1))
    yield taken
    handle.remove()


@pytest.mark.parametrize("batch_size", [1, 2, 7, 16, 1000])
@pytest.mark.parametrize("epochs", [1, 3])
def test_local_steps_are_those_that_clients_take(federation, steps, batch_size, epochs):
    cost, local = Cost(), LocalTraining(epochs=epochs, batch_size=batch_size, lr=1e-3)
    federate(small_model(), federation, rounds=2, local=local, observers=[Meter(cost, federation, local)])
    assert cost.local_steps == len(steps) > 0


@pytest.mark.parametrize(("rounds", "clients_per_round"), [(1, None), (3, None), (4, 2)])
def test_bytes_are_a_serialised_model_down_and_up_for_each_client_of_each_round(federation, rounds, clients_per_round):
    cost, local, model = Cost(), LocalTraining(lr=1e-3), small_model()
    federate(
        model,
        federation,
        rounds=Rounds(rounds, clients_per_round=clients_per_round),
        local=local,
        observers=[Meter(cost, federation, local)],
    )
    message = len(save(model.state_dict(), metadata={"fedup": json.dumps({})}))
    sent = rounds * (clients_per_round or len(federation.clients)) * message
    assert (cost.bytes_down, cost.bytes_up) == (sent, sent)
    if clients_per_round is None:
        assert cost.clients == set(federation.ids)


def test_clients_without_a_row_left_cost_nothing(federation, steps):
    gone = Forget.clients([1, 4])
    retained, cost, local = federation.without(gone), Cost(), LocalTraining(batch_size=8, lr=1e-3)
    federate(small_model(), retained, rounds=2, local=local, observers=[Meter(cost, retained, local)])
    assert cost.clients == {0, 2, 3}
    assert cost.local_steps == len(steps)
    message = len(save(small_model().state_dict(), metadata={"fedup": json.dumps({})}))
    assert cost.bytes_up == 2 * 3 * message


SLEEP = 0.1


def sleepy(model: nn.Module) -> dict[str, float]:
    time.sleep(SLEEP)
    return {"r_a": 0.5, "unwanted": 0.5}


def test_training_a_task_counts_no_second_of_its_probes(federation):
    recipe = Recipe("digits", "lenet5", rounds=3, clients=5, lr=1e-3)
    task = Task(federation, Forget.classes([0]), small_model(), small_model(), recipe, sleepy, lambda *_: None)
    cost = Cost()
    started = time.perf_counter()
    task.train(task.start, federation, rounds=3, cost=cost, what="Retrain")
    wall = time.perf_counter() - started
    assert 0 < cost.total_time_s <= wall - 3 * SLEEP
    moments = [moment["time_s"] for moment in cost.path]
    assert len(moments) == 3
    assert 0 < moments[0] < moments[1] < moments[2] <= cost.total_time_s + SLEEP / 10
    assert all(set(moment) == {"time_s", "r_a", "unwanted"} for moment in cost.path)


def test_training_twice_on_one_account_goes_on_where_the_first_stopped(federation):
    recipe = Recipe("digits", "lenet5", rounds=2, clients=5, lr=1e-3)
    task = Task(federation, Forget.classes([0]), small_model(), small_model(), recipe, sleepy, lambda *_: None)
    cost = Cost()
    for _ in range(2):
        task.train(task.start, federation, rounds=2, cost=cost, what="Train")
    moments = [moment["time_s"] for moment in cost.path]
    assert moments == sorted(moments)
    assert all(moment >= 0 for moment in moments)

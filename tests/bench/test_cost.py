"""What an answer takes: probes stop the clock, rounds are counted to the step and the byte."""

import json
import time

import pytest
import torch
from tests.bench._progress import silent
from tests.bench.methods._worlds import message
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


def test_a_stage_takes_as_long_as_its_block_even_if_it_fails_and_a_second_one_of_its_name_adds(clock):
    cost = Cost()
    with cost.stage("fit"):
        clock.passes(2.0)
    with pytest.raises(RuntimeError), cost.stage("fit"):
        clock.passes(3.0)
        raise RuntimeError
    with cost.stage("swap"):
        clock.passes(0.5)
    assert cost.time_s == {"fit": 5.0, "swap": 0.5}
    assert cost.total_time_s == 5.5


def test_probes_stop_the_clock_of_a_stage_and_of_the_path(clock):
    """A method may train twice: in its second training the probes of the first are over and done with."""
    cost, probe = Cost(), probing(clock, 50.0)
    with cost.stage("contact"):
        clock.passes(4.0)
    for _ in range(2):
        with cost.stage("train"):
            clock.passes(2.0)
            cost.probe(probe, MODEL)
            clock.passes(1.0)
    assert cost.time_s == {"contact": 4.0, "train": 6.0}
    assert cost.path == [{"time_s": moment, "r_a": 0.5} for moment in (6.0, 9.0)]
    plain = json.loads(json.dumps(cost.to_json()))
    assert Cost(**{**plain, "clients": set(plain["clients"])}) == cost


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


@pytest.mark.parametrize(
    ("batch_size", "epochs", "clients_per_round", "gone"), [(1, 1, None, []), (7, 3, 2, []), (1000, 1, None, [1, 4])]
)
def test_steps_are_those_that_clients_take_and_bytes_a_model_down_and_up_for_each_client_of_each_round(
    federation, steps, batch_size, epochs, clients_per_round, gone
):
    """Clients without a row left cost nothing."""
    retained = federation.without(Forget.clients(gone)) if gone else federation
    cost, local = Cost(), LocalTraining(epochs=epochs, batch_size=batch_size, lr=1e-3)
    rounds, meter = Rounds(2, clients_per_round=clients_per_round), Meter(cost, retained, local)
    federate(small_model(), retained, rounds=rounds, local=local, observers=[meter])
    assert cost.local_steps == len(steps) > 0
    sent = 2 * (clients_per_round or 5 - len(gone)) * message(small_model().state_dict())
    assert (cost.bytes_down, cost.bytes_up) == (sent, sent)
    assert clients_per_round or cost.clients == set(federation.ids) - set(gone)


SLEEP = 0.1


def sleepy(model: nn.Module) -> dict[str, float]:
    time.sleep(SLEEP)
    return {"r_a": 0.5, "unwanted": 0.5}


def test_training_a_task_counts_no_second_of_its_probes(federation):
    recipe = Recipe("digits", "lenet5", rounds=3, clients=5, lr=1e-3)
    task = Task(federation, Forget.classes([0]), small_model(), small_model(), recipe, sleepy, silent)
    cost = Cost()
    started = time.perf_counter()
    task.train(task.start, federation, rounds=3, cost=cost, what="Retrain")
    wall = time.perf_counter() - started
    assert 0 < cost.total_time_s <= wall - 3 * SLEEP
    moments = [moment["time_s"] for moment in cost.path]
    assert len(moments) == 3
    assert 0 < moments[0] < moments[1] < moments[2] <= cost.total_time_s + SLEEP / 10
    assert all(set(moment) == {"time_s", "r_a", "unwanted"} for moment in cost.path)

"""The captured engine's feed, lanes and schedule where there is no GPU: graphs that run their steps anew each time.

What a GPU adds (capturing, streams, each lane's own random numbers) is tested in test_captured.py, on one.
"""

import pytest
import torch
from tests.engines._federations import SIZES, make_federation, make_model

from fedup import LocalTraining
from fedup.training.averaging import RunningAverage
from fedup.training.engines import captured
from fedup.training.engines.plain import PlainEngine
from fedup.training.local import Job


class Nothing:
    """Stands in for streams and events."""

    def __init__(self, *args):
        pass

    def synchronize(self):
        pass

    def record(self):
        pass


class Rerun:
    """A graph of some lanes' steps."""

    replays = 0

    def __init__(self, engine, size, width):
        self.engine, self.size, self.width = engine, size, width

    def replay(self):
        Rerun.replays += 1
        for lane in self.engine._slots[: self.width]:
            self.engine._step(lane, self.size)


@pytest.fixture
def without_gpu(monkeypatch):
    """The engine with everything of a GPU replaced by nothing."""
    empty = torch.empty

    def capture(self, size, width, load):
        while len(self._slots) < width:
            self._slots.append(self._slot(len(self._slots)))
        return Rerun(self, size, width)

    monkeypatch.setattr(torch.cuda, "Event", Nothing)
    monkeypatch.setattr(torch.cuda, "Stream", Nothing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **more: empty(*size, **more))
    monkeypatch.setattr(captured.CapturedEngine, "_capture", capture)
    monkeypatch.setattr(Rerun, "replays", 0)


def jobs_of(federation, how, round_index=0, chosen=None):
    return [
        Job(client.id, client.train, how.in_round(round_index), seed=1000 * round_index + client.id, share=0.1)
        for client in federation.clients
        if len(client.train) and (chosen is None or client.id in chosen)
    ]


def rounds_of(engine, rounds):
    """All clients' weights and the average after these rounds."""
    average, seen = RunningAverage(engine.weights), {}
    for number, jobs in enumerate(rounds):
        for job, weights in engine.train(jobs, average.load):
            assert (number, job.client) not in seen
            seen[number, job.client] = {name: tensor.clone() for name, tensor in weights.items()}
            average.add(weights, job.share)
        average.finish()
    return seen, average.current


def assert_same_rounds(kind, how, rounds, federation):
    x, y = federation.x, federation.y
    plain, in_the_end = rounds_of(PlainEngine(make_model(kind), x, y, how), rounds)
    fast, found = rounds_of(captured.CapturedEngine(make_model(kind), x, y, how, else_plain=False), rounds)
    assert plain.keys() == fast.keys()
    for key, weights in plain.items():
        for name, value in weights.items():
            torch.testing.assert_close(fast[key][name], value, msg=lambda text, at=(key, name): f"{at}: {text}")
    for name, value in in_the_end.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("batchnorm", LocalTraining(batch_size=16, epochs=2)),
        ("layernorm", LocalTraining(batch_size=16, optimizer="adam", lr=0.01)),
        ("plain", LocalTraining(batch_size=8, momentum=0.0, weight_decay=0.01)),
        ("plain", LocalTraining(batch_size=8, schedule="cosine", warmup_rounds=1, schedule_rounds=3)),
        ("plain", LocalTraining(batch_size=8, optimizer="adam", lr=0.01, warmup_rounds=3, schedule_rounds=9)),
    ],
    ids=["sgd", "adam", "decay", "cosine", "warm-up"],
)
def test_every_client_ends_at_the_weights_of_the_plain_engine(without_gpu, kind, how):
    federation = make_federation(tuple(size for size in SIZES if size != 1))  # one row has no variance to norm by
    assert_same_rounds(kind, how, [jobs_of(federation, how, i) for i in range(3)], federation)
    assert Rerun.replays > 0


@pytest.mark.parametrize("count", [1, 3, 5, 8, 9])
def test_slots_without_work_do_no_harm_however_long_training_lasts(without_gpu, count):
    federation, how = make_federation((64,) * count), LocalTraining(batch_size=16)
    assert_same_rounds("plain", how, [jobs_of(federation, how, i) for i in range(9)], federation)


def test_cohorts_that_change_from_round_to_round(without_gpu):
    federation, how = make_federation((64, 16, 100, 7, 33, 48, 90, 20, 61)), LocalTraining(batch_size=16)
    source = torch.Generator().manual_seed(0)
    cohorts = [set(torch.randperm(9, generator=source)[: i % 10].tolist()) for i in range(15)]  # of nobody, too
    rounds = [jobs_of(federation, how, i, cohort) for i, cohort in enumerate(cohorts)]
    assert_same_rounds("plain", how, rounds, federation)


@pytest.mark.parametrize(("sizes", "replays"), [((160,) * 8, 10), ((20, 30, 5), 0)], ids=["many", "rare"])
def test_a_round_takes_as_many_replays_as_its_longest_lane_has_steps_and_rare_sizes_none(without_gpu, sizes, replays):
    federation, how = make_federation(sizes), LocalTraining(batch_size=16)
    assert_same_rounds("plain", how, [jobs_of(federation, how)], federation)
    assert Rerun.replays == replays

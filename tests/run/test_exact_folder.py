"""A run folder in exact mode: after any history, kills included, it serves what its final rows teach."""

import random

import pytest
import torch
from tests.test_exact import CLASSES, backbone, federation, tiny

import fedup
from fedup import FeatureCache, Forget, learn_head
from fedup.run.exact import keep_head, load_head_of
from fedup.run.folder import Run, Writer
from fedup.run.head_desk import HeadDesk
from fedup.run.new_request import NewRequest
from fedup.tasks.additions import Addition, with_rows
from fedup.tasks.labelled import LabelledRows


class KilledError(Exception):
    """The process ends before its commit."""


class History:
    """A folder that is asked at random, beside the federation as it was committed."""

    def __init__(self, folder, seed: int) -> None:
        self.rng, (x, y) = random.Random(seed), tiny(seed % 5, rows=64)
        self.spare = LabelledRows(x[40:], y[40:])
        self.clients = federation(x[:40], y[:40], {i: list(range(10 * i, 10 * i + 10)) for i in range(4)})
        self.run = Run(folder)
        self.run.start({"backbone": "tiny", "class_names": list(map(str, range(CLASSES)))})
        with self.run.writing("train") as writer:
            model = learn_head(backbone(), self.clients, num_classes=CLASSES, cache=self.cache())
            keep_head(writer, model, {"data": self.clients.digest(), "time_s": 0.0})

    def cache(self) -> FeatureCache:
        return FeatureCache.open(self.run.path / "features.safetensors")

    def desk(self, writer: Writer) -> HeadDesk:
        return HeadDesk(writer, load_head_of(self.run, writer.state, backbone(), cache=self.cache()), self.clients)

    def step(self) -> None:
        choice, state = self.rng.choice(["forget", "forget", "restore", "add", "add", "purge"]), self.run.read()
        with self.run.writing(choice) as writer:
            desk = self.desk(writer)
            if choice == "forget":
                request = self.request()
                left = self.clients.retained(fedup.request.union([request, *state.forgets]))
                if request not in state.forgets and len(left) > 6:
                    force = fedup.run.limits.Limits(None, force=True)
                    desk.unlearn([NewRequest(request)], limits=force, keep_sealed=self.rng.random() < 0.5)
            elif choice == "restore" and state.active:
                desk.restore([self.rng.choice(state.active)])
            elif choice == "purge" and state.active:
                desk.purge()
            elif choice == "add" and len(self.spare.y) >= 3:
                self.add(desk)

    def add(self, desk: HeadDesk) -> None:
        first, new, spare = len(self.clients.x), self.rng.randint(1, 3), self.spare
        holders = torch.tensor([self.rng.randrange(len(self.clients.clients) + 1) for _ in range(new)])
        grown = with_rows(self.clients, LabelledRows(spare.x[:new], spare.y[:new]), holders)
        rows = {int(own): (first + (holders == own).nonzero().flatten()).tolist() for own in holders.unique()}
        desk.add(grown, rows, Addition("rows", str(first), new, None, (), grown.digest()).to_json())
        self.clients, self.spare = grown, LabelledRows(spare.x[new:], spare.y[new:])  # only once it is committed

    def request(self) -> Forget:
        client = self.rng.choice(self.clients.clients)
        known = {i for own in self.run.read().forgets for i in own.sample_ids.get(client.id, ())}
        free = sorted(set(client.train.tolist()) - known)
        kind = self.rng.choice(["client", "class", "sample"])
        if kind == "sample" and free:
            return Forget.samples({client.id: self.rng.sample(free, min(2, len(free)))})
        return Forget.classes([self.rng.randrange(CLASSES)]) if kind == "class" else Forget.clients([client.id])

    def check(self) -> None:
        state = self.run.read()
        served = load_head_of(self.run, state, backbone(), cache=self.cache())
        left = self.clients.without(fedup.request.union(state.forgets)) if state.forgets else self.clients
        again = learn_head(backbone(), left, num_classes=CLASSES)
        assert served.totals == again.totals and torch.equal(served.head.weight, again.head.weight)


@pytest.mark.parametrize("seeds", [range(20, 32), pytest.param(range(200), marks=pytest.mark.slow)], ids=len)
def test_after_any_history_and_any_kill_a_folder_serves_what_its_final_rows_teach(tmp_path, monkeypatch, seeds):
    commit = Writer.commit

    def kill(*arguments):
        raise KilledError

    for seed in seeds:
        monkeypatch.setattr(Writer, "commit", commit)
        history = History(tmp_path / str(seed), seed)
        for _ in range(7):
            killed = history.rng.random() < 0.25
            monkeypatch.setattr(Writer, "commit", kill if killed else commit)
            before = history.run.read().head
            try:
                history.step()
            except KilledError:
                assert history.run.read().head == before
            history.check()

"""Exact-Fun (Xiong et al., ICDM 2023), a reconstruction from its description: there is no public code of it.

The federation learns with rounded global weights and keeps every round; a request is answered by replaying it.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedup.artifacts import serialized_size
from fedup.bench.cost import Cost, Meter
from fedup.bench.history import History
from fedup.bench.methods import AnswersAll
from fedup.bench.task import Task, Unlearned
from fedup.errors import SettingError
from fedup.request import Forget
from fedup.training.averaging import RunningAverage, Weights, weights_of
from fedup.training.fedavg import Averaging

GRID = {"step": (0.0003, 0.003)}


@dataclass(frozen=True)
class Method(AnswersAll):
    """After each round the global weights are rounded to multiples of `step`; each round is kept, and seeds are fixed.

    On a request rounds are replayed: clients that hold forgotten data train again without it, from the stored weights,
    and the uploads of the others are taken from the store. While the rounded average is the stored one nothing else
    happens; from the first round in which it is not, the federation trains again.

    It starts from its own federation, not from the one that other methods get: `answer = false` shows that one's model.
    """

    step: float = 0.001
    answer: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.step < 1:
            raise SettingError(f"step must lie between 0 and 1; found {self.step}.")

    def averaging(self, model: nn.Module) -> Averaging:
        """FedAvg's average with rounded parameters; buffers are not rounded: a variance must not become 0."""
        return partial(RoundedAverage, step=self.step, names=[name for name, _ in model.named_parameters()])

    def unlearn(self, task: Task) -> Unlearned:
        """What the rounded federation would have learned without the data."""
        cost = Cost()
        model, history = task.learned_otherwise(self.averaging(task.start), named=f"weights rounded to {self.step!r}")
        kept = [(1 + len(clients), number) for number in history.rounds if (clients := history.shares(number))]
        cost.storage_bytes = sum(count * serialized_size(history.before(number), {}) for count, number in kept)
        if not self.answer:
            did = f"no request is answered: the model of the federation whose weights are rounded to {self.step:g}"
            return Unlearned(model, cost, about={"did": did})
        replay = Replay(task, history, self.averaging(task.start), final=weights_of(model))
        changed = replay.first_change(cost)
        if changed is None:
            did, answer = "no rounded average changed: the model stays as it is", model
        else:
            number, start = changed
            rest = range(number + 1, task.recipe.rounds)
            answer = task.train(
                start, replay.retained, rounds=rest, cost=cost, what="Exact-Fun", averaging=replay.averaging
            )
            did = (
                f"a reconstruction with a federation of its own, rounded to {self.step:g}: the replay left the stored "
                f"course in round {number + 1}, and the {len(rest)} rounds after it were trained anew"
            )
        return Unlearned(answer, cost, about={"did": did, "left_in_round": changed[0] if changed else None})


class RoundedAverage(RunningAverage):
    """The average, on a grid: small differences between clients' weights round away."""

    def __init__(self, start: Weights, *, step: float, names: Iterable[str]) -> None:
        super().__init__(start)
        self._step, self._names = step, list(names)

    def finish(self) -> None:
        if not self._added:
            return
        super().finish()
        for name in self._names:
            rounded = (self.current[name].double() / self._step).round() * self._step
            self.current[name].copy_(rounded + 0.0)  # one zero only: −0 and 0 are equal, but not the same bits


class Replay:
    """Replays the stored rounds on what is retained."""

    def __init__(self, task: Task, history: History, averaging: Averaging, *, final: Weights) -> None:
        self.averaging, self.retained = averaging, task.retained
        self._task, self._history, self._final = task, history, final
        before, after = task.federation, self.retained
        self._touched = [id for id in before.ids if len(before.client(id).train) != len(after.client(id).train)]

    def first_change(self, cost: Cost) -> tuple[int, nn.Module] | None:
        """The first round whose rounded average is not the stored one, and the model after it; None if all are."""
        for number in self._history.rounds:
            if not set(self._touched) & set(self._history.shares(number)):
                continue  # uploads and shares are unchanged
            average = self._round(number, cost)
            with cost.stage("replay"):
                stored = self._after(number)
                if not all(torch.equal(tensor.cpu(), stored[name].cpu()) for name, tensor in average.current.items()):
                    model = copy.deepcopy(self._task.start)
                    average.load(weights_of(model))
                    return number, model
        return None

    def _round(self, number: int, cost: Cost) -> RunningAverage:
        """A round's average: touched clients train again, the others' uploads come from the store."""
        fresh = self._train_touched(number, cost)
        with cost.stage("replay"):
            sizes = {client: len(self.retained.client(client).train) for client in self._history.shares(number)}
            live = weights_of(self._task.start)
            average = self.averaging(_like(self._history.before(number), live))
            for client in [client for client in self.retained.ids if sizes.get(client)]:  # in the order of a round
                upload = fresh.get(client) or self._history.upload(number, client)
                average.add(_like(upload, live), sizes[client] / sum(sizes.values()))
            average.finish()
        return average

    def _train_touched(self, number: int, cost: Cost) -> dict[int, dict[str, Tensor]]:
        here = set(self._touched) & set(self._history.shares(number))
        if not any(len(self.retained.client(client).train) for client in here):
            return {}
        others = frozenset(self.retained.ids) - set(self._touched)  # stay without rows: cohorts are drawn alike
        only_touched = self.retained.without(Forget.clients(others)) if others else self.retained
        start, recipe, sent = copy.deepcopy(self._task.start), self._task.recipe, History()
        meter = Meter(cost, only_touched, recipe.local)  # no probe: the average of these clients is nobody's model
        with cost.stage("replay"):
            for name, weight in weights_of(start).items():
                weight.copy_(self._history.before(number)[name])
            recipe.train(start, only_touched, rounds=[number], observers=[sent, meter])
        return {client: sent.upload(number, client) for client in sent.shares(number)}

    def _after(self, number: int) -> Weights:
        """The stored global weights after a round."""
        later = [other for other in self._history.rounds if other > number and self._history.shares(other)]
        return self._history.before(later[0]) if later else self._final


def _like(weights: Weights, live: Weights) -> dict[str, Tensor]:
    return {name: tensor.to(live[name].device) for name, tensor in weights.items()}

"""Phase 1, learning: FedAvg in one process, on CPU or CUDA."""

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedup.artifacts import load_tensors, save_tensors
from fedup.client import LocalTraining, train_locally
from fedup.errors import ArtifactError, DataError, SettingError
from fedup.federation import Client, Federation
from fedup.rng import generator, seed_for
from fedup.sharing import fingerprint

Weights = Mapping[str, Tensor]


class Observer:
    """Watches a federation learn. The tensors are live: copy what you keep."""

    def on_update(self, round_index: int, client: int, *, before: Weights, after: Weights, weight: float) -> None:
        """A client has trained: the global weights it got, its own, and its share in the average."""

    def on_round(self, round_index: int, model: nn.Module) -> None:
        """A round is over: the model holds the new global weights."""


@dataclass(frozen=True)
class Trained:
    """A federation's model and what it took."""

    model: nn.Module
    rounds: int
    time_s: float


def federate(
    model: nn.Module,
    federation: Federation,
    *,
    rounds: int,
    local: LocalTraining | None = None,
    clients_per_round: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    observers: Sequence[Observer] = (),
    checkpoint: str | Path | None = None,
) -> Trained:
    """Train by FedAvg, weighted by client size; `model` itself is left as it is.

    With `checkpoint` the global weights are written after each round, and a call with the same settings goes on from
    there to the same bits (a client's optimizer starts anew each round, so there is nothing else to keep).
    """
    local = local or LocalTraining()
    _check(federation, rounds, clients_per_round)
    started = time.perf_counter()
    target = next(model.parameters()).device if device is None else torch.device(device)
    trained = copy.deepcopy(model).to(target)
    data = federation.to(target)
    store = _Checkpoint(checkpoint, model, federation, local, clients_per_round, seed)
    average = _RunningAverage(trained)
    for round_index in range(store.resume(average, rounds), rounds):
        # 1. who takes part
        cohort = _draw_cohort(data.clients, clients_per_round, seed, round_index)
        total = sum(len(client.train) for client in cohort)
        for client in cohort:
            # 2. each client trains from the global weights, in the one model there is
            average.load_global()
            train_seed = seed_for(seed, "round", round_index, "client", client.id)
            train_locally(trained, data.x, data.y, client.train, how=local, seed=train_seed)
            # 3. its weights join the running average
            weight = len(client.train) / total
            for observer in observers:
                observer.on_update(
                    round_index, client.id, before=average.global_weights, after=average.live, weight=weight
                )
            average.add(weight)
        if cohort:  # a cohort of clients without data changes nothing
            average.finish()
        average.load_global()
        trained.eval()
        for observer in observers:
            observer.on_round(round_index, trained)
        store.save(average, round_index + 1)
    average.load_global()
    if not all(bool(tensor.isfinite().all()) for tensor in average.live.values()):
        raise DataError("Training diverged: the averaged weights are not finite. Use a smaller lr, or check the data.")
    return Trained(trained.eval(), rounds, time.perf_counter() - started)


def _check(federation: Federation, rounds: int, clients_per_round: int | None) -> None:
    if rounds < 0:
        raise SettingError(f"rounds must be 0 or more; found {rounds}.")
    if clients_per_round is not None and not 1 <= clients_per_round <= len(federation.clients):
        raise SettingError(
            f"clients_per_round must lie in 1 … {len(federation.clients)} (all clients); found {clients_per_round}."
        )
    if not any(len(client.train) for client in federation.clients):
        raise DataError("No client has a row to train on.")


def _draw_cohort(clients: Sequence[Client], size: int | None, seed: int, round_index: int) -> list[Client]:
    """The clients of a round; those without data drop out after the draw, so that Retrain sees the same cohorts."""
    chosen = list(range(len(clients)))
    if size is not None:
        order = torch.randperm(len(clients), generator=generator(seed, "cohort", round_index))
        chosen = sorted(order[:size].tolist())
    return [clients[i] for i in chosen if len(clients[i].train)]


class _RunningAverage:
    """Global weights and the weighted sum of the clients' weights, beside one live model: no copy per client."""

    def __init__(self, model: nn.Module) -> None:
        self.live: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.live = {name: tensor.detach() for name, tensor in self.live.items()}
        self.global_weights = {name: tensor.clone() for name, tensor in self.live.items()}
        self._sum = {name: torch.zeros_like(tensor) for name, tensor in self.live.items()}
        self._added = 0
        self._floats = [name for name, tensor in self.live.items() if tensor.is_floating_point()]
        self._counters = [name for name, tensor in self.live.items() if not tensor.is_floating_point()]

    def load_global(self) -> None:
        torch._foreach_copy_(list(self.live.values()), list(self.global_weights.values()))

    def add(self, weight: float) -> None:
        torch._foreach_add_(self._pick(self._sum), self._pick(self.live), alpha=weight)
        for name in self._counters:  # BatchNorm's num_batches_tracked counts: the largest, never a mean
            largest = torch.maximum(self._sum[name], self.live[name]) if self._added else self.live[name]
            self._sum[name].copy_(largest)
        self._added += 1

    def finish(self) -> None:
        self.global_weights, self._sum = self._sum, self.global_weights
        torch._foreach_zero_(list(self._sum.values()))
        self._added = 0

    def _pick(self, weights: dict[str, Tensor]) -> list[Tensor]:
        return [weights[name] for name in self._floats]


class _Checkpoint:
    """The state after a round, on disk; refuses one written under other settings."""

    def __init__(
        self,
        path: str | Path | None,
        model: nn.Module,
        federation: Federation,
        local: LocalTraining,
        clients_per_round: int | None,
        seed: int,
    ) -> None:
        self.path = None if path is None else Path(path)
        if self.path is None:
            return
        self.settings = {
            "initial": fingerprint(model),
            "local": asdict(local),
            "clients_per_round": clients_per_round,
            "seed": seed,
            "data": federation.digest(),
        }

    def resume(self, average: _RunningAverage, rounds: int) -> int:
        """Rounds already done; their weights are loaded."""
        if self.path is None or not self.path.exists():
            return 0
        tensors, header = load_tensors(self.path, kind="checkpoint")
        if header["settings"] != self.settings:
            changed = [key for key, value in self.settings.items() if header["settings"].get(key) != value]
            raise ArtifactError(
                f"The checkpoint {self.path} was written under other settings ({', '.join(changed)} differ). "
                "Use the settings it was started with, or another file."
            )
        if header["rounds"] > rounds:
            raise ArtifactError(
                f"The checkpoint {self.path} is {header['rounds']} rounds old already, and {rounds} were asked for. "
                "Ask for at least as many, or use another file."
            )
        for name, tensor in average.global_weights.items():
            tensor.copy_(tensors[name])
        return int(header["rounds"])

    def save(self, average: _RunningAverage, rounds: int) -> None:
        if self.path is not None:
            header = {"rounds": rounds, "settings": self.settings}
            save_tensors(self.path, average.global_weights, kind="checkpoint", header=header)

"""Phase 1, learning: FedAvg in one process, on CPU or CUDA."""

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError, DataError, FedUPWarning, SettingError
from fedup.federation import Federation
from fedup.models.backbone import mark_trained
from fedup.models.outputs import check_outputs
from fedup.models.views import fingerprint
from fedup.rng import generator, seed_for
from fedup.threads import asked_threads, threads_for_training, using_threads
from fedup.training.averaging import RunningAverage, Weights, weights_of
from fedup.training.engines import EngineName, make_engine
from fedup.training.local import Job, LocalTraining
from fedup.training.value_scale import ValueScale

Averaging = Callable[[Weights], RunningAverage]  # makes an average that starts from these weights


class Observer:
    """Watches a federation learn. The tensors are live: copy what you keep."""

    def on_start(self, rounds_done: int, threads: int) -> None:
        """Training starts, or resumes after `rounds_done` rounds; torch uses `threads` threads."""

    def on_update(self, round_index: int, client: int, *, before: Weights, after: Weights, weight: float) -> None:
        """A client has trained: the global weights before, its weights after, its share in the average.

        Called once for each client of a round, in the order in which clients finish.
        """

    def on_round(self, round_index: int, model: nn.Module) -> None:
        """A round is over: the model holds the new global weights."""


@dataclass(frozen=True)
class Rounds:
    """What the server does: how many rounds or which ones, clients per round, and how it averages their weights.

    >>> Rounds(20, clients_per_round=5).numbers
    range(0, 20)
    """

    count: int | Sequence[int]  # how many, from round 0; or the numbers of the rounds, which seed cohorts and batches
    clients_per_round: int | None = None  # drawn in each round; None: all
    averaging: Averaging = RunningAverage  # FedAvg's, or another

    def __post_init__(self) -> None:
        if min([self.count] if isinstance(self.count, int) else self.count, default=0) < 0:
            raise SettingError(f"rounds must be 0 or more; found {self.count}.")
        if self.clients_per_round is not None and self.clients_per_round < 1:
            raise SettingError(f"clients_per_round must be 1 or more; found {self.clients_per_round}.")

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the rounds, in order."""
        return range(self.count) if isinstance(self.count, int) else self.count


@dataclass(frozen=True)
class Runtime:
    """Where and how training is computed, and the checkpoint it can resume from.

    With `checkpoint` the global weights are written after each round. A call with the same settings resumes there, and
    ends at the same bits (optimizers start anew each round, so there is nothing else to store).
    `engine="plain"` switches off what makes training fast on a GPU.

    `threads` is how many torch computes with; None: what FEDUP_THREADS says, else those that a checkpoint was written
    with, else one for a small model and what torch has now for others (`fedup.threads`).

    >>> Runtime(device="cpu", threads=2).engine
    'auto'
    """

    device: torch.device | str | None = None  # None: the model's
    engine: EngineName = "auto"
    checkpoint: str | Path | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise SettingError(f"threads must be 1 or more; found {self.threads}.")


@dataclass(frozen=True)
class Trained:
    """A federation's model and how it was trained."""

    model: nn.Module
    rounds: int
    time_s: float  # of all rounds, also those before an interruption
    engine: str  # the last one used
    threads: int  # of torch: the bits depend on it


def federate(
    model: nn.Module,
    federation: Federation,
    *,
    rounds: int | Sequence[int] | Rounds,
    local: LocalTraining | None = None,
    seed: int = 0,
    observers: Sequence[Observer] = (),
    runtime: Runtime = Runtime(),
) -> Trained:
    """Train by FedAvg, weighted by client size; `model` itself stays unchanged.

    `rounds` is how many, or which ones; `Rounds` also sets the clients per round and the average. `runtime` sets the
    device, engine, threads and checkpoint.

    The loss is cross entropy for classes, binary cross entropy for labels and mean squared error for values. Values are
    learned in units of their deviation (`fedup.training.value_scale`): `model` starts there, and the trained model
    gives the user's units.
    """
    local = local or LocalTraining()
    rounds = rounds if isinstance(rounds, Rounds) else Rounds(rounds)
    _check(model, federation, rounds, runtime)
    numbers, clients_per_round = rounds.numbers, rounds.clients_per_round
    started = time.perf_counter()
    target = next(model.parameters()).device if runtime.device is None else torch.device(runtime.device)
    trained = copy.deepcopy(model).to(target)
    store = _Checkpoint(runtime.checkpoint, lambda: _settings(model, federation, local, rounds, seed))
    threads = _threads(runtime.threads, store.threads, trained, federation.x[:1].to(target), local)
    scale = ValueScale.of(federation, trained)
    y = federation.y if scale is None else scale.standardized(federation.y)
    with using_threads(threads), torch.cuda.device(target) if target.type == "cuda" else nullcontext():
        work = make_engine(runtime.engine, trained, federation.x.to(target), y.to(target), local)
        average, live = rounds.averaging(work.weights), weights_of(trained)
        parts = [client.train.long() for client in federation.clients]
        rows = torch.cat(parts).cpu().split([len(part) for part in parts])  # on the CPU, where batches are drawn
        rounds_done = store.resume(average, len(numbers))
        for observer in observers:
            observer.on_start(rounds_done, threads)
        for round_index in numbers[rounds_done:]:
            # 1. who takes part
            jobs = _draw_jobs(federation.ids, rows, local.in_round(round_index), clients_per_round, seed, round_index)
            # 2. each client trains from the global weights, and 3. its weights join the running average
            for job, weights in work.train(jobs, average.load):
                for observer in observers:
                    observer.on_update(round_index, job.client, before=average.current, after=weights, weight=job.share)
                average.add(weights, job.share, round_index=round_index, client=job.client)
            average.finish()
            average.load(live)
            trained.eval()
            for observer in observers:
                observer.on_round(round_index, trained)
            store.save(average, round_index + 1 - numbers[0], threads, store.time_s + time.perf_counter() - started)
        average.load(live)
        if scale is not None and len(numbers):
            scale.put_into(trained)
    if not all(bool(tensor.isfinite().all()) for tensor in average.current.values()):
        raise DataError("Training diverged: the averaged weights are not finite. Use a smaller lr, or check the data.")
    if len(numbers):
        mark_trained(trained)  # it can be no public backbone any more
    return Trained(trained.eval(), len(numbers), store.time_s + time.perf_counter() - started, work.name, threads)


def _threads(wanted: int | None, recorded: int | None, model: nn.Module, example: Tensor, local: LocalTraining) -> int:
    """How many threads to train with: the user's choice, else as in the rounds so far, else what suits the work."""
    chosen = wanted or asked_threads()
    if chosen is None and recorded is not None:
        chosen = min(recorded, torch.get_num_threads())
    chosen = chosen or threads_for_training(model, example, local.batch_size)
    if recorded is not None and chosen != recorded and example.device.type == "cpu":
        warnings.warn(
            f"The rounds done so far were trained with {recorded} threads, and the others will be with {chosen}: the "
            f"last bits may differ from those of an uninterrupted training. For the same bits use "
            f"runtime=Runtime(threads={recorded}).",
            FedUPWarning,
            stacklevel=3,
        )
    return chosen


def _check(model: nn.Module, federation: Federation, rounds: Rounds, runtime: Runtime) -> None:
    numbers = rounds.numbers
    if runtime.checkpoint is not None and not (isinstance(numbers, range) and numbers.step == 1):
        raise SettingError("A checkpoint counts rounds: give their number or a range of them, or no checkpoint.")
    clients, per_round = len(federation.clients), rounds.clients_per_round
    if per_round is not None and per_round > clients:
        raise SettingError(f"clients_per_round must lie in 1 … {clients} (all clients); found {per_round}.")
    if not any(len(client.train) for client in federation.clients):
        raise DataError("No client has a row to train on.")
    check_outputs(model, federation.x, federation.y, federation.num_classes)


def _draw_jobs(
    ids: Sequence[int], rows: Sequence[Tensor], local: LocalTraining, size: int | None, seed: int, round_index: int
) -> list[Job]:
    """The jobs of a round. Clients without data drop out after the draw, so that Retrain draws the same cohorts."""
    order = torch.randperm(len(ids), generator=generator(seed, "cohort", round_index))
    cohort = sorted(order[:size].tolist())  # all of them where size is None
    total = sum(len(rows[i]) for i in cohort)
    seeds = {i: seed_for(seed, "round", round_index, "client", ids[i]) for i in cohort}
    return [Job(ids[i], rows[i], local, seeds[i], share=len(rows[i]) / total) for i in cohort if len(rows[i])]


def _settings(
    model: nn.Module, federation: Federation, local: LocalTraining, rounds: Rounds, seed: int
) -> dict[str, Any]:
    """What the bits of a training depend on, for its checkpoint."""
    first = rounds.numbers[0] if rounds.numbers else 0
    return {
        "initial": fingerprint(model),
        "local": local.settings(),
        "clients_per_round": rounds.clients_per_round,
        **({"first_round": first} if first else {}),
        "seed": seed,
        "data": federation.digest(),
    }


class _Checkpoint:
    """The state after a round, on disk; refuses one written under other settings."""

    def __init__(self, path: str | Path | None, settings: Callable[[], dict[str, Any]]) -> None:
        self.path = None if path is None else Path(path)
        self.threads: int | None = None  # of the rounds so far
        self.time_s = 0.0  # of the rounds so far
        self._rounds, self._weights = 0, dict[str, Tensor]()
        self.settings = settings() if self.path is not None else {}
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        self._weights, header = load_tensors(path, kind="checkpoint")
        if header["settings"] != self.settings:
            changed = [key for key, value in self.settings.items() if header["settings"].get(key) != value]
            raise ArtifactError(
                f"The checkpoint {path} was written under other settings ({', '.join(changed)} differ). "
                "Use the settings it was started with, or another file."
            )
        self._rounds, self.threads, self.time_s = int(header["rounds"]), header.get("threads"), header.get("time_s", 0)

    def resume(self, average: RunningAverage, rounds: int) -> int:
        """Rounds already done; their weights are loaded."""
        if self._rounds > rounds:
            raise ArtifactError(
                f"The checkpoint {self.path} already holds {self._rounds} rounds, and {rounds} were requested. "
                "Request at least as many, or use another file."
            )
        if self._weights:
            for name, tensor in average.current.items():
                tensor.copy_(self._weights[name])
        self._weights = {}  # as large as the model
        return self._rounds

    def save(self, average: RunningAverage, rounds: int, threads: int, time_s: float) -> None:
        if self.path is not None:
            header = {"rounds": rounds, "threads": threads, "time_s": time_s, "settings": self.settings}
            save_tensors(self.path, average.current, kind="checkpoint", header=header)

"""One client after another, one step after another, in the one model there is; other engines are checked against it."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedup.averaging import Load, Weights, weights_of
from fedup.cut import logits_of
from fedup.rng import seed_default
from fedup.training import Job, LocalTraining


class PlainEngine:
    """Plain PyTorch: no model per client, no optimizer per client."""

    name = "plain"

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, how: LocalTraining) -> None:
        self.weights: Weights = weights_of(model)
        self._model, self._x, self._y, self._how = model, x, y.long(), how

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self._how.start(self._model)

    def train(self, jobs: Sequence[Job], load: Load) -> Iterator[tuple[Job, Weights]]:
        self._model.train()
        for job in jobs:
            load(self.weights)
            self.run(job)
            yield job, self.weights

    def run(self, job: Job) -> None:
        """Train on the job's batches, from the weights as they are."""
        seed_default(job.dropout_seed, self._x.device)
        self._optimizer.state.clear()  # starts anew
        for batch in job.batches().to(self._x.device):
            train_step(self._model, self._optimizer, self._x, self._y, batch, self._how)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, batch: Tensor, how: LocalTraining
) -> None:
    """One step of gradient descent on the rows of a batch."""
    inputs = x.index_select(0, batch)
    with how.autocast(x.device):
        loss = cross_entropy(logits_of(model(inputs)), y.index_select(0, batch))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def train_locally(model: nn.Module, x: Tensor, y: Tensor, rows: Tensor, *, how: LocalTraining, seed: int) -> None:
    """Train `model` in place on the rows: same seed, same bits, whatever ran before."""
    with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
        PlainEngine(model.train(), x, y, how).run(Job(0, rows.cpu(), how, seed))

"""Clients trained one after another, step by step, in one model; other engines are checked against it."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedup.models.cut import logits_of
from fedup.rng import seed_default
from fedup.targets import training_form, training_loss
from fedup.training.averaging import Load, Weights, weights_of
from fedup.training.local import Job, LocalTraining, restart


class PlainEngine:
    """Plain PyTorch: no model per client, no optimizer per client."""

    name = "plain"

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, local: LocalTraining) -> None:
        self.weights: Weights = weights_of(model)
        self._model, self._x, self._y, self._local = model, x, training_form(y), local
        self._fused = True

    def train(self, jobs: Sequence[Job], load: Load) -> Iterator[tuple[Job, Weights]]:
        optimizer = jobs[0].local.start(self._model, fused=self._fused) if jobs else None  # with the round's rate
        for job in jobs:
            load(self.weights)
            optimizer = self.run(job, optimizer)
            yield job, self.weights

    def run(self, job: Job, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
        """Train on the job's batches from the current weights; returns an optimizer to reuse."""
        device = self._x.device
        optimizer = optimizer or job.local.start(self._model)
        restart(optimizer)
        self._model.train()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            seed_default(job.dropout_seed, device)
            for batch in job.batches().to(device):
                try:
                    train_step(self._model, optimizer, self._x, self._y, batch, self._local)
                except RuntimeError:
                    gradients = [weight.grad for weight in self._model.parameters() if weight.grad is not None]
                    if not self._fused or not any(gradient.is_sparse for gradient in gradients):
                        raise
                    self._fused = False  # fused kernels refuse sparse gradients before they change a weight
                    optimizer = job.local.start(self._model, fused=False)
                    optimizer.step()
        return optimizer


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, batch: Tensor, local: LocalTraining
) -> None:
    """One step of gradient descent on the rows of a batch."""
    inputs = local.prepared(x.index_select(0, batch))
    with local.autocast(x.device):
        loss = training_loss(logits_of(model(inputs)), y.index_select(0, batch))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()

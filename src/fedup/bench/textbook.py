"""FedAvg as a tutorial writes it, to compare engines with: a state dict and an optimizer for each client."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedup.models.cut import logits_of
from fedup.rng import seed_default
from fedup.training.local import Job, LocalTraining


def eager_round(model: nn.Module, x: Tensor, y: Tensor, jobs: Sequence[Job], config: LocalTraining) -> None:
    """One round, in place: every client loads the global weights, trains, and its state joins the average."""
    start = copy.deepcopy(model.state_dict())
    average: dict[str, Tensor] = {}
    for job in jobs:
        model.load_state_dict(start)
        seed_default(job.dropout_seed, x.device)
        plain_epoch(model, x, y, job.batches().to(x.device), config)
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                average[name] = average.get(name, 0) + job.share * tensor
            else:
                average[name] = torch.maximum(average.get(name, tensor), tensor)
    model.load_state_dict(average)


def plain_epoch(
    model: nn.Module, x: Tensor, y: Tensor, batches: Tensor | Sequence[Tensor], config: LocalTraining
) -> None:
    """A plain loop over batches, with an optimizer of its own."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer: torch.optim.Optimizer
    if config.optimizer == "adam":
        optimizer = torch.optim.Adam(weights, lr=config.lr, weight_decay=config.weight_decay)
    else:
        optimizer = torch.optim.SGD(weights, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    model.train()
    for batch in batches:
        with config.autocast(x.device):
            loss = cross_entropy(logits_of(model(x[batch])), y[batch].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

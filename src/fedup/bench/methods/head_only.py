"""Control: the last layer is trained anew on the same centroids; no filter."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedup.bench.cost import Cost
from fedup.bench.methods import AnswersAll
from fedup.bench.task import Task, Unlearned
from fedup.clients.in_process import InProcess
from fedup.errors import SettingError
from fedup.models.cut import find_cut, flat_tail
from fedup.models.views import shared_view
from fedup.rng import generator, seed_for
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.store import Centroids
from fedup.unlearning.bottleneck_fit import CellsInUse
from fedup.unlearning.refresh import Refresh
from fedup.unlearning.report import Report

GRID = {"lr": (0.003, 0.001), "steps": (300, 1000)}


@dataclass(frozen=True)
class Method(AnswersAll):
    """A last layer with fresh weights, fitted by Adam to centroids of what is retained."""

    ratio: float = 0.8
    steps: int = 300
    batch_size: int = 128
    lr: float = 3e-3

    def __post_init__(self) -> None:
        CentroidConfig(self.ratio)  # checks it
        if self.steps < 1 or self.batch_size < 1 or not 0 < self.lr < float("inf"):
            raise SettingError(
                f"steps and batch_size must be 1 or more, lr above 0; found {self.steps}, {self.batch_size}, {self.lr}."
            )

    def unlearn(self, task: Task) -> Unlearned:
        """The original model with another last layer."""
        cost = Cost()
        cut = find_cut(task.model)
        centroids = task.collect(statistics=CentroidConfig(self.ratio), cut=cut, cost=cost)
        with cost.stage("contact"):
            vectors, labels = _retained(centroids, task, cost)
        with cost.stage("fit"):
            model = shared_view(task.model)
            _fresh_last_layer(model, cut, task.recipe.seed)
            tail, order = flat_tail(model, cut, centroids.shape), generator(task.recipe.seed, "head only")
            optimizer = torch.optim.Adam(model.get_submodule(cut).parameters(), lr=self.lr)
            size = min(len(labels), self.batch_size)
            for _ in range(self.steps):
                batch = torch.randint(len(labels), (size,), generator=order).to(labels.device)
                loss = cross_entropy(tail(vectors[batch]), labels[batch])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
        did = f"a fresh last layer was fitted to the centroids of what is retained, in {self.steps} steps"
        return Unlearned(model.eval(), cost, restore=lambda: task.model, about={"did": did})


def _retained(centroids: Centroids, task: Task, cost: Cost) -> tuple[Tensor, Tensor]:
    """Centroids of what is retained and their classes; touched clients cluster again, as for a filter."""
    request, report = task.request, Report(frozenset([task.request]))
    used = CellsInUse(centroids, dropped=request)
    contact = InProcess(task.federation, task.model, one_reader=True)
    Refresh(centroids, contact, report, keep_sealed=False).bring_up_to_date(used, request)
    sent = contact.traffic
    cost.count(bytes_up=sent.bytes_up, bytes_down=sent.bytes_down, clients=report.clients_contacted)
    rows = centroids.rows_of(used)
    return centroids.vectors[rows], centroids.row_labels()[rows]


def _fresh_last_layer(model: nn.Module, cut: str, seed: int) -> None:
    """Put a copy with first weights of its own in place of the last layer, in this view of the model only."""
    parent, _, name = cut.rpartition(".")
    old = model.get_submodule(cut)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "head only"))
        layer = nn.Linear(old.in_features, old.out_features, old.bias is not None)  # type: ignore[arg-type]
    setattr(model.get_submodule(parent), name, layer.to(next(old.parameters())))

"""FUSED (Zhong et al., CVPR 2025) as its authors run it: deltas of low rank on named layers; for a class request they
are trained on that class's rows, too, under labels drawn at random (docs/baselines.md)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedup.bench.cost import Cost
from fedup.bench.methods import AnswersAll
from fedup.bench.methods._deltas import Adapted, LowRank, train_deltas
from fedup.bench.task import Task, Unlearned
from fedup.errors import SettingError
from fedup.federation import Federation
from fedup.request import Forget
from fedup.rng import generator

GRID = {"rounds": (5, 10, 20, 40)}


@dataclass(frozen=True)
class Method(AnswersAll):
    """The `layers` (names of modules; by default those that the model's file names, `FUSED_LAYERS`) get a delta of
    `rank` each, times `alpha` / `rank`.

    Clients train the deltas alone, by FedAvg for `rounds` at `lr` times the federation's learning rate. Forgotten
    clients and samples are left out. Rows of a forgotten class stay, each under a retained class drawn at random. The
    model under the deltas is frozen, BatchNorm's statistics included: without them the original model is back.
    """

    layers: tuple[str, ...] = ()
    rank: int = 16
    alpha: float = 32.0
    rounds: int = 10
    lr: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.lr <= 1:
            raise SettingError(f"lr, a share of the federation's rate, must lie in (0, 1]; found {self.lr}.")
        if min(self.rank, self.rounds) < 1 or not 0 < self.alpha < float("inf"):
            raise SettingError(
                f"rank and rounds must be 1 or more, alpha above 0; found {self.rank}, {self.rounds}, {self.alpha}."
            )

    def unlearn(self, task: Task) -> Unlearned:
        """The frozen model under trained deltas."""
        cost = Cost()
        with cost.stage("place deltas"):
            chosen = self.weights(task.model)
            start = self.on(task.model, chosen, task.recipe.seed)
        with cost.stage("relabel"):
            shown, relabelled = overwritten(task.federation, task.request, task.recipe.seed)
        model, entries = train_deltas(task, start, shown, rounds=self.rounds, lr=self.lr, cost=cost)
        rows = "retained rows" + (f" and {relabelled:,} forgotten rows under random labels" if relabelled else "")
        did = (
            f"deltas of rank {self.rank} ({entries:,} entries) on {', '.join(chosen)} were trained for {self.rounds} "
            f"rounds on {rows}; the model under them is frozen"
        )
        about = {"did": did, "layers": chosen, "relabelled_rows": relabelled}
        return Unlearned(model, cost, restore=lambda: model.base, about=about)

    def weights(self, model: nn.Module) -> list[str]:
        """Names of the weights that get a delta."""
        known = [name for name, weight in model.named_parameters() if weight.ndim >= 2]
        chosen = [f"{name}.weight" for name in self.layers or getattr(model, "fused_layers", ())]
        if not chosen or (unknown := [name for name in chosen if name not in known]):
            found = f"the model has no {', '.join(unknown)}" if chosen else "the model's file names no FUSED_LAYERS"
            raise SettingError(
                f"layers: {found}. Name modules with weights among {', '.join(known)}, or use fused_retained, which "
                "takes the layers that changed most."
            )
        return chosen

    def on(self, model: nn.Module, chosen: Sequence[str], seed: int) -> Adapted:
        """The model under deltas that do nothing yet."""
        weights, scale = {name: model.get_parameter(name) for name in chosen}, self.alpha / self.rank
        return Adapted(model, {name: LowRank(weights[name], self.rank, seed, name, scale=scale) for name in chosen})


def overwritten(federation: Federation, request: Forget, seed: int) -> tuple[Federation, int]:
    """The federation that deltas are trained on, and its number of relabelled rows: forgotten clients and samples are
    left out, each training row of a forgotten class gets a random retained class."""
    federation.check(request)
    left = sorted(set(range(federation.num_classes)) - request.class_ids)
    retained = torch.tensor(left, dtype=federation.y.dtype, device=federation.y.device)
    others = replace(request, class_ids=frozenset())
    kept = federation.without(others) if others.kind else federation
    y, relabelled = federation.y.clone(), 0
    classes = torch.tensor(sorted(request.class_ids), dtype=y.dtype, device=y.device)
    for client in kept.clients:
        rows = client.train[torch.isin(kept.y[client.train], classes)]
        drawn = torch.randint(len(retained), (len(rows),), generator=generator(seed, "relabel", client.id))
        y[rows] = retained[drawn.to(y.device)]
        relabelled += len(rows)
    return kept.relabeled(y), relabelled

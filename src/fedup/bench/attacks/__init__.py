"""Attacks as evidence: what the server, or whoever reads its store, can tell from what clients send.

Every attack runs on messages made by the clients' own code, from features of a trained model.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.in_process import InProcess
from fedup.errors import SettingError
from fedup.federation import Federation
from fedup.models.features import FeatureReader
from fedup.privacy import DP
from fedup.privacy.dp import Layout, joint_vector, release
from fedup.privacy.paper import SIGMA
from fedup.privacy.projection import basis_of
from fedup.rng import seed_for
from fedup.statistics.centroids import CentroidConfig
from fedup.tasks.progress import Progress

T = TypeVar("T")
RATIO = 0.8
CENTROIDS = {"none": 0.0, f"paper, σ = {SIGMA:g}": SIGMA}  # σ of what is sent without a guarantee
EPSILONS = (8.0, 4.0, 1.0, 0.5)
_CUT = "1"


@dataclass(frozen=True)
class Result:
    """One figure of one attack on one protection: how well it did, and how well it could at most or by guessing."""

    name: str  # of the attack
    measure: str
    protection: str
    figure: float
    low: float | None  # 95 % interval; a lower bound on ε is none of its own
    high: float | None
    chance: float | None
    bound: float | None  # that the protection claims
    n: str
    note: str = ""

    @property
    def exceeds(self) -> bool:
        """Whether the attack did better than the protection claims to allow, chance aside."""
        return self.bound is not None and (self.figure if self.low is None else self.low) > self.bound


def shown(steps: Collection[T], what: str, progress: Progress) -> Iterator[T]:
    """The steps of an attack, with progress after each."""
    for done, step in enumerate(steps):
        progress(what, done, len(steps))
        yield step
    progress(what, len(steps), len(steps))


def guarantees() -> dict[str, DP]:
    """The guarantees under attack; each trial replays noise of its own."""
    return {f"DP, ε = {epsilon:g}": DP(epsilon, delta=1e-5, clip="unit") for epsilon in EPSILONS}


def message_of(dp: DP, statistics: Tensor, *, client: int, seed: int | None, trial: tuple[object, ...]) -> Tensor:
    """What a client sends about a class, with this trial's own noise: replayed from a seed, or fresh without one.
    (numbers of a class,)"""
    noisy = dp if seed is None else replace(dp, replay_seed=seed_for(seed, f"{dp.epsilon:g}", *trial))
    return release(noisy, statistics[None], name=(client,))[0].double()


def likelihoods(message: Tensor, known: Tensor, contributions: Tensor) -> Tensor:
    """log P/Q of a message, times σ², for each record that it may hold besides all that is known. (m,)"""
    return contributions @ (message - known) - contributions.square().sum(1) / 2


@dataclass(frozen=True, eq=False)
class AttackData:
    """A federation whose inputs are features at the cut, and the layer after it as the model.

    So clients answer with their own code, thousands of times, and the network before the cut runs once.
    """

    federation: Federation
    tail: nn.Module

    @classmethod
    def of(cls, model: nn.Module, federation: Federation, cut: str) -> "AttackData":
        """What the frozen model makes of all rows."""
        features = FeatureReader(model, cut).read(federation.x, torch.arange(len(federation.x)))
        if len(features.shape) != 1:
            raise SettingError(f"Features at {cut!r} have the shape {features.shape}; attacks need plain vectors.")
        return cls(replace(federation, x=features.values), nn.Sequential(nn.Identity(), model.get_submodule(cut)))

    @cached_property
    def _contact(self) -> InProcess:
        return InProcess(self.federation, self.tail, one_reader=True)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.federation.num_classes

    @cached_property
    def owner(self) -> Tensor:
        """Which client trained on each row; -1 where none did. (N,)"""
        owner = torch.full((len(self.federation.y),), -1)
        for client in self.federation.clients:
            owner[client.train] = client.id
        return owner

    def centroids(self, client: int, label: int, *, sigma: float, seed: int) -> Tensor:
        """What a client sends of a class without a guarantee. (k, D)"""
        question = CentroidsQuestion(_CUT, CentroidConfig(RATIO, sigma, seed=seed), frozenset([label]))
        ((_, summary),) = self._contact.ask({client: question})
        return summary.vectors

    def near_centroids(self, rows: Tensor, client: int, label: int, *, sigma: float, seed: int) -> Tensor:
        """How close rows are to what a client sends of a class without a guarantee. (m,)"""
        sent = self.centroids(client, label, sigma=sigma, seed=seed)
        return -torch.cdist(self.federation.x[rows].double(), sent.double()).amin(1)

    def near_mean(self, dp: DP, message: Tensor, contributions: Tensor, dims: int) -> Tensor:
        """How close records are to the mean that a message tells of their class. (m,)"""
        layout = Layout.of(dp, dims, self.num_classes)
        sums, counts, _ = layout.split(message)
        mean = sums.sum(0) / (counts.sum() / dp.count_weight).clamp(min=1)
        return -(layout.split(contributions)[0].sum(1) - mean).norm(dim=1)

    def points(self, dp: DP) -> Tensor:
        """Projected features, as they enter a client's statistics. (N, d)"""
        x = self.federation.x
        basis = basis_of(self.tail, _CUT, x.shape[1], how=dp.projection, dims=dp.dims, num_classes=self.num_classes)
        return x @ basis.to(x)

    def exact(self, dp: DP, points: Tensor) -> dict[int, Tensor]:
        """Every client's statistics before noise. (K, numbers of a class)"""
        y = self.federation.y
        return {
            client.id: joint_vector(dp, points[client.train], y[client.train], None, self.num_classes)
            for client in self.federation.clients
        }

    def contributions(self, dp: DP, points: Tensor) -> Tensor:
        """What each point by itself adds to its class. (n, numbers of a class)

        As many at a time as there are classes, each in a class of its own, so that the layout is that of the clients.
        """
        return torch.cat(
            [
                joint_vector(dp, part, torch.arange(len(part)), None, self.num_classes)[: len(part)]
                for part in points.split(self.num_classes)
            ]
        )

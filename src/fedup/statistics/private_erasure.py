"""Statistics of an eraser under differential privacy: one noisy release of each client that holds the samples.

At one cut that is fixed beforehand, a client releases sums of its forgotten rows, of its retained rows by class, and
squares of all, at every position. The server finds the mixture to compare with, and the positions where the two differ
by more than noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedup.errors import DataError
from fedup.federation import named_rows
from fedup.models.cut import find_cut
from fedup.models.features import FeatureReader
from fedup.models.layout import Granularity, to_positions
from fedup.privacy.dp import clipped, release
from fedup.privacy.guarantee import DP
from fedup.request import union
from fedup.rng import generator
from fedup.statistics.client_data import ClientData
from fedup.statistics.eraser_statistics import RowGroups
from fedup.statistics.mixture import mixed, mixture
from fedup.statistics.moments import LEAST_ROWS, GroupStatistics, Moments, Shift, Sums
from fedup.statistics.private_features import read_privately

_NOISE_INPUTS = 128
_LARGEST_MESSAGE = 250_000  # numbers, 1 MB
_FLOOR = 2.0  # deviations of the noise of a variance: the least variance of a channel
_CLEAR = 6.0  # deviations by which the distance at a position must exceed noise


@dataclass(frozen=True)
class NoisyStatistics:
    """A client's message."""

    sums: Tensor  # (2 + G, P, C) of forgotten rows, of retained ones in G groups, and of squares of all
    counts: Tensor  # (1 + G,) of forgotten and of retained rows, in units of the guarantee's weight
    clip: float  # the norm of a row, the unit of the sums


class PlannedStatistics:
    """A question for noisy statistics at every position of a cut, checked with public data alone: no row is read.

    All features of a row together are clipped to one norm. A record is in one of the sums and in the squares, and so
    moves the whole by at most `dp.sensitivity`. Retained rows are sent by class, held or not, if that stays below the
    largest message, else all together.
    """

    def __init__(self, model: nn.Module, blank: Tensor, *, cut: str, dp: DP, num_classes: int) -> None:
        self.dp, self.cut, self.num_classes = dp, find_cut(model, cut), num_classes
        self._reader = FeatureReader(model, self.cut)
        self.spread = to_positions(self._reader.at_once(blank)[self.cut]).shape[1:]  # (P, C)
        self.numbers = math.prod(self.spread)
        self.groups = num_classes if (num_classes + 2) * self.numbers <= _LARGEST_MESSAGE else 1
        self.clip = dp.erase_clip or _public_norm(self._reader, blank)

    def answer(self, data: ClientData, groups: RowGroups) -> NoisyStatistics:
        """The release of a client's rows."""
        x, y, client, rows = data.x, data.y, data.client, data.client.train
        labels = y[rows].long()
        forgotten = torch.isin(rows, named_rows(client, union(groups.requests.values()), rows, y)[0])
        kept = torch.isin(rows, named_rows(client, groups.forget_set, rows, y)[1])
        kept &= (labels >= 0) & (labels < self.num_classes)
        group = 1 + labels if self.groups > 1 else torch.ones_like(labels)
        wanted = forgotten | kept
        places = torch.where(forgotten, 0, group)[wanted].cpu()  # one sum for each row
        exact = torch.zeros((2 + self.groups) * self.numbers + 1 + self.groups, dtype=torch.float64)
        sums, counts = exact[: -(1 + self.groups)].view(2 + self.groups, -1), exact[-(1 + self.groups) :]  # views of it
        counts += self.dp.count_weight * places.bincount(minlength=len(counts))
        done = 0
        for _, features in read_privately(self._features, x, rows, wanted=wanted, width=self.numbers):
            points = clipped(features, self.clip)
            sums.index_add_(0, places[done : done + len(points)], points)
            sums[-1] += self.dp.spread_weight * points.square().sum(0)
            done += len(points)
        noisy = release(self.dp, exact, name=("eraser", client.id, self.cut))
        return NoisyStatistics(noisy[: -len(counts)].view(-1, *self.spread), noisy[-len(counts) :], self.clip)

    def _features(self, batch: Tensor) -> Tensor:
        return to_positions(self._reader.at_once(batch)[self.cut].float()).flatten(1)


def _public_norm(reader: FeatureReader, blank: Tensor) -> float:
    """The median norm of features of standard normal inputs: about that of normalised data at an early cut."""
    if not blank.is_floating_point():
        raise DataError("Inputs are no numbers: there is no public norm for their features. Pass erase_clip.")
    inputs = torch.randn(_NOISE_INPUTS, *blank.shape[1:], generator=generator(0, "public norm")).to(blank)
    (features,) = reader.batches(inputs, torch.arange(len(inputs), device=blank.device))
    return max(float(features[reader.cut].flatten(1).double().norm(dim=1).median()), 1e-6)


@dataclass(frozen=True)
class NoisyGroupStatistics:
    """The statistics of several releases together."""

    forgotten: Sums  # (P, C)
    reference: Sums
    variance: Tensor  # (P, C) within the two
    noise: float  # variance of each number of the difference of means, from the mechanism alone

    @classmethod
    def of(cls, dp: DP, releases: Sequence[NoisyStatistics]) -> "NoisyGroupStatistics | None":
        """None if there are too few rows for an eraser, by their noisy counts."""
        added = torch.stack([message.clip * message.sums.double().cpu() for message in releases]).sum(0)
        spread = sum((each.clip**2 * each.sums[-1].double().cpu() for each in releases), torch.zeros_like(added[-1]))
        counts = torch.stack([message.counts.double().cpu() for message in releases]).sum(0) / dp.count_weight
        least = least_rows(dp, len(releases))
        groups = [group for group in range(1, len(counts)) if counts[group] >= least]
        if counts[0] < least or not groups:
            return None
        means = [added[group] / counts[group] for group in (0, *groups)]
        weights = mixture(means[0], means[1:])
        total = float(counts[0] + counts[groups].sum())
        mean = (added[0] + added[groups].sum(0)) / total
        variance = spread / dp.spread_weight / float(counts.clamp(min=0).sum()) - mean.square()
        unsure = dp.sigma * sum(message.clip**4 for message in releases) ** 0.5 / dp.spread_weight / total
        floor = max(0.01 * float(variance.mean()), _FLOOR * unsure, 1e-12)
        shares = 1 / counts[0] ** 2 + (weights / counts[groups]).square().sum()
        many = round(float(counts[0]))
        return cls(
            Sums(many, many * means[0]),
            Sums(many, many * mixed(means[1:], weights)),
            variance=variance.clamp(min=floor),
            noise=float(sum((message.clip * dp.sigma) ** 2 for message in releases) * shares),
        )

    def shift(self) -> Shift:
        """The shift that chooses positions: 0 where the two differ by no more than noise."""
        difference = self.forgotten.mean - self.reference.mean
        chance = self.variance * (1 / self.forgotten.count + 1 / self.reference.count) + self.noise
        expected, deviation = chance.sum(1), (2 * chance.square().sum(1)).sqrt()
        distance = difference.square().sum(1)
        clear = distance > expected + _CLEAR * deviation
        fisher = (difference.square() / self.variance).sum(1)
        parts = *(torch.where(clear, part, 0) for part in (distance, expected, fisher)), self.variance.sum(1)
        return Shift(self.forgotten.count, *((self.forgotten.count * part).float() for part in parts))

    def at(self, positions: Sequence[int]) -> GroupStatistics:
        """At some positions, with the variances of channels as covariance."""
        chosen = torch.tensor(positions)
        forgotten, reference = (Sums(side.count, side.sums[chosen]) for side in (self.forgotten, self.reference))
        count, mean = forgotten.count + reference.count, (forgotten + reference).mean
        second = torch.diag_embed(self.variance[chosen]) + mean[:, :, None] * mean[:, None, :]
        pooled = Moments(count, count * mean, count * second)
        return GroupStatistics({"samples": forgotten}, {"samples": reference}, pooled)


def least_rows(dp: DP, clients: int) -> float:
    """The number of forgotten rows that stands out of the noise of the clients' counts."""
    return max(LEAST_ROWS, _CLEAR * clients**0.5 * dp.sigma / dp.count_weight)


def fixed_site(offered: dict[str, Granularity], named: str) -> tuple[str, Granularity]:
    """The cut of an eraser under DP: the one named, or the earliest, chosen without data."""
    cut = next(iter(offered)) if named == "auto" else named
    return cut, offered[cut]

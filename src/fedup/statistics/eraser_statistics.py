"""The clients' statistics for an eraser, as pure functions of their own rows.

Forgotten rows are compared with rows that look like them anywhere in the federation, in three questions: a *sketch* of
the class means at the earliest cut, from which the server finds the mixture of retained cells (client × class) nearest
to the forgotten rows; means and variances at every cut, of the forgotten rows and of that mixture; second moments at
the chosen cut.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, Self

import torch
from torch import Tensor

from fedup.federation import Client, named_rows
from fedup.models.features import FeatureReader
from fedup.models.layout import Granularity, to_positions
from fedup.request import Forget
from fedup.rng import generator, sample
from fedup.statistics.client_data import ClientData
from fedup.statistics.moments import LEAST_ROWS, AddsUp, Moments, Sums

SKETCH_GROUPS = 64  # of neighbouring positions
SKETCH_SIZE = 512  # numbers of a sketch, or a few more
LEAST_REFERENCE_ROWS = 5  # fewest retained rows of one class at one client whose mean is sent
MOST_REFERENCE_ROWS = 256  # of one class at one client: more would hardly improve a mean
EVERY_CLASS = -1  # the label of a cell with all retained rows, if no class has enough alone
Weights = Mapping[str, Mapping[int, float]]  # of a client's cells in each request's mixture: {request: {label: weight}}


def write_weights(weights: Weights) -> dict[str, Any]:
    """Plain data."""
    return {name: [[label, weight] for label, weight in of.items()] for name, of in weights.items()}


def read_weights(plain: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """The opposite of `write_weights`."""
    return {name: {int(label): float(weight) for label, weight in of} for name, of in plain.items()}


@dataclass(frozen=True)
class RowGroups:
    """The rows of an eraser: requests to erase one by one, and all that is forgotten."""

    requests: Mapping[str, Forget]  # by name
    forget_set: Forget  # all active requests together
    finished: frozenset[int] = field(default=frozenset(), kw_only=True)  # classes: no row of them counts any more

    def to(self, client: int) -> Self:
        """The part that a client needs to know."""
        return self.with_places(lambda request: request.at(client))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        requests = {name: request.to_json() for name, request in self.requests.items()}
        finished = {"finished": sorted(self.finished)} if self.finished else {}
        return {"requests": requests, "gone": self.forget_set.to_json(), **finished}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """The opposite of `to_json`."""
        requests = {name: Forget.from_json(request) for name, request in plain["requests"].items()}
        return cls(requests, Forget.from_json(plain["gone"]), finished=frozenset(plain.get("finished", ())))

    def with_places(self, places: Callable[[Forget], Forget]) -> Self:
        """The same with the places of samples among a node's rows."""
        requests = {name: places(request) for name, request in self.requests.items()}
        return replace(self, requests=requests, forget_set=places(self.forget_set))

    def forgotten(self, client: Client, y: Tensor) -> dict[str, Tensor]:
        """By request, its training rows at the client, if there are enough."""
        named = ((name, named_rows(client, request, client.train, y)[0]) for name, request in self.requests.items())
        return {name: rows.unique() for name, rows in named if len(rows.unique()) >= LEAST_ROWS}

    def retained(self, client: Client, y: Tensor) -> dict[int, Tensor]:
        """By class, some of the client's retained training rows; classes with too few rows are left out."""
        kept = named_rows(client, self.forget_set, client.train, y)[1]
        cells = {label: kept[y[kept] == label] for label in y[kept].unique().tolist()}
        enough = {label: rows for label, rows in cells.items() if len(rows) >= LEAST_REFERENCE_ROWS}
        if not enough and len(kept) >= LEAST_REFERENCE_ROWS:
            enough = {EVERY_CLASS: kept}
        return {
            label: sample(rows, MOST_REFERENCE_ROWS, "reference", client.id, label).sort().values
            for label, rows in enough.items()
        }


@dataclass(frozen=True)
class Sketches:
    """A client's means at the earliest cut, as sketches that keep distances."""

    forgotten: Mapping[str, Sums]  # by request (G, S)
    retained: Mapping[int, Sums]  # by class (G, S)


@dataclass(frozen=True)
class Spread(AddsUp):
    """Mean and variance at each position and channel of a cut, times a weight, so that they add up."""

    weight: float  # rows, or share of a mixture
    mean: Tensor  # (P, C)
    variance: Tensor  # (P, C)

    @property
    def average(self) -> "Spread":
        """The same with weight 1."""
        weight = max(self.weight, 1e-30)
        return Spread(1.0, self.mean / weight, self.variance / weight)


@dataclass(frozen=True)
class GroupSpreads:
    """Spreads of a client's forgotten rows and of its part of the mixture, by request and cut."""

    forgotten: Mapping[str, Mapping[str, Spread]]
    reference: Mapping[str, Mapping[str, Spread]]


def sketch_groups(data: ClientData, cut: str, groups: RowGroups, granularity: Granularity) -> Sketches:
    """Sketches of a client's forgotten rows by request, and of its retained rows by class."""
    reader = FeatureReader(data.model, cut)

    def sketch(rows: Tensor) -> Sums:
        means = _diagonals(reader, {cut: granularity}, data.x, rows)[cut].mean
        return Sums(len(rows), (len(rows) * shortened(means)).float().cpu())

    forgotten = {name: sketch(rows) for name, rows in groups.forgotten(data.client, data.y).items()}
    return Sketches(forgotten, {label: sketch(rows) for label, rows in groups.retained(data.client, data.y).items()})


def shortened(mean: Tensor) -> Tensor:
    """A sketch of a mean (P, C): neighbouring positions share a few buckets with random signs, which keeps distances on
    average (count sketch, Charikar et al. 2002) and distant positions apart. (G, S)"""
    positions, channels = mean.shape
    groups = min(positions, SKETCH_GROUPS)
    group = torch.arange(positions) * groups // positions
    size = min(SKETCH_SIZE // groups, -(-positions // groups) * channels)
    if positions == groups and channels <= size:
        return mean  # short enough
    source = generator(0, "sketch", positions, channels)
    bucket = torch.randint(size, (positions, channels), generator=source) + size * group[:, None]
    sign = 2.0 * torch.randint(2, (positions, channels), generator=source) - 1
    flat = mean.new_zeros(groups * size)
    flat.index_add_(0, bucket.flatten().to(mean.device), (sign.to(mean) * mean).flatten())
    return flat.view(groups, size)


def measure_groups(
    data: ClientData, cuts: Mapping[str, Granularity], groups: RowGroups, weights: Weights
) -> GroupSpreads:
    """Means and variances at each cut, of a client's forgotten rows and of its share of the mixture."""
    reader = FeatureReader(data.model, *cuts)
    retained = groups.retained(data.client, data.y)
    wanted = {label for shares in weights.values() for label, share in shares.items() if share and label in retained}
    cells = {label: _diagonals(reader, cuts, data.x, retained[label]) for label in sorted(wanted)}
    reference: dict[str, dict[str, Spread]] = {}
    for name, shares in weights.items():
        own = {label: share for label, share in shares.items() if share and label in cells}
        for cut in cuts if own else ():
            first, *others = (_spread(cells[label][cut], share) for label, share in own.items())
            reference.setdefault(name, {})[cut] = sum(others, start=first)
    forgotten = {
        name: {cut: _spread(moments, len(rows)) for cut, moments in _diagonals(reader, cuts, data.x, rows).items()}
        for name, rows in groups.forgotten(data.client, data.y).items()
    }
    return GroupSpreads(forgotten, reference)


def second_moments(
    data: ClientData, cut: str, groups: RowGroups, *, granularity: Granularity, positions: Sequence[int]
) -> Moments | None:
    """Second moments of a client's forgotten and retained rows at some positions of a cut; None if it has too few.

    For tokens, of retained rows alone if there are any: an eraser finds the tokens that are unusual among them.
    """
    chosen, rows = torch.tensor(positions, device=data.x.device), second_moment_rows(data, groups, granularity)
    if rows is None:
        return None
    batches = FeatureReader(data.model, cut).batches(data.x, rows)
    spreads = (to_positions(batch[cut], granularity).index_select(1, chosen) for batch in batches)
    return reduce(add, map(Moments.of, spreads))


def second_moment_rows(data: ClientData, groups: RowGroups, granularity: Granularity) -> Tensor | None:
    """The rows of `second_moments`; None if there are too few."""
    kept = named_rows(data.client, groups.forget_set, data.client.train, data.y)[1]
    parts = [kept] if len(kept) >= max(LEAST_ROWS, data.least_rows) else []
    if granularity != "tokens" or not parts:
        parts += groups.forgotten(data.client, data.y).values()
    return torch.cat(parts).unique() if parts else None


def _diagonals(reader: FeatureReader, cuts: Mapping[str, Granularity], x: Tensor, rows: Tensor) -> dict[str, Moments]:
    added: dict[str, Moments] = {}
    for batch in reader.batches(x, rows):
        for cut, features in batch.items():
            spread = to_positions(features, cuts[cut])
            if cuts[cut] == "tokens":  # tokens of one text are alike: a text counts once
                spread = spread.unflatten(0, (len(features), -1)).mean(1)
            part = Moments.of(spread, diagonal=True)
            added[cut] = added[cut] + part if cut in added else part
    return added


def _spread(moments: Moments, weight: float) -> Spread:
    return Spread(weight, (weight * moments.mean).float().cpu(), (weight * moments.variance).float().cpu())


def sum_by_cut(parts: Iterable[Mapping[str, Spread]]) -> dict[str, Spread]:
    """The sum over clients, in double precision."""
    total: dict[str, Spread] = {}
    for part in parts:
        for cut, spread in part.items():
            exact = Spread(spread.weight, spread.mean.double(), spread.variance.double())
            total[cut] = total[cut] + exact if cut in total else exact
    return total

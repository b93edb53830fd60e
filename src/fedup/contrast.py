"""What a client tells of its forgotten and retained rows so that an eraser can be made, as pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedup.cut import offered_cuts
from fedup.federation import Client, named_rows
from fedup.moments import LEAST_ROWS, Contrast, Moments, Shift, Sums
from fedup.positions import Over, to_positions
from fedup.request import Forget
from fedup.taps import Taps

_MIXTURE_STEPS = 400


@dataclass(frozen=True)
class Question:
    """What a client is asked about: requests to erase one by one, and all that is forgotten besides.

    With `by_class` each class of a request's rows is contrasted with retained rows of the same class, where the client
    has enough of them, and with all of them otherwise.
    """

    requests: Mapping[str, Forget]  # by name
    gone: Forget  # all active requests together
    by_class: bool = False

    def to(self, client: int) -> "Question":
        """The part of it that a client needs to know."""
        parts = {name: _part_of(request, client) for name, request in self.requests.items()}
        gone = _part_of(self.gone, client)
        return Question(parts, replace(gone, client_ids=gone.client_ids & {client}), self.by_class)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        requests = {name: request.to_json() for name, request in self.requests.items()}
        return {"requests": requests, "gone": self.gone.to_json(), "by_class": self.by_class}

    def groups(self, client: Client, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """By name: forgotten training rows of the client and retained ones to compare them with.

        Fewer rows than the least number are left out, forgotten and retained ones alike.
        """
        kept = named_rows(client, self.gone, client.train, y)[1]
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name, request in self.requests.items():
            rows = named_rows(client, request, client.train, y)[0]
            if not self.by_class:
                found[name] = rows, kept
                continue
            for label in y[rows if len(rows) else kept].unique().tolist():
                same = kept[y[kept] == label]
                found[f"{name}:{label}"] = rows[y[rows] == label], same if len(same) >= LEAST_ROWS else kept
        told = {name: (rows, same if len(same) >= LEAST_ROWS else same[:0]) for name, (rows, same) in found.items()}
        return {name: pair for name, pair in told.items() if len(pair[0]) >= LEAST_ROWS or self._compares(name, pair)}

    def _compares(self, name: str, pair: tuple[Tensor, Tensor]) -> bool:
        """Whether a client without forgotten rows tells of retained ones: where another client goes as a whole, which
        has none left to compare its rows with."""
        whole_client = bool(self.requests[name.partition(":")[0]].client_ids)
        return whole_client and not len(pair[0]) and len(pair[1]) > 0


def measure_shifts(
    model: nn.Module, cuts: Mapping[str, Over], x: Tensor, y: Tensor, client: Client, question: Question
) -> dict[str, Shift]:
    """A client's shift at each cut; none where it has too few forgotten rows, or nothing to compare them with."""
    forgotten = torch.cat([pair[0] for pair in question.groups(client, y).values()] or [client.train[:0]]).unique()
    kept = named_rows(client, question.gone, client.train, y)[1]
    if min(len(forgotten), len(kept)) < LEAST_ROWS:
        return {}
    first = _first(model)
    taps = Taps(model, [*{**first, **cuts}])
    there = _diagonals(taps, {**first, **cuts}, x, forgotten)
    by_class = [_diagonals(taps, {**first, **cuts}, x, rows) for rows in _by_class(kept, y)]
    (early,) = first
    weights = mixture(there[early].mean, [one[early].mean for one in by_class])
    return {cut: _shift(len(forgotten), there[cut], [one[cut] for one in by_class], weights) for cut in cuts}


def _first(model: nn.Module) -> dict[str, Over]:
    """The earliest cut that the model offers: what rows show is mixed least with what the model thinks of them."""
    cut, over = next(iter(offered_cuts(model).items()))
    return {cut: over}


def _by_class(rows: Tensor, y: Tensor) -> list[Tensor]:
    """Retained rows class by class; those of few rows are no reference of their own, unless all have few."""
    parts = [rows[y[rows] == label] for label in y[rows].unique().tolist()]
    return [part for part in parts if len(part) >= LEAST_ROWS] or ([rows] if len(rows) else [])


def mixture(mean: Tensor, references: Sequence[Tensor]) -> Tensor:
    """Weights of a mixture of references that comes closest to a mean: none negative, 1 together.

    Forgotten rows rarely have the classes of retained ones in the same proportions (the label of a poisoned row says
    nothing of its content). Compared with the mixture, what is left is what only forgotten rows have.
    """
    centre = mean.flatten()
    table = torch.stack([reference.flatten() - centre for reference in references])  # (K, D)
    gram = (table @ table.T).cpu().numpy()
    step = 1 / max(float(np.linalg.norm(gram, 2)), 1e-12)
    weights = ahead = np.full(len(references), 1 / len(references))
    pace = 1.0
    for _ in range(_MIXTURE_STEPS):  # projected gradient with momentum (Beck & Teboulle 2009)
        before, weights = weights, _onto_simplex(ahead - step * (gram @ ahead))
        faster = (1 + (1 + 4 * pace**2) ** 0.5) / 2
        ahead = weights + (pace - 1) / faster * (weights - before)
        pace = faster
    return torch.from_numpy(weights)


def _onto_simplex(values: np.ndarray) -> np.ndarray:
    """The nearest weights that are not negative and sum to 1 (Duchi et al. 2008)."""
    ordered = np.sort(values)[::-1]
    beyond = (ordered.cumsum() - 1) / np.arange(1, len(values) + 1)
    return np.maximum(values - beyond[int((ordered > beyond).sum()) - 1], 0)


def mixed(means: Sequence[Tensor], weights: Tensor) -> Tensor:
    """The mean of such a mixture."""
    return torch.einsum("k,k...->...", weights.to(means[0]), torch.stack(list(means)))


def _diagonals(taps: Taps, cuts: Mapping[str, Over], x: Tensor, rows: Tensor) -> dict[str, Moments]:
    found: dict[str, Moments] = {}
    for batch in taps.read(x, rows):
        for cut, features in batch.items():
            spread = to_positions(features, cuts[cut])
            if cuts[cut] == "tokens":  # those of one text are alike: a text counts once
                spread = spread.unflatten(0, (len(features), -1)).mean(1)
            part = Moments.of(spread, diagonal=True)
            found[cut] = found[cut] + part if cut in found else part
    return found


def _shift(rows: int, forgotten: Moments, by_class: Sequence[Moments], weights: Tensor) -> Shift:
    distance = (forgotten.mean - mixed([one.mean for one in by_class], weights)).square()  # (P, C)
    parts = [forgotten, *by_class]
    within = sum((one.count * one.variance for one in parts), torch.zeros_like(distance)) / sum(p.count for p in parts)
    floor = 0.01 * within.mean() + 1e-12  # a channel that never changes is not infinitely telling
    chance = sum(float(weight) ** 2 / one.count for weight, one in zip(weights, by_class, strict=True))
    noise = within * (1 / forgotten.count + chance)
    told = distance, noise, distance / (within + floor), within
    return Shift(rows, *((rows * one.sum(1)).float().cpu() for one in told))


def gather(
    model: nn.Module,
    cut: str,
    x: Tensor,
    y: Tensor,
    client: Client,
    question: Question,
    *,
    over: Over,
    positions: Sequence[int],
) -> Contrast | None:
    """A client's statistics at some positions of a cut; None where it has nothing to tell."""
    groups = question.groups(client, y)
    if not any(len(part) for pair in groups.values() for part in pair):
        return None
    look = _Look(model, cut, x, over, torch.tensor(positions, device=x.device))
    forgotten: dict[str, Sums] = {}
    reference: dict[str, Sums] = {}
    for name, (rows, kept) in groups.items():
        there, parts = look.at(rows), [look.at(part, reference=True) for part in _by_class(kept, y)]
        forgotten[name] = Sums(there.here.count, there.here.sums)
        if len(rows) and parts:
            weights = mixture(there.early_mean, [part.early_mean for part in parts])
            mean = mixed([part.here.mean for part in parts], weights)
            reference[name] = Sums(there.here.count, there.here.count * mean)
        else:  # another client's rows are compared with these, or these with another's
            whole = sum((part.here for part in parts), start=_nothing_of(there.here))
            reference[name] = Sums(whole.count, whole.sums)
    return Contrast(forgotten, reference, look.pooled(reference_only=over == "tokens"))


@dataclass(frozen=True)
class _Seen:
    """Rows as they look at the place in question and at the earliest cut."""

    here: Moments
    early_mean: Tensor


class _Look:
    """Reads rows at some positions of a cut and at the earliest cut beside it, each set of rows once."""

    def __init__(self, model: nn.Module, cut: str, x: Tensor, over: Over, positions: Tensor) -> None:
        ((self._early, self._early_over),) = _first(model).items()
        self._taps = Taps(model, [*{self._early: None, cut: None}])
        self._cut, self._over, self._x, self._positions = cut, over, x, positions
        self._known: dict[tuple[int, ...], _Seen] = {}  # groups share their retained rows
        self._reference: dict[tuple[int, ...], None] = {}  # in the order met

    def at(self, rows: Tensor, *, reference: bool = False) -> _Seen:
        """What some rows look like; no rows look like nothing."""
        key = tuple(rows.tolist())
        if reference:
            self._reference[key] = None
        if key not in self._known:
            x = self._x if len(rows) else torch.zeros_like(self._x[:1])  # a blank tells the width
            seen = self._read(x, rows if len(rows) else rows.new_zeros(1))
            self._known[key] = seen if len(rows) else _Seen(_nothing_of(seen.here), seen.early_mean)
        return self._known[key]

    def pooled(self, *, reference_only: bool) -> Moments:
        """Moments of all rows that were looked at, or of what others are compared with, where there is any."""
        chosen = list(self._reference if reference_only and self._reference else self._known)
        seen = [self._known[key].here for key in chosen]
        return sum(seen[1:], start=seen[0])

    def _read(self, x: Tensor, rows: Tensor) -> _Seen:
        here: Moments | None = None
        early: Moments | None = None
        for batch in self._taps.read(x, rows):
            one = Moments.of(to_positions(batch[self._cut], self._over).index_select(1, self._positions))
            other = Moments.of(to_positions(batch[self._early], self._early_over), diagonal=True)
            here, early = (one, other) if here is None or early is None else (here + one, early + other)
        assert here is not None  # there is at least one row
        assert early is not None
        return _Seen(here, early.mean)


def _nothing_of(moments: Moments) -> Moments:
    return Moments(0, torch.zeros_like(moments.sums), torch.zeros_like(moments.squares))


def _part_of(request: Forget, client: int) -> Forget:
    samples = {client: request.sample_ids[client]} if client in request.sample_ids else {}
    return Forget(request.client_ids, request.class_ids, samples)

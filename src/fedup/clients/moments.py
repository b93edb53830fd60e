"""Integer moments of a client's rows: of all it holds, of some classes, or of what changes with a request."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedup.clients import checks
from fedup.clients.checks import require
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, ExactQuestion, Message
from fedup.errors import DataError, RequestError
from fedup.federation import check_samples
from fedup.models.features import FeatureReader
from fedup.statistics.integer_moments import (
    VALUE_STEPS,
    IntegerMoments,
    MomentConfig,
    class_sums,
    diagonal_of,
    one_class,
    retained_mask,
    row_groups,
    second_moment,
)
from fedup.targets import kind_of

_USUAL_BYTES = 4  # of a second moment in a message, or fewer
MOST_CLASS_BYTES = 12_000_000  # of second moments by class that a client sends; above, a class request asks for its own


@dataclass(frozen=True, eq=False)
class ClientMoments:
    """One client's message."""

    client: int
    moments: IntegerMoments
    by_class: Mapping[int, Tensor] = field(default_factory=dict)  # second moments of each class, where asked for
    shortened: int = 0  # rows beyond the bound
    unreported: int = 0  # rows of classes with too few of them
    few: frozenset[int] = frozenset()  # these classes
    clipped: int = 0  # rows with a value beyond its bound
    shape: tuple[int, ...] = ()  # of one row's features at the cut
    nonnegative: bool = False


@dataclass(frozen=True)
class MomentsQuestion(ExactQuestion[ClientMoments]):
    """The moments of a client's rows of some classes (None: all), without some samples."""

    kind: ClassVar[str] = "integer moments"
    reported_as: ClassVar[str] = "moments"

    cut: str
    config: MomentConfig
    labels: frozenset[int] | None = None
    without: frozenset[int] = frozenset()  # classes
    excluded: frozenset[int] = frozenset()  # samples

    @property
    def protection(self) -> MomentConfig:
        return self.config

    def leaves_out(self) -> tuple[frozenset[int], frozenset[int]]:
        return self.excluded, self.without

    def answer(self, data: ClientData) -> ClientMoments:
        """What is to be left out is never read."""
        chosen, lacking = self.chosen(data)
        answer = _moments(data, self.cut, self.config, chosen, always=self.labels is not None)
        return replace(answer, unreported=int(lacking.sum()), few=_few(data, chosen, lacking))

    def chosen(self, data: ClientData) -> tuple[Tensor, Tensor]:
        """Masks of the client's rows that the answer is of, and of those of classes with too few."""
        labels, out = data.cell_labels, _named(data, self.excluded)
        kept = retained_mask(row_groups(data.targets, self.config), out, _at_least(self.config, data))
        asked = _among(labels, self.labels) & ~_among(labels, self.without or frozenset())
        return kept & asked, asked & ~out & ~kept

    def cells_in(self, details: Details) -> int:
        return _cells_in(details)

    def answer_message(self, answer: ClientMoments) -> Message:
        return _message(answer)

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> ClientMoments:
        read = _read(details, arrays, facts, self.cut, self.config, always=self.labels is not None)
        held = set(read.moments.held)
        require(self.labels is None or held <= self.labels, "it reports classes that nobody asked for")
        require(not held & self.without, "it reports classes that were to be left out")
        return read

    def read_again(self, details: Details, arrays: Arrays, facts: ModelFacts) -> ClientMoments:
        return _read(details, arrays, facts, self.cut, self.config, always=self.labels is not None, again=True)

    def check_rows(self, answer: ClientMoments, declared: int) -> None:
        _check_rows(answer.moments.rows + answer.unreported + len(self.excluded), declared)


@dataclass(frozen=True)
class MomentChangeQuestion(ExactQuestion[tuple[ClientMoments, ClientMoments]]):
    """What leaves, and what comes back, where samples are left out that were not, or the other way round.

    Answered with the moments of the rows that leave and of those that come back, by class. Of the classes in `absent`
    the server has nothing: all their rows that are not left out come back.
    """

    kind: ClassVar[str] = "integer moment changes"
    reported_as: ClassVar[str] = "moments"

    cut: str
    config: MomentConfig
    labels: frozenset[int]
    before: frozenset[int]  # samples left out so far
    excluded: frozenset[int]  # and from now on
    absent: frozenset[int] = frozenset()  # classes

    @property
    def protection(self) -> MomentConfig:
        return self.config

    def leaves_out(self) -> tuple[frozenset[int], frozenset[int]]:
        return self.excluded, frozenset()

    def answer(self, data: ClientData) -> tuple[ClientMoments, ClientMoments]:
        rule, changes = _at_least(self.config, data), self.changes(data)
        groups = row_groups(data.targets, self.config)
        for change in changes:
            few = [name for name, n in _sizes(groups[change]).items() if 0 < n < rule.least_rows]
            if few:
                raise RequestError(
                    f"Client {data.client.id} would report moments of fewer than {rule.least_rows} rows"
                    f"{', '.join(few)}, which would show the rows. Join this request with others "
                    "of the same client and class, or collect with MomentConfig(least_rows=1) where that is allowed."
                )
        leaving, returning = (_moments(data, self.cut, self.config, rows, always=True) for rows in changes)
        return leaving, returning

    def changes(self, data: ClientData) -> tuple[Tensor, Tensor]:
        """Masks of the client's rows that leave, and of those that come back."""
        labels, rule = data.cell_labels, _at_least(self.config, data)
        asked, groups = _among(labels, self.labels), row_groups(data.targets, self.config)
        before = retained_mask(groups, _named(data, self.before), rule) & asked & ~_among(labels, self.absent)
        after = retained_mask(groups, _named(data, self.excluded), rule) & asked
        return before & ~after, after & ~before

    def cells_in(self, details: Details) -> int:
        return sum(_cells_in(part) for part in details.values() if isinstance(part, dict))

    def answer_message(self, answer: tuple[ClientMoments, ClientMoments]) -> Message:
        messages = [_message(part) for part in answer]
        details = {name: part[0] for name, part in zip(("leaving", "returning"), messages, strict=True)}
        arrays = {
            f"{name}/{key}": array
            for name, part in zip(("leaving", "returning"), messages, strict=True)
            for key, array in part[1].items()
        }
        return details, arrays

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> tuple[ClientMoments, ClientMoments]:
        parts = []
        for name in ("leaving", "returning"):
            own = details.get(name)
            if not isinstance(own, dict):
                raise DataError(f"{name} is missing")
            mine = {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}
            part = _read({**own, "client": details.get("client")}, mine, facts, self.cut, self.config, always=True)
            held = set(part.moments.held)
            require(held <= self.labels, "it reports classes that nobody asked for")
            parts.append(part)
        return parts[0], parts[1]

    def check_rows(self, answer: tuple[ClientMoments, ClientMoments], declared: int) -> None:
        leaving, returning = answer
        _check_rows(leaving.moments.rows, declared)
        _check_rows(returning.moments.rows + len(self.excluded), declared)


def _at_least(config: MomentConfig, data: ClientData) -> MomentConfig:
    """The rule of whichever asks for more rows: the question's or the node's."""
    consented = 1 if data.few_rows else MomentConfig.least_rows
    return replace(config, least_rows=max(config.least_rows, data.least_rows, consented))


def _named(data: ClientData, samples: frozenset[int]) -> Tensor:
    """A mask of the client's rows that these ids name; raises on an id that is not the client's."""
    ids = data.sample_ids
    check_samples(ids, samples, data.client.id)
    return torch.isin(ids, torch.tensor(sorted(samples), dtype=ids.dtype, device=ids.device))


def _among(labels: Tensor, wanted: frozenset[int] | None) -> Tensor:
    if wanted is None:
        return torch.ones_like(labels, dtype=torch.bool)
    return torch.isin(labels, torch.tensor(sorted(wanted), dtype=labels.dtype, device=labels.device))


def _few(data: ClientData, chosen: Tensor, lacking: Tensor) -> frozenset[int]:
    """Classes or labels of which some rows, but none that are reported, are there."""
    y = data.targets
    if kind_of(y) == "labels":
        return frozenset((y[lacking].any(0) & ~y[chosen].any(0)).nonzero().flatten().tolist())
    return frozenset() if kind_of(y) == "values" else frozenset(y[lacking].tolist())


def _sizes(groups: Tensor) -> dict[str, int]:
    """The rows of each group, by its name in words."""
    if groups.ndim == 1:
        return {f" of class {label}": n for label, n in sorted(Counter(groups.tolist()).items())}
    return {"" if i == 0 else f" with label {i - 1}": n for i, n in enumerate(groups.sum(0).tolist())}


def _moments(data: ClientData, cut: str, config: MomentConfig, chosen: Tensor, *, always: bool) -> ClientMoments:
    """The moments of the chosen rows (a mask over the client's), which alone are read; by class `always`, or where that
    is not too much to send."""
    rows = data.client.train
    reader = data.shared_reader(cut) or FeatureReader(data.model, cut)
    if config.targets != "classes" and len(rows):
        reader.check_tail(data.x[rows[:1]], exact=True)
    features = reader.read(data.x, rows, wanted=chosen)
    labels, classes = data.cell_labels[chosen], config.cells(data.num_classes)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(f"Client {data.client.id} has labels beyond the {classes} declared classes. Nothing was sent.")
    integers, shortened = config.integers(features.values)
    targets, clipped = config.target_integers(data.targets[chosen])
    integers = torch.cat([integers, targets.to(integers.device)], 1)
    counts, sums = class_sums(integers, labels, classes)
    if always or _sends_classes(config, int((counts > 0).sum()), *integers.shape):
        seconds = {c: second_moment(integers[labels == c], config) for c in counts.nonzero().flatten().tolist()}
        second = sum(seconds.values(), start=IntegerMoments.zeros(classes, integers.shape[1]).second)
    else:
        seconds, second = {}, second_moment(integers, config)
    moments = IntegerMoments(counts, sums, second)
    shortened, about = shortened + features.shortened, (features.shape, features.nonnegative)
    return ClientMoments(data.client.id, moments, seconds, shortened, 0, frozenset(), clipped, *about)


def _message(answer: ClientMoments) -> Message:
    """Integers travel in as few bytes as the largest of an array needs."""
    moments = answer.moments
    held = moments.held
    details: dict[str, Any] = {
        "rows": [[label, int(moments.counts[label])] for label in held],
        "shortened": answer.shortened,
        "unreported": answer.unreported,
        "few": sorted(answer.few),
        "clipped": answer.clipped,
        "shape": list(answer.shape),
        "nonnegative": answer.nonnegative,
    }
    arrays = {"sums": _to_bytes(moments.sums[held])}
    if answer.by_class:
        arrays["by_class"] = _to_bytes(torch.stack([answer.by_class[label] for label in held]))
    else:
        arrays["second"] = _to_bytes(moments.second)
    return details, arrays


def _read(
    details: Details,
    arrays: Arrays,
    facts: ModelFacts,
    cut: str,
    config: MomentConfig,
    *,
    always: bool,
    again: bool = False,
) -> ClientMoments:
    """The opposite of `_message`, with all its parts checked; where it is read `again`, not whether rows can have such
    moments, which takes longest."""
    features, classes = facts.features(cut), config.cells(facts.num_classes)
    inputs = math.prod(features.shape)
    width = inputs + config.outputs
    triangle = width * (width + 1) // 2
    rows = dict(checks.pairs(details, "rows"))
    require(len(rows) == len(details["rows"]), "a class comes twice")
    require(all(0 <= label < classes for label in rows), "a label is out of range")
    require(list(rows) == sorted(rows), "classes are out of order")
    least, most = config.least_rows, config.most_rows
    require(all(least <= count <= most for count in rows.values()), "a count is out of range")
    require(checks.list_of(details, "shape") == list(features.shape), "its features have another shape")
    require(details.get("nonnegative") is features.nonnegative, "its features are of another kind")
    shortened, unreported, clipped = (_count(details, name) for name in ("shortened", "unreported", "clipped"))
    few = checks.whole_set(details, "few")
    require(all(0 <= label < classes for label in few), "a label is out of range")
    require(not few & rows.keys(), "a class is reported, and has too few rows to be")
    require(max(shortened, clipped) <= sum(rows.values()), "more rows were shortened or cut off than it reports")
    held = list(rows)
    counts, sums = torch.zeros(classes, dtype=torch.int64), torch.zeros(classes, width, dtype=torch.int64)
    counts.numpy()[held] = list(rows.values())
    sums.numpy()[held] = _from_bytes(arrays, "sums", (len(held), width)).numpy()
    if "by_class" in arrays and held:
        seconds = _from_bytes(arrays, "by_class", (len(held), triangle))
        moments, of_classes = IntegerMoments(counts, sums, seconds.sum(0)), dict(zip(held, seconds, strict=True))
        for label, second in of_classes.items() if not again else ():
            one_class(moments, label, second).check(config)
    else:
        require(not (always and held), "second moments by class are missing")
        moments, of_classes = IntegerMoments(counts, sums, _from_bytes(arrays, "second", (triangle,))), {}
    if not again:
        moments.check(config)
        _check_targets(moments, config)
        of_features = moments.sums.numpy()[:, :inputs], moments.second.numpy()[: inputs * (inputs + 1) // 2]
        negative = features.nonnegative and any(part.min() < 0 for part in of_features)
        require(not negative, "sums of features are below 0 where none can be")
    about = shortened, unreported, few, clipped, features.shape, features.nonnegative
    return ClientMoments(checks.client_number(details), moments, of_classes, *about)


def _check_targets(moments: IntegerMoments, config: MomentConfig) -> None:
    """Raise where the columns of targets are not those of any rows: features may be far longer than a target."""
    if config.targets == "classes":
        return
    inputs, most = moments.width - config.outputs, 1 if config.targets == "labels" else VALUE_STEPS
    sums, squares = moments.sums.numpy().sum(0)[inputs:], diagonal_of(moments.second, moments.width)[inputs:]
    fits = bool((abs(sums) <= moments.rows * most).all()) and bool((squares <= moments.rows * most**2).all())
    require(fits and (most > 1 or np.array_equal(sums, squares)), "its targets are larger than any row has")


def _sends_classes(config: MomentConfig, held: int, rows: int, width: int) -> bool:
    """Whether a client sends second moments by class ahead of any request: as the config says, or where that is no more
    than four times what centroids of eight in ten rows would be. Small clients then send more, large ones less."""
    if config.targets != "classes":  # all rows are one cell
        return False
    if config.by_class != "auto":
        return config.by_class == "always"
    return held * width * (width + 1) / 2 * _USUAL_BYTES <= min(MOST_CLASS_BYTES, 4 * 0.8 * rows * width * 4)


def _check_rows(rows: int, declared: int) -> None:
    require(rows <= declared, f"it has {rows:,} rows now, and said that it trained on {declared:,}")


def _cells_in(details: Details) -> int:
    return len(rows) if isinstance(rows := details.get("rows"), list) else 0


def _count(details: Details, name: str) -> int:
    value = details.get(name)
    if type(value) is not int or not 0 <= value < 2**53:
        raise DataError(f"{name} is no count")
    return value


def _to_bytes(numbers: Tensor) -> Tensor:
    """Integers in the fewest bytes that hold the largest: little end first, two's complement. (*shape, bytes)"""
    numbers = numbers.contiguous()
    largest = int(torch.maximum(numbers, -numbers - 1).max()) if numbers.numel() else 0
    needed = largest.bit_length() // 8 + 1
    return numbers.view(torch.uint8).reshape(*numbers.shape, 8)[..., :needed].contiguous()


def _from_bytes(arrays: Arrays, name: str, shape: tuple[int, ...]) -> Tensor:
    """The opposite: integers of that shape."""
    sent = checks.array(arrays, name, None)
    fits = sent.dtype == torch.uint8 and tuple(sent.shape[:-1]) == shape and 1 <= sent.shape[-1] <= 8
    require(fits, f"{name} is no array of integers of shape {shape}")
    count, size = math.prod(shape), sent.shape[-1]
    wide = 4 if size <= 4 else 8  # bytes of the integers that are read, each of which ends where a sent one ends
    buffer = np.zeros(wide - size + sent.numel(), dtype=np.uint8)
    buffer[wide - size :] = sent.numpy().reshape(-1)
    read = np.ndarray((count,), dtype=f"<i{wide}", buffer=buffer, strides=(size,))
    return torch.from_numpy(read.astype(np.int64) >> 8 * (wide - size)).reshape(shape)  # which keeps the sign

"""What a hostile node sends: messages made of rows that nobody holds, and honest messages with parts exchanged."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor, nn

from fedup.bench.attacks.flower_grid import Falsify
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.moments import ClientMoments, MomentsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.clients.question import Message
from fedup.clients.tally import TallyQuestion
from fedup.federation import Federation
from fedup.flower.wire import Answer, Ask, read_answer, write_answer
from fedup.models.cut import flat_tail
from fedup.models.features import FeatureReader
from fedup.privacy.dp import joint_vector, release
from fedup.privacy.projection import basis_of
from fedup.rng import generator
from fedup.statistics.centroids import Summary
from fedup.statistics.integer_moments import IntegerMoments, one_class, second_moment
from fedup.statistics.kmeans import centroid_count
from fedup.statistics.tally import MOST_CLASS_ROWS

COLLECTIONS = (CentroidsQuestion.kind, MomentsQuestion.kind, PrivateCentroidsQuestion.kind)
_NO_LIMIT = 10**13
_STEPS = 40  # in which an adaptive node moves towards what the last layer answers

Rows = tuple[Tensor, Tensor]  # features (N, D) and the labels that a node claims for them


@dataclass(frozen=True, eq=False)
class Insider:
    """All that a node may know: the model, what it makes of the data, and which rows are the node's own."""

    model: nn.Module
    cut: str
    federation: Federation
    features: Tensor  # (N, D) of all rows
    shape: tuple[int, ...]
    nonnegative: bool
    client: int

    @classmethod
    def of(cls, model: nn.Module, cut: str, federation: Federation, client: int) -> "Insider":
        """One who has seen all rows."""
        read = FeatureReader(model, cut).read(federation.x, torch.arange(len(federation.x)))
        return cls(model, cut, federation, read.values, read.shape, read.nonnegative, client)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.federation.num_classes

    def own(self) -> Rows:
        """The node's own rows."""
        rows = self.federation.client(self.client).train
        return self.features[rows], self.federation.y[rows]

    def drawn(self, label: int, rows: int) -> Tensor:
        """Features of real rows of a class, as many as wanted. (rows, D)"""
        pool = (self.federation.y == label).nonzero().flatten()
        chosen = torch.randint(len(pool), (rows,), generator=generator(0, "invented", label, rows))
        return self.features[pool[chosen]]

    def next_label(self, rows_of: Callable[[int], int]) -> Rows:
        """Rows of every class by the next one's name; `rows_of` says how many of each class."""
        parts = [(self.drawn(label, rows_of(label)), (label + 1) % self.num_classes) for label in self._classes()]
        return torch.cat([part for part, _ in parts]), torch.cat(
            [torch.full((len(part),), claimed) for part, claimed in parts]
        )

    def own_next_label(self) -> Rows:
        """The node's own rows by the next class's name: what a node with flipped labels really holds."""
        features, labels = self.own()
        return features, (labels + 1) % self.num_classes

    def disguised(self) -> Rows:
        """The same, moved until the last layer answers what the node claims: within norm and share."""
        features, labels = self.own_next_label()
        return torch.cat(
            [self._moved(features[labels == c], c) for c in labels.unique().tolist()]
        ), labels.sort().values

    def part_flipped(self, *, longest: bool = False) -> Rows:
        """The node's own rows, two fifths of each class by the next one's name: most rows of a class are right. With
        `longest` those are as long as any row is, so that they count more."""
        features, labels = (part.clone() for part in self.own())
        claimed = labels.clone()
        for label in labels.unique().tolist():
            own = (labels == label).nonzero().flatten()
            claimed[own[: (2 * len(own)) // 5]] = (label + 1) % self.num_classes
        if longest:
            lengths = features.norm(dim=1, keepdim=True)
            features = torch.where((claimed != labels)[:, None], features * lengths.max() / lengths, features)
        return features, claimed

    def _classes(self) -> list[int]:
        return list(range(self.num_classes))

    def _moved(self, features: Tensor, label: int) -> Tensor:
        """Features that the last layer takes for a class on average, as near to these as steps of its gradient lead."""
        tail, moved = flat_tail(self.model, self.cut, self.shape), features.clone()
        least, most = self.features.min(), features.norm(dim=1).max()
        for _ in range(_STEPS):
            mean = moved.mean(0, keepdim=True).requires_grad_()
            scores = tail(mean)[0]
            if int(scores.argmax()) == label:
                break
            others = scores.clone()
            others[label] = -torch.inf
            (slope,) = torch.autograd.grad(scores[label] - others.max(), mean)
            moved = moved + 0.05 * most * slope / slope.norm().clamp(min=1e-12)
            moved = moved.clamp(min=float(least)) if self.nonnegative else moved
        return moved * (most / moved.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)


def instead(change: Callable[[Ask, Answer], Answer | RecordDict], *kinds: str) -> Falsify:
    """A node that exchanges its answers to these kinds of questions."""

    def falsify(ask: Ask, content: RecordDict) -> RecordDict:
        if ask.kind not in kinds:
            return content
        answer = read_answer(content, most_bytes=_NO_LIMIT)
        changed = change(ask, answer) if answer.status == "ok" else answer
        return write_answer(changed) if isinstance(changed, Answer) else changed

    return falsify


def refusing() -> Falsify:
    """A node that answers no question for a collection."""
    return instead(lambda ask, answer: Answer("refused", answer.base, reason="no"), *COLLECTIONS)


def rows_instead(insider: Insider, rows: Callable[[], Rows]) -> Falsify:
    """A node that answers a collection as if it held these rows."""
    made: list[Rows] = []

    def change(ask: Ask, answer: Answer) -> Answer:
        made[:] = made or [rows()]
        details, arrays = _message(insider, ask, *made[0])
        return replace(answer, details={**answer.details, **details}, arrays=arrays)

    return instead(change, *COLLECTIONS)


def _message(insider: Insider, ask: Ask, features: Tensor, labels: Tensor) -> Message:
    """What a node sends that holds these rows, in the form that the question asks for."""
    classes = insider.num_classes
    if ask.kind == MomentsQuestion.kind:
        question = MomentsQuestion.from_message(ask.details, ask.arrays)
        enough = labels.bincount(minlength=classes)[labels] >= question.config.least_rows
        features, labels = features[enough], labels[enough]
        integers, shortened = question.config.integers(features)
        moments = IntegerMoments.of(features, labels, classes, question.config)
        seconds = {c: second_moment(integers[labels == c], question.config) for c in labels.unique().tolist()}
        about: dict[str, Any] = {"shape": insider.shape, "nonnegative": insider.nonnegative}
        return question.answer_message(ClientMoments(insider.client, moments, seconds, shortened, **about))
    if ask.kind == PrivateCentroidsQuestion.kind:
        private = PrivateCentroidsQuestion.from_message(ask.details, ask.arrays)
        dp, width = private.dp, features.shape[1]
        basis = basis_of(insider.model, insider.cut, width, how=dp.projection, dims=dp.dims, num_classes=classes)
        exact = joint_vector(dp, features.double() @ basis.double().cpu(), labels, None, classes)
        return {}, {
            "vectors": release(dp, exact, name=("hostile",)),
            "counts": torch.ones(classes, dtype=torch.int32),
        }
    asked = CentroidsQuestion.from_message(ask.details, ask.arrays)
    held = labels.unique().tolist()
    rows = {label: int((labels == label).sum()) for label in held}
    sizes = [centroid_count(rows[label], asked.config.ratio) for label in held]
    counts = [torch.ones(size, dtype=torch.int32) for size in sizes]
    for label, own in zip(held, counts, strict=True):
        own[0] += rows[label] - len(own)
    vectors = torch.cat([features[labels == label][:size] for label, size in zip(held, sizes, strict=True)])
    about = {"nonnegative": insider.nonnegative, "shape": insider.shape, "rows": rows}
    summary = Summary(
        insider.client, tuple(held), tuple(sizes), (frozenset(),) * len(held), vectors, torch.cat(counts), **about
    )
    return asked.answer_message(summary)


def scaled_vectors(factor: float) -> Falsify:
    """All numbers of vectors times a factor."""

    def change(ask: Ask, answer: Answer) -> Answer:
        vectors = (answer.arrays["vectors"].double() * factor).float()
        return replace(answer, arrays={**answer.arrays, "vectors": vectors})

    return instead(change, CentroidsQuestion.kind, PrivateCentroidsQuestion.kind)


def other_details(details: Mapping[str, Any], **arrays: Callable[[Tensor], Tensor]) -> Falsify:
    """Some details exchanged, and arrays changed."""

    def change(ask: Ask, answer: Answer) -> Answer:
        changed = {name: make(answer.arrays[name]) for name, make in arrays.items() if name in answer.arrays}
        return replace(answer, details={**answer.details, **details}, arrays={**answer.arrays, **changed})

    return instead(change, *COLLECTIONS)


def other_text(old: str, new: str) -> Falsify:
    """The text of the message with a part exchanged: numbers and depths that no honest JSON writer makes."""

    def falsify(ask: Ask, content: RecordDict) -> RecordDict:
        if ask.kind in COLLECTIONS and "arrays" in content:
            text = str(content.config_records["fedup"]["json"])
            content.config_records["fedup"] = ConfigRecord({"json": text.replace(old, new, 1)})
        return content

    return falsify


def long_reply(size_bytes: int) -> Falsify:
    """A reply with a text of so many bytes."""

    def change(ask: Ask, answer: Answer) -> RecordDict:
        padded = write_answer(answer)
        text = json.dumps({"format": 1, "status": "ok", "base": answer.base, "details": {"client": 0, "x": ""}})
        padded.config_records["fedup"] = ConfigRecord({"json": text[:-3] + "x" * size_bytes + text[-3:]})
        return padded

    return instead(change, *COLLECTIONS)


def many_moment_rows(rows: int) -> Falsify:
    """Moments as of that many rows in each class, all at the class's mean."""

    def change(ask: Ask, answer: Answer) -> Answer:
        question = MomentsQuestion.from_message(ask.details, ask.arrays)
        counts = dict(answer.details["rows"])
        classes = int(ask.details["num_classes"])
        width = answer.arrays["sums"].shape[1]
        moments = IntegerMoments.zeros(classes, width)
        seconds = {}
        for label in counts:
            moments.counts[label], moments.sums[label, 0] = rows, rows
            alone = torch.zeros(moments.second.shape, dtype=torch.int64)
            alone[0] = rows
            seconds[label] = one_class(moments, label, alone).second
        total = sum(seconds.values(), start=moments.second)
        about = {"shape": tuple(answer.details["shape"]), "nonnegative": answer.details["nonnegative"]}
        made = ClientMoments(0, replace(moments, second=total), seconds, **about)
        details, arrays = question.answer_message(made)
        return replace(answer, details={**answer.details, **details}, arrays=arrays)

    return instead(change, MomentsQuestion.kind)


def lying_eraser(factor: float, classes: int, *, also_counts: bool) -> Falsify:
    """Statistics for an eraser as if the forgotten samples were the usual rows many times over, and hardly varied; and
    counts of as many answers as are taken, all of them right."""

    def change(ask: Ask, answer: Answer) -> Answer:
        arrays = dict(answer.arrays)
        for name, numbers in arrays.items():
            if name.startswith("forgotten/"):
                arrays[name] = 0 * numbers if name.endswith("/variance") else factor * numbers
            elif name == "squares":
                arrays[name] = 1e-6 * numbers
        details = dict(answer.details)
        if ask.kind == TallyQuestion.kind:
            details |= {
                part: [[c, *[MOST_CLASS_ROWS] * 4] for c in range(classes)] for part in ("retained", "held_out")
            }
        return replace(answer, details=details, arrays=arrays)

    return instead(change, "sketch", "spreads", "moments", *([TallyQuestion.kind] if also_counts else []))

"""What a server takes from nodes that may lie: answers are compared with each other before any of them is used."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedup.clients.agreement import MOST_LENGTH, mistaken, too_long, too_many_rows
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.checks import require
from fedup.clients.eraser_questions import SketchesQuestion, SpreadsQuestion
from fedup.clients.model_facts import ModelFacts
from fedup.clients.moments import ClientMoments, MomentChangeQuestion, MomentsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.clients.profiles import Profile, Profiles
from fedup.clients.question import Question
from fedup.errors import SettingError, check_choice
from fedup.privacy.dp import Layout
from fedup.privacy.guarantee import DP
from fedup.statistics.centroids import Summary
from fedup.statistics.integer_moments import MomentConfig, diagonal_of

IntakePolicy = Literal["leave_out", "report", "off"]
_CERTAIN = 7.0  # deviations: noise is beyond in one of 10^11 numbers
_NUMBERS_AT_ONCE = 2**18  # of vectors
_MOST_HELD_BACK = 1000  # rows of a class that a node's own rules may hold back


@dataclass(frozen=True)
class Intake:
    """What becomes of nodes whose answers disagree with all others: they are left out, only reported, or not looked for
    ("off"). All are named in `GridContact.flagged`.

    A node disagrees if it reports more rows than it declared, or, where it declared none, more than `most_rows` times
    those of the middle node; if its features are more than `most_length` times as long; or if many of its rows look
    like another class than it says, to the other nodes and to the model. `declared_rows` has the rows of each Flower
    node, as it reported them in training (`num-examples`).

    A node that is left out, or whose answer cannot be read, does not end a collection, even where all have to answer
    (`Delivery.least_fraction`). That holds for a share of `most_left_out` of all nodes, rounded up: two that claim one
    number are both left out. More of them count like nodes that did not answer: then something else is wrong.

    A node with honest rows and wrong labels disagrees, too. The server cannot tell it from a liar.
    """

    policy: IntakePolicy = "leave_out"
    declared_rows: Mapping[int, int] = field(default_factory=dict)
    most_rows: float = 30.0
    most_length: float = MOST_LENGTH
    most_left_out: float = 1 / 3

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, IntakePolicy)
        if not self.most_rows >= 1 or not self.most_length >= 1:
            raise SettingError(
                f"most_rows and most_length must be 1 or more; found {self.most_rows} and {self.most_length}."
            )
        if not 0 <= self.most_left_out < 1:
            raise SettingError(f"most_left_out is a share of the nodes, in [0, 1); found {self.most_left_out}.")

    @property
    def leaves_out(self) -> bool:
        """Whether nodes that disagree are left out."""
        return self.policy == "leave_out"

    def most_excused(self, nodes: int) -> int:
        """How many of so many nodes may be left out by their answers without being missed."""
        return math.ceil(self.most_left_out * nodes * (1 - 1e-9))

    def judge(self, profiles: Mapping[int, Profile], question: Question[Any], facts: ModelFacts) -> dict[int, str]:
        """By node, why its answer disagrees with the others."""
        if self.policy == "off" or not profiles:
            return {}
        profiles = Profiles.of(profiles)

        def rest() -> Profiles:
            return profiles.only([node for node in profiles if node not in reasons])

        reasons = too_many_rows(profiles, self.declared_rows, self.most_rows)
        reasons |= _beyond_totals(rest(), question)
        reasons |= too_long(rest(), self.most_length)
        if facts.targets != "classes":  # what looks like which class is not defined
            return reasons
        exact = not isinstance(question, PrivateCentroidsQuestion)
        cut = getattr(question, "cut", "")
        answers = (lambda means: facts.answers(cut, means)) if exact else None
        return reasons | mistaken(rest(), answers, facts.num_classes)

    def judge_later(
        self, later: Profiles, compared: Profiles, questions: Mapping[int, Question[Any]], facts: ModelFacts
    ) -> dict[int, str]:
        """By node, why an answer after the collection disagrees with what the others sent then; not where there is
        nothing to compare it with. Rows that leave may well look like another class: they may have wrong labels."""
        reasons: dict[int, str] = {}
        for kind in {type(questions[node]) for node in later} if self.policy != "off" else ():
            own = later.only([node for node in later if type(questions[node]) is kind])
            question = questions[next(iter(own))]  # those of one kind have cut and settings in common
            reasons |= self._judge_kind(own, compared, question, facts)
        return reasons

    def _judge_kind(
        self, later: Profiles, compared: Profiles, question: Question[Any], facts: ModelFacts
    ) -> dict[int, str]:
        without_classes = [node for node, profile in later.items() if not profile.labels]
        reasons = too_long(later.only(without_classes), self.most_length)
        rest = {node: profile for node, profile in later.items() if profile.labels}
        together = compared.only(compared)
        together.update(rest)
        if isinstance(question, MomentChangeQuestion):
            judged = too_long(together, self.most_length) if rest else {}
        else:
            judged = self.judge(together, question, facts) if rest else {}
        return reasons | {node: why for node, why in judged.items() if node in rest}


def _beyond_totals(profiles: Profiles, question: Question[Any]) -> dict[int, str]:
    """The nodes with the most rows, where all together have more than integers of 64 bits can hold the totals of."""
    config = getattr(question, "config", None)
    if not isinstance(config, MomentConfig):
        return {}
    columns, reasons = profiles.columns(), dict[int, str]()
    totals = columns.totals
    left = float(totals.sum())
    for place in totals.argsort(descending=True).tolist():
        if left <= config.most_rows:
            break
        rows = float(totals[place])
        reasons[columns.nodes[place]] = f"with its {rows:,.0f} rows there would be more than totals can hold"
        left -= rows
    return reasons


def profile_of(question: Question[Any], answer: Any, facts: ModelFacts) -> Profile | None:
    """What an answer claims by class; None for other questions. Raises DataError if the answer contradicts itself."""
    if isinstance(question, MomentsQuestion):
        _check_counts(answer, question.config)
        return _of_moments(answer, question.config)
    if isinstance(question, MomentChangeQuestion) and question.config.targets != "classes":
        return None
    if isinstance(question, MomentChangeQuestion):
        leaving, returning = answer
        for part in answer:
            _check_counts(part, question.config)
        both = replace(leaving, moments=leaving.moments + returning.moments, by_class={})
        return _of_moments(both, question.config)
    if isinstance(question, CentroidsQuestion):
        return _of_centroids(answer, question, facts)
    if isinstance(question, PrivateCentroidsQuestion):
        return _of_release(answer, question.dp, facts, question.cut)
    if isinstance(question, SketchesQuestion):
        return _of_means(sums.mean for group in (answer.forgotten, answer.retained) for sums in group.values())
    if isinstance(question, SpreadsQuestion):
        groups = [*answer.forgotten.values(), *answer.reference.values()]
        return _of_means(spread.average.mean for cuts in groups for spread in cuts.values())
    return None


def _of_means(means: Iterable[Tensor]) -> Profile:
    """Of statistics for an eraser: how long their longest mean is."""
    nothing = torch.zeros(0)
    return Profile((), nothing, nothing[:, None], max((float(mean.norm()) for mean in means), default=0.0), nothing)


def _check_counts(answer: ClientMoments, config: MomentConfig) -> None:
    require(answer.shortened <= answer.moments.rows, "it shortened more rows than it has")
    groups = len(answer.few) if config.targets == "classes" else 1
    most = max(config.least_rows, _MOST_HELD_BACK) * groups
    require(answer.unreported <= most, "it holds back more rows than classes with few rows have")


def _of_moments(answer: ClientMoments, config: MomentConfig) -> Profile:
    moments = answer.moments
    held, inputs = moments.held, moments.width - config.outputs
    rows = moments.counts.numpy()[held].astype(np.float64)
    means = moments.sums.numpy()[held, :inputs] * config.step / rows[:, None]
    parts = [(moments.second, moments.rows), *((own, int(moments.counts[c])) for c, own in answer.by_class.items())]
    lengths = [_rms(diagonal_of(second, moments.width)[:inputs], count, config) for second, count in parts]
    of_classes = torch.from_numpy(rows), torch.from_numpy(means.astype(np.float32))
    return Profile(tuple(held), *of_classes, max(lengths), torch.zeros(len(held)))


def _rms(squares: np.ndarray, rows: int, config: MomentConfig) -> float:
    """The root mean square length of rows, from the sums of their features' squares."""
    return config.step * float(np.sqrt(squares.sum(dtype=np.float64) / max(rows, 1)))


def _of_centroids(summary: Summary, question: CentroidsQuestion, facts: ModelFacts) -> Profile:
    vectors, sizes = summary.vectors, list(summary.sizes)
    least = -1e-6 - _CERTAIN * question.config.sigma  # the paper's noise is of either sign
    if facts.features(question.cut).nonnegative and vectors.numel():
        require(float(vectors.min()) >= least, "features are below 0 where none can be")
    filled, width = [i for i, size in enumerate(sizes) if size], max(1, vectors.shape[1])
    cell, points = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes).long()), summary.counts.double()
    totals, length = torch.zeros(len(sizes), vectors.shape[1], dtype=torch.float64), 0.0
    at_once = max(1, _NUMBERS_AT_ONCE // width)  # rows: the message may be large
    for part, own, weights in zip(*(each.split(at_once) for each in (vectors, cell, points)), strict=True):
        block = part.double()
        if len(block):
            length = max(length, float(block.norm(dim=1).max()))
            totals.index_add_(0, own, block * weights[:, None])
    behind = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, cell, points)
    held = torch.tensor(filled).long()
    means = (totals[held] / behind[held, None]).float()
    claimed = torch.tensor([float(summary.rows[summary.labels[i]]) for i in filled], dtype=torch.float64)
    return Profile(tuple(summary.labels[i] for i in filled), claimed, means, length, torch.zeros(len(filled)))


def _of_release(summary: Summary, dp: DP, facts: ModelFacts, cut: str) -> Profile:
    """Of noisy statistics: raises where no rows and no likely noise give them."""
    layout = Layout.of(dp, facts.projected(cut, dp), facts.num_classes)
    sums, counts, spread = layout.split(summary.vectors.double())
    rows = counts / dp.count_weight  # (C, H)
    unsure = _CERTAIN * dp.sigma / dp.count_weight
    require(bool((rows >= -unsure).all()), "a class has fewer than 0 rows, by more than noise can do")
    most = rows.clamp(min=0) + unsure
    reach = dp.sigma * (math.sqrt(layout.dims) + _CERTAIN)
    require(bool((sums.norm(dim=-1) <= most + reach).all()), "sums are longer than its rows within the clip can be")
    reach = dp.sigma * (math.sqrt(layout.spread) + _CERTAIN)
    within = spread.norm(dim=-1) <= dp.spread_weight * most.sum(-1) + reach
    require(bool(within.all()), "second moments are larger than its rows within the clip can have")
    total = rows.sum(-1)
    clear = total.clamp(min=1.0)
    deviation = dp.sigma * math.sqrt(layout.cells) * torch.ones_like(total) / clear
    return Profile(summary.labels, total, (sums.sum(-2) / clear[:, None]).float(), 0.0, deviation)

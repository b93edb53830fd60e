"""A client's noisy statistics of every class, under differential privacy."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedup.clients.centroids import cells_in_summary, check_summary_classes, read_summary, summary_message
from fedup.clients.checks import require
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, Message, PrivateQuestion
from fedup.errors import DataError, SettingError
from fedup.federation import check_samples
from fedup.models.features import FeatureReader
from fedup.privacy.dp import Layout, checked_subjects
from fedup.privacy.guarantee import DP
from fedup.statistics.centroids import Summary
from fedup.statistics.private_summary import PlannedSummary

MOST_NUMBERS = 16_000_000  # of statistics: 128 MB in double precision


@dataclass(frozen=True)
class PrivateCentroidsQuestion(PrivateQuestion[Summary, PlannedSummary]):
    """Noisy statistics of some classes (None: all), held or not, without some samples. Samples that a client does not
    hold change nothing."""

    kind: ClassVar[str] = "summarize privately"
    reported_as: ClassVar[str] = "centroids"
    charged_as: ClassVar[str] = "centroids"

    cut: str
    dp: DP
    labels: frozenset[int] | None = None
    without: frozenset[int] = frozenset()  # classes
    excluded: frozenset[int] = frozenset()  # samples

    def leaves_out(self) -> tuple[frozenset[int], frozenset[int]]:
        return self.excluded, self.without

    def _classes(self, num_classes: int) -> frozenset[int]:
        return frozenset(range(num_classes)) - self.without if self.labels is None else self.labels

    def check_classes(self, num_classes: int) -> None:
        unknown = sorted(label for label in self._classes(num_classes) if not 0 <= label < num_classes)
        if unknown:
            raise SettingError(f"Classes are 0 to {num_classes - 1}; found {unknown[:5]}.")

    def check_data(self, data: ClientData) -> None:
        check_samples(data.sample_ids, self.excluded, data.client.id)
        if self.dp.unit == "subject":
            rows = data.client.train
            checked_subjects(None if data.subjects is None else data.subjects[rows], len(rows))

    def plan(
        self, model: nn.Module, blank: Tensor, num_classes: int, reader: FeatureReader | None = None
    ) -> PlannedSummary:
        self.check_classes(num_classes)
        labels = self._classes(num_classes)
        planned = PlannedSummary(
            model, blank, cut=self.cut, dp=self.dp, num_classes=num_classes, labels=labels, reader=reader
        )
        size = num_classes * Layout.of(self.dp, planned.basis.shape[1], num_classes).size
        if size > MOST_NUMBERS:
            raise DataError(f"The release would take {size:,} numbers, and at most {MOST_NUMBERS:,} are made.")
        return planned

    def release(self, plan: PlannedSummary, data: ClientData) -> Summary:
        return plan.answer(data, self.excluded)

    def cells_in(self, details: Details) -> int:
        return cells_in_summary(details)

    def answer_message(self, answer: Summary) -> Message:
        return summary_message(answer)

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> Summary:
        width, shape = facts.width(self.cut, self.dp), facts.features(self.cut).shape
        summary = read_summary(details, arrays, width=width, shape=shape, nonnegative=False)
        check_summary_classes(summary, self.without, self._classes(facts.num_classes), facts.num_classes)
        require(set(summary.sizes) <= {1} and not summary.rows, "it reports sizes, which a guarantee keeps secret")
        require(all(ids == self.excluded for ids in summary.excluded), "it leaves out other samples than were named")
        return summary

    def read_again(self, details: Details, arrays: Arrays, facts: ModelFacts) -> Summary:
        width, shape = facts.width(self.cut, self.dp), facts.features(self.cut).shape
        return read_summary(details, arrays, width=width, shape=shape, nonnegative=False)

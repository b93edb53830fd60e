"""A client's noisy statistics for an eraser, under differential privacy."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedup.clients import checks
from fedup.clients.checks import require
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, Message, PrivateQuestion
from fedup.errors import DataError
from fedup.models.features import FeatureReader
from fedup.privacy.guarantee import DP
from fedup.statistics.eraser_statistics import RowGroups
from fedup.statistics.private_erasure import NoisyStatistics, PlannedStatistics

_LARGEST_CLIP = 1e12


@dataclass(frozen=True)
class PrivateEraserQuestion(PrivateQuestion[NoisyStatistics, PlannedStatistics]):
    """Noisy sums and squares at all positions of a cut."""

    kind: ClassVar[str] = "gather privately"
    reported_as: ClassVar[str] = "statistics under DP"
    charged_as: ClassVar[str] = "eraser"

    cut: str
    dp: DP
    groups: RowGroups

    def plan(
        self, model: nn.Module, blank: Tensor, num_classes: int, reader: FeatureReader | None = None
    ) -> PlannedStatistics:
        return PlannedStatistics(model, blank, cut=self.cut, dp=self.dp, num_classes=num_classes)

    def release(self, plan: PlannedStatistics, data: ClientData) -> NoisyStatistics:
        return plan.answer(data, self.groups)

    def answer_message(self, answer: NoisyStatistics) -> Message:
        return {"clip": answer.clip}, {"sums": answer.sums, "counts": answer.counts}

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> NoisyStatistics:
        clip = details.get("clip")
        if not isinstance(clip, int | float) or not 0 < clip < _LARGEST_CLIP:
            raise DataError("its clip is no positive number, or one that no feature has")
        sums, counts = checks.floats(arrays, "sums", None), checks.floats(arrays, "counts", None)
        groups = len(counts.flatten()) - 1  # retained rows class by class, or all together where that would be too much
        require(groups in (1, facts.num_classes) and counts.ndim == 1, "its counts are of other groups")
        layout = facts.layouts({self.cut: "each"})[self.cut]
        require(tuple(sums.shape) == (groups + 2, *layout), f"sums is of shape {tuple(sums.shape)}")
        return NoisyStatistics(sums, counts, float(clip))

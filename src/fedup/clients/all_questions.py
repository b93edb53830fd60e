"""All questions by their names in messages."""

from typing import Any

from fedup.clients.biases import BiasesQuestion
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.delta import DeltaQuestion
from fedup.clients.eraser_questions import (
    PrivateEraserQuestion,
    SecondMomentsQuestion,
    SketchesQuestion,
    SpreadsQuestion,
)
from fedup.clients.labels import LabelsQuestion, WhoQuestion
from fedup.clients.moments import MomentChangeQuestion, MomentsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.clients.question import Question
from fedup.clients.subjects import SubjectsQuestion
from fedup.clients.tally import TallyQuestion

_EXACT = WhoQuestion, LabelsQuestion, CentroidsQuestion, SketchesQuestion, SpreadsQuestion, SecondMomentsQuestion
_MOMENTS = MomentsQuestion, MomentChangeQuestion
_COUNTS = TallyQuestion, BiasesQuestion
_PRIVATE = PrivateCentroidsQuestion, PrivateEraserQuestion
QUESTIONS: dict[str, type[Question[Any]]] = {
    kind.kind: kind for kind in (*_EXACT, SubjectsQuestion, *_COUNTS, DeltaQuestion, *_MOMENTS, *_PRIVATE)
}

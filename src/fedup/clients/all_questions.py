"""Every question there is, by the name it has in messages: a new one is one more line."""

from typing import Any

from fedup.clients.centroids import CentroidsQuestion
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
from fedup.clients.tally import TallyQuestion

QUESTIONS: dict[str, type[Question[Any]]] = {
    question.kind: question
    for question in (
        WhoQuestion,
        LabelsQuestion,
        CentroidsQuestion,
        PrivateCentroidsQuestion,
        SketchesQuestion,
        SpreadsQuestion,
        SecondMomentsQuestion,
        PrivateEraserQuestion,
        TallyQuestion,
        MomentsQuestion,
        MomentChangeQuestion,
    )
}

"""Questions under differential privacy at a node: checked without data, charged, and only then answered from rows.

A curious server may choose weights, classes and ids as it likes. So nothing that leaves the node depends on its rows
but the noisy numbers. What can be refused is refused before any row is read, with its reason. Then the charge is
written down. From there on there are two answers: the release, whose size and shape are public, or one fixed text.
"""

import logging
from functools import partial
from typing import Any

from torch import Tensor, nn

from fedup.clients.question import PrivateQuestion
from fedup.errors import DataError, FedUPError
from fedup.flower.handlers import Work
from fedup.flower.node_data import by_place
from fedup.flower.state import release_once
from fedup.flower.wire import ROW, Answer, blank_from

FAILED = "This node was charged for the release and could not make it. Its own log says why; the charge stands."
_LOG = logging.getLogger(__name__)


def answer_privately(work: Work, question: PrivateQuestion[Any, Any]) -> Answer:
    """The release, the same again where it was made already, or a refusal that nothing in the node's rows decides."""
    question.check_classes(work.num_classes)
    if question.dp.unit != "record":
        raise DataError("A node knows no subjects: it protects records (unit='record').")
    model = work.model()
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise DataError("The weights that came hold NaN or infinity.")
    blank = blank_from(work.ask.details.get(ROW)).to(next(model.parameters()).device)
    plan = _planned(question, model, blank, work.num_classes)
    client = work.source.number  # the user's own function, and none of data

    def release() -> Answer:
        work.source.ledger.spend(client, question.dp, question.charged_as)  # it is written down before any row is read
        try:
            data = work.client_data(model, like=blank)
            work.drop_features(question, data, quietly=True)
            placed = question.with_places(partial(by_place, data, quietly=True))
            return work.ok(placed, placed.release(plan, data))
        except Exception:  # whatever it was, the server is told the same
            _LOG.exception("FedUP could not make a release that was charged; the server was not told why.")
            return Answer("failed", work.ask.base, reason=FAILED)

    return release_once(work.source.context, work.ask, release)


def _planned(question: PrivateQuestion[Any, Any], model: nn.Module, blank: Tensor, num_classes: int) -> Any:
    try:
        return question.plan(model, blank, num_classes)
    except FedUPError:
        raise
    except Exception as error:  # the user's own model
        raise DataError(
            f"The model does not take a blank row of {tuple(blank.shape[1:])}, {blank.dtype} ({type(error).__name__})."
        ) from error

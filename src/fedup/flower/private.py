"""Questions under differential privacy at a node: checked without data, charged, and only then answered from rows.

A curious server may choose weights, classes and ids as it likes. So only the noisy numbers that leave the node may
depend on its rows. A refusal comes before any row is read, with its reason. Then the charge is written down. From there
on two answers are possible: the release, whose size and shape are public, or one fixed text.
"""

import logging
from functools import partial
from typing import Any

from fedup.clients.question import PrivateQuestion
from fedup.errors import DataError, FedUPError
from fedup.flower.handlers import Work
from fedup.flower.node_data import by_place
from fedup.flower.state import release_once
from fedup.flower.wire import ROW, Answer, blank_from

FAILED = "This node was charged for the release and could not make it. Its own log says why; the charge stands."
_LOG = logging.getLogger(__name__)


def answer_privately(work: Work, question: PrivateQuestion[Any, Any]) -> Answer:
    """The release (the same one again if it was made before), or a refusal that does not depend on the node's rows."""
    by_person = question.dp.unit == "subject"
    if by_person and work.source.subjects is None:
        raise DataError("This node does not know whose its rows are (mount(…, subjects=…)): ask with unit='record'.")
    model = work.model()
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise DataError("The weights that came hold NaN or infinity.")
    blank = blank_from(work.ask.details.get(ROW)).to(next(model.parameters()).device)
    try:
        plan = question.plan(model, blank, work.num_classes)
    except FedUPError:
        raise
    except Exception as error:  # the user's own model
        row = f"{tuple(blank.shape[1:])}, {blank.dtype}"
        raise DataError(f"The model does not take a blank row of {row} ({type(error).__name__}).") from error
    client = work.source.number  # by the user's own function, which reads no row

    def release() -> Answer:
        work.source.ledger.spend(client, question.dp, question.charged_as)  # written down before any row is read
        try:
            data = work.client_data(model, like=blank, with_persons=by_person)
            work.drop_features(question, data, quietly=True)
            placed = question.with_places(partial(by_place, data, quietly=True))
            return work.ok(placed, placed.release(plan, data))
        except Exception:  # the server gets the same answer whatever it was
            _LOG.exception("FedUP could not make a release that was charged. The server does not learn why.")
            return Answer("failed", work.ask.base, reason=FAILED)

    return release_once(work.source.context, work.ask, release)

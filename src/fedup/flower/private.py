"""Questions under differential privacy at a node: checked without data, charged, and only then answered from rows.

A curious server may choose weights, classes and ids as it likes. So nothing that leaves the node depends on its rows
but the noisy numbers. What can be refused is refused before any row is read, with its reason. Then the charge is
written down. From there on there are two answers: the release, whose size and shape are public, or one fixed text.
"""

import json
import logging
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from torch import Tensor, nn

from fedup.clients.question import PrivateQuestion
from fedup.errors import ArtifactError, BudgetError, DataError, FedUPError
from fedup.flower.handlers import Work
from fedup.flower.state import release_once
from fedup.flower.wire import NONCE, ROW, Answer, blank_from
from fedup.privacy.guarantee import DP
from fedup.statistics.private_features import blank_row

FAILED = "This node was charged for the release and could not make it. Its own log says why; the charge stands."
MOST_CLASSES = 65_536
_LOG = logging.getLogger(__name__)


def answer_privately(work: Work, question: PrivateQuestion[Any, Any], details: Mapping[str, Any]) -> Answer:
    """The release, the same again where it was made already, or a refusal that nothing in the node's rows decides."""
    dp = question.dp
    question.check_classes(work.num_classes)
    if dp.unit != "record":
        raise DataError("A node knows no subjects: it protects records (unit='record').")
    model = work.make_model()
    _check_finite(model)
    row = None if details.get(ROW) is None else blank_from(details[ROW]).to(next(model.parameters()).device)
    plan = None if row is None else _planned(question, model, row, work.num_classes)
    client = work.source.client  # the user's own function, and none of data
    name, digest = str(details.get(NONCE, "")), _digest(work.base, details)

    def release() -> Answer:
        _charge(work, client, dp, question.charged_as)
        try:
            holding = work.source.holding_like(row).on(next(model.parameters()).device)
            made = plan or question.plan(model, blank_row(holding.x), work.num_classes)
            samples, _ = question.leaves_out()
            work.drop_features(question, holding, holding.known_places(samples))
            placed = question.with_places(holding.translated_quietly)
            return work.ok(placed, placed.release(made, work.data(model, holding)))
        except Exception:  # whatever it was, the server is told the same
            _LOG.exception("FedUP could not make a release that was charged; the server was not told why.")
            return Answer("failed", work.base, reason=FAILED)

    return release_once(work.context, question.kind, name, digest, release)


def _charge(work: Work, client: int, dp: DP, what: str) -> None:
    """On disk, or in the state, before any row is read; raises where the budget does not allow it."""
    try:
        work.ledger.spend(client, dp, what)
    except (BudgetError, ArtifactError):
        raise
    except (FedUPError, OSError) as error:  # what they say names paths of this machine
        raise DataError(
            "This node could not write to its account: no row was read and nothing was released."
        ) from error


def _planned(question: PrivateQuestion[Any, Any], model: nn.Module, row: Tensor, num_classes: int) -> Any:
    try:
        return question.plan(model, row, num_classes)
    except FedUPError:
        raise
    except Exception as error:  # the user's own model
        raise DataError(
            f"The model does not take a blank row of {tuple(row.shape[1:])}, {row.dtype} ({type(error).__name__})."
        ) from error


def _check_finite(model: nn.Module) -> None:
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise DataError("The weights that came hold NaN or infinity.")


def _digest(base: str, details: Mapping[str, Any]) -> str:
    """Of a question but for its name."""
    told = {key: value for key, value in details.items() if key != NONCE}
    return sha256(json.dumps([base, told], sort_keys=True).encode()).hexdigest()


def num_classes_of(details: Mapping[str, Any]) -> int:
    """The number of classes, as a question says."""
    number = details["num_classes"]
    if type(number) is not int or not 1 <= number <= MOST_CLASSES:
        raise DataError(f"num_classes must be a whole number from 1 to {MOST_CLASSES:,}.")
    return number

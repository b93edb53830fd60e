"""Exact questions at a node with rules: answered unless all answers together would single out a small group of rows."""

import logging
from dataclasses import replace
from typing import Any

from fedup.clients.labels import LabelsQuestion
from fedup.clients.messages import NONCE, RULES
from fedup.clients.question import ClientData, ExactQuestion
from fedup.flower.handlers import NeedsWeightsError, Work
from fedup.flower.node_data import OwnError, Source
from fedup.flower.node_record import NodeRecord, StateError, WithheldError, log_answer
from fedup.flower.policy import RefusedError
from fedup.flower.question_check import view_of
from fedup.flower.row_sets import sets_of
from fedup.flower.wire import Answer, Ask

_LONGEST = 200  # characters of a text from a stranger in the log
_LOG = logging.getLogger(__name__)


def answer_within_rules(work: Work, question: ExactQuestion[Any]) -> Answer:
    """The answer, or one fixed text: that text is all that a server learns of rows that do not allow an answer, and the
    rules limit how often it gets it."""
    rules = work.source.rules
    record = NodeRecord(rules)

    def admit(placed: ExactQuestion[Any], data: ClientData) -> None:
        sets = sets_of(placed, data, with_named=LabelsQuestion.kind not in rules.questions)
        record.admit(view_of(work.ask), data.x, data.y, sets)

    try:
        return work.answer(question, admit)
    except (NeedsWeightsError, OwnError, StateError):
        raise
    except Exception as error:
        if isinstance(error, RefusedError) and not isinstance(error, WithheldError):
            raise  # whatever the rows are
        why = error.why if isinstance(error, WithheldError) else f"{type(error).__name__}: {error}"
        _LOG.warning("FedUP withheld an exact answer to %r: %s", work.ask.kind, why)
        record.refused()
        raise WithheldError(why) from error


def logged(answer: Answer, ask: Ask, source: Source) -> Answer:
    """The answer with the label of the node's rules, once it is in the node's own log."""
    identity = {"run": source.context.run_id, "kind": ask.kind, "base": ask.base, "question": ask.digest}
    how = ask.details.get("how")
    about = {"cut": ask.details.get("cut"), "epsilon": how.get("epsilon") if isinstance(how, dict) else None}
    entry = {name: str(value)[:_LONGEST] for name, value in {**identity, **about}.items() if value is not None}
    if NONCE in answer.details and not source.rules.open:  # a release: its charge cannot be undone from here on
        NodeRecord(source.rules).charged(len(source.ledger.charges))
    log_answer(source.rules, {**entry, "status": answer.status, "reason": answer.reason})
    return replace(answer, details={**answer.details, RULES: source.rules.label}) if answer.status == "ok" else answer

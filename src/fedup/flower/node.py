"""A node's side: one query handler on the user's ClientApp, which answers from the node's own rows."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedup.clients.all_questions import QUESTIONS
from fedup.clients.labels import WhoQuestion
from fedup.clients.messages import NONCE, SPENT
from fedup.clients.question import ExactQuestion, PrivateQuestion
from fedup.errors import BudgetError, DataError, FedUPError
from fedup.flower.exact import answer_within_rules, logged
from fedup.flower.handlers import NeedsWeightsError, Work
from fedup.flower.node_data import OwnError, Source
from fedup.flower.policy import Policy, RefusedError
from fedup.flower.private import answer_privately
from fedup.flower.question_check import check_question
from fedup.flower.rows import Rows
from fedup.flower.rules import find_rules
from fedup.flower.state import WEIGHTS, kept_of
from fedup.flower.wire import QUERY, Answer, Ask, read_ask, write_answer
from fedup.privacy.guarantee import DP
from fedup.subjects import SubjectKey

MOST_CLASSES = 65_536


class NodeOptions(TypedDict, total=False):
    """What a node may say of itself and its rows."""

    ids: Callable[[Context], Sequence[int]] | None
    client: Callable[[Context], int] | None
    held_out: Callable[[Context], Rows] | None
    subjects: Callable[[Context], Sequence[str]] | None
    subject_key: SubjectKey | None
    policy: Policy | None


def mount(
    app: ClientApp,
    *,
    data: Callable[[Context], Rows],
    model: Callable[[], nn.Module],
    **about: Unpack[NodeOptions],
) -> None:
    """Let the app answer FedUP's questions.

    `data` gives the rows the node trained on and their labels, in the same order each time: a pair of tensors, a
    Dataset, or a DataLoader (its data set is read in order). `model` gives an untrained model, for the weights that the
    server sends. `ids` gives whole numbers that name the rows in sample requests (default: places). `client` gives the
    number of the node in client requests (default: its partition, or else the node's number). `held_out` gives rows
    that it did not train on: they show whether what is forgotten looks unseen (else a verdict is "not measured").
    `subjects` gives the id of the person behind each row ("": unknown), for requests that name persons and guarantees
    that protect them. Ids become tags by the `subject_key`; without one, `subjects` gives the tags themselves. `policy`
    narrows what the node's own rules allow (`fedup node-rules`); without rules a node answers nothing.
    """
    reply = replying(data=data, model=model, **about)

    @app.query(QUERY)
    def answer(message: Message, context: Context) -> Message:
        return Message(reply(message.content, context), reply_to=message)


def replying(*, policy: Policy | None = None, **functions: Any) -> Callable[[RecordDict, Context], RecordDict]:
    """What `mount` registers: a function of a message's content and the node's context that gives the reply."""
    policy = policy or Policy()

    def reply(content: RecordDict, context: Context) -> RecordDict:
        started, wait_s = time.monotonic(), policy.answer_after_s
        try:
            ask, rules = read_ask(content), find_rules(context, policy)
            wait_s = max(wait_s, rules.answer_after_s)
            source = Source(context, policy=policy, rules=rules, **functions)
            answer = logged(_with_spent(_answer(ask, source), ask, source), ask, source)
        except RefusedError as refusal:  # there are no rules
            answer = Answer("refused", "", reason=str(refusal))
        except DataError as error:  # the message is no question
            answer = Answer("failed", "", reason=str(error))
        except Exception as error:  # a bug of the node's or ours: only its kind may leave
            answer = Answer("failed", "", reason=type(error).__name__)
        reply = write_answer(answer)
        time.sleep(max(0.0, started + wait_s - time.monotonic()))
        return reply

    return reply


def _answer(ask: Ask, source: Source) -> Answer:
    """The answer to a question, which may be a refusal or a failure. A failure names its kind, never a value; under a
    guarantee it says nothing once a row is read (`fedup.flower.private`)."""
    try:
        if ask.kind not in QUESTIONS:
            raise DataError(f"There is no question {ask.kind!r}: server and node may have different versions of fedup.")
        kind = QUESTIONS[ask.kind]
        private = issubclass(kind, PrivateQuestion)
        dp = DP(**ask.details["how"]) if private and "epsilon" in ask.details["how"] else None
        check_question(ask, source, dp)
        source.policy.check(ask.kind, dp)
        if private and dp is None:
            raise DataError(f"The question {ask.kind!r} is answered under a guarantee only (epsilon and clip).")
        if kind.needs_model and ask.weights is None and kept_of(source.context, WEIGHTS).get("base") != ask.base:
            raise NeedsWeightsError  # before any row is read
        if kind is WhoQuestion:
            return Answer("ok", ask.base, {"client": source.number})
        question, work = kind.from_message(ask.details, ask.arrays), Work(ask, source, _num_classes_of(ask))
        question.check_classes(work.num_classes)
        if isinstance(question, PrivateQuestion):
            return answer_privately(work, question)
        assert isinstance(question, ExactQuestion)  # there is no third kind
        return work.answer(question) if source.rules.open else answer_within_rules(work, question)
    except NeedsWeightsError:
        return Answer("needs weights", ask.base)
    except (RefusedError, BudgetError) as refusal:
        return Answer("refused", ask.base, reason=str(refusal))
    except (OwnError, FedUPError) as error:
        return Answer("failed", ask.base, reason=str(error))
    except Exception as error:  # the user's own code must not end the node's run
        return Answer("failed", ask.base, reason=type(error).__name__)


def _num_classes_of(ask: Ask) -> int:
    """The number of classes in a question."""
    number = ask.details["num_classes"]
    if type(number) is not int or not 1 <= number <= MOST_CLASSES:
        raise DataError(f"num_classes must be a whole number from 1 to {MOST_CLASSES:,}.")
    return number


def _with_spent(answer: Answer, ask: Ask, source: Source) -> Answer:
    """The answer with the sum of μ² that the node has spent, if it is asked who it is, or for a release: the server's
    ledger follows the node's own. The sum depends on the questions that were answered, and on no row."""
    with suppress(FedUPError, OwnError):  # without an account that can be read
        if ask.kind == WhoQuestion.kind or NONCE in ask.details:
            return replace(answer, details={**answer.details, SPENT: source.ledger.spent(source.number)})
    return answer

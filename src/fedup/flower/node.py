"""A node's side: one query handler on the user's own ClientApp, which answers from the node's own rows."""

import time
from collections.abc import Callable, Mapping, Sequence

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedup.clients.all_questions import QUESTIONS
from fedup.clients.labels import WhoQuestion
from fedup.clients.question import ExactQuestion, PrivateQuestion
from fedup.errors import BudgetError, DataError, FedUPError
from fedup.flower.account import with_spent
from fedup.flower.handlers import Work
from fedup.flower.node_data import OwnError, Source, own
from fedup.flower.policy import Policy, RefusedError
from fedup.flower.private import answer_privately, num_classes_of
from fedup.flower.rows import Rows
from fedup.flower.state import keep_weights, keeps_weights_of, kept_weights
from fedup.flower.wire import QUERY, Answer, Ask, read_ask, write_answer
from fedup.models.views import fingerprint
from fedup.privacy.guarantee import DP
from fedup.statistics.store import how_from

MOST_KEPT = 64_000_000  # bytes of features in a node's state


def mount(
    app: ClientApp,
    *,
    data: Callable[[Context], Rows],
    model: Callable[[], nn.Module],
    ids: Callable[[Context], Sequence[int]] | None = None,
    client: Callable[[Context], int] | None = None,
    held_out: Callable[[Context], Rows] | None = None,
    policy: Policy | None = None,
    most_kept: int = MOST_KEPT,
) -> None:
    """Let the app answer FedUP's questions.

    `data` gives the rows the node trained on and their labels, in the same order each time: a pair of tensors, or a
    Dataset or DataLoader (whose data set is read in its own order); `model` an untrained model,
    which takes the weights that the server sends; `ids` whole numbers that name the rows in sample requests (their
    places, where it is not given); `client` the number that names the node in client requests (its partition, or else
    the node's own number); `held_out` rows that it did not train on, by which it is measured whether what is forgotten
    looks unseen (without them a verdict says that it was not measured). Features stay in the node's state, up to
    `most_kept` bytes (0: none), so that they are read once for each model.
    """
    reply = replying(
        data=data, model=model, ids=ids, client=client, held_out=held_out, policy=policy, most_kept=most_kept
    )

    @app.query(QUERY)
    def answer(message: Message, context: Context) -> Message:
        return Message(reply(message.content, context), reply_to=message)


def replying(
    *,
    data: Callable[[Context], Rows],
    model: Callable[[], nn.Module],
    ids: Callable[[Context], Sequence[int]] | None = None,
    client: Callable[[Context], int] | None = None,
    held_out: Callable[[Context], Rows] | None = None,
    policy: Policy | None = None,
    most_kept: int = MOST_KEPT,
) -> Callable[[RecordDict, Context], RecordDict]:
    """What `mount` registers, without Flower's processes: a function of a message's content and the node's context that
    gives the content of the reply."""
    rules = policy or Policy()

    def reply(content: RecordDict, context: Context) -> RecordDict:
        until = time.monotonic() + rules.answer_after_s
        source = Source(context, data, ids, client, held_out)
        answer = _answer(content, context, source, model, rules, most_kept)
        told = write_answer(with_spent(answer, content, source, rules))
        time.sleep(max(0.0, until - time.monotonic()))
        return told

    return reply


class _NeedsWeightsError(Exception):
    """The question is about a model whose weights are not here, or are not sound."""


def _answer(
    content: RecordDict,
    context: Context,
    source: Source,
    blank: Callable[[], nn.Module],
    policy: Policy,
    most_kept: int,
) -> Answer:
    """The answer to a message; refusals and failures are answers, too. A failure tells its kind, never what it met;
    under a guarantee it tells nothing at all once a row is read (`fedup.flower.private`)."""
    base = ""
    try:
        ask = read_ask(content)
        base, details = ask.base, dict(ask.details)
        if ask.kind not in QUESTIONS:
            raise DataError(f"There is no question of the kind {ask.kind!r}.")
        kind = QUESTIONS[ask.kind]
        how = how_from(details["how"]) if issubclass(kind, PrivateQuestion) else None
        dp = how if isinstance(how, DP) else None
        policy.check(ask.kind, dp)
        if dp is None and issubclass(kind, PrivateQuestion):
            raise DataError(f"The question {ask.kind!r} is answered under a guarantee only (epsilon and clip).")
        if kind.needs_model and ask.weights is None and not keeps_weights_of(context, base):
            raise _NeedsWeightsError  # before any row is read
        if kind is WhoQuestion:
            return Answer("ok", base, {"client": source.client})
        question, classes = kind.from_message(details, ask.arrays), num_classes_of(details)
        work = Work(source, lambda: _model(ask, context, blank), context, policy, base, most_kept, classes)
        if isinstance(question, PrivateQuestion):
            return answer_privately(work, question, details)
        assert isinstance(question, ExactQuestion)  # there is no third kind
        return work.answer(question)
    except _NeedsWeightsError:
        return Answer("needs weights", base)
    except OwnError as error:
        return Answer("failed", base, reason=str(error))
    except RefusedError as refusal:
        return Answer("refused", base, reason=str(refusal))
    except BudgetError as error:
        return Answer("refused", base, reason=str(error))
    except FedUPError as error:
        return Answer("failed", base, reason=str(error))
    except Exception as error:  # a failure of the user's own code must not end the node's run
        return Answer("failed", base, reason=type(error).__name__)


def _model(ask: Ask, context: Context, blank: Callable[[], nn.Module]) -> nn.Module:
    """The model that is asked about: with the weights that came, or those that are kept."""
    if ask.weights is None:
        try:
            return _loaded(own(blank), kept_weights(context), ask.base)
        except DataError as error:  # the state was damaged
            raise _NeedsWeightsError from error
    model = _loaded(own(blank), ask.weights, ask.base)
    keep_weights(context, ask.base, ask.weights)
    return model


def _loaded(model: nn.Module, weights: Mapping[str, Tensor], base: str) -> nn.Module:
    try:
        model.load_state_dict(dict(weights))
    except (RuntimeError, KeyError) as error:
        raise DataError("The weights do not fit this node's model: it is of another shape.") from error
    model.eval().requires_grad_(False)
    if fingerprint(model) != base:
        raise DataError("The weights that came are not those that the question is about.")
    return model

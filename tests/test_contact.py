"""Clients in this process: all of them answer or nobody does; they may share one look at the model for each cut."""

import json
import threading

import pytest
import torch
from tests._asking import ask_one
from torch import nn

from fedup import Federation, Forget, collect, iid, plug, unlearn
from fedup.clients import in_process
from fedup.clients.all_questions import QUESTIONS
from fedup.clients.biases import BiasesQuestion
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.delta import DeltaQuestion
from fedup.clients.eraser_questions import (
    PrivateEraserQuestion,
    SecondMomentsQuestion,
    SketchesQuestion,
    SpreadsQuestion,
)
from fedup.clients.in_process import InProcess
from fedup.clients.labels import LabelsQuestion, WhoQuestion
from fedup.clients.moments import MomentChangeQuestion, MomentsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.clients.subjects import SubjectsQuestion
from fedup.clients.tally import TallyQuestion
from fedup.errors import BudgetError, ContactError, RequestError
from fedup.models.features import FeatureReader
from fedup.privacy import DP, Budget, Ledger
from fedup.statistics.centroids import CentroidConfig, Summary, summarize
from fedup.statistics.client_data import ClientData
from fedup.statistics.eraser_statistics import RowGroups
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.tally import RowsToCount

HOW = CentroidConfig(1.0)
PRIVATE = DP(2.0, clip=4.0)
CLASSES = frozenset(range(3))


def make_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5), nn.Sigmoid(), nn.Linear(5, 3)
        ).eval()


def make_federation() -> Federation:
    source = torch.Generator().manual_seed(1)
    y = torch.arange(120) % 3
    return Federation.split(torch.randn(120, 6, generator=source), y, iid(y, 4), num_classes=3)


FEDERATION = make_federation()


def alone(model: nn.Module, client: int, cut: str) -> Summary:
    """What the client answers without any reader of others."""
    own = FEDERATION.client(client)
    return summarize(ClientData(model, FEDERATION.x, FEDERATION.y, own, FEDERATION.num_classes), cut, HOW)


def ask(clients: InProcess, client: int, cut: str = "5", **more) -> Summary:
    return ask_one(clients, client, CentroidsQuestion(cut, HOW, **{"labels": CLASSES, **more}))


def assert_same(one: Summary, other: Summary) -> None:
    assert torch.equal(one.vectors, other.vectors) and torch.equal(one.counts, other.counts)
    for name in ("labels", "sizes", "nonnegative", "shape"):
        assert getattr(one, name) == getattr(other, name)


@pytest.fixture
def readers(monkeypatch) -> list[str]:
    """The cut of each reader that is made."""
    made = []

    class Counted(FeatureReader):
        def __init__(self, model, cut):
            made.append(cut)
            super().__init__(model, cut)

    monkeypatch.setattr(in_process, "FeatureReader", Counted)
    return made


def test_clients_that_share_a_reader_answer_as_each_does_alone(readers):
    model = make_model()
    clients = InProcess(FEDERATION, model, one_reader=True)
    for _ in range(2):
        for client in clients.clients:
            for cut in ("5", "3"):
                assert_same(ask(clients, client, cut), alone(model, client, cut))
    assert readers == ["5", "3"]  # one for each cut


@pytest.mark.parametrize("shared", [False, True])
def test_weights_written_in_place_are_followed_and_replaced_ones_too_where_no_reader_is_shared(shared, readers):
    model = make_model()
    clients = InProcess(FEDERATION, model, one_reader=shared)
    old = ask(clients, 0)
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=not shared)
    assert_same(ask(clients, 0), alone(model, 0, "5"))
    assert not torch.equal(ask(clients, 0).vectors, old.vectors)
    assert len(readers) == int(shared)


class Waiting(nn.Module):
    """Holds up the thread of one name until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.go = threading.Event(), threading.Event()

    def __deepcopy__(self, memo):
        return self

    def forward(self, x):
        if threading.current_thread().name == "late":
            self.there.set()
            assert self.go.wait(10)
        return x


class Whole(nn.Module):
    """Only the whole of it knows the way."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)

    def tail(self, features, cut):
        return self.layers[-1](features)


def test_clients_asked_by_several_threads_answer_as_they_do_alone():
    waiting = Waiting()
    model = Whole(nn.Sequential(waiting, *make_model())).eval()
    clients, found = InProcess(FEDERATION, model, one_reader=True), []
    ask(clients, 0, "layers.6")

    def late() -> None:
        try:
            found.append(ask(clients, 1, "layers.6"))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=late, name="late")
    thread.start()
    assert waiting.there.wait(10)
    ask(clients, 0, "layers.6")  # begins and ends while the other is on its way to the cut
    waiting.go.set()
    thread.join()
    assert isinstance(found[0], Summary), found
    assert_same(found[0], alone(model, 1, "layers.6"))


class Unwell(InProcess):
    """Clients of which one does not answer; notes who is asked."""

    def __init__(self, silent: int, **more) -> None:
        super().__init__(FEDERATION, make_model(), **more)
        self.asked, self.ill = [], silent

    def _answer(self, client, question):
        self.asked.append(client)
        if client == self.ill:
            raise ContactError(f"client {client} is ill")
        return super()._answer(client, question)


def questions(*clients: int) -> dict[int, CentroidsQuestion]:
    return {client: CentroidsQuestion("5", HOW) for client in clients}


def test_answers_come_in_the_order_of_the_questions_each_from_its_client():
    contact = InProcess(FEDERATION, make_model())
    for order in ((2, 0, 3), (1,), ()):
        found = list(contact.ask(questions(*order)))
        assert [client for client, _ in found] == [summary.client for _, summary in found] == list(order)
    assert contact.silent == {}


def test_an_optional_client_that_gives_no_answer_is_named_and_the_others_answers_come():
    contact = Unwell(silent=2)
    found = dict(contact.ask(questions(0, 2, 3), optional=[2]))
    assert (list(found), contact.asked) == ([0, 3], [0, 2, 3]) and contact.silent == {2: "client 2 is ill"}
    contact.ill = None
    assert list(dict(contact.ask(questions(2)))) == [2]
    assert contact.silent == {}, "it has answered since"


@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("question", [CentroidsQuestion("5", HOW), PrivateCentroidsQuestion("5", PRIVATE)], ids=str)
def test_what_one_clients_budget_does_not_allow_is_refused_before_anybody_is_asked(question, everyone):
    contact = Unwell(silent=9, ledger=Ledger(budgets={3: Budget(0.1)}))
    with pytest.raises(BudgetError, match="Client 3"):
        contact.ask_everyone(question) if everyone else contact.ask(dict.fromkeys([0, 3], question))
    assert contact.asked == contact.ledger.charges == []
    assert len(list(contact.ask_everyone(question, but=[3]))) == 3


def test_everyone_is_asked_but_some_and_some_are_asked_something_else():
    contact = Unwell(silent=9)
    other = CentroidsQuestion("5", HOW, labels=frozenset([1]))
    found = dict(contact.ask_everyone(CentroidsQuestion("5", HOW), instead={2: other}, but=[1]))
    assert {client: summary.labels for client, summary in found.items()} == {0: (0, 1, 2), 2: (1,), 3: (0, 1, 2)}
    assert contact.asked == [0, 2, 3]


GROUPS = RowGroups({"r": Forget.samples({0: [3, 7]})}, Forget.samples({0: [3, 7]}) | Forget.classes([1]))
EVERY_QUESTION = [
    WhoQuestion(),
    SubjectsQuestion(frozenset(["f0", "0a"])),
    LabelsQuestion(frozenset([7, 3])),
    CentroidsQuestion("5", HOW, frozenset([2, 1]), frozenset([0]), frozenset([9, 4]), half=True),
    CentroidsQuestion("5", HOW),
    PrivateCentroidsQuestion("5", PRIVATE, frozenset([2, 1]), frozenset([0]), frozenset([9, 4])),
    PrivateCentroidsQuestion("5", PRIVATE),
    SketchesQuestion("2", "each", GROUPS),
    SpreadsQuestion({"2": "each", "5": "all"}, GROUPS, {"r": {0: 0.25, -1: 0.5}}),
    SecondMomentsQuestion("2", "tokens", (4, 1), GROUPS),
    PrivateEraserQuestion("2", PRIVATE, GROUPS),
    DeltaQuestion("5", GROUPS),
    TallyQuestion(None, None, RowsToCount(GROUPS.requests, GROUPS.forget_set, {"r": {2: 1.0}}, False)),
    BiasesQuestion(None, RowsToCount({}, GROUPS.forget_set), ((0.0, 0.5, -1.0), (0.0, 0.0, 0.25)), trained_on=False),
    MomentsQuestion("5", MomentConfig(8.0, 0.5, 2, "never"), frozenset([2, 1]), frozenset([0]), frozenset([9, 4])),
    MomentChangeQuestion("5", MomentConfig(), frozenset([1]), frozenset([3]), frozenset([3, 4]), frozenset([2])),
]


def test_every_question_is_known_by_its_kind():
    assert {type(question) for question in EVERY_QUESTION} == set(QUESTIONS.values())
    assert all(QUESTIONS[question.kind] is type(question) for question in EVERY_QUESTION)


@pytest.mark.parametrize("question", EVERY_QUESTION, ids=lambda question: question.kind)
def test_a_question_arrives_as_it_was_sent(question):
    details, arrays = question.to_message()
    assert type(question).from_message(json.loads(json.dumps(details)), arrays) == question


def test_an_unknown_sample_at_one_client_charges_nobody():
    ledger = Ledger()
    known = frozenset(FEDERATION.client(0).train[:2].tolist())
    questions = {
        client: PrivateCentroidsQuestion("5", PRIVATE, excluded=ids)
        for client, ids in ((0, known), (1, frozenset([10**6])))
    }
    with pytest.raises(RequestError):
        InProcess(FEDERATION, make_model(), ledger=ledger).ask(questions)
    assert ledger.charges == []


def test_a_budget_keeps_no_request_from_an_answer_that_needs_no_client():
    model = make_model()
    store, plugged = collect(model, FEDERATION, cut="5"), plug(model, cut="5")
    store.ledger.budgets = {3: Budget(1.0)}
    request = Forget.clients([1])
    report = unlearn(plugged, store, request, clients=FEDERATION, force=True)
    assert report.verdicts[request.digest].finding == "not measured"
    assert "budget" in report.verdicts[request.digest].why and report.traffic.messages == 0

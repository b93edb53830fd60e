"""One node without a grid: its app, its state, and the questions of a server."""

import json
from dataclasses import asdict, replace
from typing import TypeVar

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from tests.flower._grid import World, be_inside_a_run
from torch import nn

from fedup import Forget, fingerprint
from fedup.clients.biases import BiasesQuestion
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.eraser_questions import SecondMomentsQuestion, SketchesQuestion, SpreadsQuestion
from fedup.clients.in_process import InProcess
from fedup.clients.labels import LabelsQuestion
from fedup.clients.model_facts import ModelFacts
from fedup.clients.moments import MomentChangeQuestion, MomentsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.clients.question import Question
from fedup.clients.tally import TallyQuestion
from fedup.flower.wire import Answer, Ask, read_answer, row_of, write_ask
from fedup.privacy import DP, Ledger
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.eraser_statistics import RowGroups
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.tally import RowsToCount

A = TypeVar("A")
HOW = CentroidConfig(0.5, 0.01, seed=3)
CLIENT = 2  # holds 108 rows


class Node:
    """One node and its state; weights are sent where it asks for them, as the server does."""

    def __init__(self, world: World, app: ClientApp, client: int = CLIENT) -> None:
        be_inside_a_run()
        self.world, self.app = world, app
        self.context = Context(0, 7, {"partition-id": client, "fedup-open": True}, RecordDict(), {})

    def say(self, ask: Ask | RecordDict) -> Answer:
        """One message, one reply."""
        content = ask if isinstance(ask, RecordDict) else write_ask(ask)
        reply = self.app(Message(content, dst_node_id=7, message_type="query.fedup"), self.context)
        return read_answer(reply.content, most_bytes=10**9)

    def ask(self, kind: str, model: nn.Module | None = None, **details) -> Answer:
        model = model or self.world.model
        ask = Ask(kind, fingerprint(model), {"row": row_of(self.world.example), **details, "num_classes": 10})
        answer = self.say(ask)
        return self.say(replace(ask, weights=model.state_dict())) if answer.status == "needs weights" else answer

    def answer(self, question: Question) -> Answer:
        """As it is sent."""
        details, arrays = question.to_message()
        assert not arrays, "premise"
        return self.ask(question.kind, **details)

    def read(self, question: Question[A]) -> A:
        """The answer, as a server reads it."""
        answer = self.answer(question)
        assert answer.status == "ok", answer.reason
        return question.read(answer.details, answer.arrays, ModelFacts(self.world.model, self.world.example, 10))

    def summarize(self, how=HOW, *, cut="head", labels=None, without=(), excluded=(), **more) -> Answer:
        excluded, kind = sorted(map(int, excluded)), type(centroids(how)).kind
        details = {"cut": cut, "how": asdict(how), "labels": labels, "without": list(without), "excluded": excluded}
        return self.ask(kind, **details, **more)

    def charges(self) -> list[dict]:
        kept = self.context.state.config_records.get("fedup-ledger")
        return json.loads(kept["json"])["charges"] if kept else []


def centroids(how=HOW, *, cut="head", labels=range(10), excluded=()) -> CentroidsQuestion | PrivateCentroidsQuestion:
    """The question for the centroids of some classes, exact or noisy."""
    labels, excluded = frozenset(labels), frozenset(map(int, excluded))
    if isinstance(how, DP):
        return PrivateCentroidsQuestion(cut, how, labels, excluded=excluded)
    return CentroidsQuestion(cut, how, labels, excluded=excluded)


def about(base: str, weights: dict | None = None) -> Ask:
    """A question that needs the model."""
    details = {"cut": "head", "how": asdict(HOW), "labels": None, "without": [], "excluded": [], "num_classes": 10}
    return Ask("summarize", base, details, weights)


def in_process(world: World, ledger: Ledger | None = None) -> InProcess:
    return InProcess(world.federation, world.model, ledger=ledger)


def assert_summary(answer: Answer, expected) -> None:
    assert answer.status == "ok", answer.reason
    told = answer.details
    assert torch.equal(answer.arrays["vectors"], expected.vectors)
    assert torch.equal(answer.arrays["counts"], expected.counts)
    assert (tuple(told["labels"]), tuple(told["sizes"])) == (expected.labels, expected.sizes)
    assert tuple(map(frozenset, told["excluded"])) == expected.excluded
    assert (told["client"], told["nonnegative"], tuple(told["shape"])) == (CLIENT, expected.nonnegative, expected.shape)
    assert tuple(told["paper_epsilons"]) == expected.paper_epsilons
    assert dict(told["rows"]) == expected.rows


def row_groups(world: World, many: int = 40) -> RowGroups:
    request = Forget.samples({CLIENT: world.rows(CLIENT)[:many].tolist()})
    return RowGroups({request.digest: request}, request | Forget.classes([3]))


def weights_for(groups: RowGroups) -> dict[str, dict[int, float]]:
    """A share of two classes, and of one of which the client has none."""
    return {name: {1: 0.25, 5: 0.5, 2: 0.25} for name in groups.requests}


def exact_details(world: World) -> dict[str, dict]:
    """By kind, questions that are under no guarantee."""
    groups, sample = row_groups(world), int(world.rows(CLIENT)[0])
    questions = (
        LabelsQuestion(frozenset([sample])),
        SketchesQuestion("conv2", "each", groups),
        SpreadsQuestion({"conv2": "each"}, groups, weights_for(groups)),
        SecondMomentsQuestion("conv2", "each", (0,), groups),
        MomentsQuestion("head", MomentConfig()),
        MomentChangeQuestion("head", MomentConfig(), frozenset([1]), frozenset(), frozenset([sample])),
        TallyQuestion(None, None, RowsToCount(groups.requests, groups.forget_set)),
        BiasesQuestion(None, RowsToCount({}, groups.forget_set), ((0.0,) * 10,)),
    )
    return {question.kind: question.to_message()[0] for question in questions}

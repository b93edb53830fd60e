"""A Grid in this process: real messages, real ClientApps with states of their own; no wire."""

import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn

import fedup
from fedup import Centroids, Federation, Forget
from fedup.flower import Delivery, GridContact, mount
from fedup.flower.answer_log import AnswerLog
from fedup.flower.wire import Answer, Ask, read_answer, read_ask, write_answer
from fedup.tasks.recipe import Recipe

SERVER = 1
FIRST = 100  # the number of client 0's node

Spoil = Callable[[int, Message], Message | None]


def be_inside_a_run() -> None:
    """Where alone messages can be made."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 0, SERVER


class LocalGrid(Grid):
    """Nodes by number, each with its app; `spoil` may change a node's reply, or lose it by giving None.

    As over a wire, a message has a name of its own, which its reply carries. Replies come together, or `one_by_one`.
    """

    def __init__(self, apps: dict[int, ClientApp], spoil: Spoil | None = None) -> None:
        self.apps, self.spoil = apps, spoil or (lambda node, reply: reply)
        self.contexts = {
            node: Context(0, node, {"partition-id": place, "fedup-open": True}, RecordDict(), {})
            for place, node in enumerate(sorted(apps))
        }
        self.sent: list[tuple[int, Message]] = []
        self.came: list[Message] = []
        self.one_by_one = False
        self._queued: dict[str, tuple[int, Message]] = {}
        self._numbers = itertools.count()
        be_inside_a_run()

    def set_run(self, run) -> None: ...

    @property
    def run(self):
        return None

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            name = f"message-{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = name  # as Flower's own grids do
            self.sent.append((node, message))
            self._queued[name] = node, message
            ids.append(name)
        if not ids:
            raise ValueError("`messages_list` must not be empty")  # as Flower's own grid
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for name in message_ids:
            if name in self._queued:
                reply = self._reply(*self._queued.pop(name))
                found += [] if reply is None else [reply]
                if self.one_by_one:
                    break
        self.came += found
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        ids, found = list(self.push_messages(sent)) if (sent := list(messages)) else [], []
        while any(name in self._queued for name in ids):
            found += self.pull_messages(ids)
        return found

    def _reply(self, node: int, message: Message) -> Message | None:
        try:
            reply = self.apps[node](message, self.contexts[node])
        except Exception as error:
            reply = Message(Error(0, repr(error)), reply_to=message)
        return self.spoil(node, reply)

    def asked(self, *kinds: str) -> list[tuple[int, Ask]]:
        """The questions that were sent, of some kinds or of all."""
        asks = [(node, read_ask(message.content)) for node, message in self.sent]
        return [(node, ask) for node, ask in asks if not kinds or ask.kind in kinds]

    def nodes_asked(self, *kinds: str) -> list[int]:
        return sorted({node for node, _ in self.asked(*kinds)})


def changed(reply: Message, details: Mapping[str, Any] | None = None, **arrays: Tensor | None) -> Message:
    """A reply with some details and arrays exchanged; None takes an array out."""
    told = read_answer(reply.content, most_bytes=10**12)
    kept = {name: tensor for name, tensor in {**told.arrays, **arrays}.items() if tensor is not None}
    return with_answer(reply, replace(told, details={**told.details, **(details or {})}, arrays=kept))


def with_answer(reply: Message, answer: Answer) -> Message:
    reply.content = write_answer(answer)
    return reply


def told(reply: Message) -> Answer:
    return read_answer(reply.content, most_bytes=10**12)


def unnamed(charge: dict) -> dict:
    """Without the name of the release, which differs from account to account."""
    return {name: value for name, value in charge.items() if name != "release"}


def spent_by_nodes(grid: LocalGrid) -> dict[int, float]:
    """By client: the sum of μ² over its releases, as each node's own account has it."""
    spent = {}
    for node, context in grid.contexts.items():
        kept = context.state.config_records.get("fedup-ledger")
        charges = json.loads(str(kept["json"]))["charges"] if kept else []
        spent[node - FIRST] = sum(charge["mu"] ** 2 for charge in charges)
    return spent


def assert_ledgers_agree(grid: LocalGrid, contact: GridContact) -> None:
    """Whatever was lost, late or asked for again: the server has charged each client what it has charged itself."""
    at_nodes, at_server = spent_by_nodes(grid), contact.ledger
    assert {client: at_server.spent(client) for client in at_nodes} == pytest.approx(at_nodes, rel=1e-9)


class Clock:
    """The server's time: it passes while the server sleeps, and only then."""

    def __init__(self) -> None:
        self.now, self.slept, self.kills = 0.0, [], False

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if self.kills and seconds >= 1:
            raise Killed
        self.now += seconds
        self.slept.append(seconds)

    @property
    def pauses(self) -> list[float]:
        """Those between tries; the pauses between looks for answers are shorter."""
        return [seconds for seconds in self.slept if seconds >= 1]


class Killed(BaseException):
    """As a signal would end the server."""


@dataclass(frozen=True, eq=False)
class World:
    """A small federation on digits, a model trained on it, and nodes that hold the same rows."""

    federation: Federation
    model: nn.Module
    test_x: Tensor

    @property
    def example(self) -> Tensor:
        return torch.zeros_like(self.federation.x[:1])

    @staticmethod
    def blank() -> nn.Module:
        """Two convolutions and three linear layers, for images of 14 x 14."""
        layers = {
            "conv1": nn.Conv2d(1, 4, 3),
            "relu1": nn.ReLU(),
            "pool1": nn.MaxPool2d(2),
            "conv2": nn.Conv2d(4, 6, 3),
            "relu2": nn.ReLU(),
            "pool2": nn.MaxPool2d(2),
            "flatten": nn.Flatten(),
            "fc1": nn.Linear(24, 20),
            "relu3": nn.ReLU(),
            "fc2": nn.Linear(20, 24),
            "relu4": nn.ReLU(),
            "head": nn.Linear(24, 10),
        }
        return nn.Sequential(OrderedDict(layers))

    def rows(self, client: int) -> Tensor:
        return self.federation.client(client).train

    def samples(self, **many: int) -> Forget:
        """The first training rows of clients: c2=40."""
        return Forget.samples({int(name[1:]): self.rows(int(name[1:]))[:n].tolist() for name, n in many.items()})

    def unseen(self, client: int) -> Tensor:
        """Rows that it holds out of training."""
        own = self.federation.client(client)
        return torch.cat([own.validation, own.heldout])

    def app(self, number: int, **settings: Any) -> ClientApp:
        """That of a client; settings are those of `mount`."""
        app, rows, unseen = ClientApp(), self.rows(number), self.unseen(number)
        usual = {
            "data": lambda context: (self.federation.x[rows], self.federation.y[rows]),
            "model": self.blank,
            "ids": lambda context: rows.tolist(),
            "held_out": lambda context: (self.federation.x[unseen], self.federation.y[unseen]),
        }
        mount(app, **{**usual, **settings})
        return app

    def grid(self, spoil: Spoil | None = None, **settings: Any) -> LocalGrid:
        return LocalGrid({FIRST + i: self.app(i, **settings) for i in self.federation.ids}, spoil)

    def contact(self, grid: Grid, model: nn.Module | None = None, **settings: Any) -> GridContact:
        """Settings are those of `GridContact`, and of `Delivery`."""
        about = {name: settings.pop(name) for name in ("num_classes", "folder", "ledger") if name in settings}
        about = {"example": self.example, "num_classes": 10, **about}
        return GridContact(grid, model or self.model, **about, delivery=Delivery(**{"timeout_s": 2.0, **settings}))


@cache
def digits(seed: int = 0, rounds: int = 2, rows: int = 400) -> World:
    """Four clients with every second pixel of some digits."""
    recipe = Recipe.suited_to("digits", rounds=rounds, clients=4, rows=rows, seed=seed)
    dataset = recipe.load()
    whole = recipe.federation(dataset)
    federation = replace(whole, x=whole.x[..., ::2, ::2].contiguous())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        start = World.blank()
    return World(federation, recipe.train(start, federation).model, dataset.test_x[..., ::2, ::2].contiguous())


def kept_answers(folder: Path) -> list[str]:
    """The keys of all answers that wait below a folder."""
    return [key for path in sorted(folder.rglob("*-answers")) for key in AnswerLog(path).keys]


def collect(*arguments: Any, **settings: Any) -> Centroids:
    """Centroids, unless the settings say otherwise."""
    return fedup.collect(*arguments, **{"statistics": "centroids", **settings})

"""A Flower Grid in this process, without a wire: real messages and nodes' own code; nodes may falsify replies."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from fedup.artifacts import digest_of
from fedup.federation import Federation
from fedup.flower.node import replying
from fedup.flower.wire import Ask, read_ask

FIRST = 100  # the number of client 0's node
_SERVER = 1

Falsify = Callable[[Ask, RecordDict], RecordDict]  # a question, and what the node would honestly reply


class HostileGrid(Grid):
    """The clients of a federation as nodes; some falsify what they reply.

    The same question gets the same reply, which is made once: a second run shows what the server alone takes.
    """

    def __init__(
        self, federation: Federation, blank: Callable[[], nn.Module], hostile: Mapping[int, Falsify] | None = None
    ) -> None:
        self._hostile = {FIRST + client: falsify for client, falsify in (hostile or {}).items()}
        self._replies = {FIRST + client: _node(federation, client, blank) for client in federation.ids}
        self._contexts = {
            node: Context(0, node, {"partition-id": node - FIRST, "fedup-open": True}, RecordDict(), {})
            for node in self._replies
        }
        self._queued: dict[str, Message] = {}
        self._known: dict[tuple[int, str, bool], RecordDict] = {}  # replies: nodes work once for each question
        self._numbers = itertools.count()
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 0, _SERVER  # else no message can be made

    def set_run(self, run: Any) -> None:
        """There is no run."""

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *arguments: Any, **settings: Any) -> Message:
        raise NotImplementedError  # as Flower wants it: messages are made without a grid

    def get_node_ids(self) -> Iterable[int]:
        return list(self._replies)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            names.append(f"message-{next(self._numbers)}")
            message.metadata.__dict__["_message_id"] = names[-1]  # as Flower's own grids do
            self._queued[names[-1]] = message
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        waiting = [self._queued.pop(name) for name in message_ids if name in self._queued]
        return (self._reply(message) for message in waiting)  # one at a time is in memory

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _reply(self, message: Message) -> Message:
        node, ask = message.metadata.dst_node_id, read_ask(message.content)
        name = node, ask.digest + _digest(ask), ask.weights is not None
        if name not in self._known:
            content = self._replies[node](message.content, self._contexts[node])
            self._known[name] = self._hostile[node](ask, content) if node in self._hostile else content
        return Message(self._known[name], reply_to=message)


def _digest(ask: Ask) -> str:
    """Of the arrays of a question: a filter, for example."""
    return digest_of("", ask.arrays.items()) if ask.arrays else ""


def _node(
    federation: Federation, client: int, blank: Callable[[], nn.Module]
) -> Callable[[RecordDict, Context], RecordDict]:
    own = federation.client(client)
    unseen = torch.cat([own.validation, own.heldout])
    return replying(
        data=lambda context: (federation.x[own.train], federation.y[own.train]),
        model=blank,
        ids=lambda context: own.train.tolist(),
        held_out=lambda context: (federation.x[unseen], federation.y[unseen]),
    )

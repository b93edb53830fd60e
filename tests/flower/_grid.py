"""A Grid in this process: real messages, real ClientApps with states of their own; no wire."""

import itertools
from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

SERVER = 1


class LocalGrid(Grid):
    """Nodes by number, each with its app; `spoil` may change a node's reply, or lose it by giving None."""

    def __init__(self, apps: dict[int, ClientApp], spoil: Callable[[int, Message], Message | None] | None = None) -> None:
        self.apps, self.spoil = apps, spoil or (lambda node, reply: reply)
        self.contexts = {
            node: Context(0, node, {"partition-id": place}, RecordDict(), {}) for place, node in enumerate(sorted(apps))
        }
        self.sent: list[tuple[int, Message]] = []
        self._replies: dict[str, Message] = {}
        self._numbers = itertools.count()
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 0, SERVER  # as inside a run

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
            message.metadata.__dict__["_message_id"] = name  # as a real grid does
            self.sent.append((node, message))
            ids.append(name)
            try:
                reply = self.apps[node](message, self.contexts[node])
            except Exception as error:
                reply = Message(Error(0, repr(error)), reply_to=message)
            reply = self.spoil(node, reply)
            if reply is not None:
                self._replies[name] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in list(message_ids) if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

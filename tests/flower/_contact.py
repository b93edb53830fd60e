"""What tests of a contact over a grid look at: stores, bytes and accounts, and how a node's answers are spoilt."""

import json
from collections.abc import Callable

import torch
from flwr.app import Error, Message, RecordDict
from flwr.common.serde import recorddict_to_proto
from tests.flower._grid import FIRST, LocalGrid, Spoil, told, unnamed, with_answer

from fedup import Centroids
from fedup.flower.wire import Answer
from fedup.privacy import Ledger

ODD = FIRST + 2  # the node that is spoilt; its client holds the most rows
NODES = [FIRST, FIRST + 1, FIRST + 2, FIRST + 3]
CENTROIDS = ("summarize", "summarize privately")  # kinds of questions: exact, and under a guarantee
_SAME = ("cells", "clients", "num_classes", "how", "cut", "base", "nonnegative", "shape", "collected_for", "excluded")


def assert_same_store(one: Centroids, other: Centroids) -> None:
    assert torch.equal(one.vectors, other.vectors)
    assert torch.equal(one.counts, other.counts)
    for name in (*_SAME, "sample_labels", "purged", "paper_epsilons"):
        assert getattr(one, name) == getattr(other, name), name
    assert server_charges(one.ledger) == server_charges(other.ledger)
    assert one.sealed.keys() == other.sealed.keys()


def assert_is_part_of(store: Centroids, whole: Centroids, clients: set[int]) -> None:
    """All cells of these clients, each with the same bits, and none of others."""
    assert set(store.clients) == clients
    assert [cell.name for cell in store.cells] == [cell.name for cell in whole.cells if cell.client in clients]
    for cell in store.cells:
        for mine, theirs in zip(store.take(cell), whole.take(whole.cell(cell.name)), strict=True):
            assert torch.equal(mine, theirs), cell
    assert sum(cell.size for cell in store.cells) == len(store.vectors) == len(store.counts)
    assert (store.base, store.cut, store.excluded) == (whole.base, whole.cut, whole.excluded)


# --- bytes


def bytes_of(messages: list[Message]) -> int:
    """By Flower's own protocol buffers; its errors carry no content."""
    contents = [message.content for message in messages if not message.has_error()]
    return sum(recorddict_to_proto(content).ByteSize() for content in contents)


class Carried:
    """Bytes that a grid carries from now on."""

    def __init__(self, grid: LocalGrid) -> None:
        self._grid, self._sent, self._came = grid, len(grid.sent), len(grid.came)

    @property
    def up(self) -> int:
        return bytes_of(self._grid.came[self._came :])

    @property
    def down(self) -> int:
        return bytes_of([message for _, message in self._grid.sent[self._sent :]])


# --- accounts


def charges(grid: LocalGrid) -> dict[int, list[dict]]:
    """By client, as each node has charged itself."""
    records = {
        node - FIRST: context.state.config_records.get("fedup-ledger") for node, context in grid.contexts.items()
    }
    return {
        client: [unnamed(charge) for charge in json.loads(record["json"])["charges"]] if record else []
        for client, record in records.items()
    }


def server_charges(ledger: Ledger) -> dict[int, list[dict]]:
    by_client: dict[int, list[dict]] = {client: [] for client in range(4)}
    for charge in ledger.to_json()["charges"]:
        by_client[charge["client"]].append(unnamed(charge))
    return by_client


def releases_charged(grid: LocalGrid) -> list[int]:
    """How many releases each node has charged itself for."""
    return [len(charges(grid)[client]) for client in range(4)]


# --- answers that are spoilt


def spoiling(change: Callable[[Message], Message | None], node: int = ODD, kind: str | None = None) -> Spoil:
    """Exchange what a node answers to a kind of question, or for centroids; what it says of weights is left alone."""
    kinds = CENTROIDS if kind is None else (kind,)

    def spoil(number: int, reply: Message) -> Message | None:
        if number != node or reply.metadata.group_id not in kinds or reply.has_error() or told(reply).status != "ok":
            return reply
        return change(reply)

    return spoil


def untouched(node: int, reply: Message) -> Message:
    """All is well."""
    return reply


def losing(node: int) -> Spoil:
    return lambda number, reply: None if number == node else reply


def refused(reply: Message) -> Message:
    return with_answer(reply, Answer("refused", told(reply).base, reason="not on Sundays"))


def flower_error(reply: Message, code: int = 0) -> Message:
    """An error of Flower's in place of a reply."""
    meta = reply.metadata
    message = Message(RecordDict(), dst_node_id=meta.src_node_id, message_type="query.fedup", group_id=meta.group_id)
    message.metadata.__dict__["_message_id"] = meta.reply_to_message_id
    return Message(Error(code, "out of memory"), reply_to=message)

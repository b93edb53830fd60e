"""Forgotten clients, rows and persons are left out of later rounds: the server says which, and nodes leave them out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedup.errors import DataError
from fedup.request import Forget
from fedup.subjects import SubjectKey

RECORD = "fedup-left-out"  # of a message that asks a node to train
_SAMPLES, _CLASSES, _PERSONS = "samples", "classes", "persons"


def leave_out(strategy: Strategy, forget: Forget, nodes: Mapping[int, int]) -> None:
    """Train without these clients, classes, rows and persons. Call it before the strategy starts.

    `nodes` is the node of each client (`contact.nodes`). A forgotten client's node is not asked to train, and where
    clients or rows are forgotten, neither is a node that nobody knows: it may be theirs. Every other node gets the ids
    of its own rows with the instruction to train, and nothing about others but tags of persons whose rows no client has
    named yet; `retained_rows` reads it there.
    """
    clients = {node: client for client, node in nodes.items()}
    configure = strategy.configure_train

    def leaving_out(*arguments: Any, **settings: Any) -> Iterable[Message]:
        for message in configure(*arguments, **settings):
            client = clients.get(message.metadata.dst_node_id)
            if client is None and not (forget.client_ids or forget.sample_ids):
                yield _with_left_out(message, forget, forget)
            elif client is not None and client not in forget.client_ids:
                yield _with_left_out(message, forget.at(client), forget)

    strategy.configure_train = leaving_out  # type: ignore[method-assign]


def _with_left_out(message: Message, own: Forget, forget: Forget) -> Message:
    ids = sorted(i for samples in own.sample_ids.values() for i in samples)
    tags = sorted(forget.subject_tags - forget.resolved_tags)
    record = ConfigRecord({_SAMPLES: ids, _CLASSES: sorted(forget.class_ids), _PERSONS: tags})
    content = RecordDict({**message.content, RECORD: record})  # nodes share one content otherwise
    meta = message.metadata
    return Message(content, meta.dst_node_id, meta.message_type, ttl=meta.ttl, group_id=meta.group_id)


def retained_rows(
    message: Message,
    *,
    ids: Sequence[int],
    labels: Tensor,
    subjects: Sequence[str] | None = None,
    subject_key: SubjectKey | None = None,
) -> Tensor:
    """Which of a node's rows it may train on, as a mask, by the instruction to train; `ids` and `subjects` as for
    `mount`. Raises if persons are left out and the node does not say whose its rows are."""
    kept = torch.ones(len(ids), dtype=torch.bool)
    record = message.content.config_records.get(RECORD)
    if record is None:
        return kept
    samples, classes, persons = (set(record[name]) for name in (_SAMPLES, _CLASSES, _PERSONS))  # type: ignore[arg-type]
    if persons and subjects is None:
        raise DataError("Persons are to be left out, and this node does not say whose its rows are: pass subjects=….")
    tags = [subject_key.tag(own) if subject_key and own else own for own in subjects or [""] * len(ids)]
    for place, (row, label, tag) in enumerate(zip(ids, labels.tolist(), tags, strict=True)):
        kept[place] = not (row in samples or label in classes or tag in persons)
    return kept

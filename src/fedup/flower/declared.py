"""Rows that nodes say they train on, noted during training: statistics of more rows are refused later."""

import math
from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from flwr.serverapp.strategy import Strategy


def declared_rows(strategy: Strategy, key: str = "num-examples") -> dict[int, int]:
    """By node, the most rows that it said it trained on. Call it before the strategy starts, which fills it in.

    `key` is the number of rows in the metrics of a node's reply, by which FedAvg weighs its model. What a node says now
    bounds what it may report later: `contact.declared_rows = declared_rows(strategy)`.
    """
    rows: dict[int, int] = {}
    aggregate = strategy.aggregate_train

    def noting(server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        for reply in replies:
            for metrics in reply.content.metric_records.values() if reply.has_content() else ():
                count = metrics.get(key)
                if isinstance(count, int | float) and math.isfinite(count):  # else the node has declared nothing
                    node = reply.metadata.src_node_id
                    rows[node] = max(int(count), rows.get(node, 0))
        return aggregate(server_round, replies)

    strategy.aggregate_train = noting  # type: ignore[method-assign]
    return rows

"""How much of the federation an answer involves."""

from fedup.bench.case import Case
from fedup.bench.metrics import Column

COLUMNS = (
    Column("clients_contacted", "clients", "Clients contacted after the request.", "cost", "lower", "count", order=10),
    Column("local_steps", "local steps", "Steps of gradient descent at clients.", "cost", "lower", "count", order=11),
    Column(
        "storage_bytes",
        "storage",
        "Bytes that the server keeps for the sake of requests.",
        "cost",
        "lower",
        "bytes",
        order=12,
    ),
)


def measure(case: Case) -> dict[str, int]:
    """Clients, their work, and what the server keeps."""
    cost = case.unlearned.cost
    return {
        "clients_contacted": len(cost.clients),
        "local_steps": cost.local_steps,
        "storage_bytes": cost.storage_bytes,
    }

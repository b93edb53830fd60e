"""Settings that suit the size of a data set of the user's own; measured by tools/small_data.py."""

from fedup.tasks.datasets._dataset import Defaults

_STEPS = 2000  # of all clients together that a small model needs to learn a small data set
_MIN_ROUNDS, _MAX_ROUNDS = 20, 100


def suited_to_size(model: str, rows: int) -> Defaults:
    """Few rows: small batches, many rounds and few clients; many rows: what large data sets have."""
    batch_size = 8 if rows < 500 else 16 if rows < 5_000 else 64
    rounds = min(_MAX_ROUNDS, max(_MIN_ROUNDS, _STEPS * batch_size // max(rows, 1)))
    clients = max(2, min(10, rows // 40))  # each with rows enough to train, to validate and to hold out
    return Defaults(model=model, rounds=rounds, batch_size=batch_size, clients=clients)

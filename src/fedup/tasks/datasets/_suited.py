"""Settings that suit the size of a data set of the user's own; measured by tools/small_data.py."""

from fedup.tasks.datasets._dataset import Defaults

_ROW_VISITS = 100_000  # rows times rounds, within the bounds below
_MIN_ROUNDS, _MAX_ROUNDS = 10, 80
_ROUNDS, _ROUNDS_OF_CLASS = 20, 6  # few classes are learned soon, and by heart soon after
_ROWS_OF_CLIENT = 40  # enough to train, to validate and to hold out


def suited_to_size(model: str, rows: int, classes: int) -> Defaults:
    """Few rows: small batches, many rounds and few clients; many rows: what large data sets have."""
    batch_size = 8 if rows < 2_000 else 16 if rows < 10_000 else 64
    most = min(_MAX_ROUNDS, _ROUNDS + _ROUNDS_OF_CLASS * classes)
    rounds = min(most, max(_MIN_ROUNDS, _ROW_VISITS // max(rows, 1)))
    clients = max(2, min(10, rows // _ROWS_OF_CLIENT))
    return Defaults(model=model, rounds=rounds, batch_size=batch_size, clients=clients)

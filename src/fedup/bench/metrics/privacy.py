"""What clients' messages give away by account: the ε of a guarantee, and the paper's ε beside it, which is none."""

from fedup.bench.case import Case
from fedup.bench.metrics import Column
from fedup.privacy.paper import DISCLAIMER

_EPSILON = "ε of the differential-privacy guarantee of a client's messages together, at δ = 1e-5."
_PAPER = f"The paper's ε, mean over (client, class): {DISCLAIMER}."
_UPLOAD = "Bytes of the client that sent most."
COLUMNS = (
    Column("epsilon", "ε", _EPSILON, "cost", "lower", "number", order=31),
    Column("paper_epsilon", f"ε, paper: {DISCLAIMER}", _PAPER, "cost", "neither", "number", order=32),
    Column("largest_upload", "largest upload", _UPLOAD, "cost", "lower", "bytes", order=33),
)


def measure(case: Case) -> dict[str, float | None]:
    """As the method tells; None where it tells nothing."""
    reported = case.unlearned.about.get("privacy", {})
    return {column.key: reported.get(column.key) for column in COLUMNS}

"""How close a model is to Retrain: gaps of accuracies and of the forget loss, tug of war, distances of outputs."""

import math

from torch.nn.functional import cross_entropy

from fedup.bench.case import Case, Outputs, Rows
from fedup.bench.metrics import Column

_GAP_TRAIN, _GAP_TEST = "F-A on training rows less Retrain's.", "Test accuracy less Retrain's, in points."
_TOW = "Π (1 − |gap to Retrain|) over forgotten train, retained train and test rows."
_TV = "Total variation between outputs and Retrain's on forgotten inputs."
_KL = "KL divergence of outputs from Retrain's on forgotten inputs."
_LOSS = "Mean cross-entropy on the forgotten training rows, as labelled."
COLUMNS = (
    Column("gap_r_a", "R-A − Retrain", "R-A less Retrain's, in points.", "closeness", "higher", "points", order=1),
    Column("gap_f_a", "F-A − Retrain", "F-A less Retrain's, in points.", "closeness", "retrain", "points", order=5),
    Column("gap_f_a_train", "F-A train − Retrain", _GAP_TRAIN, "closeness", "retrain", "points", order=8),
    Column("gap_test", "test − Retrain", _GAP_TEST, "closeness", "higher", "points", order=11),
    Column("tow", "ToW", _TOW, "closeness", "higher", order=15),
    Column("tv", "TV to Retrain", _TV, "closeness", "lower", order=18),
    Column("kl", "KL to Retrain", _KL, "closeness", "lower", "ratio", order=20),
    Column("forget_loss", "loss, forgotten", _LOSS, "closeness", "retrain", "number", order=22),
    Column("gap_forget_loss", "loss − Retrain", "The same less Retrain's.", "closeness", "retrain", "number", order=26),
)
_SETS: dict[str, tuple[Rows, bool]] = {  # rows, and whether those to be forgotten are meant
    "gap_r_a": ("heldout", False),
    "gap_f_a": ("heldout", True),
    "gap_f_a_train": ("forgotten", True),
    "gap_test": ("test", False),
}
_TUG: tuple[tuple[Rows, bool], ...] = (("forgotten", True), ("retained", False), ("test", False))
_LEAST = 1e-9  # a probability below it counts as this one, so that one struck-out class does not make KL infinite


def measure(case: Case) -> dict[str, float | None]:
    """Differences to Retrain; None where there is no row."""
    loss = forget_loss(case.now)
    figures = {name: _gap(case, *rows) for name, rows in _SETS.items()}
    tug = [gap for rows in _TUG if (gap := _gap(case, *rows)) is not None]
    figures["tow"] = math.prod(1 - abs(gap) for gap in tug)
    figures |= _output_distances(case)
    return {**figures, "forget_loss": loss, "gap_forget_loss": _less(loss, forget_loss(case.retrained))}


def _gap(case: Case, rows: Rows, forgotten: bool) -> float | None:
    return _less(*(of.accuracy(rows, forgotten=forgotten) for of in (case.now, case.retrained)))


def _less(ours: float | None, reference: float | None) -> float | None:
    return None if ours is None or reference is None else ours - reference


def _output_distances(case: Case) -> dict[str, float]:
    """Means over held-out forgotten inputs; over the forgotten samples themselves where only samples are named."""
    rows: Rows = "heldout" if bool(case.data.to_forget("heldout").any()) else "forgotten"
    named = case.data.to_forget(rows)
    ours, reference = (of.probabilities(rows)[named] for of in (case.now, case.retrained))
    logs = [one.clamp(min=_LEAST).log() for one in (reference, ours)]
    return {
        "tv": float((ours - reference).abs().sum(1).mean() / 2),
        "kl": float((reference * (logs[0] - logs[1])).sum(1).mean()),
    }


def forget_loss(of: Outputs) -> float | None:
    """Finer than accuracy where samples were honest."""
    logits, labels = of.logits("forgotten"), of.data.labels("forgotten")
    if not len(labels):
        return None
    loss = float(cross_entropy(logits.double(), labels.long()))
    return loss if loss < 1e6 else None  # a masked logit has none

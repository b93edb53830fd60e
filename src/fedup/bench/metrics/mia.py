"""Membership inference: can outputs tell what was trained on and then forgotten from what never was?"""

import warnings

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedup.bench.case import Case
from fedup.bench.metrics import Column
from fedup.rng import generator

_AUC = "Forgotten training rows against held-out rows of the same clients and classes, by loss: 0.5 is chance."
_TPR = "The same attack: forgotten rows found at 1 % false alarms."
_LEARNED = (
    "The paper's: forgotten against retained training rows by their sorted outputs, learned on one half of "
    "them, accuracy on the other (without a shadow model)."
)
COLUMNS = (
    Column("mia_auc", "MIA, AUC", _AUC, "closeness", "retrain", order=34),
    Column("mia_tpr", "MIA, TPR at 1 %", _TPR, "closeness", "retrain", order=35),
    Column("mia_learned", "MIA, paper", _LEARNED, "closeness", "retrain", order=36),
)
_ROWS = 2000  # of each side, for the learned attack
_FEWEST = 40


def measure(case: Case) -> dict[str, float | None]:
    """None where there are too few rows of a side."""
    there, away = case.data.labels("forgotten"), case.data.labels("heldout")
    outside = case.data.to_forget("heldout")
    figures: dict[str, float | None] = {"mia_auc": None, "mia_tpr": None}
    if min(len(there), int(outside.sum())) >= _FEWEST:
        members = -cross_entropy(case.now.logits("forgotten"), there, reduction="none").double()
        others = -cross_entropy(case.now.logits("heldout")[outside], away[outside], reduction="none").double()
        figures = {"mia_auc": _auc(members, others), "mia_tpr": _tpr(members, others, alarms=0.01)}
    return figures | {"mia_learned": _learned(case)}


def _auc(members: Tensor, others: Tensor) -> float:
    """The chance that a member scores above another; ties count half."""
    ordered = others.sort().values
    below = torch.searchsorted(ordered, members) + torch.searchsorted(ordered, members, right=True)
    return float(below.double().mean() / (2 * len(others)))


def _tpr(members: Tensor, others: Tensor, *, alarms: float) -> float:
    threshold = others.sort(descending=True).values[int(alarms * len(others))]
    return float((members > threshold).double().mean())


def _learned(case: Case) -> float | None:
    """Accuracy, on balanced rows, of an attack trained on other rows."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    forgotten, retained = (case.now.probabilities(rows).sort(dim=1).values.cpu() for rows in ("forgotten", "retained"))
    size = min(len(forgotten), len(retained), _ROWS) // 2 * 2
    if size < _FEWEST:
        return None
    source = generator(0, "mia")
    parts = [rows[torch.randperm(len(rows), generator=source)[:size]] for rows in (forgotten, retained)]
    first, second = (torch.cat([part[half::2] for part in parts]).numpy() for half in (0, 1))
    sides = [0] * (size // 2) + [1] * (size // 2)
    attack = make_pipeline(StandardScaler(), MLPClassifier((32,), max_iter=200, random_state=0))
    with warnings.catch_warnings():  # 200 passes are enough, whatever it says
        warnings.simplefilter("ignore", ConvergenceWarning)
        attack.fit(first, sides)
    return float(attack.score(second, sides))

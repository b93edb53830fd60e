"""The membership inference of the authors' code: one shadow model, raw logits, forgotten against retained rows.

Their shadow is a second run of the method on rows set apart. Ours is one Retrain on held-out rows, the same for every
method, so that methods are compared under one attack. It is measured where an experiment says `shadow = true`.
"""

import warnings

import torch
from torch import Tensor

from fedup.bench.case import Case
from fedup.bench.metrics import Column
from fedup.rng import generator

_ABOUT = (
    "The authors': an attack learns on the logits of one shadow model which rows are forgotten and which retained; its "
    "accuracy on the training rows."
)
COLUMNS = (Column("mia_authors", "MIA, authors' code", _ABOUT, "closeness", "retrain", order=37),)
_ROWS = 2000  # of each side
_FEWEST = 40
_LARGEST = 50.0  # a removed logit is −∞


def measure(case: Case) -> dict[str, float | None]:
    """None without a shadow model, or with too few rows of a side."""
    shadow = case.data.shadow
    if shadow is None:
        return {"mia_authors": None}
    learned_on = _balanced(*shadow.logits)
    judged_on = _balanced(case.now.logits("forgotten"), case.now.logits("retained"))
    return {"mia_authors": None if learned_on is None or judged_on is None else _attack(learned_on, judged_on)}


def _balanced(forgotten: Tensor, retained: Tensor) -> Tensor | None:
    """As many rows of either side, the forgotten ones first; None where there are too few."""
    size = min(len(forgotten), len(retained), _ROWS)
    if size < _FEWEST:
        return None
    source = generator(0, "mia authors")
    chosen = [rows.cpu()[torch.randperm(len(rows), generator=source)[:size]] for rows in (forgotten, retained)]
    return torch.cat(chosen).double().nan_to_num(0.0).clamp(-_LARGEST, _LARGEST)


def _attack(learned_on: Tensor, judged_on: Tensor) -> float:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    attack = MLPClassifier((32,), max_iter=200, random_state=0)
    with warnings.catch_warnings():  # 200 passes are enough, whatever it says
        warnings.simplefilter("ignore", ConvergenceWarning)
        attack.fit(learned_on.numpy(), _sides(learned_on))
    return float(attack.score(judged_on.numpy(), _sides(judged_on)))


def _sides(rows: Tensor) -> list[int]:
    half = len(rows) // 2
    return [0] * half + [1] * half

"""When a model has forgotten well enough: the paper's "Time" is the time until then."""

from torch import nn

from fedup.bench.case import Case, EvaluationData, Outputs, Rows

_NEAR = 0.01  # within one point of Retrain


def figures_of(model: nn.Module, data: EvaluationData) -> dict[str, float]:
    """R-A and what is to go down: a backdoor's success, else F-A (of training rows, where samples are named)."""
    return _figures(Outputs(model, data))


def reached(case: Case) -> float | None:
    """Seconds until R-A ≥ Retrain − 1 point and F-A, or attack success, ≤ Retrain + 1 point; None if never.

    A model that is put in force at once, such as a filter, has its one moment at the end.
    """
    cost, goal = case.unlearned.cost, _figures(case.retrained)
    moments = [*cost.path, {"time_s": cost.total_time_s, **_figures(case.now)}]
    for moment in moments:
        if moment["r_a"] >= goal["r_a"] - _NEAR and moment["unwanted"] <= goal["unwanted"] + _NEAR:
            return moment["time_s"]
    return None


def _figures(of: Outputs) -> dict[str, float]:
    data, triggered = of.data, of.data.situation.triggered
    if triggered is not None:
        others = triggered.y != triggered.target
        unwanted = float((of.logits("triggered").argmax(1)[others] == triggered.target).float().mean())
    else:
        rows: Rows = "heldout" if bool(data.to_forget("heldout").any()) else "forgotten"
        unwanted = of.accuracy(rows, forgotten=True) or 0.0
    return {"r_a": of.accuracy("heldout", forgotten=False) or 0.0, "unwanted": unwanted}

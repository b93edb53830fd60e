"""A warning after training, where a model has hardly learned."""

from typing import Any

from fedup.federation import Federation

_LEAST_GAIN = 0.2  # of the way from a constant answer to no error


def constant_score(federation: Federation) -> float:
    """The score on held-out rows of always the same answer: the largest class; of labels each as it is mostly; of
    values their mean, whose R² is 0."""
    y = federation.y[federation.rows("heldout")].cpu()
    if len(y) == 0 or y.is_floating_point():
        return 0.0
    shares = y.float().mean(0)
    return float(y.bincount().max() / len(y) if y.ndim == 1 else shares.maximum(1 - shares).mean())


def remark(result: dict[str, Any]) -> str:
    """The warning, with what to try; empty where the model is better."""
    score, constant = result["accuracy"].get("heldout", 1.0), result.get("constant_score", 0.0)
    if score - constant >= _LEAST_GAIN * (1 - constant):
        return ""
    return (
        f"Warning: this is hardly better than to answer always the same ({constant:.3f}). Try more --rounds, another "
        "--lr or a smaller --batch-size; look at the columns with `fedup data check`; bring more rows.\n"
    )

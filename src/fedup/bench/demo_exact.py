"""The demo's last part: the same data learned exactly, beside the filter."""

from typing import Any

from fedup.federation import Federation
from fedup.request import Forget
from fedup.tasks.backbones import load_backbone
from fedup.tasks.datasets import Dataset
from fedup.tasks.evaluation import retain_and_forget
from fedup.unlearning.learn_head import learn_head

BACKBONE = "random_conv"
_SALT = "demo"


def exact_part(dataset: Dataset, federation: Federation) -> dict[str, Any]:
    """A client forgotten by a head on a public backbone: accuracies, claims, and hashes of totals.

    `learned_without` is computed from the other clients' rows alone, `relearned` by asking them to add up anew.
    """
    backbone = load_backbone(BACKBONE, tuple(dataset.x.shape[1:]))
    request = Forget.clients([federation.ids[-1]])
    model = learn_head(backbone, federation, num_classes=dataset.num_classes)
    figures = {"learned": retain_and_forget(model, federation, request)}
    before = model.totals_hash(_SALT)
    report = model.unlearn(request)
    figures["forgotten"] = retain_and_forget(model, federation, request)
    relearned = model.relearn(federation) == model.totals
    retained = model.claim.kind
    model.purge()
    without = learn_head(
        backbone, federation.without(request), num_classes=dataset.num_classes, cache=model.cache
    ).totals_hash(_SALT)
    return {
        "backbone": BACKBONE,
        "origin": backbone.origin.source if backbone.origin else None,
        "features": backbone.width,
        "request": request.to_json(),
        **figures,
        "time_s": report.total_time_s,
        "claims": [retained, model.claim.kind],
        "sentence": model.claim.sentence,
        "totals": {"before": before, "after": model.totals_hash(_SALT), "learned_without": without},
        "relearned_equal": relearned,
        "store_bytes": model.store.stored_bytes,
    }


def summary(exact: dict[str, Any]) -> str:
    """The same in a few lines of text."""
    totals = {name: value[:12] for name, value in exact["totals"].items()}
    shares = {name: f"{exact[name]['retain']:.3f} / {exact[name]['forget']:.3f}" for name in ("learned", "forgotten")}
    equal = exact["relearned_equal"] and totals["after"] == totals["learned_without"]
    return (
        f"Exact, beside the filter: a head on {exact['backbone']} learned in one round, R-A / F-A {shares['learned']}; "
        f"client {exact['request']['clients'][0]} forgotten in {1000 * exact['time_s']:.0f} ms, "
        f"{shares['forgotten']}.\n"
        f"Totals {totals['before']} before, {totals['after']} after; learned without it {totals['learned_without']}: "
        f"{'equal' if equal else 'DIFFERENT'}. Claim: {exact['claims'][0]}; after purging: {exact['claims'][1]}."
    )

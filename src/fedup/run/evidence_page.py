"""What the evidence page shows of a request, in the words and per cents of its template."""

from collections.abc import Mapping
from typing import Any

from fedup.request import Forget
from fedup.run.in_words import (
    STATES,
    class_in_words,
    count,
    eraser_in_words,
    forget_set,
    ids,
    machine_in_words,
    moment,
)
from fedup.target_words import MEASURE, OUTPUT, SCORE, targets_of

Evidence = Mapping[str, Any]  # as `build_evidence` makes it
_MOST_CLASSES = 12  # that fit a chart
_SENTENCES = {  # for the person whose data it is, by finding
    "forgotten": "The model now treats {} like data it has never seen.",
    "already like unseen": "The model treats {} like data it has never seen, as it did before.",
    "partly": "The model knows {} less well than before, but still better than data it has never seen.",
    "too few rows": "The request is in force, but there are too few examples to prove that the model forgot {}.",
    "waiting": "The request waits and is not answered yet: the model still knows {}.",
    "not measured": "The request is in force, but nobody measured whether the model forgot {}.",
    "unchanged": "The request is in force, but the model still knows {} as well as before.",
    "farther than before": "The request is in force, but the model knows {} even better than before.",
}


def page_content(evidence: Evidence) -> dict[str, Any]:
    """All that the template `evidence` shows."""
    request, names, first, filtered = (evidence[name] for name in ("request", "class_names", "first_filter", "filter"))
    states, targets = _states(evidence), targets_of(evidence["federation"])
    clients = evidence["federation"].get("client_names", ())
    losses = {label: recall["before"] - recall["after"] for label, recall in evidence["class_recall"].items()}
    worst = max(losses, key=losses.__getitem__, default=None)
    return {
        **evidence,
        "moment": moment,
        "output": OUTPUT[targets],
        "outputs": "outputs" if targets == "values" else targets,
        "measure": MEASURE[targets],
        "score": SCORE[targets],
        "machine_in_words": machine_in_words,
        "named": forget_set(Forget.from_json(request["forget"]), class_names=names, client_names=clients, most=None),
        "sentence": _sentence(evidence),
        "compared": _compared(evidence["finished"]),
        "claim_accuracy": _claim_accuracy(evidence["claim"]),
        "contacted": ids(evidence["contact"]["clients_contacted"], None, names=clients),
        "counting": ids(evidence["contact"]["clients_counting"], None, names=clients),
        "seconds": sum(evidence["time_s"].values()),
        "measured": _measured(evidence),
        "of_retrain": _of_retrain(evidence),
        "other_filter": filtered and filtered["sha256"] != (first or filtered)["sha256"],
        "worst": worst and {"name": class_in_words(int(worst), names), **evidence["class_recall"][worst]},
        "states": states,
        "kept": [figures["heldout"]["retain"] for figures in states.values()],
        "classes": _classes(states, names, OUTPUT[targets]),
        "count": count,
        "interval": _interval,
        "eraser_in_words": eraser_in_words,
        "mechanisms": sorted({release["mechanism"] for release in evidence["contact"]["releases"]}),
    }


def _sentence(evidence: Evidence) -> str:
    """One sentence that the person whose data it is understands."""
    request, verdict = evidence["request"], evidence["verdict"]
    if request["restored_at"]:
        return "The request was taken back and has no effect any more."
    if evidence["finished"]:
        return "The model was trained anew without the data named in the request: its weights never saw them."
    claim, data = evidence["claim"], "the class" if request["kind"] == "class" else "the data named in the request"
    if claim and claim["kind"] != "suppressed":
        kept = "" if claim["kind"] == "exact" else " Statistics of the rows are still kept, to restore them."
        return f"The model is the one that would have been learned without {data}.{kept}"
    finding = verdict["finding"] if verdict else "not measured"
    whose = "your data" if "subject" in request["kind"] else "the data named in the request"
    if evidence["first_filter"] is None and finding != "waiting":
        return "The request is not answered yet: the model still knows the data."
    if request["kind"] == "class" and finding == "forgotten":
        return "The model does not recognise the class any more."
    return _SENTENCES[finding].format("the class" if request["kind"] == "class" else whose)


def _claim_accuracy(claim: Mapping[str, Any] | None) -> list[tuple[str, list[float]]]:
    """Accuracies before and after, by part of the data."""
    measured = (claim or {}).get("accuracy") or {"before": {}, "after": {}}
    return [(part, [measured["before"][part], value]) for part, value in measured["after"].items()]


def _compared(finished: Mapping[str, Any] | None) -> list[tuple[str, list[float]]]:
    """The model before, under its filter, and the one trained without the rows, on retained validation rows."""
    if not finished or not finished["compared"]:  # a server app has no rows to compare on
        return []
    scores = [finished["compared"][name]["validation"] for name in ("served", "candidate")]
    return [("validation rows that stay", scores)] if None not in scores else []


def _of_retrain(evidence: Evidence) -> float | None:
    """The share that a model retrained without the data has on the rows of the verdict."""
    by_request = (evidence["retrained"] or {}).get("by_request", {})
    part = "heldout" if evidence["request"]["kind"] == "class" else "train"
    return by_request.get(evidence["forget_set"]["digest"], {}).get(part)


def _measured(evidence: Evidence) -> dict[str, Any] | None:
    """The verdict's shares as a chart: rows of the request, and unseen ones where these are the goal."""
    verdict = evidence["verdict"]
    if not verdict or verdict["statistic"] is None:
        return None
    own, unseen, retrained = verdict["statistic"], verdict["reference"], _of_retrain(evidence)
    groups = [("data of the request", [own["before"], own["after"], *([] if retrained is None else [retrained])])]
    groups += [("unseen data", [unseen["before"], unseen["after"]])] if unseen else []
    series = ["without the request", "with it", *([] if retrained is None else ["retrained without the data"])]
    return {"series": series, "groups": groups, "rows": count(round(own["rows"]), "row")}


def _states(evidence: Evidence) -> dict[str, Any]:
    """Figures of the model before, with the filter, of Retrain where there is one, and restored where that differs."""
    figures = evidence["accuracy"]
    if not figures:
        return {}
    retrained = {"Retrain": evidence["retrained"]} if evidence["retrained"] else {}
    shown = {name: figures[state] for state, name in STATES.items()}
    restored = shown.pop(STATES["restored"])
    return {**shown, **retrained, **({} if evidence["restored_bit_identical"] else {STATES["restored"]: restored})}


def _classes(states: Mapping[str, Any], names: list[str], output: str) -> dict[str, Any]:
    """Accuracy by class, of those that changed most where there are many."""
    by_class = list(zip(*(figures["per_class"] for figures in states.values()), strict=True))
    changes = [abs((after or 0.0) - (before or 0.0)) for before, after, *_ in by_class]
    most = sorted(sorted(range(len(by_class)), key=lambda label: -changes[label])[:_MOST_CLASSES])
    some = "" if len(most) == len(by_class) else f", the {len(most)} of {len(by_class)} that changed most"
    return {
        "caption": f"The same by {output}{some}; all clients, rows named in requests included",
        "groups": [(class_in_words(label, names), by_class[label]) for label in most],
    }


def _interval(estimate: Mapping[str, float]) -> str:
    """A difference of shares and its 95 % interval, in points."""
    value, low, high = (f"{100 * estimate[name]:+.1f}".replace("-", "−") for name in ("value", "low", "high"))
    return f"{value} ({low} … {high})"

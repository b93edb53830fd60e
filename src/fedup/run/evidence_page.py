"""What the evidence page shows of a request, in the words and per cents of its template."""

from collections.abc import Mapping
from typing import Any

from fedup.page import percent
from fedup.request import Forget
from fedup.run.in_words import STATES, class_in_words, count, eraser_in_words, forget_set, machine_in_words, moment

Evidence = Mapping[str, Any]  # as `build_evidence` makes it
_MOST_CLASSES = 12  # that fit a chart
_SENTENCES = {  # for the person whose data it is, by finding
    "forgotten": "The model now treats {} like data it has never seen.",
    "already like unseen": "The model treats {} like data it has never seen, as it did before.",
    "partly": "The model knows {} less well than before, but still better than data it has never seen.",
    "too few rows": "The request is in force, but there are too few examples to prove that the model forgot {}.",
    "not measured": "The request is in force, but nobody measured whether the model forgot {}.",
    "unchanged": "The request is in force, but the model still knows {} as well as before.",
    "farther than before": "The request is in force, but the model knows {} even better than before.",
}


def page_content(evidence: Evidence) -> dict[str, Any]:
    """All that the template `evidence` shows."""
    request, names, first, filtered = (evidence[name] for name in ("request", "class_names", "first_filter", "filter"))
    states = _states(evidence)
    losses = {label: recall["before"] - recall["after"] for label, recall in evidence["class_recall"].items()}
    worst = max(losses, key=losses.__getitem__, default=None)
    return {
        **evidence,
        "moment": moment,
        "machine_in_words": machine_in_words,
        "named": forget_set(Forget.from_json(request["forget"]), class_names=names, most=None),
        "sentence": _sentence(evidence),
        "seconds": sum(evidence["time_s"].values()),
        "measured": _measured(evidence),
        "table": _table(evidence),
        "other_filter": filtered and filtered["sha256"] != (first or filtered)["sha256"],
        "worst": worst and {"name": class_in_words(int(worst), names), **evidence["class_recall"][worst]},
        "states": states,
        "kept": [figures["heldout"]["retain"] for figures in states.values()],
        "classes": _classes(states, names),
        "asked": _asked(evidence),
        "answer": _answer(evidence),
        "hashes": _hashes(evidence),
    }


def _sentence(evidence: Evidence) -> str:
    """One sentence that the person whose data it is understands."""
    request, verdict = evidence["request"], evidence["verdict"]
    if request["restored_at"]:
        return "The request was taken back and has no effect any more."
    if evidence["first_filter"] is None:
        return "The request is not answered yet: the model still knows the data."
    finding = verdict["finding"] if verdict else "not measured"
    if request["kind"] == "class" and finding == "forgotten":
        return "The model does not recognise the class any more."
    return _SENTENCES[finding].format("the class" if request["kind"] == "class" else "the data named in the request")


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


def _table(evidence: Evidence) -> list[list[str]]:
    """The verdict's figures with their intervals."""
    verdict = evidence["verdict"]
    if not verdict or verdict["statistic"] is None:
        return []
    sides = {verdict["measure"]: verdict["statistic"], "the same on unseen rows": verdict["reference"]}
    rows = [
        [name, percent(side["before"]), percent(side["after"]), f"{side['rows']:,.0f}"]
        for name, side in sides.items()
        if side
    ]
    if verdict["reference"]:
        excess = [_interval(verdict[name]) for name in ("excess_before", "excess_after")]
        rows.append(["excess in points, with 95 % interval", *excess, ""])
    rows.append(["change in points, with 95 % interval", "", _interval(verdict["change"]), ""])
    if evidence["retrained"]:
        rows.append(["after retraining without it", "", percent(_of_retrain(evidence)), ""])
    return rows


def _states(evidence: Evidence) -> dict[str, Any]:
    """Figures of the model before, with the filter, of Retrain where there is one, and restored where that differs."""
    figures = evidence["accuracy"]
    if not figures:
        return {}
    retrained = {"Retrain": evidence["retrained"]} if evidence["retrained"] else {}
    shown = {name: figures[state] for state, name in STATES.items()}
    restored = shown.pop(STATES["restored"])
    return {**shown, **retrained, **({} if evidence["restored_bit_identical"] else {STATES["restored"]: restored})}


def _classes(states: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Accuracy by class, of those that changed most where there are many."""
    by_class = list(zip(*(figures["per_class"] for figures in states.values()), strict=True))
    changes = [abs((after or 0.0) - (before or 0.0)) for before, after, *_ in by_class]
    most = sorted(sorted(range(len(by_class)), key=lambda label: -changes[label])[:_MOST_CLASSES])
    some = "" if len(most) == len(by_class) else f", the {len(most)} of {len(by_class)} that changed most"
    return {
        "caption": f"The same by class{some}; all clients, with the rows of requests",
        "groups": [(class_in_words(label, names), by_class[label]) for label in most],
    }


def _asked(evidence: Evidence) -> dict[str, str]:
    request, rows = evidence["request"], evidence["forget_set"]["rows"]
    counted = f"{rows['count']:,}, of {count(len(rows['clients']), 'client')}" if rows else "not counted"
    facts = {"Asked": moment(request["asked_at"]), "Training rows named": counted}
    if evidence["filter"]:
        verb = "Is" if request["status"] == "in force" else "Was last"
        facts[f"{verb} in force with"] = ", ".join(request["in_force_with"]) or "no other request"
    if request["answered_with"]:
        facts["In one answer with"] = ", ".join(request["answered_with"])
    if request["restored_at"]:
        facts["Taken back"] = moment(request["restored_at"])
    return facts


def _answer(evidence: Evidence) -> list[tuple[str, str]]:
    contact, filtered, times = evidence["contact"], evidence["filter"], evidence["time_s"]
    stages = ", ".join(f"{stage} {value:.2f} s" for stage, value in times.items())
    contacted = ", ".join(map(str, contact["clients_contacted"])) or "none: answered from centroids sent before"
    counting = ", ".join(map(str, contact["clients_counting"]))
    facts = [
        ("Time", f"{sum(times.values()):.2f} s: {stages}"),
        ("Clients contacted to answer", contacted),
        *([("Clients that counted answers, to measure", counting)] if counting else []),
        ("Sent by clients", f"{contact['bytes_up']:,} bytes in {count(len(contact['releases']), 'message')}"),
        ("Sent to clients", f"{contact['bytes_down']:,} bytes"),
        ("Protection of what was sent", ", ".join(sorted({r["mechanism"] for r in contact["releases"]})) or "–"),
        ("Protection of what was sent before", contact["protection_of_the_cache"]),
    ]
    if evidence["erasure"]:
        facts.append(("Eraser", eraser_in_words(evidence["erasure"])))
    facts += [("Note", note) for note in evidence["notes"]]
    if filtered:
        settings = ", ".join(f"{key} {value}" for key, value in filtered["config"].items() if value is not None)
        used = f"{filtered['centroids_used']:,}" if filtered["centroids_used"] else "none"
        facts += [("Centroids that the filter was fitted to", used), ("Settings of the filter", settings)]
    return facts


def _hashes(evidence: Evidence) -> dict[str, str]:
    base, journal, filtered, first = (evidence[name] for name in ("base", "journal", "filter", "first_filter"))
    forgotten = evidence["forget_set"]
    facts = {
        "Request": forgotten["digest"],
        "Forget set (client and row ids)": forgotten["rows"].get("sha256", "–"),
        "Base model, fingerprint of all weights": base["fingerprint"],
        "Base model, sha256 of the file": base["file"]["sha256"] if base["file"] else "–",
    }
    if filtered:
        state = "in force" if filtered["in_force_now"] else "last in force"
        facts[f"Filter {state}, sha256 of the file"] = filtered["sha256"]
    if first:
        facts["Filter it was answered by, sha256 of the file"] = first["sha256"]
    facts[f"Journal, event {journal['event']}"] = journal["event_hash"]
    facts[f"Journal, head of {journal['events']} events"] = journal["head"]
    return facts


def _interval(estimate: Mapping[str, float]) -> str:
    value, low, high = (f"{100 * estimate[name]:+.1f}".replace("-", "−") for name in ("value", "low", "high"))
    return f"{value} ({low} … {high})"

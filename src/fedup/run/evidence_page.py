"""The HTML page of a request's evidence."""

from collections.abc import Mapping
from typing import Any

from fedup.page import Page
from fedup.request import Forget
from fedup.run.in_words import STATES, class_in_words, count, eraser_in_words, forget_set, machine_in_words, moment

Evidence = Mapping[str, Any]  # as `build_evidence` makes it


def evidence_page(evidence: Evidence) -> Page:
    """What was asked, what it did, how it was answered, what is claimed and what is not."""
    request, names, journal = evidence["request"], evidence["class_names"], evidence["journal"]
    named = forget_set(Forget.from_json(request["forget"]), class_names=names, most=None)
    reference = f" · {request['reference']}" if request["reference"] else ""
    page = Page(f"Request {request['id']}{reference}: forget {named}", _lead(evidence))
    verdict = evidence["verdict"]
    page.badge(
        f"{request['status']}: {verdict['finding']}" if verdict else request["status"],
        good=request["status"] == "in force" and bool(verdict and verdict["good"]),
    )
    page.heading("What was asked")
    _add_request(page, evidence)
    page.heading("What it did")
    _add_verdict(page, evidence)
    _add_accuracies(page, evidence)
    page.heading("How it was answered")
    _add_answer(page, evidence)
    page.heading("What is claimed")
    page.bullets(evidence["claimed"])
    page.heading("What is not claimed")
    page.bullets(evidence["not_claimed"])
    page.heading("Hashes")
    _add_hashes(page, evidence)
    page.footer(
        f"Made by fedup {evidence['fedup']} from the journal of the run folder. Trained on "
        f"{machine_in_words(evidence['trained_on'])}. Answered on {machine_in_words(evidence['machine'])}. Check the "
        f"folder with `fedup verify --head {journal['head'][:16]}`."
    )
    return page


def _lead(evidence: Evidence) -> str:
    federation, request = evidence["federation"], evidence["request"]
    origin, asked_at = "", moment(request["asked_at"])
    if "data" in federation:
        origin = (
            f"A federation of {federation['clients']} clients trained {federation['model']} on {federation['data']}. "
        )
    if evidence["first_filter"] is None:
        if request["restored_at"]:
            return f"{origin}The request came in on {asked_at} and was taken back; no filter ever answered it."
        return f"{origin}The request came in on {asked_at} and is open: no filter answers it."
    return (
        f"{origin}The request was answered on {asked_at} in {sum(evidence['time_s'].values()):.1f} s by a filter "
        "inside the model; the model's weights were not touched."
    )


def _add_request(page: Page, evidence: Evidence) -> None:
    request, forgotten = evidence["request"], evidence["forget_set"]
    rows = forgotten["rows"]
    counted = f"{rows['count']:,}, of {count(len(rows['clients']), 'client')}" if rows else "not counted"
    facts = {
        "Asked": moment(request["asked_at"]),
        "Training rows named": counted,
        "Hash of the request": forgotten["digest"],
        "Hash of the forget set (client and row ids)": rows.get("sha256", "–"),
    }
    if evidence["filter"]:
        verb = "Is" if request["status"] == "in force" else "Was last"
        facts[f"{verb} in force with"] = ", ".join(request["in_force_with"]) or "no other request"
    if request["restored_at"]:
        facts["Taken back"] = moment(request["restored_at"])
    page.facts(facts.items())


def _add_verdict(page: Page, evidence: Evidence) -> None:
    """What the request did, measured with it and without it, everything else equal."""
    verdict, retrained = evidence["verdict"], evidence["retrained"]
    if not verdict:
        return
    page.paragraph(verdict["words"])
    if verdict["statistic"] is None:
        return
    measured = {verdict["measure"]: verdict["statistic"], "the same on unseen rows": verdict["reference"]}
    rows = [
        [name, _share(own["before"]), _share(own["after"]), f"{own['rows']:,.0f}"]
        for name, own in measured.items()
        if own is not None
    ]
    if verdict["reference"] is not None:
        excess = [_interval(verdict[name]) for name in ("excess_before", "excess_after")]
        rows.append(["excess, with 95 % interval", *excess, ""])
    rows.append(["change, with 95 % interval", "", _interval(verdict["change"]), ""])
    if retrained:
        value = retrained["by_request"].get(evidence["forget_set"]["digest"], {})
        part = "heldout" if evidence["request"]["kind"] == "class" else "train"
        rows.append(["after retraining without it", "", _share(value.get(part)), ""])
    page.table(["measured alone", "without the request", "with it", "rows"], rows)


def _add_accuracies(page: Page, evidence: Evidence) -> None:
    """Of the filter for all requests in force: what is retained."""
    figures, retrained, recalls = evidence["accuracy"], evidence["retrained"], evidence["class_recall"]
    filtered, names = evidence["filter"], evidence["class_names"]
    if filtered and filtered["sha256"] != (evidence["first_filter"] or filtered)["sha256"]:
        page.paragraph(
            "Other requests came or went since it was answered, and each made a new filter for all in force. The "
            "verdict is of the moment it was answered, with it and without it. Below is "
            f"the {'one in force' if filtered['in_force_now'] else 'last one it was in force under'}, fitted on "
            f"{moment(filtered['fitted_at'])}."
        )
    if recalls:
        label, worst = max(recalls.items(), key=lambda pair: pair[1]["before"] - pair[1]["after"])
        page.paragraph(
            f"Of all classes that stay, {class_in_words(int(label), names)} loses most of its recall on "
            f"rows that stay: {_share(worst['before'])} before, {_share(worst['after'])} with the filter."
        )
    if not figures:
        page.paragraph("Accuracies on held-out rows were not measured: no filter, or no data at hand.")
        return
    shown = {name: figures[state] for state, name in STATES.items()} | ({"Retrain": retrained} if retrained else {})
    page.table(
        ["accuracy, under the filter of all requests in force", "held-out rows that stay"],
        [[name, _share(own["heldout"]["retain"])] for name, own in shown.items()],
    )
    same = "bit for bit the original's" if evidence["restored_bit_identical"] else "NOT the original's"
    hint = "" if retrained else "Retraining without the data was not run; `fedup evaluate --retrain` adds it."
    page.paragraph(f"Restored outputs are {same}. {hint}")
    page.bars(
        {name: own["per_class"] for name, own in shown.items()},
        names,
        "Accuracy by class on held-out rows, all clients, under the filter of all requests in force",
    )


def _add_answer(page: Page, evidence: Evidence) -> None:
    request, contact, filtered = evidence["request"], evidence["contact"], evidence["filter"]
    stages = ", ".join(f"{stage} {value:.2f} s" for stage, value in evidence["time_s"].items())
    contacted = ", ".join(map(str, contact["clients_contacted"])) or "none: answered from centroids sent before"
    counting = ", ".join(map(str, contact["clients_counting"]))
    facts = [("In one answer with", ", ".join(request["answered_with"]))] if request["answered_with"] else []
    facts += [
        ("Time", f"{sum(evidence['time_s'].values()):.2f} s: {stages}"),
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
        used = f"{filtered['centroids_used']:,}" if filtered["centroids_used"] else "none"
        settings = ", ".join(f"{key} {value}" for key, value in filtered["config"].items() if value is not None)
        facts += [("Centroids that the filter was fitted to", used), ("Settings of the filter", settings)]
    page.facts(facts)


def _add_hashes(page: Page, evidence: Evidence) -> None:
    base, journal, filtered, first = (evidence[name] for name in ("base", "journal", "filter", "first_filter"))
    facts = {
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
    page.facts(facts.items())


def _interval(estimate: Mapping[str, float]) -> str:
    return f"{estimate['value']:+.4f} ({estimate['low']:+.4f} … {estimate['high']:+.4f})"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"

"""Evidence for one request: one JSON file for programs, one HTML page for people, both from the journal alone."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fedup
from fedup.files import write_text
from fedup.page import Page
from fedup.run.folder import Run
from fedup.run.journal import Event
from fedup.run.state import Request, State
from fedup.run.store import hash_of

FORMAT_VERSION = 1
STAGES = ("check", "contact", "erase", "fit", "swap", "measure", "store")  # in the order in which they happen
_SUPPRESSED = (
    "Suppression at the served interface: while the request is in force, whoever asks the model through this folder is "
    "answered under the filter, or not at all."
)
_UNCHANGED = (
    "The original model was never changed: its weights have the fingerprint given below, and with the filter taken out "
    "it answers bit for bit as before."
)
_UNUSED = (
    "The filter was fitted without the rows named above: no feature, centroid or label of theirs took part. (Cells "
    "that samples were taken from were clustered again by their clients without them.)"
)
_ERASED = (
    "The filter has an eraser, which was made from sums and second moments of the features of the rows named above "
    "and contains the difference between their mean and that of retained rows: its file is marked "
    "derived_from_forgotten. It holds means of at least 20 rows, no single one."
)
_REMAPPED = "The filter was fitted with centroids of the forgotten class under other labels (class policy `remap`)."
NOT_CLAIMED = (
    "That the weights have forgotten: the frozen model still holds what it learned, and whoever has the weights can "
    "use them without the filter.",
    "That copies elsewhere are gone: backups, exported programs and what clients or third parties keep are outside of "
    "this folder.",
    "That a low accuracy on forgotten data is always the goal: for clients and samples the goal is the accuracy that "
    "retraining without them would give, not zero.",
    "Differential privacy beyond what is said under Protection: the trained model and the sizes of clients are outside "
    "any guarantee on messages, and the paper's noise is none.",
    "That the journal cannot be forged: its hashes show edits, but whoever can write the whole folder can write a new "
    "chain. Keep the head hash elsewhere.",
)


def checked_evidence(run: Run, state: State, request: str) -> dict[str, Any]:
    """Evidence for the request of that id or reference; none from a folder whose files are not those on record."""
    found = build_evidence(state, state.request(request))
    for record in state.files:
        run.files.checked(record)
    return found


def build_evidence(state: State, request: Request) -> dict[str, Any]:
    """What the journal knows about a request: how it was answered, and the filter that suppresses it now (or did last).

    Each later request and restoration makes another filter for all that are in force; accuracies, settings and claims
    are those of the last one that this request was in force under.
    """
    event, serving = request.asked_in, _serving(state, request)
    asked = next(one for one in event.body["requests"] if one["id"] == request.id)
    body, figures = event.body, serving.body["figures"]
    config = serving.body["config"]
    remapped = "class" in request.forget.kind and config["class_policy"] != "drop"
    erased = request.forget.digest in (serving.body.get("erasure") or {}).get("requests", ())
    return {
        "format": FORMAT_VERSION,
        "fedup": fedup.__version__,
        "request": {
            "id": request.id,
            "reference": request.reference,
            "kind": request.forget.kind,
            "forget": request.forget.to_json(),
            "asked_at": event.at,
            "status": "in force" if request.is_active else "taken back",
            "restored_at": request.restored_in.at if request.restored_in else None,
            "answered_with": [one["id"] for one in body["requests"] if one["id"] != request.id],
            "in_force_with": [name for name in serving.body["active"] if name != request.id],
        },
        "forget_set": {"digest": asked["digest"], "rows": asked["rows"]},
        "federation": {key: value for key, value in state.about.items() if key != "class_names"},
        "class_names": list(state.about.get("class_names", ())),
        "base": {"fingerprint": body["base"], "file": state.model.to_json() if state.model else None},
        "filter": {
            **serving.body["filter"],
            "config": serving.body["config"],
            "centroids_used": serving.body["centroids_used"],
            "fitted_at": serving.at,
            "in_force_now": request.is_active,
        },
        "first_filter": {**body["filter"], "config": body["config"], "fitted_at": event.at},
        "accuracy": figures and {
            "this_request": figures["by_request"].get(request.forget.digest),
            **{name: figures[name] for name in ("original", "forgotten", "restored")},
        },
        "restored_bit_identical": figures["restored_bit_identical"] if figures else None,
        "retrained": _retrained(state, serving),
        "time_s": {stage: body["time_s"][stage] for stage in STAGES if stage in body["time_s"]},
        "contact": {
            "clients_contacted": body["clients_contacted"],
            "bytes_up": body["bytes_up"],
            "bytes_down": body["bytes_down"],
            "releases": body["releases"],
            "protection_of_the_cache": state.protection,
            "guarantee_of_the_cache": asdict(state.guarantee) if state.guarantee else None,
        },
        "machine": body.get("machine"),
        "erasure": serving.body.get("erasure"),
        "notes": serving.body.get("notes", []),
        "claimed": [
            _SUPPRESSED,
            *([_ERASED] if erased else []),
            *([_REMAPPED] if remapped else [] if erased else [_UNUSED]),
            _UNCHANGED,
        ],
        "not_claimed": list(NOT_CLAIMED),
        "journal": {"event": event.seq, "event_hash": event.hash, "head": state.head, "events": len(state.events)},
    }  # fmt: skip


def write_evidence(evidence: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `R1.json` and `R1.html` into the folder."""
    stem = evidence["request"]["id"]
    paths = [folder / f"{stem}.json", folder / f"{stem}.html"]
    write_text(paths[0], json.dumps(evidence, indent=2, ensure_ascii=False) + "\n")
    _page(evidence).write(paths[1])
    return paths


def record_of(paths: list[Path]) -> dict[str, str]:
    """Names and hashes of evidence files, for the journal."""
    return {path.name: hash_of(path)[0] for path in paths}


def evidence_files(state: State) -> dict[str, str]:
    """The hash of each evidence file as it was last written."""
    files: dict[str, str] = {}
    for event in state.events:
        if event.kind == "evidenced":
            files |= event.body["files"]
    return files


def _serving(state: State, request: Request) -> Event:
    """The last answer after which the request was in force."""
    return next(
        event
        for event in reversed(state.events)
        if event.kind in ("unlearned", "restored") and request.id in event.body["active"]
    )


def _retrained(state: State, serving: Event) -> dict[str, Any] | None:
    """Retrain's accuracies, where someone had it computed for the same set of requests."""
    wanted = sorted(serving.body["active"])
    for event in reversed(state.events):
        if event.kind == "evaluated" and sorted(event.body["requests"]) == wanted:
            return {"at": event.at, **event.body["retrained"]}
    return None


def _page(evidence: Mapping[str, Any]) -> Page:
    request, filtered, contact = evidence["request"], evidence["filter"], evidence["contact"]
    name = f"Request {request['id']}" + (f" · {request['reference']}" if request["reference"] else "")
    page = Page(f"{name}: {_what(request['forget'], evidence['class_names'])}", _lead(evidence))
    page.badge(request["status"], good=request["status"] == "in force")
    page.heading("What was asked")
    rows = evidence["forget_set"]["rows"]
    facts = [
        ("Asked", _moment(request["asked_at"])),
        (
            "Training rows named",
            f"{rows['count']:,}, of {_count(len(rows['clients']), 'client')}" if rows else "not counted",
        ),
        ("Hash of the request", evidence["forget_set"]["digest"]),
        ("Hash of the forget set (client and row ids)", rows.get("sha256", "–")),
        (f"{_verb(request)} in force with", ", ".join(request["in_force_with"]) or "no other request"),
    ]
    if request["restored_at"]:
        facts.append(("Taken back", _moment(request["restored_at"])))
    page.facts(facts)
    page.heading("What it did")
    if filtered["sha256"] != evidence["first_filter"]["sha256"]:
        page.paragraph(
            "Other requests came or went since it was answered, and each made a new filter for all in force. Below is "
            f"the {'one in force' if filtered['in_force_now'] else 'last one it was in force under'}, fitted on "
            f"{_moment(filtered['fitted_at'])}."
        )
    _accuracies(page, evidence)
    page.heading("How it was answered")
    stages = ", ".join(f"{stage} {value:.2f} s" for stage, value in evidence["time_s"].items())
    asked = ", ".join(map(str, contact["clients_contacted"])) or "none: answered from centroids sent before"
    page.facts(
        [
            *([("In one answer with", ", ".join(request["answered_with"]))] if request["answered_with"] else []),
            ("Time", f"{sum(evidence['time_s'].values()):.2f} s: {stages}"),
            ("Clients contacted", asked),
            ("Sent by clients", f"{contact['bytes_up']:,} bytes in {_count(len(contact['releases']), 'message')}"),
            ("Sent to clients", f"{contact['bytes_down']:,} bytes"),
            ("Protection of what was sent", ", ".join(sorted({r["mechanism"] for r in contact["releases"]})) or "–"),
            ("Protection of what was sent before", contact["protection_of_the_cache"]),
            (
                "Centroids that the filter was fitted to",
                f"{filtered['centroids_used']:,}" if filtered["centroids_used"] else "none",
            ),
            *([("Eraser", _eraser(evidence["erasure"]))] if evidence["erasure"] else []),
            *(("Note", note) for note in evidence["notes"]),
            ("Settings of the filter", ", ".join(f"{key} {value}" for key, value in filtered["config"].items())),
        ]
    )
    page.heading("What is claimed")
    page.bullets(evidence["claimed"])
    page.heading("What is not claimed")
    page.bullets(evidence["not_claimed"])
    page.heading("Hashes")
    base = evidence["base"]
    page.facts(
        [
            ("Base model, fingerprint of all weights", base["fingerprint"]),
            ("Base model, sha256 of the file", base["file"]["sha256"] if base["file"] else "–"),
            (
                f"Filter {'in force' if filtered['in_force_now'] else 'last in force'}, sha256 of the file",
                filtered["sha256"],
            ),
            ("Filter it was answered by, sha256 of the file", evidence["first_filter"]["sha256"]),
            (f"Journal, event {evidence['journal']['event']}", evidence["journal"]["event_hash"]),
            (f"Journal, head of {evidence['journal']['events']} events", evidence["journal"]["head"]),
        ]
    )
    machine = evidence["machine"] or {}
    page.footer(
        f"Made by fedup {evidence['fedup']} from the journal of the run folder. Answered on "
        f"{machine.get('processor', 'an unknown machine')}, {machine.get('threads', '?')} threads, torch "
        f"{machine.get('torch', '?')}. Check the folder with `fedup verify --head {evidence['journal']['head'][:16]}`."
    )
    return page


def _eraser(erasure: Mapping[str, Any]) -> str:
    place = erasure["place"]
    return (
        f"at {place['cut']}, {place['positions']} of {place['of']} positions; made of {erasure['rows']:,} forgotten "
        f"rows; {place['cover']:.0%} of what sets them apart goes, and {place['price']:.1%} of the variance"
    )


def _lead(evidence: Mapping[str, Any]) -> str:
    federation, request = evidence["federation"], evidence["request"]
    origin = (
        f"A federation of {federation['clients']} clients trained {federation['model']} on {federation['data']}. "
        if "data" in federation
        else ""
    )
    took = f"{sum(evidence['time_s'].values()):.1f} s"
    lead = (
        f"{origin}The request was answered on {_moment(request['asked_at'])} in {took} by a filter inside the model; "
    )
    return lead + "the model's weights were not touched."


def _accuracies(page: Page, evidence: Mapping[str, Any]) -> None:
    figures, retrained = evidence["accuracy"], evidence["retrained"]
    if not figures:
        page.paragraph("Accuracies were not measured: the federation's data was not at hand.")
        return
    own = figures["this_request"] or {}
    states = [("before", "original"), ("with the filter", "forgotten"), ("restored", "restored")]
    rows = []
    for name, state in states:
        one = own.get(state, {})
        rows.append([name, *map(_share, (figures[state]["heldout"]["retain"], one.get("heldout"), one.get("train")))])
    if retrained:
        one = retrained["by_request"].get(evidence["forget_set"]["digest"], {})
        rows.append(["Retrain", *map(_share, (retrained["heldout"]["retain"], one.get("heldout"), one.get("train")))])
    page.table(
        ["accuracy", "held-out rows that stay", "held-out rows forgotten", "training rows forgotten"],
        rows,
    )
    same = "bit for bit the original's" if evidence["restored_bit_identical"] else "NOT the original's"
    page.paragraph(
        f"Restored outputs are {same}. "
        + ("" if retrained else "Retraining without the data was not run; `fedup evaluate --retrain` adds it. ")
        + "The forgotten columns are about this request alone; the first is about all that requests in force leave."
    )
    series = {name: figures[state]["per_class"] for name, state in states}
    if retrained:
        series["Retrain"] = retrained["per_class"]
    page.bars(
        series,
        evidence["class_names"],
        "Accuracy by class on held-out rows, all clients",
    )


def _what(forget: Mapping[str, Any], class_names: list[str]) -> str:
    parts = []
    if forget["clients"]:
        parts.append("client " + ", ".join(map(str, forget["clients"])))
    if forget["classes"]:
        named = [_class(label, class_names) for label in forget["classes"]]
        parts.append("class " + ", ".join(named))
    for client, ids in forget["samples"].items():
        parts.append(f"{len(ids)} sample{'s' if len(ids) > 1 else ''} of client {client}")
    return "forget " + " and ".join(parts)


def _class(label: int, names: list[str]) -> str:
    name = names[label] if label < len(names) else ""
    return str(label) if name in ("", str(label)) else f"{label} “{name}”"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _verb(request: Mapping[str, Any]) -> str:
    return "Is" if request["status"] == "in force" else "Was last"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _moment(at: str) -> str:
    return at[:19].replace("T", " ") + " UTC"

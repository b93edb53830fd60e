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
_OPEN = (
    "The request is open: no filter answers it, and the model knows the rows as it did before. They are left out of "
    "all centroids, and of later rounds of training."
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
    body, figures = event.body, serving.body["figures"] if serving else None
    config = serving.body["config"] if serving else None
    remapped = config is not None and "class" in request.forget.kind and config["class_policy"] != "drop"
    erasure = serving.body.get("erasure") if serving else None
    erased = request.forget.digest in (erasure or {}).get("requests", ())
    return {
        "format": FORMAT_VERSION,
        "fedup": fedup.__version__,
        "request": {
            "id": request.id,
            "reference": request.reference,
            "kind": request.forget.kind,
            "reason": request.forget.reason,
            "forget": request.forget.to_json(),
            "asked_at": event.at,
            "status": request.status,
            "restored_at": request.restored_in.at if request.restored_in else None,
            "answered_with": [one["id"] for one in body["requests"] if one["id"] != request.id],
            "in_force_with": [name for name in serving.body["active"] if name != request.id] if serving else [],
        },
        "verdict": asked.get("verdict"),
        "forced": body.get("forced", []),
        "class_recall": serving.body.get("class_recall", {}) if serving else {},
        "forget_set": {"digest": asked["digest"], "rows": asked["rows"]},
        "federation": {key: value for key, value in state.about.items() if key != "class_names"},
        "class_names": list(state.about.get("class_names", ())),
        "base": {"fingerprint": body["base"], "file": state.model.to_json() if state.model else None},
        "filter": serving and {
            **serving.body["filter"],
            "config": serving.body["config"],
            "centroids_used": serving.body["centroids_used"],
            "fitted_at": serving.at,
            "in_force_now": request.is_active,
        },
        "first_filter": None
        if request.withheld
        else {**body["filter"], "config": body["config"], "fitted_at": event.at},
        "accuracy": figures and {name: figures[name] for name in ("original", "forgotten", "restored")},
        "restored_bit_identical": figures["restored_bit_identical"] if figures else None,
        "retrained": _retrained(state, serving) if serving else None,
        "time_s": {stage: body["time_s"][stage] for stage in STAGES if stage in body["time_s"]},
        "contact": {
            "clients_contacted": body["clients_contacted"],
            "clients_counting": body.get("clients_counting", []),
            "bytes_up": body["bytes_up"],
            "bytes_down": body["bytes_down"],
            "releases": body["releases"],
            "protection_of_the_cache": state.protection,
            "guarantee_of_the_cache": asdict(state.guarantee) if state.guarantee else None,
        },
        "machine": body.get("machine"),
        "trained_on": state.trained.body.get("machine") if state.trained else None,
        "erasure": erasure if erased else None,
        "notes": asked.get("notes", []),
        "claimed": [*([_OPEN] if request.is_open else []), _UNCHANGED]
        if serving is None
        else [
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


def _serving(state: State, request: Request) -> Event | None:
    """The last answer that made a filter under which the request was in force; None where it never was."""
    answers = (event for event in reversed(state.events) if event.kind in ("unlearned", "restored"))
    return next((event for event in answers if request.id in event.body["active"] and not _withheld(event)), None)


def _withheld(event: Event) -> bool:
    """Whether no filter was made: all of its requests stay open, and what was served before still is."""
    return event.kind == "unlearned" and all(one.get("withheld", False) for one in event.body["requests"])


def _retrained(state: State, serving: Event) -> dict[str, Any] | None:
    """Retrain's accuracies, where someone had it computed for the same set of requests."""
    wanted = sorted(serving.body["active"])
    for event in reversed(state.events):
        if event.kind == "evaluated" and sorted(event.body["requests"]) == wanted:
            return {"at": event.at, **event.body["retrained"]}
    return None


def _settings(config: Mapping[str, Any]) -> str:
    """In words; a rank that nobody chose is none where there is no bottleneck."""
    return ", ".join(f"{key} {value}" for key, value in config.items() if value is not None)


def _page(evidence: Mapping[str, Any]) -> Page:
    request, filtered, contact = evidence["request"], evidence["filter"], evidence["contact"]
    name = f"Request {request['id']}" + (f" · {request['reference']}" if request["reference"] else "")
    page = Page(f"{name}: {_what(request['forget'], evidence['class_names'])}", _lead(evidence))
    verdict = evidence["verdict"]
    page.badge(
        f"{request['status']}: {verdict['finding']}" if verdict else request["status"],
        good=request["status"] == "in force" and bool(verdict and verdict["good"]),
    )
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
    ]
    if filtered:
        facts.append((f"{_verb(request)} in force with", ", ".join(request["in_force_with"]) or "no other request"))
    if request["restored_at"]:
        facts.append(("Taken back", _moment(request["restored_at"])))
    page.facts(facts)
    page.heading("What it did")
    _verdict(page, evidence)
    if filtered and filtered["sha256"] != (evidence["first_filter"] or filtered)["sha256"]:
        page.paragraph(
            "Other requests came or went since it was answered, and each made a new filter for all in force. The "
            "verdict is of the moment it was answered, with it and without it. Below is "
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
            ("Clients contacted to answer", asked),
            *_counting(contact["clients_counting"]),
            ("Sent by clients", f"{contact['bytes_up']:,} bytes in {_count(len(contact['releases']), 'message')}"),
            ("Sent to clients", f"{contact['bytes_down']:,} bytes"),
            ("Protection of what was sent", ", ".join(sorted({r["mechanism"] for r in contact["releases"]})) or "–"),
            ("Protection of what was sent before", contact["protection_of_the_cache"]),
            *([("Eraser", _eraser(evidence["erasure"]))] if evidence["erasure"] else []),
            *(("Note", note) for note in evidence["notes"]),
            *_about_filter(filtered),
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
            *_hashes_of_filters(evidence),
            (f"Journal, event {evidence['journal']['event']}", evidence["journal"]["event_hash"]),
            (f"Journal, head of {evidence['journal']['events']} events", evidence["journal"]["head"]),
        ]
    )
    page.footer(
        f"Made by fedup {evidence['fedup']} from the journal of the run folder. Trained on "
        f"{machine_in_words(evidence['trained_on'])}. Answered on {machine_in_words(evidence['machine'])}. Check the "
        f"folder with `fedup verify --head {evidence['journal']['head'][:16]}`."
    )
    return page


def machine_in_words(machine: Mapping[str, Any] | None) -> str:
    """What the bits of a result depend on besides its settings: processor, threads and version of torch."""
    if not machine:
        return "an unknown machine"
    threads = machine.get("threads", "?")
    return (
        f"{machine.get('processor', 'an unknown processor')}, {threads} thread{'' if threads == 1 else 's'}, torch "
        f"{machine.get('torch', '?')}"
    )


def _eraser(erasure: Mapping[str, Any]) -> str:
    place = erasure["place"]
    return (
        f"at {place['cut']}, {place['positions']} of {place['of']} positions; made of {erasure['rows']:,} forgotten "
        f"rows; {place['cover']:.0%} of what sets them apart goes, and {place['price']:.1%} of the variance"
    )


def _counting(clients: list[int]) -> list[tuple[str, str]]:
    """Who counted answers: for the verdict, and to check every class."""
    return [("Clients that counted answers, to measure", ", ".join(map(str, clients)))] if clients else []


def _about_filter(filtered: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if filtered is None:
        return []
    used = f"{filtered['centroids_used']:,}" if filtered["centroids_used"] else "none"
    return [
        ("Centroids that the filter was fitted to", used),
        ("Settings of the filter", _settings(filtered["config"])),
    ]


def _hashes_of_filters(evidence: Mapping[str, Any]) -> list[tuple[str, str]]:
    filtered, first = evidence["filter"], evidence["first_filter"]
    state = "in force" if filtered and filtered["in_force_now"] else "last in force"
    found = [(f"Filter {state}, sha256 of the file", filtered["sha256"])] if filtered else []
    return [*found, *([("Filter it was answered by, sha256 of the file", first["sha256"])] if first else [])]


def _lead(evidence: Mapping[str, Any]) -> str:
    federation, request = evidence["federation"], evidence["request"]
    origin = (
        f"A federation of {federation['clients']} clients trained {federation['model']} on {federation['data']}. "
        if "data" in federation
        else ""
    )
    took, moment = f"{sum(evidence['time_s'].values()):.1f} s", _moment(request["asked_at"])
    if evidence["first_filter"] is None:
        if request["restored_at"]:
            return f"{origin}The request came in on {moment} and was taken back; no filter ever answered it."
        return f"{origin}The request came in on {moment} and is open: no filter answers it."
    return (
        f"{origin}The request was answered on {moment} in {took} by a filter inside the model; the model's weights "
        "were not touched."
    )


def _verdict(page: Page, evidence: Mapping[str, Any]) -> None:
    """What the request did, measured with it and without it, everything else equal."""
    verdict, retrained = evidence["verdict"], evidence["retrained"]
    if not verdict:
        return
    page.paragraph(verdict["words"])
    own, unseen = verdict["statistic"], verdict["reference"]
    if own is None:
        return
    rows = [[verdict["measure"], _share(own["before"]), _share(own["after"]), f"{own['rows']:,.0f}"]]
    if unseen is not None:
        rows.append(
            ["the same on unseen rows", _share(unseen["before"]), _share(unseen["after"]), f"{unseen['rows']:,.0f}"]
        )
        rows.append(
            ["excess, with 95 % interval", _interval(verdict["excess_before"]), _interval(verdict["excess_after"]), ""]
        )
    rows.append(["change, with 95 % interval", "", _interval(verdict["change"]), ""])
    if retrained:
        value = retrained["by_request"].get(evidence["forget_set"]["digest"], {})
        part = "heldout" if evidence["request"]["kind"] == "class" else "train"
        rows.append(["after retraining without it", "", _share(value.get(part)), ""])
    page.table(["measured alone", "without the request", "with it", "rows"], rows)


def _interval(estimate: Mapping[str, float]) -> str:
    return f"{estimate['value']:+.4f} ({estimate['low']:+.4f} … {estimate['high']:+.4f})"


def _accuracies(page: Page, evidence: Mapping[str, Any]) -> None:
    """Of the filter for all requests in force: what is retained."""
    figures, retrained, recalls = evidence["accuracy"], evidence["retrained"], evidence["class_recall"]
    if recalls:
        label, worst = max(recalls.items(), key=lambda pair: pair[1]["before"] - pair[1]["after"])
        page.paragraph(
            f"Of all classes that stay, {_class(int(label), evidence['class_names'])} loses most of its recall on "
            f"rows that stay: {_share(worst['before'])} before, {_share(worst['after'])} with the filter."
        )
    if not figures:
        page.paragraph("Accuracies on held-out rows were not measured: no filter, or no data at hand.")
        return
    states = [("before", "original"), ("with the filter", "forgotten"), ("restored", "restored")]
    rows = [[name, _share(figures[state]["heldout"]["retain"])] for name, state in states]
    if retrained:
        rows.append(["Retrain", _share(retrained["heldout"]["retain"])])
    page.table(["accuracy, under the filter of all requests in force", "held-out rows that stay"], rows)
    same = "bit for bit the original's" if evidence["restored_bit_identical"] else "NOT the original's"
    page.paragraph(
        f"Restored outputs are {same}. "
        + ("" if retrained else "Retraining without the data was not run; `fedup evaluate --retrain` adds it.")
    )
    series = {name: figures[state]["per_class"] for name, state in states}
    if retrained:
        series["Retrain"] = retrained["per_class"]
    page.bars(
        series,
        evidence["class_names"],
        "Accuracy by class on held-out rows, all clients, under the filter of all requests in force",
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

"""Evidence for one request, from the journal alone: one JSON file for programs, and its HTML page for people."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fedup
from fedup.files import write_text
from fedup.page import render
from fedup.run.bases import weights_in_words
from fedup.run.evidence_exact import added_later, last_claim, of_head
from fedup.run.evidence_finished import not_claimed_of_finished, of_finished
from fedup.run.evidence_page import page_content
from fedup.run.folder import Run
from fedup.run.in_words import client_in_words
from fedup.run.journal import Event
from fedup.run.state import Request, State

FORMAT_VERSION = 1
_CONTACT = ("clients_contacted", "clients_counting", "bytes_up", "bytes_down", "releases")
STAGES = ("check", "contact", "erase", "fit", "swap", "measure", "store")  # in the order in which they happen
_SUPPRESSED = (
    "Suppression at the served interface: while the request is in force, whoever asks the model through this folder is "
    "answered under the filter, or not at all."
)
_OPEN = (
    "The request is open: no filter answers it, and the model knows the rows as it did before. They are left out of "
    "all statistics, and of later rounds of training."
)
_WAITING = (
    "The request waits: no filter answers it, and the model knows the rows as it did before. They are left out of "
    "later rounds of training. It has too few rows to be answered alone, and is answered with others as soon as they "
    "are enough."
)
_QUEUED = (
    "The request is queued: no filter answers it, and the model knows the rows as it did before. They are left out of "
    "later rounds of training. The server that reaches the clients answers it."
)
_UNCHANGED = (
    "The original model was never changed: its weights have the fingerprint given below, and with the filter taken out "
    "it answers bit for bit as before."
)
_UNUSED = (
    "The filter was fitted without the rows named above: no feature, centroid, sum or label of theirs took part. "
    "(Cells that samples were taken from were computed again by their clients without them.)"
)
_ERASED = (
    "The filter has an eraser, which was made from sums and second moments of the features of the rows named above "
    "and contains the difference between their mean and that of retained rows: its file is marked "
    "derived_from_forgotten. It holds means of at least 20 rows, no single one."
)
_KEPT = (
    "The sums of these rows that clients sent for the eraser are kept at the server, sealed, so that a later request "
    "does not need these clients; `fedup purge` destroys them."
)
_CHANGED = (
    "The filter has a delta, a small change of weights, which clients fitted to the rows named above so that their "
    "losses are those of rows never trained on: its file is marked derived_from_forgotten. Whoever has both the model "
    "and the filter could learn something of these rows from it."
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


def build_evidence(run: Run, state: State, name: str) -> dict[str, Any]:
    """What the journal knows about the request of that id or reference: how it was answered, and the filter that
    suppresses it now (or did last). There is none from a folder whose files are not those on record.

    Each later request and restoration makes another filter for all that are in force; accuracies, settings and claims
    are those of the last one that this request was in force under.
    """
    request = state.request(name)
    for record in state.files:
        run.files.path(record)
    event, asked, serving = request.answered_in, request.entry, _serving(state, request)
    body = event.body
    answered, in_force = [entry["id"] for entry in body["requests"]], serving.body["active"] if serving else []
    named = _named(request, asked["rows"], state.about)
    return {
        "format": FORMAT_VERSION,
        "fedup": fedup.__version__,
        "request": {
            **request.to_json(),
            "answered_at": event.at,
            "answered_with": [name for name in answered if name != request.id],
            "in_force_with": [name for name in in_force if name != request.id],
        },
        "verdict": asked["verdict"],
        "forced": body["forced"],
        "forget_set": {"digest": asked["digest"], "rows": asked["rows"], **named},
        "federation": {key: value for key, value in state.about.items() if key != "class_names"},
        "class_names": list(state.about.get("class_names", ())),
        "base": _base(state, serving or event),
        "weights": weights_in_words(state, request),
        "first_filter": None
        if request.withheld or "filter" not in body  # it waits, or is queued
        else {**body["filter"], "config": body["config"], "fitted_at": event.at},
        **_of_filter(state, request, serving),
        "finished": None,
        **(of_finished(state, request) if request.finished_in is not None else {}),
        "time_s": {stage: body["time_s"][stage] for stage in STAGES if stage in body["time_s"]},
        "contact": {
            **{name: body[name] for name in _CONTACT},
            "protection_of_the_cache": state.protection,
            "guarantee_of_the_cache": asdict(state.guarantee) if state.guarantee else None,
        },
        "added": added_later(state),
        "machine": body.get("machine"),
        "trained_on": state.trained.body.get("machine") if state.trained else None,
        "notes": asked["notes"],
        "not_claimed": _not_claimed(state, request),
        "journal": {"event": event.seq, "event_hash": event.hash, "head": state.head, "events": len(state.events)},
    }


def _base(state: State, answer: Event) -> dict[str, Any]:
    """The base that an answer holds for, and which one is served now; the file of one that was replaced is gone."""
    own = answer.body["base"]
    return {
        "fingerprint": own,
        "generation": state.generation_at(answer.seq),
        "file": state.model.to_json() if state.model and own == state.base else None,
        "served_now": {"fingerprint": state.base, "generation": state.generation},
    }


def _not_claimed(state: State, request: Request) -> list[str]:
    if request.finished_in is not None:
        return not_claimed_of_finished(state, NOT_CLAIMED)
    return list(last_claim(state)["not_claimed"] if state.is_exact else NOT_CLAIMED)


def _named(request: Request, rows: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """Whose rows a request names, and how many each client holds."""
    names, samples = about.get("client_names", ()), request.forget.sample_ids
    counts = rows.get("clients") or {str(client): len(ids) for client, ids in samples.items()}
    held = {client_in_words(int(client), names): number for client, number in counts.items()}
    return {"tags": sorted(request.forget.subject_tags), "held": held}


def _of_filter(state: State, request: Request, serving: Event | None) -> dict[str, Any]:
    """The filter that the request is, or was last, in force under: its settings, figures and what is claimed of it."""
    if serving is None:
        states = {_OPEN: request.is_open, _WAITING: request.is_waiting, _QUEUED: request.is_queued}
        claimed = [*(text for text, holds in states.items() if holds), _UNCHANGED]
        claimed += [f"The request was refused: {request.refusal}"] if request.refusal is not None else []
        names = ("claim", "filter", "accuracy", "restored_bit_identical", "retrained", "erasure")
        return {**dict.fromkeys(names), "class_recall": {}, "claimed": claimed, "pending": []}
    if state.is_exact:
        return of_head(state, request, serving)
    body, figures, erasure = serving.body, serving.body["figures"], serving.body["erasure"]
    is_erased = erasure is not None and request.forget.digest in erasure["requests"]
    is_remapped = "class" in request.forget.kind and body["config"]["class_policy"] != "drop"
    is_changed = request.forget.digest in (body.get("delta") or {}).get("requests", ())
    source = [_REMAPPED] if is_remapped else [] if is_erased or is_changed else [_UNUSED]
    source = [*_about_eraser(state, serving, is_erased=is_erased), *([_CHANGED] if is_changed else []), *source]
    pending = [dict(part) for part in body.get("pending", ())]
    waits = [f"Client {part['client']} has not answered, and its part is pending: {part['part']}." for part in pending]
    return {
        "filter": {
            **body["filter"],
            "config": body["config"],
            "centroids_used": body["centroids_used"],
            "fitted_at": serving.at,
            "in_force_now": request.is_active,
        },
        "accuracy": figures and {name: figures[name] for name in ("original", "forgotten", "restored")},
        "restored_bit_identical": figures["restored_bit_identical"] if figures else None,
        "class_recall": body["class_recall"],
        "retrained": _retrained(state, serving),
        "erasure": erasure if is_erased else None,
        "claim": {"kind": "suppressed", "sentence": _SUPPRESSED, "conditions": [], "totals": None, "accuracy": None},
        "claimed": [_SUPPRESSED, *source, _UNCHANGED, *waits],
        "pending": pending,
    }


def _about_eraser(state: State, serving: Event, *, is_erased: bool) -> list[str]:
    if not is_erased:
        return []
    purged = any(event.kind == "purged" and event.seq > serving.seq for event in state.events)
    kept = serving.body.get("erased_rows_kept", 0)
    return [_ERASED, _KEPT] if kept and not purged else [_ERASED]


def write_evidence(evidence: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `R1.json` and `R1.html` into the folder."""
    stem = evidence["request"]["id"]
    data = json.dumps(evidence, indent=2, ensure_ascii=False) + "\n"
    texts = {folder / f"{stem}.json": data, folder / f"{stem}.html": render("evidence", page_content(evidence))}
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def _serving(state: State, request: Request) -> Event | None:
    """The last answer that made a filter under which the request was in force; None where it never was."""
    for event in reversed(state.events):
        kinds = ("unlearned", "restored", "renewed", "added", "continued")
        if event.kind in kinds and request.id in event.body["active"]:
            new = event.body["requests"] if event.kind in ("unlearned", "renewed") else []
            if not new or not all(entry["withheld"] for entry in new):  # else what was served before still is
                return event
    return None


def _retrained(state: State, serving: Event) -> dict[str, Any] | None:
    """Retrain's accuracies, where someone had it computed for the same set of requests."""
    wanted = sorted(serving.body["active"])
    for event in reversed(state.events):
        if event.kind == "evaluated" and sorted(event.body["requests"]) == wanted:
            return {"at": event.at, **event.body["retrained"]}
    return None

"""What the evidence of a request says in exact mode: the claim, what it rests on, and hashes of totals."""

from collections.abc import Mapping
from typing import Any

from fedup.run.in_words import client_in_words
from fedup.run.journal import Event
from fedup.run.state import Request, State

_CONFIGURATION = (
    "The configuration (backbone, preprocessing, scale, clip, label set, ridge rule, calibration rule) was fixed "
    "before any client was asked."
)
_CHECKED = (
    "Whoever holds the clients' features can check it: `fedup verify --relearn` adds up anew and compares hashes."
)
_TAKEN_BACK = "The request was taken back: this was claimed while it was in force, and not of the model served now."


def last_claim(state: State) -> Mapping[str, Any]:
    """What was claimed last: by an answer, a restoration or a purge."""
    claims = [event.body["claim"] for event in state.events if "claim" in event.body]
    return claims[-1] if claims else {"kind": "suppressed", "not_claimed": []}


def added_later(state: State) -> list[dict[str, Any]]:
    """Rows and clients that came after the head was learned: each changed the totals, too."""
    events = [event for event in state.events if event.kind == "added"]
    return [{"at": event.at, "in_words": _in_words(event), **event.body["added"]} for event in events]


def _in_words(event: Event) -> str:
    body, added = event.body, event.body["added"]
    rows = f"{added['rows']:,} rows from {added['source']}" if "rows" in added else added["source"]
    clients = ", ".join(client_in_words(own, added["client_names"]) for own in body["clients_contacted"])
    return f"{rows}, of client {clients}; totals {body['claim']['totals']['after']}"


def of_head(state: State, request: Request, serving: Event) -> dict[str, Any]:
    """The head that the request is, or was last, in force under, and what is claimed of it.

    The claim is that of the last event while the request is in force: a purge makes it stronger. Totals are those
    before and after the request was answered.
    """
    body, answered = serving.body, request.asked_in.body["claim"]
    claim = dict(last_claim(state) if request.is_active else body["claim"])
    claim |= {"totals": answered["totals"], "accuracy": answered["accuracy"]}
    return {
        "claim": claim,
        "filter": {
            **body["filter"],
            "config": body["config"],
            "centroids_used": body["centroids_used"],
            "fitted_at": serving.at,
            "in_force_now": request.is_active,
        },
        "accuracy": None,
        "restored_bit_identical": None,
        "class_recall": {},
        "retrained": None,
        "erasure": None,
        "pending": [dict(part) for part in body.get("pending", ())],
        "claimed": [
            *([] if request.is_active else [_TAKEN_BACK]),
            claim["sentence"],
            *([] if claim["kind"] == "suppressed" else [_CONFIGURATION]),
            _CHECKED,
        ],
    }

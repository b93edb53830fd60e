"""What the evidence of a request says once the model was trained without it."""

from typing import Any

from fedup.run.state import Request, State

_TRAINED_WITHOUT = (
    "Not in the weights: the model served now was trained from its first weights without the rows named above, by the "
    "recipe of the one before."
)
_DROPPED = (
    "The model before, its filter and all statistics that clients had sent are in no file of this folder any more. "
    "Later rounds and later statistics leave the rows out."
)
_SCALED = (
    "That the constants that scale the columns of the table are without the rows: they were made from the sums of all "
    "clients before the first training."
)


def of_finished(state: State, request: Request) -> dict[str, Any]:
    """The claim, and how the new model compares with the one that was served before it."""
    assert request.finished_in is not None
    body = request.finished_in.body
    claim: dict[str, Any] = {
        "kind": "trained without it",
        "sentence": _TRAINED_WITHOUT,
        "conditions": [],
        "totals": None,
    }
    return {
        "claim": {**claim, "accuracy": None},
        "claimed": [_TRAINED_WITHOUT, _DROPPED],
        "finished": {
            "at": request.finished_in.at,
            "with": [name for name in body.get("finished", body["requests"]) if name != request.id],
            "fingerprint": body["trained"]["fingerprint"],
            "generation": state.generation_at(request.finished_in.seq),
            "rows": body["trained"]["rows"],
            "compared": body["compared"],
        },
    }


def not_claimed_of_finished(state: State, others: tuple[str, ...]) -> list[str]:
    """What is still not claimed: all but that the weights hold it."""
    scaled = state.about.get("input", {}).get("standardise") == "clients"
    return [*others[1:], *([_SCALED] if scaled else [])]

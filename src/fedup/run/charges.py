"""Charges in the journal: one in an event of its own, or many that belong together in one event ("booked")."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fedup.privacy.ledger import Charge
from fedup.run.journal import Event

CHARGING = ("charged", "corrected", "booked")  # kinds of events with charges
_SHARED = ("what", "mechanism", "replayable", "correction")  # the same for most charges of an event: written once


def event_of(charges: Sequence[Charge]) -> tuple[str, dict[str, Any]]:
    """The kind and the body of the event that records these charges."""
    if len(charges) == 1:
        return "corrected" if charges[0].correction else "charged", asdict(charges[0])
    terms: dict[tuple[Any, ...], int] = {}
    rows = []
    for charge in charges:
        place = terms.setdefault(tuple(getattr(charge, name) for name in _SHARED), len(terms))
        rows.append([charge.client, charge.mu, charge.release, charge.covered, place])
    return "booked", {"terms": [dict(zip(_SHARED, values, strict=True)) for values in terms], "charges": rows}


def charges_of(kind: str, body: Mapping[str, Any]) -> Iterable[Charge]:
    """The opposite, in their order; no charge for an event of another kind."""
    if kind == "booked":
        terms = [dict(own) for own in body["terms"]]
        for client, mu, release, covered, place in body["charges"]:
            yield Charge(client=client, mu=mu, release=release, covered=covered, **terms[place])
    elif kind in CHARGING:
        charge = Charge(**body)
        if charge.correction != (kind == "corrected"):
            raise ValueError("a charge under the name of a correction, or the other way round")
        yield charge


def charges_in(event: Event) -> Iterable[Charge]:
    """The charges that an event records."""
    return charges_of(event.kind, event.body)

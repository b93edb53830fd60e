"""Charges in the journal: one in an event of its own, or many that belong together in one event ("booked")."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fedup.privacy.ledger import Charge, grouped, ungrouped
from fedup.run.journal import Event

CHARGING = ("charged", "corrected", "booked")  # kinds of events with charges


def event_of(charges: Sequence[Charge]) -> tuple[str, dict[str, Any]]:
    """The kind and the body of the event that records these charges."""
    if len(charges) == 1:
        return "corrected" if charges[0].correction else "charged", asdict(charges[0])
    return "booked", grouped(charges)


def charges_of(kind: str, body: Mapping[str, Any]) -> Iterable[Charge]:
    """The opposite, in their order; no charge for an event of another kind."""
    if kind == "booked":
        yield from ungrouped(body)
    elif kind in CHARGING:
        charge = Charge(**body)
        if charge.correction != (kind == "corrected"):
            raise ValueError("a charge under the name of a correction, or the other way round")
        yield charge


def charges_in(event: Event) -> Iterable[Charge]:
    """The charges that an event records."""
    return charges_of(event.kind, event.body)

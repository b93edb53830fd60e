"""The ledger of a run folder: charges and budgets are events of its journal, whose chain shows every edit."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from fedup.errors import RequestError
from fedup.privacy.ledger import Budget, Charge, Ledger
from fedup.run.charges import charges_in, event_of
from fedup.run.folder import Writer
from fedup.run.state import State


def ledger_of(state: State) -> Ledger:
    """What the folder's clients have spent and may spend; for readers."""
    charges = [charge for event in state.events for charge in charges_in(event)]
    budgets: dict[int | None, Budget] = {
        client: Budget(**event.body["budget"])
        for event in state.events
        if event.kind == "budgeted"
        for client in event.body["clients"] or [None]
    }
    return Ledger(charges, budgets)


class RunLedger(Ledger):
    """The same for the one writer: a charge is on disk before its release is made, or used where another made it."""

    def __init__(self, writer: Writer) -> None:
        known = ledger_of(writer.state)
        super().__init__(known.charges, known.budgets)
        self._writer = writer

    def _record(self, charges: Sequence[Charge]) -> None:
        self._writer.commit(*event_of(charges))


def set_budget(writer: Writer, budget: Budget, clients: Collection[int]) -> None:
    """Limit what these clients may spend; where none is named, all clients that have no budget of their own."""
    known = range(int(writer.state.about.get("clients", 0)))
    unknown = sorted(set(clients) - set(known))
    if unknown:
        raise RequestError(f"Unknown client {unknown[0]}; this federation has clients 0 to {len(known) - 1}.")
    writer.commit("budgeted", {"clients": sorted(clients), "budget": asdict(budget)})


def describe_ledger(state: State) -> list[dict[str, Any]]:
    """By client: releases, ε spent, allowed and left, each at the δ named (the budget's, else 1e-5)."""
    ledger, accounts = ledger_of(state), []
    releases = [release for event in state.events for release in event.body.get("releases", ())]
    unprotected = Counter(release["client"] for release in releases if release["guarantee"] is None)
    by_client: dict[int, list[Charge]] = {}
    for charge in ledger.charges:
        by_client.setdefault(charge.client, []).append(charge)
    for client in ledger.clients:
        budget, own = ledger.budget(client), by_client.get(client, [])
        delta = budget.delta if budget else Budget.delta
        accounts.append(
            {
                "client": client,
                "releases": sum(not charge.correction for charge in own),
                "corrections": sum(charge.correction for charge in own),
                "mu": ledger.mu(client),
                "delta": delta,
                "epsilon": ledger.epsilon(client, delta),
                "budget": budget.epsilon if budget else None,
                "left": ledger.left(client) if budget else None,
                "unprotected": unprotected[client],  # messages outside any guarantee, which the ε spent does not bound
                "test_mode": any(charge.replayable for charge in own),
            }
        )
    return accounts


def describe_charges(state: State) -> list[dict[str, Any]]:
    """Every charge with its time, in the order of the journal."""
    return [{"at": event.at, **asdict(charge)} for event in state.events for charge in charges_in(event)]

"""What `fedup train --more-rounds` does: train on without what was forgotten, and let the requests follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer

from fedup.cli._collecting import ask_clients, last_config
from fedup.cli._new_base import check_can_train, new_base_facts, retained, start_from_base, train_beside
from fedup.cli._progress import wide_console
from fedup.cli._session import Session
from fedup.cli._text import figures_table, of, print_declined
from fedup.cli._wording import visible
from fedup.privacy.guarantee import DP
from fedup.run.in_words import count
from fedup.run.ledger import ledger_of
from fedup.run.limits import Limits
from fedup.run.new_base import BaseDesk
from fedup.run.serving import load_base
from fedup.run.state import State
from fedup.run.training_files import check_purpose, drop_training, put_in_place_unseen, training
from fedup.serving.plugged import plug
from fedup.training.engines import EngineName, known_engine


@dataclass(frozen=True)
class MoreRounds:
    """How to go on."""

    rounds: int
    limits: Limits
    engine: EngineName
    wait_s: float


def go_on(
    session: Session, given: Mapping[str, Any], rounds: int, limits: Limits, engine: str, wait_s: float
) -> dict[str, Any]:
    """Train on, unless options are `given` that the folder's own recipe settles."""
    if names := sorted(name for name, value in given.items() if value is not None):
        named = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise typer.BadParameter(f"--more-rounds goes on by the folder's own recipe: leave out {named}.")
    chosen = known_engine(engine, torch.device(session.device))
    return train_on(session, MoreRounds(rounds, limits, chosen, wait_s))


def _check_budgets(session: Session, state: State) -> None:
    """Refuse before the training what no client could answer after it."""
    if state.collected is None:
        return
    clients = [client.id for client in session.federation.clients if len(client.train)]
    config, ledger = last_config(state), ledger_of(state)
    if isinstance(config, DP):
        ledger.check(clients, config)
    elif ledger.budgets:
        ledger.check_exact(clients)


def train_on(session: Session, more: MoreRounds) -> dict[str, Any]:
    """Train the served base for more rounds; statistics and filters are made anew, and one event puts all in place."""
    say = partial(session.console.print, markup=False, soft_wrap=True)
    check_can_train(session.run.read(), session.run.path, "train on")
    waiting = partial(training, session.run.path, "train", wait_s=more.wait_s)
    with waiting(on_wait=lambda holder: say(f"Waiting for {holder} …")):
        state = session.run.read()
        unseen = put_in_place_unseen(session.run.path, state)
        if unseen is not None and unseen.body["more_rounds"] == more.rounds:
            say("These rounds were trained before: the command was ended when all was in place.")
            with session.writing("train", more.wait_s):  # removes what is left of the base before
                drop_training(session.run.path)
            return _described(state, unseen.body)
        federation = retained(session, state)
        _check_budgets(session, state)
        base = load_base(session.run, state, session.blank(state))
        rounds = range(state.rounds, state.rounds + more.rounds)
        start = start_from_base(base, federation)
        trained = train_beside(session, state, start, federation, rounds, "continue", more.engine)
        facts = new_base_facts(session, state, trained, federation)
        with session.writing("train", more.wait_s) as writer:
            check_purpose(state, writer.state)
            plugged, store, collected = plug(trained.model, state.about.get("cut")), None, dict[str, Any]()
            if state.collected is not None:
                store, collected = ask_clients(session, writer, trained.model, last_config(state))
            served = session.plugged(state).served
            desk = BaseDesk(
                writer, plugged, store, session.federation, session.judge(), served.config if served else None
            )
            if state.active:
                say("Answering the requests in force from the new base …")
            done = desk.put_in_place(facts, collected, more.rounds, more.limits)
            after = writer.state
        if done.declined is None:
            drop_training(session.run.path)
            return _described(after, done.body)
    own = {"trained": facts, "more_rounds": more.rounds, "replaced": state.base, "notes": done.report.notes}
    return {**_described(after, {**after.events[-1].body, **own}), "declined": done.declined}


def _described(state: State, body: Mapping[str, Any]) -> dict[str, Any]:
    """What the event of a new base says, for people and programs."""
    trained = body["trained"]
    return {
        "declined": None,
        "more_rounds": body["more_rounds"],
        "rounds": state.rounds,
        "base": state.base,
        "generation": state.generation,
        "replaced": body["replaced"],
        "fingerprint": state.base,
        **{name: trained[name] for name in ("accuracy", "score", "rows", "time_s")},
        "collected": state.collected is not None,
        "followed": [request.id for request in state.active],
        "open": [request.id for request in state.open],
        "waiting": [request.id for request in state.waiting],
        "filter": state.filter.id if state.filter else None,
        "figures": body.get("figures"),
        "notes": list(body.get("notes", ())),
        "charged": any(release["name"] for release in body.get("releases", ())),
    }


def print_trained_on(result: dict[str, Any], run: Path) -> None:
    """The new base, and which requests followed."""
    console = wide_console()
    if result["declined"]:
        print_declined(console, result, done="put in place", fitted="the new base was trained and a filter")
        console.print("The rounds are kept: the same command with --force trains no round again.")
        return
    typer.echo(
        visible(
            f"{count(result['more_rounds'], 'more round')} on {result['rows']:,} rows, in {result['time_s']:.1f} s; "
            f"held-out {result['score']} {result['accuracy'].get('heldout', float('nan')):.3f}.\n"
            f"Base {result['generation']} is {result['base'][:12]}; base {result['generation'] - 1} "
            f"({result['replaced'][:12]}), its statistics and its filter are no longer in {run}."
        )
    )
    if result["followed"]:
        typer.echo(f"In force again, answered from the new base: {', '.join(result['followed'])}.")
    for name, words in (("open", "Still open, without a filter"), ("waiting", "Still waiting")):
        if result[name]:
            typer.echo(f"{words}: {', '.join(result[name])}.")
    if result["figures"]:
        console.print(figures_table(result["figures"]))
    next_step = f"fedup status{of(run)}" if result["collected"] else f"fedup collect{of(run)}"
    typer.echo(visible(f"Next: {next_step}"))

"""What `fedup retrain` does: train anew without what was forgotten, compare, and put the new model in place."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from torch import nn

from fedup.cli._collecting import ask_clients, last_config
from fedup.cli._new_base import check_can_train, new_base_facts, retained, start_anew, train_beside
from fedup.cli._progress import wide_console
from fedup.cli._session import Session
from fedup.cli._text import accuracy_table, of
from fedup.cli._wording import visible
from fedup.federation import Federation
from fedup.run.bases import NOT_IN_WEIGHTS, SUPPRESSED
from fedup.run.folder import Writer
from fedup.run.in_words import class_in_words, count
from fedup.run.limits import Limits
from fedup.run.new_base import BaseDesk, keep_retrained
from fedup.run.state import State
from fedup.run.status import peek
from fedup.run.training_files import came_since, checkpoint, drop_training, training
from fedup.serving.plugged import plug
from fedup.target_words import MEASURE, OUTPUT, targets_of
from fedup.tasks.comparison import compare
from fedup.tasks.evaluation import FederationJudge

if TYPE_CHECKING:
    from fedup.training.engines import EngineName

_NOTHING = "No request is in force, open or waiting: there is nothing to retrain for. Nothing was changed."


@dataclass(frozen=True)
class Retraining:
    """How to train anew."""

    limits: Limits
    engine: "EngineName"
    wait_s: float
    weights: Path | None = None


def plan_retraining(session: Session, weights: Path | None) -> dict[str, Any]:
    """What a retraining would do and cost; changes nothing."""
    state = session.run.read()
    check_can_train(state, session.run.path, "retrain")
    if not _standing(state):
        return {"dry_run": True, "requests": []}
    federation = retained(session, state)
    start_anew(session, state, weights)
    body = state.trained.body if state.trained else {}
    rows, trained_rows = len(federation.rows("train")), body.get("rows") or 1
    last = next((event.body["more_rounds"] for event in state.events[::-1] if event.kind == "continued"), None)
    per_round_s = body.get("time_s", 0.0) / max(1, last or state.rounds)
    done = int(peek(checkpoint(session.run.path, state, "retrain")).get("rounds", 0))
    return {
        "dry_run": True,
        "requests": _standing(state),
        "rounds": state.rounds,
        "rounds_done": done,
        "rows": rows,
        "rows_left_out": len(session.federation.rows("train")) - rows,
        "expected_time_s": round(per_round_s * (state.rounds - done) * rows / trained_rows, 3),
        "files_dropped": [file.name for file in state.files],
    }


def retrain_into(session: Session, how: Retraining) -> dict[str, Any]:
    """Train anew, compare with what is served, and swap; declined where the new model is worse than allowed."""
    check_can_train(session.run.read(), session.run.path, "retrain")
    say = partial(session.console.print, markup=False, soft_wrap=True)
    waiting = partial(training, session.run.path, "retrain", wait_s=how.wait_s)
    with waiting(on_wait=lambda holder: say(f"Waiting for {holder} …")):
        state = session.run.read()
        if not _standing(state):
            with session.writing("retrain", how.wait_s):  # removes what a kill after the swap left of the old base
                drop_training(session.run.path)
            return {"requests": [], "declined": None}
        federation = retained(session, state)
        start = start_anew(session, state, how.weights)
        trained = train_beside(session, state, start, federation, range(state.rounds), "retrain", how.engine)
        now, served = session.answering()
        compared = compare(served, trained.model, retained(session, now), now.left_out)
        refusal = None if how.limits.force else _refusal(compared, how.limits, state)
        facts = new_base_facts(session, state, trained, federation)
        with session.writing("retrain", how.wait_s) as writer:
            came = came_since(state, writer.state)
            followed = [request.id for request in came if request.is_active or request.is_open]
            new = _NewModel(trained.model, federation, facts, compared)
            if refusal is not None:
                _decline(writer, state, refusal, compared)
            elif followed:
                refusal = _follow(session, writer, state, new, how.limits)
            else:
                keep_retrained(writer, trained.model.to("cpu"), facts, compared, finished=state.standing)
            after = writer.state
        if refusal is None:
            drop_training(session.run.path)
    return {
        "requests": _standing(state),
        "declined": refusal,
        "followed": followed,
        "waiting": [request.id for request in came if request.id not in followed],
        "collected": after.collected is not None,
        "compared": compared,
        "base": after.base,
        "generation": after.generation,
        "replaced": state.base,
        "rounds": state.rounds,
        "rows": facts["rows"],
        "accuracy": facts["accuracy"],
        "time_s": trained.time_s,
        "weights": SUPPRESSED if refusal else NOT_IN_WEIGHTS,
        "scaled_with": _scaled_with(state),
    }


@dataclass(frozen=True)
class _NewModel:
    """A model that was trained anew."""

    model: nn.Module
    federation: Federation  # that it was trained on
    facts: Mapping[str, Any]
    compared: Mapping[str, Any]


def _follow(session: Session, writer: Writer, state: State, new: _NewModel, limits: Limits) -> str | None:
    """Finish the requests of `state`, and answer from the new base those that came in since: it was trained on their
    rows. Why not, if one of them would harm somebody."""
    model, now = new.model.to(session.device), writer.state
    store, collected = ask_clients(session, writer, model, last_config(now), new.federation)
    served = session.plugged(now).served
    desk = BaseDesk(
        writer,
        plug(model, now.about.get("cut")),
        store,
        new.federation,
        FederationJudge(new.federation),
        served.config if served else None,
        state.standing,
        new.compared,
    )
    return desk.put_in_place(new.facts, collected, 0, limits).declined


def _standing(state: State) -> list[str]:
    return [request.id for request in state.standing]


def _scaled_with(state: State) -> bool:
    """Whether constants that scale a table were made with rows of all clients, the forgotten ones included."""
    return bool(state.about.get("input", {}).get("standardise") == "clients")


def _decline(writer: Writer, state: State, why: str, compared: Mapping[str, Any]) -> None:
    event = {"requests": [], "declined": _standing(state), "step": "retrained", "why": why, "time_s": {}}
    writer.commit("declined", {**event, "compared": dict(compared)})


def _refusal(compared: Mapping[str, Any], limits: Limits, state: State) -> str | None:
    """Why the new model may not take the place of the one that is served; None when it may."""
    before, after = compared["served"], compared["candidate"]
    figures: dict[str, Any] = {"score": compared["score"]}
    for name, own in (("original", before), ("forgotten", after)):
        figures[name] = {"validation": {"retain": own["validation"]}}
    if overall := limits.refusal(figures):
        return overall
    targets, harmed = targets_of(state.about), []
    for label, value in before["per_class"].items():
        other = after["per_class"][label]
        if value is not None and other is not None and 100 * (value - other) > limits.max_class_loss + 1e-9:
            name = class_in_words(int(label), list(state.about["class_names"]))
            harmed.append(
                f"{OUTPUT[targets]} {name} would lose {100 * (value - other):.1f} points of {MEASURE[targets]}"
            )
    if not harmed:
        return None
    return f"{'; '.join(harmed)} on retained rows, and {limits.max_class_loss:g} are allowed"


def print_retrained(result: dict[str, Any], run: Path) -> None:
    """The new base and what it costs, or why the old one stays; or a plan."""
    names = ", ".join(result["requests"])
    if not result["requests"]:
        typer.echo(_NOTHING)
    elif "dry_run" in result:
        _print_plan(result, names)
    else:
        _print_comparison(result)
        if result["declined"]:
            _print_declined(result)
            return
        typer.echo(
            visible(
                f"{names} finished, {NOT_IN_WEIGHTS}. Base {result['generation']} is {result['base'][:12]}: "
                f"{count(result['rounds'], 'round')} on {result['rows']:,} rows, in {result['time_s']:.1f} s.\n"
                f"Base {result['generation'] - 1} ({result['replaced'][:12]}), its filter, its statistics and what was "
                f"sealed in them are no longer in {run}. Backups and exported programs are yours to delete."
            )
        )
        if result["scaled_with"]:
            typer.echo(
                "Note: the constants that scale the table's columns were made from all rows, the forgotten ones "
                "included. Train a new folder with --standardise FILE for public constants."
            )
        if result["followed"]:
            typer.echo(
                f"{', '.join(result['followed'])} came in while the model was trained, which holds their rows: they "
                "stand as before, answered from the new base. `fedup retrain` finishes them."
            )
        if result["waiting"]:
            typer.echo(
                f"Still waiting, without a filter: {', '.join(result['waiting'])}. The model holds these rows, and "
                "`fedup retrain` finishes what waits, too."
            )
        step = f"fedup status{of(run)}" if result["collected"] else f"fedup collect{of(run)}"
        typer.echo(visible(f"Next: {step}. Evidence: fedup evidence {result['requests'][0]}{of(run)}"))


def _print_plan(result: dict[str, Any], names: str) -> None:
    left, done = result["rounds"] - result["rounds_done"], result["rounds_done"]
    before = f" ({count(done, 'round')} are done already)" if done else ""
    typer.echo(
        f"Would train anew without {names}: {count(left, 'round')}{before} on {result['rows']:,} training rows, "
        f"{result['rows_left_out']:,} left out.\n"
        f"Expected time: {result['expected_time_s']:.1f} s. Until the end the folder serves what it serves now.\n"
        f"Would compare both on validation rows, then finish {names} for good: they cannot be taken back any more. "
        f"Statistics and filter would be dropped; requests after it need `fedup collect` first.\nNothing was changed."
    )


def _print_comparison(result: dict[str, Any]) -> None:
    compared, console = result["compared"], wide_console()
    rows = {"served": compared["served"], "retrained": compared["candidate"]}
    scores = {name: [own["validation"]] for name, own in rows.items()}
    console.print(accuracy_table(compared["score"], ["validation, retained"], scores))
    labels = list(compared["served"]["per_class"])
    if len(labels) <= 12:
        by_class = {name: list(own["per_class"].values()) for name, own in rows.items()}
        console.print(accuracy_table("retained, by class", labels, by_class))


def _print_declined(result: dict[str, Any]) -> None:
    reason, came = result["declined"], ", ".join([*result["followed"], *result["waiting"]])
    kept = "Its rounds are kept: the same command with --force puts it in place, and trains no round again."
    if came:
        kept = f"{came} came in meanwhile: the same command trains for all of them."
    typer.echo(
        visible(
            f"Not put in place: a model was trained without {', '.join(result['requests'])}, but {reason}.\n"
            f"The folder serves what it served before. {kept}"
        )
    )

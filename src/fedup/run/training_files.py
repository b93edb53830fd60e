"""Training beside a served base: its own lock, and a checkpoint that holds for one base and one set of requests.

Such a training may take hours, so it does not hold the lock of the folder: requests are answered meanwhile. What it
was started for is in the name of its checkpoint. When that is no longer so, the next command that writes removes it.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fedup.errors import RequestError
from fedup.files import explained
from fedup.run.journal import Event
from fedup.run.lock import held, holder
from fedup.run.state import NEW_BASE, Request, State, state_of

Kind = Literal["continue", "retrain"]
FOLDER, LOCK = "training", "retrain.lock"
_SHOWN = 16  # hex digits in a file's name


def purpose(state: State) -> str:
    """A hash of what a training is for: the base that it replaces, and the requests that it leaves out."""
    left_out = [(request.id, request.forget.digest) for request in state.standing]
    finished = [request.id for request in state.finished]
    returning = [request.id for request in state.returning]
    text = json.dumps([state.base, sorted(left_out), finished, *([returning] if returning else [])])
    return hashlib.sha256(text.encode()).hexdigest()


def checkpoint(folder: Path, state: State, kind: Kind) -> Path:
    """Where the rounds of a training are kept that is not finished."""
    return folder / FOLDER / f"{kind}-{purpose(state)[:_SHOWN]}.safetensors"


def checkpoints(folder: Path, state: State) -> dict[Path, str]:
    """Where such rounds may lie, and the command that goes on from there."""
    commands: dict[Kind, str] = {"retrain": "retrain", "continue": "train --more-rounds"}
    return {checkpoint(folder, state, kind): command for kind, command in commands.items()}


def training_holder(folder: Path) -> str | None:
    """The process that trains beside the served base, in words; None when there is none."""
    return holder(folder / LOCK)


@contextmanager
def training(
    folder: Path, command: str, *, wait_s: float, on_wait: Callable[[str], None] = lambda holder: None
) -> Iterator[None]:
    """Only one training at a time; whoever writes to the folder meanwhile is not kept waiting."""
    with held(folder / LOCK, command, wait_s=wait_s, on_wait=on_wait):
        yield


def check_purpose(before: State, now: State) -> None:
    """Raise if the base or the requests changed since a training began."""
    if purpose(before) == purpose(now):
        return
    if before.base != now.base:
        changed = f"the base is {now.base[:12]} now, and it was {before.base[:12]}"
    else:
        names = [{request.id for request in state.standing} for state in (before, now)]
        came, went = sorted(names[1] - names[0]), sorted(names[0] - names[1])
        parts = [f"{', '.join(came)} came in"] if came else []
        parts += [f"{', '.join(went)} is taken back or finished"] if went else []
        back = sorted({own.id for own in now.returning} - {own.id for own in before.returning})
        parts += [f"{', '.join(back)} is to be taken back"] if back else []
        parts = parts or ["more became known of a request"]
        changed = " and ".join(parts)
    raise RequestError(
        f"While the model was trained, {changed}: the new model was made for other requests than those that hold now. "
        "It was not put in place, and the folder serves what it served. Run the same command again: it trains "
        "for the requests that hold then."
    )


def came_since(before: State, now: State) -> tuple[Request, ...]:
    """The requests that came in since a training anew began. Raises if the base changed meanwhile or a request was
    taken back: then the new model would be another than the one that is wanted."""
    known = {(request.id, request.forget.digest) for request in before.standing}
    came = tuple(request for request in now.standing if (request.id, request.forget.digest) not in known)
    later = {request.id for request in came}
    rest = (replace(s, requests=tuple(own for own in s.requests if own.id not in later)) for s in (before, now))
    check_purpose(*rest)
    return came


def put_in_place_unseen(folder: Path, state: State) -> Event | None:
    """The event of more rounds whose command was killed between that event and its end; None if there is none."""
    event = _more_rounds(state)
    return event if event is not None and _checkpoint_behind(folder, state, event).exists() else None


def _more_rounds(state: State) -> Event | None:
    """The event of the rounds that led to the base, if it was trained on."""
    event = next((event for event in reversed(state.events) if event.kind in NEW_BASE), None)
    return event if event is not None and event.kind == "continued" and event.body["more_rounds"] else None


def _checkpoint_behind(folder: Path, state: State, event: Event) -> Path:
    """Where the rounds of that event lay."""
    return checkpoint(folder, state_of(state.events[: event.seq - 1]), "continue")


def sweep_training(folder: Path, state: State) -> None:
    """Remove checkpoints that no training goes on from, unless one runs now. That of the rounds behind the base stays
    after a kill: it tells the same command that they are in place."""
    place = folder / FOLDER
    if not place.is_dir() or training_holder(folder) is not None:
        return
    wanted = set(checkpoints(folder, state))
    if (event := _more_rounds(state)) is not None:
        wanted.add(_checkpoint_behind(folder, state, event))
    with explained(f"remove leftovers in {place}"):
        for path in place.iterdir():
            if path not in wanted:
                path.unlink(missing_ok=True)
    with suppress(OSError):
        place.rmdir()  # if it is empty


def drop_training(folder: Path) -> None:
    """Remove all checkpoints: the training is over."""
    with explained(f"remove {folder / FOLDER}"):
        shutil.rmtree(folder / FOLDER, ignore_errors=False) if (folder / FOLDER).is_dir() else None

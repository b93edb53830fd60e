"""What `fedup train --more-rounds` and `fedup retrain` share: training beside the served base."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedup.cli._progress import progress_bars
from fedup.cli._remark import constant_score
from fedup.cli._session import BusyNoted, Session
from fedup.errors import RequestError
from fedup.federation import Federation
from fedup.models.views import fingerprint
from fedup.run.state import State
from fedup.run.training_files import Kind, came_since, check_purpose, checkpoint
from fedup.target_words import SCORE
from fedup.tasks.datasets import Dataset
from fedup.tasks.evaluation import accuracy
from fedup.tasks.progress import RoundsShown
from fedup.training.fedavg import Observer, Runtime, Trained
from fedup.training.value_scale import ValueScale

if TYPE_CHECKING:
    from fedup.training.engines import EngineName


def facts_of(session: Session, trained: Trained, federation: Federation, dataset: Dataset) -> dict[str, Any]:
    """What the journal notes of a training, on these rows."""
    rows, device = federation.rows("heldout"), session.device
    x, y = (federation.x[rows].to(device), federation.y[rows].to(device))
    test = dataset.test_x.to(device), dataset.test_y.to(device)
    measured = {"heldout": accuracy(trained.model, x, y), "test": accuracy(trained.model, *test)}
    facts = {
        "constant_score": constant_score(federation),
        "rows": len(federation.rows("train")),
        "accuracy": {name: value for name, value in measured.items() if value == value},
        "score": SCORE[federation.targets],
        "time_s": trained.time_s,
        "engine": trained.engine,
        **session.facts,
    }
    facts["machine"] |= {"threads": trained.threads}
    return facts


def new_base_facts(session: Session, state: State, trained: Trained, federation: Federation) -> dict[str, Any]:
    """The same for a base that takes the place of another; `data` stays the whole federation, which is checked when it
    is loaded, and `trained_on` are the rows that were left."""
    assert state.trained is not None  # else there is no base
    facts = facts_of(session, trained, federation, session.dataset)
    return {"data": state.trained.body["data"], "trained_on": federation.digest(), **facts}


def check_can_train(state: State, path: Path, verb: str) -> None:
    """Refuse folders that have nothing to train on here."""
    if state.is_exact:
        raise RequestError(
            f"{path} serves a head on a public backbone, which is solved anew for each request, exactly: there is "
            f"nothing to {verb}. `fedup purge` destroys what is kept of forgotten rows. Nothing was changed."
        )
    if state.trained is None:
        raise RequestError(f"{path} has no trained model yet: run `fedup train --run {path}` to the end.")
    if state.about.get("made_by"):
        raise RequestError(
            f"{path} was made by a program of yours ({state.about['made_by']}), which alone has the clients: train "
            "there. Nothing was changed."
        )


def retained(session: Session, state: State) -> Federation:
    """The clients without the rows of finished requests and of all that are in force, open or waiting."""
    return session.federation.without(state.left_out) if state.standing else session.federation


def start_anew(session: Session, state: State, weights: Path | None) -> nn.Module:
    """The model with the weights that the first training started from; refused where they cannot be made again."""
    recipe = session.recipe if weights is None else replace(session.recipe, weights=str(weights))
    start = recipe.blank_model(state.about["input_shape"], len(state.about["class_names"]))
    if state.rounds == 0:
        raise RequestError(
            "The weights were brought, and no round was trained here: whoever trained them has to train anew. Nothing "
            "was changed."
        )
    if fingerprint(start) != state.about["initial"]:
        raise RequestError(
            "The weights that the model started from cannot be made again: they were brought (name the same file with "
            "--weights), or another version of torch draws others. Nothing was changed."
        )
    return start.to(session.device)


def start_from_base(base: nn.Module, federation: Federation) -> nn.Module:
    """A copy of the base to train on; values are learned in units of their deviation, which the base left behind."""
    start = copy.deepcopy(base)
    if (scale := ValueScale.of(federation, start)) is not None:
        scale.take_from(start)
    return start


class _PurposeHolds(Observer):
    """Ends a training after a round if what it makes could not be used: requests or base have changed. A training anew
    goes on where requests only came in: they are answered from the new base."""

    def __init__(self, session: Session, state: State, kind: Kind) -> None:
        self._session, self._state = session, state
        self._check = came_since if kind == "retrain" else check_purpose

    def on_round(self, round_index: int, model: nn.Module) -> None:
        self._check(self._state, self._session.run.read())


def train_beside(
    session: Session,
    state: State,
    start: nn.Module,
    federation: Federation,
    rounds: Sequence[int],
    kind: Kind,
    engine: "EngineName",
) -> Trained:
    """Train while the folder serves what it serves; goes on after an interruption."""
    words = {"continue": "Training on", "retrain": "Training anew without what was forgotten"}[kind]
    checks = _PurposeHolds(session, state, kind)
    with progress_bars(session.console, line_for_each="round") as show:
        return session.recipe.train(
            start,
            federation,
            rounds=rounds,
            observers=[BusyNoted(session.console), RoundsShown(show, words, rounds), checks],
            runtime=Runtime(session.device, engine, checkpoint(session.run.path, state, kind)),
        )

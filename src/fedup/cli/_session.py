"""A run folder together with what its recipe makes: data, federation, model; each made when first needed."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn

from fedup.cli import load_above_cores
from fedup.cli._names import Names
from fedup.cli._progress import wide_console
from fedup.errors import ArtifactError, MissingDataError, NoArchitectureError, SettingError
from fedup.federation import Federation
from fedup.models.backbone import with_blank_head
from fedup.request import union
from fedup.rng import generator
from fedup.run.architecture import architecture_of, build_architecture
from fedup.run.folder import Run, Writer
from fedup.run.ledger import RunLedger, ledger_of
from fedup.run.serving import load_plugged, load_store, read_served, read_with
from fedup.run.state import State
from fedup.serving.plugged import PluggedModel
from fedup.statistics.store import Centroids
from fedup.subjects import SubjectKey
from fedup.target_words import targets_of
from fedup.targets import Targets
from fedup.tasks.datasets import Dataset
from fedup.tasks.evaluation import FederationJudge
from fedup.tasks.machine import describe_machine
from fedup.tasks.recipe import Recipe
from fedup.training.fedavg import Observer

if TYPE_CHECKING:
    from fedup.run.limits import Judge
    from fedup.tasks.additions import Addition
    from fedup.tasks.labelled import LabelledRows


class Session:
    """One command's work on a folder."""

    def __init__(
        self, path: Path, *, device: str = "cpu", subject_key: Path | None = None, model: str | None = None
    ) -> None:
        self.run = Run(path)
        self.model = model  # import path of the function that makes it, for the folder of a server app
        self.key_path = subject_key or self.run.path / "subjects.key"
        self._key_is_given = subject_key is not None
        self.device = checked_device(device)
        self.console = wide_console(stderr=True)

    @cached_property
    def recipe(self) -> Recipe:
        """How the federation was made; the user's own files are the copies in the folder."""
        about = self.run.read().about
        code = {"model" if name == "backbone" else name: own for name, own in about.get("code", {}).items()}
        copies: dict[str, Any] = {name: str(self.run.code(own)) for name, own in code.items()}
        return replace(Recipe.from_about(about), **copies)

    @cached_property
    def subject_key(self) -> SubjectKey | None:
        """The key of the persons: in the file named, or in the folder; None where there is none."""
        if not self._key_is_given and not self.key_path.exists():
            return None
        key, known = SubjectKey.load(self.key_path), self.run.read().about.get("subject_key")
        if key.fingerprint != known and not self.is_remote:  # nodes alone know the key of their persons
            raise ArtifactError(f"{self.key_path} is not the key that the persons of {self.run.path} are tagged with.")
        return key

    def names(self) -> Names:
        """The names of clients, classes and rows, and the key of persons."""
        about = self.run.read().about
        names = Names.of(about, self.subject_key, str(self.key_path))
        if self.is_remote:
            return replace(names, has_persons=True)  # nodes know whose their rows are
        return replace(names, row_ids=lambda: self.row_ids) if about.get("file") else names

    def key_for(self, dataset: Dataset) -> SubjectKey | None:
        """For training: the key at hand, or a new one where the data say whose rows they are; `keep_key` stores it."""
        if dataset.subjects is None:
            if self._key_is_given:
                raise SettingError("--subject-key is for data that say whose their rows are, and these do not.")
            return None
        kept = self._key_is_given or self.key_path.exists()
        return SubjectKey.load(self.key_path) if kept else SubjectKey.new()

    def keep_key(self, key: SubjectKey | None) -> None:
        """Store a new key in the folder."""
        if key is not None and not self._key_is_given and not self.key_path.exists():
            key.save(self.key_path)
            self.console.print(
                f"The key of persons is in {self.key_path}. Whoever has it can find out whether an id is in the data.",
                markup=False,
                soft_wrap=True,
            )

    @cached_property
    def dataset(self) -> Dataset:
        return self.recipe.load()

    @cached_property
    def federation(self) -> Federation:
        """The clients and their rows, without those of finished requests; refused if the model was trained on
        others."""
        federation, state = self.recipe.federation(self.dataset, self.subject_key), self.run.read()
        if state.trained is not None and state.trained.body["data"] != federation.digest():
            raise ArtifactError(
                f"The data set {self.recipe.data!r} at hand is not the one that {self.run.path} was trained on: "
                "its rows or labels differ. Bring back the data set it was trained on."
            )
        federation = self._with_additions(federation)
        if state.finished:
            federation = federation.without(union(request.forget for request in state.finished))
        return federation.to(self.device)

    @cached_property
    def added(self) -> "list[tuple[Addition, LabelledRows]]":
        """What came to the folder after it was learned, read again."""
        from fedup.tasks.additions import additions

        state = self.run.read()
        copies = {own.sha256: str(self.run.code(own.code)) for own in additions(state) if own.code}
        return [(own, own.read(self.about, copies.get(own.sha256))) for own in additions(state)]

    @property
    def about(self) -> dict[str, Any]:
        """What the folder is about; where its data set has code, `data` is the path of the copy here."""
        return {**self.run.read().about, "data": self.recipe.data}

    def _with_additions(self, federation: Federation) -> Federation:
        from fedup.tasks.additions import holders_of, with_rows

        for own, rows in self.added:
            holders = holders_of(rows, own.client, own.client_names)
            federation = with_rows(federation, rows, holders, own.client_names)
            if federation.digest() != own.data:
                raise ArtifactError(f"The rows of {own.source} are not those that were added to {self.run.path}.")
        subjects = self.dataset.subjects
        if not self.added or subjects is None:
            return federation
        more = [name for _, rows in self.added for name in rows.subjects or [""] * len(rows.y)]
        return federation.with_subjects([*subjects, *more], key=self.subject_key)

    @property
    def row_ids(self) -> list[str] | None:
        """The ids of all rows, those that were added included; None where rows have numbers only."""
        ids = self.dataset.row_ids
        if ids is None:
            return None
        first, names = len(ids), list(ids)
        for _, rows in self.added:
            names += rows.ids or [str(first + place) for place in range(len(rows.y))]
            first += len(rows.y)
        return names

    @cached_property
    def federation_if_here(self) -> Federation | None:
        """The federation, or None (and a note) where its data set is not on this machine."""
        if self.is_remote:
            return None
        try:
            return self.federation
        except MissingDataError as error:
            self.console.print(f"Note: {error}", markup=False)
            return None

    def blank(self, state: State) -> nn.Module:
        """The model's architecture, without its trained weights; needs no data."""
        about = state.about
        if about.get("made_by"):
            return self._built_elsewhere(state).to(self.device)
        if state.is_exact:
            from fedup.cli._exact import backbone_of

            return with_blank_head(backbone_of(self, state), len(about["class_names"])).to(self.device)
        return self.recipe.blank_model(about["input_shape"], len(about["class_names"])).to(self.device)

    @cached_property
    def is_remote(self) -> bool:
        """Whether a server app made the folder, whose clients commands cannot reach."""
        return bool(self.run.read().about.get("made_by"))

    def _built_elsewhere(self, state: State) -> nn.Module:
        """The architecture of a server app's model, by the import path that was given or is on record."""
        noted = architecture_of(state)
        if self.model is None and noted is None:
            raise NoArchitectureError(
                f"{self.run.path} was made by a program of yours ({state.about['made_by']}), which alone can build its "
                f"{state.about['model']}: name the function with --model package.module:function."
            )
        return build_architecture(self.model or noted["import"], noted["root"] if noted else None)  # type: ignore[index]

    def probe(self, state: State) -> torch.Tensor:
        """Random inputs of the model's shape, always the same: for checks that need no data."""
        if state.about.get("made_by"):
            row, dtype = self.row_form(state)
            if not dtype.is_floating_point:
                raise NoArchitectureError(f"{self.run.path} takes whole numbers, and does not say which.")
            return torch.randn(16, *row, generator=generator(0, "probe")).to(self.device)
        shape, source = state.about["input_shape"], generator(0, "probe")
        if state.about["input"]["kind"] == "text":
            return torch.randint(1, 20_000, (16, *shape), generator=source).to(self.device)
        return torch.randn(16, *shape, generator=source).to(self.device)

    def row_form(self, state: State) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of a row, as the server app noted them when it collected."""
        collected = self._last_collection(state)
        if "example" not in collected:
            raise NoArchitectureError(f"{self.run.path} does not say what its inputs look like: nobody collected yet.")
        return tuple(collected["example"]["shape"]), getattr(torch, collected["example"]["type"])

    def targets(self, state: State) -> Targets:
        """What the model learns."""
        settings = self._last_collection(state).get("how", {}) if self.is_remote else {}
        targets: Targets = settings.get("targets", targets_of(state.about))
        return targets

    @staticmethod
    def _last_collection(state: State) -> Mapping[str, Any]:
        """What the journal says of the last collection, of whichever base."""
        events = reversed(state.events)
        bodies = (event.body if event.kind == "collected" else event.body.get("collected") for event in events)
        return next((body for body in bodies if body), {})

    def plugged(self, state: State) -> PluggedModel:
        """The model under the filter in force, for a writer."""
        return load_plugged(self.run, state, self.blank(state))

    def store(self, state: State, writer: Writer | None = None) -> Centroids:
        """The centroids, on the model's device; a writer charges releases to the folder's ledger."""
        store = load_store(self.run, state)
        if store.device != torch.device(self.device):  # `to` would copy the whole file into memory
            store = store.to(self.device)
        store.ledger = RunLedger(writer) if writer else ledger_of(state)
        return store

    def served(self) -> tuple[State, PluggedModel]:
        """State and model under the filter in force, for a reader, who holds no lock."""
        return read_served(self.run, self.blank)

    def answering(self) -> tuple[State, nn.Module]:
        """State and the model that answers for the folder: under the filter in force, or the original if none is."""
        if self.run.read().is_exact:
            from fedup.cli._exact import load_model

            return read_with(self.run, lambda state: load_model(self, state))
        state, plugged = self.served()
        return state, plugged.view() if state.active else plugged.base

    def judge(self) -> "Judge | None":
        """Measures filters on the federation's data; None where that is not here."""
        return FederationJudge(federation) if (federation := self.federation_if_here) else None

    @property
    def facts(self) -> dict[str, Any]:
        """What every event notes besides its own content."""
        return {"machine": describe_machine()}

    def writing(self, command: str, wait_s: float) -> AbstractContextManager[Writer]:
        """The folder with this process as its writer; names the process it waits for."""
        say = partial(self.console.print, markup=False)
        return self.run.writing(command, wait_s=wait_s, on_wait=lambda holder: say(f"Waiting for {holder} …"))


class BusyNoted(Observer):
    """A hint where training with several threads begins on a busy machine."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_start(self, rounds_done: int, threads: int) -> None:
        busy = load_above_cores()
        if busy and threads > 1:
            self._console.print(
                f"Note: the machine is busy ({busy}), where {threads} threads wait for each other. --threads 1 may be "
                "faster; the last bits of the model depend on it.",
                markup=False,
                soft_wrap=not self._console.is_terminal,
            )


def checked_device(device: str) -> str:
    """The device, if there is one of that name; `auto` is a GPU where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError(f"There is no device {device!r} here ({reason}). Use --device cpu.") from error
    return device

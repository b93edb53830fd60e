"""A folder's model as it is served: under the filter in force, or an error; never unfiltered by mistake."""

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from fedup.errors import ArtifactError, FingerprintError, RequestError
from fedup.models.views import fingerprint
from fedup.run.folder import Run
from fedup.run.state import State
from fedup.serving.filter_file import load_filter
from fedup.serving.model_file import load_model
from fedup.serving.plugged import PluggedModel, plug
from fedup.statistics.store import Centroids
from fedup.statistics.store_file import load_centroids

T = TypeVar("T")


def load_base(run: Run, state: State, blank: nn.Module) -> nn.Module:
    """The trained model, loaded into a blank one."""
    if state.model is None:
        raise RequestError(f"{run.path} has no trained model yet: run `fedup train --run {run.path}` to the end.")
    model = load_model(blank, run.files.path(state.model))
    found = fingerprint(model)
    if found != state.base:
        raise FingerprintError(
            f"The model in {run.path} is {found[:12]}, and {state.base[:12]} was stored. Take a good copy."
        )
    return model


def load_plugged(run: Run, state: State, blank: nn.Module) -> PluggedModel:
    """The model under the filter of exactly the requests in force; without requests it has no filter."""
    plugged = plug(load_base(run, state, blank), state.about.get("cut"))
    if state.filter is not None:
        load_filter(plugged, run.files.path(state.filter))
    if plugged.requests != state.forgets:
        raise ArtifactError(
            f"The filter in {run.path} was not fitted for the requests in force "
            f"({', '.join(request.id for request in state.active) or 'none'}). Take a good copy of the folder."
        )
    return plugged


def load_store(run: Run, state: State) -> Centroids:
    """The centroids, which must be the trained model's."""
    if state.centroids is None:
        raise RequestError(f"{run.path} has no centroids yet: run `fedup collect --run {run.path}` first.")
    store = load_centroids(run.files.path(state.centroids))
    if store.base != state.base:
        raise FingerprintError(f"The centroids in {run.path} come from another model: take a good copy of the folder.")
    return store


def read_served(run: Run, blank: Callable[[State], nn.Module]) -> tuple[State, PluggedModel]:
    """State and plugged model for readers, who hold no lock."""
    return read_with(run, lambda state: load_plugged(run, state, blank(state)))


def read_with(run: Run, load: Callable[[State], T]) -> tuple[State, T]:
    """State and what is loaded from it, for readers, who hold no lock: a file replaced meanwhile is read again."""
    state = run.read()
    while True:
        try:
            for record in state.files:  # all of them: a folder that was tampered with answers nothing
                run.files.path(record)
            return state, load(state)
        except ArtifactError:
            before, state = state, run.read()
            if state.head == before.head:  # nobody wrote meanwhile: it is damaged
                raise

"""Engines: ways to train the clients of a round. All do the same jobs at different speeds."""

import os
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, cast, get_args

import torch
from torch import Tensor, nn

from fedup.errors import SettingError
from fedup.training.averaging import Load, Weights
from fedup.training.engines.captured import CapturedEngine
from fedup.training.engines.plain import PlainEngine
from fedup.training.local import Job, LocalTraining

EngineName = Literal["auto", "plain", "captured"]
VARIABLE = "FEDUP_ENGINE"  # switches engines for whole programs, as in FEDUP_ENGINE=plain fedup bench run …


class Engine(Protocol):
    """Trains clients from weights it is given."""

    @property
    def name(self) -> str:
        """How it trains now: an engine chosen by "auto" may have to fall back."""

    @property
    def weights(self) -> Weights:
        """Its weights: the model's names and shapes, on its device."""

    def train(self, jobs: Sequence[Job], load: Load) -> Iterator[tuple[Job, Weights]]:
        """Each job once, in any order, with its final weights, valid until the next job is yielded.

        `load` writes the weights that every job starts from.
        """


def make_engine(name: EngineName, model: nn.Module, x: Tensor, y: Tensor, local: LocalTraining) -> Engine:
    """The engine of that name; it may train `model` in place. "auto" means the variable FEDUP_ENGINE, else captured on
    a GPU and plain elsewhere."""
    name = known_engine(name, x.device)
    if name == "plain" or x.device.type != "cuda":
        return PlainEngine(model, x, y, local)
    with torch.cuda.device(x.device):
        return CapturedEngine(model, x, y, local, else_plain=name == "auto")


def known_engine(name: str, device: torch.device) -> EngineName:
    """The name of the engine to use; raises if it is unknown or needs another device."""
    by_variable = os.environ.get(VARIABLE) if name == "auto" else None
    meant, setting = by_variable or name, VARIABLE if by_variable else "engine"
    if meant not in get_args(EngineName):
        raise SettingError(f"{setting} must be 'auto', 'plain' or 'captured'; found {meant!r}.")
    if meant == "captured" and device.type != "cuda":
        raise SettingError(f"{setting} is 'captured', which needs a CUDA device, and this is {device}. Use 'auto'.")
    return cast(EngineName, meant)

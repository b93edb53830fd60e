"""Engines: ways to train the clients of a round. All do the same jobs; they differ in how fast."""

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
        """The way it trains now: an engine that was chosen by "auto" may have to change it."""

    @property
    def weights(self) -> Weights:
        """Weights as it holds them: the same names and shapes as the model's, on its device."""

    def train(self, jobs: Sequence[Job], load: Load) -> Iterator[tuple[Job, Weights]]:
        """Each job once, in any order, with the weights it ended at: live ones, until the next is asked for.

        `load` writes the weights that every job starts from.
        """


def make_engine(name: EngineName, model: nn.Module, x: Tensor, y: Tensor, local: LocalTraining) -> Engine:
    """The engine of that name; "auto" is what FEDUP_ENGINE says, else captured on a GPU and plain elsewhere.

    `model` may be trained in place.
    """
    name = known_engine(name, x.device)
    if name == "plain" or x.device.type != "cuda":
        return PlainEngine(model, x, y, local)
    with torch.cuda.device(x.device):
        return CapturedEngine(model, x, y, local, else_plain=name == "auto")


def known_engine(name: str, device: torch.device) -> EngineName:
    """The engine that is meant; raises where there is none of that name, or none for that device."""
    by_variable = os.environ.get(VARIABLE) if name == "auto" else None
    meant, setting = by_variable or name, VARIABLE if by_variable else "engine"
    if meant not in get_args(EngineName):
        raise SettingError(f"{setting} must be 'auto', 'plain' or 'captured'; found {meant!r}.")
    if meant == "captured" and device.type != "cuda":
        raise SettingError(f"{setting} is 'captured', which needs a CUDA device, and this is {device}. Use 'auto'.")
    return cast(EngineName, meant)

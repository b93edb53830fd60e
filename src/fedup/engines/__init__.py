"""Engines: ways to train the clients of a round. All do the same jobs; they differ in how fast."""

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from fedup.averaging import Load, Weights
from fedup.engines.captured import CapturedEngine
from fedup.engines.plain import PlainEngine
from fedup.errors import SettingError
from fedup.training import Job, LocalTraining

EngineName = Literal["auto", "plain", "captured"]


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


def make_engine(name: EngineName, model: nn.Module, x: Tensor, y: Tensor, how: LocalTraining) -> Engine:
    """The engine of that name; "auto" is captured on a GPU and plain elsewhere. `model` may be trained in place."""
    if name not in ("auto", "plain", "captured"):
        raise SettingError(f"engine must be 'auto', 'plain' or 'captured'; found {name!r}.")
    on_gpu = x.device.type == "cuda"
    if name == "captured" and not on_gpu:
        raise SettingError(f"The captured engine needs a CUDA device; the data are on {x.device}. Use engine='auto'.")
    if name == "plain" or not on_gpu:
        return PlainEngine(model, x, y, how)
    with torch.cuda.device(x.device):
        return CapturedEngine(model, x, y, how, else_plain=name == "auto")

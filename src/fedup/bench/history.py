"""The history of a training, kept by the server for later requests: each round's global weights and uploads."""

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedup.artifacts import write_plain
from fedup.errors import ArtifactError
from fedup.files import explained, write_text
from fedup.training.averaging import Weights
from fedup.training.fedavg import Observer


@dataclass
class _Round:
    """A round's clients and their shares, and how far each tensor moved, summed over the clients."""

    shares: dict[int, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)  # mean |after − before| of a tensor's entries


class History(Observer):
    """An observer that keeps everything, in memory or in a folder.

    A training that resumes from its checkpoint continues the same folder. Files carry no checksum: together they are
    many times a model's size.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._rounds: dict[int, _Round] = {}
        self._now, self._number = _Round(), -1  # the round going on
        self._moved: dict[str, Tensor] = {}  # of the round going on, on the device
        for path in sorted(folder.glob("[0-9]*.json")) if folder else []:
            self._rounds[int(path.stem)] = _read(path)

    def on_update(self, round_index: int, client: int, *, before: Weights, after: Weights, weight: float) -> None:
        if round_index != self._number or client in self._now.shares:  # one that was interrupted begins again
            self._now, self._number, self._moved = _Round(), round_index, {}
            self._put(_global(round_index), before)
        self._now.shares[client] = weight
        self._put(_upload(round_index, client), after)
        for name, old in before.items():
            if old.is_floating_point():
                moved = (after[name] - old).abs().mean(dtype=torch.float64)
                self._moved[name] = self._moved.get(name, 0.0) + moved

    def on_round(self, round_index: int, model: nn.Module) -> None:
        done = self._now if self._number == round_index else _Round()  # nobody trained
        done.moved = {name: float(moved) for name, moved in self._moved.items()}
        if self._folder is not None:
            text = json.dumps({"shares": {str(c): share for c, share in done.shares.items()}, "moved": done.moved})
            write_text(self._folder / f"{round_index:04}.json", text)
        self._rounds[round_index] = done
        self._now, self._number, self._moved = _Round(), -1, {}

    @property
    def rounds(self) -> list[int]:
        """The rounds that are kept."""
        return sorted(self._rounds)

    def holds(self, rounds: int) -> bool:
        """Whether the first `rounds` rounds are complete: all files are there, all of one size."""
        if self.rounds != list(range(rounds)):
            return False
        names = [name for number in self.rounds for name in _names(number, self.shares(number))]
        if self._folder is None:
            return all(name in self._memory for name in names)
        paths = [self._folder / f"{name}.safetensors" for name in names]
        return all(path.exists() for path in paths) and len({path.stat().st_size for path in paths}) <= 1

    def shares(self, round_index: int) -> Mapping[int, float]:
        """The clients of a round and their shares in its average."""
        return self._rounds[round_index].shares

    def before(self, round_index: int) -> dict[str, Tensor]:
        """The global weights that the clients of a round started from, on the CPU."""
        return self._get(_global(round_index))

    def upload(self, round_index: int, client: int) -> dict[str, Tensor]:
        """What a client sent back, on the CPU."""
        return self._get(_upload(round_index, client))

    def update(self, round_index: int, client: int) -> dict[str, Tensor]:
        """By how much a client moved the weights, parameters and buffers of floating point alike, on the CPU."""
        before, after = self.before(round_index), self.upload(round_index, client)
        return {name: after[name] - old for name, old in before.items() if old.is_floating_point()}

    def changes(self) -> dict[str, float]:
        """The mean change of an entry of each tensor from weights sent out to weights sent back, over all uploads."""
        rounds = self._rounds.values()
        uploads, names = sum(len(each.shares) for each in rounds), {name for each in rounds for name in each.moved}
        return {name: sum(each.moved.get(name, 0.0) for each in rounds) / uploads for name in names}

    def remove(self) -> None:
        """Delete everything, on disk too."""
        self._rounds, self._memory = {}, {}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _put(self, name: str, weights: Weights) -> None:
        plain = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in weights.items()}
        if self._folder is None:
            self._memory[name] = plain
            return
        path = self._folder / f"{name}.safetensors"
        with explained(f"write {path}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_plain(path, plain)

    def _get(self, name: str) -> dict[str, Tensor]:
        if self._folder is None and name in self._memory:
            return {key: tensor.clone() for key, tensor in self._memory[name].items()}
        path = (self._folder or Path()) / f"{name}.safetensors"
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"The history lacks {path.name}, or it is damaged ({error}). Train again.") from error


def _global(number: int) -> str:
    return f"{number:04}-global"


def _upload(number: int, client: int) -> str:
    return f"{number:04}-client-{client}"


def _names(number: int, clients: Collection[int]) -> list[str]:
    """All that is kept of a round; nothing of one in which nobody trained."""
    return [_global(number), *(_upload(number, client) for client in clients)] if clients else []


def _read(path: Path) -> _Round:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return _Round({int(client): share for client, share in content["shares"].items()}, content["moved"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ArtifactError(f"{path} is no round of a history ({error}). Train again.") from error

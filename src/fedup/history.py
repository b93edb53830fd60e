"""What a server keeps of a training for the sake of requests to come: each round's global weights, and each upload."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedup.averaging import Weights
from fedup.errors import ArtifactError
from fedup.fedavg import Observer
from fedup.files import explained, write_text


@dataclass
class _Round:
    """Who took part in a round, with which share, and how far each tensor moved at them: sums over the clients."""

    shares: dict[int, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)  # mean |after − before| of a tensor's entries


class History(Observer):
    """An observer that keeps everything: in memory, or below a folder, where a training of any size fits.

    A training that was interrupted and goes on from its checkpoint goes on with the same folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._rounds: dict[int, _Round] = {}
        self._now: _Round | None = None
        self._moved: dict[str, Tensor] = {}  # of the round going on, on the device
        for path in sorted(folder.glob("*.json")) if folder else []:
            self._rounds[int(path.stem)] = _read(path)

    def on_update(self, round_index: int, client: int, *, before: Weights, after: Weights, weight: float) -> None:
        if self._now is None:
            self._now, self._moved = _Round(), {}
            self._put(f"{round_index:04}-global", before)
        self._now.shares[client] = weight
        self._put(f"{round_index:04}-client-{client}", after)
        for name, old in before.items():
            if old.is_floating_point():
                moved = (after[name] - old).abs().mean(dtype=torch.float64)
                self._moved[name] = self._moved.get(name, 0.0) + moved

    def on_round(self, round_index: int, model: nn.Module) -> None:
        done = self._now or _Round()
        done.moved = {name: float(moved) for name, moved in self._moved.items()}
        if self._folder is not None:
            text = json.dumps({"shares": {str(c): share for c, share in done.shares.items()}, "moved": done.moved})
            write_text(self._folder / f"{round_index:04}.json", text)
        self._rounds[round_index] = done
        self._now, self._moved = None, {}

    @property
    def rounds(self) -> list[int]:
        """The rounds that are kept."""
        return sorted(self._rounds)

    def shares(self, round_index: int) -> Mapping[int, float]:
        """The clients of a round and their shares in its average."""
        return self._rounds[round_index].shares

    def before(self, round_index: int) -> dict[str, Tensor]:
        """The global weights that the clients of a round started from, on the CPU."""
        return self._get(f"{round_index:04}-global")

    def upload(self, round_index: int, client: int) -> dict[str, Tensor]:
        """What a client sent back, on the CPU."""
        return self._get(f"{round_index:04}-client-{client}")

    def update(self, round_index: int, client: int) -> dict[str, Tensor]:
        """By how much a client moved the weights, parameters and buffers of floating point alike, on the CPU."""
        before, after = self.before(round_index), self.upload(round_index, client)
        return {name: after[name] - old for name, old in before.items() if old.is_floating_point()}

    def changes(self) -> dict[str, float]:
        """The mean change of an entry of each tensor from weights sent out to weights sent back, over all uploads."""
        uploads = sum(len(one.shares) for one in self._rounds.values())
        names = {name for one in self._rounds.values() for name in one.moved}
        return {name: sum(one.moved.get(name, 0.0) for one in self._rounds.values()) / uploads for name in names}

    def remove(self) -> None:
        """Give the disk back."""
        self._rounds, self._memory = {}, {}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _put(self, name: str, weights: Weights) -> None:
        plain = {one: tensor.detach().to("cpu", copy=True).contiguous() for one, tensor in weights.items()}
        if self._folder is None:
            self._memory[name] = plain
            return
        path = self._folder / f"{name}.safetensors"
        with explained(f"write {path}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(plain, path)

    def _get(self, name: str) -> dict[str, Tensor]:
        if self._folder is None:
            return dict(self._memory[name])
        path = self._folder / f"{name}.safetensors"
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"The history lacks {path.name}, or it is damaged ({error}). Train again.") from error


def _read(path: Path) -> _Round:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return _Round({int(client): share for client, share in told["shares"].items()}, told["moved"])
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise ArtifactError(f"{path} is no round of a history ({error}). Train again.") from error

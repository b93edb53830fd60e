"""Features on the public grid, computed once at a client and kept: every sum is made from the same integers."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedup.artifacts import digest_of, load_tensors, save_tensors
from fedup.errors import ArtifactError, DataError
from fedup.models.features import FEATURE_BATCH, FeatureReader, Features
from fedup.statistics.integer_moments import MomentConfig

_KIND = "features"
_SAVE_EVERY_S = 20.0
_NOT_YET, _COMPUTED, _SHORTENED = 0, 1, 2  # of a row


@dataclass(eq=False)
class FeatureCache:
    """Integers of features by row, for one model, one grid and one array of inputs.

    The last bit of a feature depends on the machine, its libraries and the batch. So rows are computed once, and what
    they were computed with is noted. With a `path` the cache is kept on disk; it is a client's own and never sent.
    """

    path: Path | None = None
    key: str = ""  # of model, grid and inputs
    values: Tensor | None = None  # (N, D) of 16 bits, or 32 where the grid is finer
    status: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.uint8))  # (N,)
    about: dict[str, Any] = field(default_factory=dict)  # versions, device, shape and kind of the features
    earlier: dict[int, str] = field(default_factory=dict)  # keys of the same inputs when there were so many rows
    _unsaved_since: float | None = field(default=None, repr=False)

    @classmethod
    def open(cls, path: str | Path) -> "FeatureCache":
        """The cache in a file, which need not be there yet; raises on a damaged one."""
        cache = cls(Path(path))
        if cache.path is not None and cache.path.exists():
            tensors, header = load_tensors(cache.path, kind=_KIND)
            try:
                cache.values, cache.status = tensors["values"], tensors["status"]
                cache.key, cache.about = str(header["key"]), dict(header["about"])
                cache.earlier = {int(rows): str(key) for rows, key in header.get("earlier", {}).items()}
                fits = cache.values.ndim == 2 and cache.status.shape == (len(cache.values),)
            except (KeyError, TypeError) as error:
                raise ArtifactError(f"{path} lacks a part of a feature cache ({error!r}). Delete it.") from error
            if not fits:
                raise ArtifactError(f"{path} holds features and rows that do not fit each other. Delete it.")
        return cache

    @property
    def digest(self) -> str:
        """sha256 of all integers and of which rows they are of."""
        parts = [("status", self.status)] + ([("values", self.values)] if self.values is not None else [])
        return digest_of(self.key, parts)

    @property
    def rows(self) -> int:
        """Rows that were computed."""
        return int((self.status != _NOT_YET).sum())

    def rows_of(self, rows: Tensor) -> int:
        """How many of these rows were computed."""
        return int(self.holds(rows).sum())

    def holds(self, rows: Tensor) -> Tensor:
        """Which of these rows were computed. (N,), bool"""
        places, known = rows.cpu(), torch.cat([self.status, self.status.new_zeros(1)])
        return (known[places.clamp(max=len(self.status))] != _NOT_YET).to(rows.device)

    def save(self) -> None:
        """Write the cache to its file, if it has one and something changed."""
        if self.path is not None and self.values is not None and self._unsaved_since is not None:
            tensors = {"values": self.values, "status": self.status}
            header = {"key": self.key, "about": self.about, "earlier": self.earlier}
            save_tensors(self.path, tensors, kind=_KIND, header=header)
        self._unsaved_since = None

    def changed(self) -> None:
        """Note new features; now and then they are written, so that little is lost with a killed process."""
        now = time.monotonic()
        self._unsaved_since = now if self._unsaved_since is None else self._unsaved_since
        if now - self._unsaved_since > _SAVE_EVERY_S:
            self.save()

    def drop(self, rows: Tensor) -> None:
        """Delete the features of rows that are forgotten for good, in files of killed processes, too."""
        if self.path is not None:
            for partial in self.path.parent.glob(f".{self.path.name}.*.partial"):
                partial.unlink(missing_ok=True)
        if self.values is not None and len(rows := self._known(rows)):
            self.values[rows], self.status[rows] = 0, _NOT_YET
            self.changed()
            self.save()

    def fit_to(self, rows: int, key_of: Callable[[int], str]) -> None:
        """Make the cache one of inputs with so many rows; `key_of` gives the key of the first of them.

        Rows that came later are appended. Rows that are not there any more, because whoever added them was killed, are
        dropped. Features of another model, grid or data are refused.
        """
        key = key_of(rows)
        if self.values is None or self.key == key:
            self.key = key
            return
        known = len(self.values)
        if rows > known and key_of(known) == self.key:
            self._resize(rows)
            self.earlier[known] = self.key
        elif self.earlier.get(rows) == key:
            self._resize(rows)
            self.earlier = {before: own for before, own in self.earlier.items() if before < rows}
        else:
            raise DataError(
                "These features were computed with another backbone, another grid or other rows. Use their own cache, "
                "or a new one."
            )
        self.key = key
        self.changed()

    def _resize(self, rows: int) -> None:
        assert self.values is not None
        values, status = self.values.new_zeros(rows, self.values.shape[1]), self.status.new_zeros(rows)
        both = min(rows, len(self.values))
        values[:both], status[:both] = self.values[:both], self.status[:both]
        self.values, self.status = values, status

    def _known(self, rows: Tensor) -> Tensor:
        """Those of the rows that the cache has a place for."""
        rows = rows.cpu()
        return rows[rows < len(self.status)]


class CachedReader(FeatureReader):
    """Reads features from a cache, and computes those that are missing there."""

    def __init__(self, model: nn.Module, cut: str, cache: FeatureCache, config: MomentConfig, base: str) -> None:
        super().__init__(model, cut)
        self._cache, self._config, self._base = cache, config, base
        self._content: tuple[Tensor, int, str] | None = None  # inputs, how many of them, and their hash

    def read(
        self, x: Tensor, rows: Tensor, *, wanted: Tensor | None = None, batch_size: int = FEATURE_BATCH
    ) -> Features:
        """As the cache has them: multiples of the step, which become the same integers again."""
        cache, chosen = self._cache, (rows if wanted is None else rows[wanted]).cpu()
        cache.fit_to(len(x), lambda rows: self._key(x, rows))
        if cache.values is None or bool((cache.status[chosen] == _NOT_YET).any()):
            self._compute(x, rows, wanted)
        assert cache.values is not None
        values = (cache.values[chosen].double() * self._config.step).float().to(rows.device)
        shape, nonnegative = tuple(cache.about["shape"]), bool(cache.about["nonnegative"])
        return Features(values, nonnegative, shape, int((cache.status[chosen] == _SHORTENED).sum()))

    def _compute(self, x: Tensor, rows: Tensor, wanted: Tensor | None) -> None:
        cache, config = self._cache, self._config
        known = cache.status[rows.cpu()] != _NOT_YET if len(cache.status) else torch.zeros(len(rows), dtype=torch.bool)
        missing = ~known.to(rows.device) if wanted is None else wanted & ~known.to(rows.device)
        features = super().read(x, rows, wanted=missing)
        integers, _ = config.integers(features.values)
        beyond = features.values.double().norm(dim=1) > config.bound
        if cache.values is None:
            dtype = torch.int16 if config.limit < 2**15 else torch.int32
            cache.values = torch.zeros(len(x), integers.shape[1], dtype=dtype)
            cache.status = torch.zeros(len(x), dtype=torch.uint8)
            versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
            device = {"device": str(rows.device), "machine": _machine(rows.device)}
            cache.about = {
                **versions, **device, "shape": list(features.shape), "nonnegative": features.nonnegative
            }  # fmt: skip
        place = rows[missing].cpu()
        cache.values[place] = integers.to(cache.values.dtype).cpu()
        cache.status[place] = torch.where(beyond, _SHORTENED, _COMPUTED).to(torch.uint8).cpu()
        cache.changed()

    def _key(self, x: Tensor, rows: int) -> str:
        if self._content is None or self._content[0] is not x or self._content[1] != rows:
            self._content = x, rows, digest_of("", [("x", x[:rows])])
        grid = f"{self._config.bound} {self._config.step}"
        return hashlib.sha256(f"{self._base} {self.cut} {grid} {self._content[2]}".encode()).hexdigest()


def _machine(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()

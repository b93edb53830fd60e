"""What the server keeps of each client by itself: little of it in memory, whatever the number of clients."""

import hashlib
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from threading import Lock
from typing import IO, Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from fedup.errors import ArtifactError
from fedup.files import explained

IN_MEMORY_BYTES = 2**23  # parts that are written lie in memory up to this size, then in an unnamed file
_SHORT = np.iinfo(np.int32)
_PLACE = struct.Struct("<IqqI?32s")  # the number of its file, and all else


@dataclass(frozen=True, eq=False)
class ClientPart:
    """Sums of one client: of each of its cells, and the second moments of all its rows."""

    sums: Tensor  # (cells, D)
    second: Tensor | None  # (D (D + 1) / 2,); None: not known any more, its cells are asked for

    def to_bytes(self) -> bytes:
        """All its numbers, 32 bits each where that is enough for all of them, else 64."""
        numbers = [tensor.numpy() for tensor in (self.sums, self.second) if tensor is not None]
        fits = all(each.size == 0 or (each.min() >= _SHORT.min and each.max() <= _SHORT.max) for each in numbers)
        return b"".join(each.astype(np.int32 if fits else np.int64, copy=False).tobytes() for each in numbers)


class PartsFile:
    """Bytes by offset: in a saved file, which is only read, or of its own.

    Those of its own lie in memory while they are few, then in an unnamed file that goes with its last user.
    """

    def __init__(self, folder: Path | None = None, saved: Path | None = None, start: int = 0) -> None:
        self._folder, self._saved, self._start, self._lock = folder, saved is not None, start, Lock()
        self._name = str(saved or folder or gettempdir())
        with explained(f"read {saved}"):
            self._file: IO[bytes] = BytesIO() if saved is None else saved.open("rb", buffering=0)
        self._end, self._free = 0, dict[int, list[int]]()  # of what was written, and what was erased of it by size

    def read(self, place: "Place", client: int) -> bytes:
        """What lies there; raises if it is not what was written."""
        start = self._start + place.offset
        with self._lock, explained(f"read {self._name}"):
            if isinstance(self._file, BytesIO):
                content = bytes(self._file.getbuffer()[start : start + place.size])
            else:
                content = os.pread(self._file.fileno(), place.size, start)  # processes may share the file's position
        if hashlib.sha256(content).digest() != place.digest:
            raise ArtifactError(
                f"The statistics of client {client} in {self._name} are damaged or were exchanged. Take a good copy."
            )
        return content

    def write(self, content: bytes) -> int:
        """Write bytes where others of that size were erased, or at the end. Returns where."""
        free = self._free.get(len(content), [])
        offset = free[-1] if free else self._end
        self._write(content, offset)
        self._end = max(self._end, offset + len(content))
        if free:
            free.pop()
        return offset

    def erase(self, place: "Place") -> None:
        """Overwrite what lies there; a saved file stays as it is."""
        if not self._saved:
            self._write(bytes(place.size), place.offset)
            self._free.setdefault(place.size, []).append(place.offset)

    def _write(self, content: bytes, offset: int) -> None:
        with self._lock, explained(f"write to {self._name}"):
            if isinstance(self._file, BytesIO) and offset + len(content) > IN_MEMORY_BYTES:
                on_disk = TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (closed with its last user)
                _write_at(on_disk.fileno(), self._file.getbuffer(), 0)
                self._file = on_disk
            if isinstance(self._file, BytesIO):
                self._file.seek(offset)
                self._file.write(content)
            else:
                _write_at(self._file.fileno(), memoryview(content), offset)


def _write_at(file: int, content: memoryview, offset: int) -> None:
    while content:  # a disk that is nearly full takes some of it first
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written


class Place(NamedTuple):
    """Where a client's part lies."""

    file: PartsFile
    offset: int
    size: int
    cells: int
    has_second: bool
    digest: bytes


class ClientParts(MutableMapping[int, ClientPart]):
    """Parts by client, read when they are looked at and checked by their hash.

    What is replaced or deleted is overwritten, unless it lies in a saved file: that is left to whoever saves the store
    in its place. A copy is independent, and costs little: it reads what is still the same from the same file.
    """

    def __init__(self, width: int, folder: Path | None = None) -> None:
        self._width, self._folder = width, folder
        self._packed: dict[int, bytes] = {}  # places: as objects those of very many clients would take much memory
        self._files: dict[int, PartsFile] = {}  # those with parts: one without is closed with its last user
        self._parts_in: Counter[int] = Counter()  # how many parts lie in each
        self._own: PartsFile | None = None
        self._sharers: WeakSet[ClientParts] = WeakSet([self])

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __len__(self) -> int:
        return len(self._packed)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._packed))

    def __contains__(self, client: object) -> bool:
        return client in self._packed

    def __getitem__(self, client: int) -> ClientPart:
        place = self.place(client)
        content = place.file.read(place, client)
        is_short = len(content) < 8 * numbers_of(self._width, place.cells, place.has_second)
        numbers = torch.from_numpy(np.frombuffer(content, dtype=np.int32 if is_short else np.int64).astype(np.int64))
        sums = numbers[: place.cells * self._width].view(place.cells, self._width)
        return ClientPart(sums, numbers[sums.numel() :] if place.has_second else None)

    def __setitem__(self, client: int, part: ClientPart) -> None:
        self.replace_all([(client, part)])

    def __delitem__(self, client: int) -> None:
        if client not in self:
            raise KeyError(client)
        self.replace_all([(client, None)])

    def replace_all(self, changes: Iterable[tuple[int, ClientPart | None]]) -> None:
        """Replace parts, or delete them (None): all of them, or on an error none."""
        written: dict[int, Place | None] = {}
        try:
            for client, part in changes:
                self._hand_over(client)
                written[client] = None if part is None else self._written(part)
        except BaseException:
            for place in written.values():
                if place is not None:
                    place.file.erase(place)
            raise
        before = [self.place(client) for client in written if client in self]
        for client, place in written.items():
            self._forget_place(client)
            if place is not None:
                self.put_place(client, place)
        for place in before:
            place.file.erase(place)

    def has_second(self, client: int) -> bool:
        """Whether the client's second moments are known; reads nothing."""
        return client in self and self.place(client).has_second

    def place(self, client: int) -> Place:
        """Where the client's part lies."""
        file, *about = _PLACE.unpack(self._packed[client])
        return Place(self._files[file], *about)

    def put_place(self, client: int, place: Place) -> None:
        """Note where a part lies that is written already."""
        self._forget_place(client)
        number = next((number for number, file in self._files.items() if file is place.file), None)  # of few
        if number is None:
            number = next(number for number in count() if number not in self._files)
            self._files[number] = place.file
        self._packed[client] = _PLACE.pack(number, *place[1:])
        self._parts_in[number] += 1

    def _forget_place(self, client: int) -> None:
        if (packed := self._packed.pop(client, None)) is not None:
            number = _PLACE.unpack(packed)[0]
            self._parts_in[number] -= 1
            if not self._parts_in[number]:
                del self._files[number]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.place(client).size for client in self._packed)

    def copy(self) -> "ClientParts":
        """Another one with the same parts; changes to one never show in the other."""
        other = ClientParts(self._width, self._folder)
        other._packed, other._files, other._sharers = dict(self._packed), dict(self._files), self._sharers
        other._parts_in = self._parts_in.copy()
        self._sharers.add(other)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> "ClientParts":
        return self.copy()

    def _written(self, part: ClientPart) -> Place:
        self._own = self._own or PartsFile(self._folder)
        content, known = part.to_bytes(), part.second is not None
        offset = self._own.write(content)
        return Place(self._own, offset, len(content), len(part.sums), known, hashlib.sha256(content).digest())

    def _hand_over(self, client: int) -> None:
        """Copies that still use a part that is about to be erased get it for themselves."""
        place = self.place(client) if client in self else None
        for other in list(self._sharers) if place is not None else ():
            if other is not self and client in other and other.place(client) == place:
                other.put_place(client, other._written(self[client]))


def numbers_of(width: int, cells: int, has_second: bool) -> int:
    """How many numbers a part has."""
    return cells * width + (width * (width + 1) // 2 if has_second else 0)

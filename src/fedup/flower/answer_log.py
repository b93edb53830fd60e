"""A file of answers, one behind the other.

Thousands of nodes answer within seconds: a file for each would take longer to sync than all else that the server does.
"""

import hashlib
import json
import math
import os
import struct
from io import FileIO
from pathlib import Path

import numpy as np
import torch

from fedup.files import explained
from fedup.flower.wire import Answer

_HEAD = struct.Struct("<4sHIQ32s")  # magic, bytes of the key, of the header and of the numbers, sha256 of all three
_MAGIC = b"FUPA"
_COPIED_BYTES = 2**16  # of arrays: larger ones are written one by one
_SYNCED_BYTES = 2**25  # at most so much is lost in a power cut; nothing is if only the process dies


class AnswerLog:
    """Answers by key. One that is damaged, or was not written to its end, is as one that never came."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._places: dict[int, int] = {}  # by the key's hash; a record says itself which key it has
        self._unsynced = 0
        if path.exists():
            self._open()

    @property
    def keys(self) -> list[str]:
        """Of the answers that are there, in the order in which they came."""
        if self._file is None:
            return []
        file, size = self._file.fileno(), os.fstat(self._file.fileno()).st_size
        return [head[0] for place in self._places.values() if (head := _head_at(file, place, size)) is not None]

    def get(self, key: str) -> Answer | None:
        """An answer; None if there is none, or it is damaged."""
        place = self._places.get(hash(key))
        if place is None or self._file is None:
            return None
        with explained(f"read {self._path}"):
            return _answer_at(self._file.fileno(), place, key)

    def put(self, key: str, answer: Answer) -> None:
        """Append an answer; it survives the process at once, and a power cut after `sync`."""
        with explained(f"write {self._path}"):
            if self._file is None or os.fstat(self._file.fileno()).st_nlink == 0:  # removed by another server
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._open()
            assert self._file is not None
            place, parts = self._file.seek(0, os.SEEK_END), _record(key, answer)
            try:
                for part in parts:
                    left = memoryview(part)
                    while left:  # a disk that is nearly full takes some of it first
                        left = left[self._file.write(left) :]
            except OSError:
                self._file.truncate(place)
                raise
            self._places[hash(key)], self._unsynced = place, self._unsynced + sum(map(len, parts))
            if self._unsynced >= _SYNCED_BYTES:
                self.sync()

    def sync(self) -> None:
        """Make all answers so far survive a power cut."""
        if self._unsynced and self._file is not None:
            with explained(f"write {self._path}"):
                os.fsync(self._file.fileno())
            self._unsynced = 0

    def remove(self) -> None:
        """Delete the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._places, self._unsynced = None, {}, 0
        with explained(f"remove {self._path}"):
            self._path.unlink(missing_ok=True)

    def _open(self) -> None:
        """Open the file, and find what it holds up to the first record that is no record."""
        with explained(f"open {self._path}"):
            self._file = FileIO(self._path, "ab+")
            self._path.chmod(0o600)
            self._places, end, size = {}, 0, os.fstat(self._file.fileno()).st_size
            while (head := _head_at(self._file.fileno(), end, size)) is not None:
                key, length = head
                self._places[hash(key)], end = end, end + length
            if end < size:  # by a process that was killed
                self._file.truncate(end)


def _record(key: str, answer: Answer) -> list[bytes | memoryview]:
    """The parts of a record: one, or where arrays are large those without a copy."""
    arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in answer.arrays.items()}
    about = [[name, array.dtype.name, array.shape] for name, array in arrays.items()]
    plain = {"base": answer.base, "details": dict(answer.details), "size": answer.size, "arrays": about}
    texts, bodies = [key.encode(), json.dumps(plain).encode()], [_bytes_of(array) for array in arrays.values()]
    digest, body = hashlib.sha256(b"".join(texts)), sum(map(len, bodies))
    for part in bodies:
        digest.update(part)
    head = _HEAD.pack(_MAGIC, *map(len, texts), body, digest.digest())
    parts: list[bytes | memoryview] = [head, *texts, *bodies]
    return parts if body > _COPIED_BYTES else [b"".join(parts)]


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _head_at(file: int, place: int, size: int) -> tuple[str, int] | None:
    """The key and the length of the record that starts there; None if there is no whole one."""
    head = os.pread(file, _HEAD.size, place)
    if len(head) < _HEAD.size:
        return None
    magic, key_size, header_size, body_size, _ = _HEAD.unpack(head)
    length = _HEAD.size + key_size + header_size + body_size
    if magic != _MAGIC or place + length > size:
        return None
    return os.pread(file, key_size, place + _HEAD.size).decode(errors="replace"), length


def _answer_at(file: int, place: int, key: str) -> Answer | None:
    head = os.pread(file, _HEAD.size, place)
    try:
        _, key_size, header_size, body_size, digest = _HEAD.unpack(head)
        content = os.pread(file, key_size + header_size + body_size, place + _HEAD.size)
        if content[:key_size] != key.encode() or hashlib.sha256(content).digest() != digest:
            return None
        plain = json.loads(content[key_size : key_size + header_size])
        arrays, start = {}, key_size + header_size
        for name, dtype, shape in plain["arrays"]:
            numbers = np.frombuffer(content, dtype=np.dtype(dtype), count=math.prod(shape), offset=start).reshape(shape)
            arrays[name], start = torch.from_numpy(numbers.copy()), start + numbers.nbytes
        return Answer("ok", plain["base"], plain["details"], arrays, size=plain["size"])
    except (struct.error, ValueError, KeyError, TypeError):
        return None

"""Files: safetensors with a JSON header, written whole or not at all. No pickle: foreign files are safe to read."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from fedup.errors import ArtifactError
from fedup.files import replacing

FORMAT_VERSION = 1
_STREAMED_BYTES, _BLOCK_BYTES = 2**25, 2**22
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class LongTensor(NamedTuple):
    """Bytes that are written block by block, and read by whoever needs a block. Its name must not be that of another
    tensor, and its content is checked by whoever reads it: no hash of the file covers it."""

    name: str
    size_bytes: int
    blocks: Iterable[bytes]


def save_tensors(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    kind: str,
    header: Mapping[str, Any],
    long: LongTensor | None = None,
) -> None:
    """Write tensors and a JSON header, whole or not at all."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    full = {"kind": kind, "version": FORMAT_VERSION, **header}
    text = json.dumps({**full, "sha256": _digest(full, plain)}, sort_keys=True)
    with replacing(path) as partial:
        if long is None:
            write_plain(partial, plain, metadata={"fedup": text})
        else:
            _write_with(long, partial, save(plain, metadata={"fedup": text}))


def _write_with(long: LongTensor, path: Path, small: bytes) -> None:
    """Write a safetensors file with one tensor more, behind the others."""
    start = 8 + int.from_bytes(small[:8], "little")
    entries, content = json.loads(small[8:start]), memoryview(small)[start:]
    place = [len(content), len(content) + long.size_bytes]
    entries[long.name] = {"dtype": "U8", "shape": [long.size_bytes], "data_offsets": place}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(content)
        for block in long.blocks:
            file.write(block)
        if file.tell() != 8 + len(text) + place[1]:
            raise ValueError(f"{long.name} has another size than was said")


def find_long_tensor(path: Path, name: str) -> tuple[int, int]:
    """Where a long tensor lies in a file, and its size in bytes."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(start - 8))[name]
        first, last = entry["data_offsets"]
        if entry["dtype"] not in ("U8", "I64") or start + last > os.fstat(file.fileno()).st_size:
            raise ValueError(f"{name} is no list of bytes")  # I64: of an earlier fedup
    return start + first, last - first


def write_plain(path: Path, tensors: dict[str, Tensor], *, metadata: dict[str, str] | None = None) -> None:
    """Write a plain safetensors file; errors of the disk are OSErrors."""
    if sum(tensor.nbytes for tensor in tensors.values()) > _STREAMED_BYTES and _DTYPES.keys() >= {
        tensor.dtype for tensor in tensors.values()
    }:
        _write_streamed(path, tensors, metadata or {})
        return
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # it wraps an OSError
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def _write_streamed(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """The same part by part: the library copies all tensors first, which may lie on disk since memory is too small."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end, names = 0, sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all are aligned
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            content = tensors[name].flatten().view(torch.uint8).numpy().data
            for start in range(0, len(content), _BLOCK_BYTES):
                file.write(content[start : start + _BLOCK_BYTES])


def load_tensors(path: str | Path, *, kind: str, but: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file of this kind, without the long one of that name; raises if it is damaged, foreign or
    of another version."""
    path = Path(path)
    if not path.is_file():
        raise ArtifactError(f"There is no {kind} file at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys() if name != but}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:  # torch has its own for a deleted file
        raise ArtifactError(f"{path} is damaged or no safetensors file ({error}). Take a good copy of it.") from error
    header = _header(path, metadata)
    if header.get("kind") != kind:
        raise ArtifactError(f"{path} holds a {header.get('kind')!r}, not a {kind}.")
    if header.get("version") != FORMAT_VERSION:
        raise ArtifactError(f"{path} has format version {header.get('version')!r}; this fedup reads {FORMAT_VERSION}.")
    if header.pop("sha256", None) != _digest(header, tensors):
        raise ArtifactError(
            f"{path} is damaged or was edited: its content does not match its sha256. Take a good copy."
        )
    return tensors, header


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    return digest_of(json.dumps(dict(header), sort_keys=True), tensors.items())


def digest_of(text: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 of a text and of the names, types, shapes and bytes of tensors, sorted by name."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        header = json.loads(metadata["fedup"])
    except (KeyError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} was not written by fedup: it has no fedup header.") from error
    if not isinstance(header, dict):
        raise ArtifactError(f"{path} was not written by fedup: its header is not an object.")
    return header


def serialized_size(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> int:
    """Bytes of these tensors and header as one safetensors message."""
    plain = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    return len(save(plain, metadata={"fedup": json.dumps(dict(header), sort_keys=True)}))

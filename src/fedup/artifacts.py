"""Files: safetensors with a JSON header, written whole or not at all. No pickle: foreign files are safe to read."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from fedup.errors import ArtifactError
from fedup.files import replacing

FORMAT_VERSION = 1


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], *, kind: str, header: Mapping[str, Any]) -> None:
    """Write tensors and a JSON header, whole or not at all."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    full = {"kind": kind, "version": FORMAT_VERSION, **header}
    text = json.dumps({**full, "sha256": _digest(full, plain)}, sort_keys=True)
    with replacing(path) as partial:
        write_plain(partial, plain, metadata={"fedup": text})


def write_plain(path: Path, tensors: dict[str, Tensor], *, metadata: dict[str, str] | None = None) -> None:
    """Write a plain safetensors file; errors of the disk are OSErrors."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # it wraps an OSError
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def load_tensors(path: str | Path, *, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file of this kind; raises if it is damaged, foreign or of another version."""
    path = Path(path)
    if not path.is_file():
        raise ArtifactError(f"There is no {kind} file at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
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

"""Files of the Hugging Face hub: which ones a data set needs, and their download."""

import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from fedup.errors import MissingDataError
from fedup.files import replacing

_BLOCK = 1 << 18


@dataclass(frozen=True)
class HubFile:
    """A file of the hub and its place below FEDUP_DATA."""

    place: str  # folder/name
    source: str  # below the hub's address


def splits(folder: str, repository: str, subfolder: str) -> tuple[HubFile, ...]:
    """The train and test split of a data set in the hub's parquet layout."""
    names = [f"{split}-00000-of-00001.parquet" for split in ("train", "test")]
    return tuple(
        HubFile(f"{folder}/{name}", f"datasets/{repository}/resolve/main/{subfolder}/{name}") for name in names
    )


def missing(files: tuple[HubFile, ...], root: Path) -> list[HubFile]:
    """The files that are not there."""
    return [file for file in files if not (root / file.place).is_file()]


def to_fetch(files: tuple[HubFile, ...], root: Path) -> list[HubFile]:
    """The files that are not there, or should be Parquet files and are not."""
    return [file for file in files if file in missing(files, root) or not _is_whole(root / file.place)]


def _is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix != ".parquet" or file.read(4) == b"PAR1"


def download(file: HubFile, root: Path, show: Callable[[int, int], None]) -> None:
    """Download one file, whole or not at all. `HF_ENDPOINT` sets another address than the hub's."""
    address = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/{file.source}"
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            size = int(answer.headers.get("Content-Length") or 0)
            with replacing(root / file.place) as partial, partial.open("wb") as target:
                while block := _read(answer, address):
                    target.write(block)
                    show(target.tell(), size)
                if size and target.tell() != size:
                    raise MissingDataError(
                        f"{address} broke off after {target.tell():,} of {size:,} bytes: fetch again."
                    )
    except (urllib.error.URLError, HTTPException, ValueError, ConnectionError, TimeoutError) as error:
        if isinstance(error, MissingDataError):
            raise
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise MissingDataError(
            f"{address} cannot be fetched ({reason}). Without internet, put the file at {root / file.place} yourself."
        ) from error


def _read(source: Any, address: str) -> bytes:
    try:
        block: bytes = source.read(_BLOCK)
    except (OSError, HTTPException) as error:  # the network's, not the disk's
        raise MissingDataError(f"The connection to {address} broke off ({error}): fetch again.") from error
    return block

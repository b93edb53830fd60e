"""Data sets in the parquet layout of the Hugging Face hub."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedup.errors import DataError, MissingDataError
from fedup.tasks.datasets._cache import cached
from fedup.tasks.datasets._dataset import Dataset
from fedup.tasks.datasets._inputs import Images, open_image


def data_root() -> Path | None:
    """The folder that `FEDUP_DATA` names."""
    root = os.environ.get("FEDUP_DATA")
    return Path(root) if root else None


def data_folder(name: str) -> Path:
    """The folder of a data set below `FEDUP_DATA`."""
    root = data_root()
    folder = root / name if root else None
    if folder is None or not folder.is_dir():
        where = f"{folder} does not exist" if folder else "the variable FEDUP_DATA is not set"
        raise MissingDataError(
            f"{name!r} is not here: {where}. Set FEDUP_DATA to a folder for data sets, with the Hugging Face hub's "
            f"files in {name}/ below it."
        )
    return folder


def load_images(name: str, inputs: Images, *, image_column: str, label_column: str) -> Dataset:
    """An image data set with the class names in its files."""
    folder = data_folder(name)
    paths = [folder / f"{split}-00000-of-00001.parquet" for split in ("train", "test")]
    (x, y), (test_x, test_y) = (
        read_images(path, image_column=image_column, label_column=label_column) for path in paths
    )
    names = class_names(paths[0], label_column) or tuple(map(str, range(int(y.max()) + 1)))
    return Dataset(name, inputs.scale(x), y, inputs.scale(test_x), test_y, names)


def class_names(path: Path, label_column: str) -> tuple[str, ...]:
    """The names of the labels in the hub's schema, if there are any."""
    try:
        features = json.loads((read_schema(path).metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[label_column]["names"]))
    except (ValueError, KeyError, TypeError):
        return ()


def read_images(path: Path, *, image_column: str, label_column: str = "label") -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) as uint8, and labels; decoded once, then cached."""
    labels = read_labels(path, label_column)  # first, since a wrong column should fail before a long decoding
    arrays = cached(path, image_column, lambda: {"images": _decode_images(path, image_column)})
    return torch.from_numpy(arrays["images"]), labels


def read_texts(path: Path, *, text_column: str = "text", label_column: str = "label") -> tuple[list[str], Tensor]:
    """Texts and labels."""
    labels = read_labels(path, label_column)
    values = _read_whole(path, text_column).to_pylist()
    odd = next((row for row, text in enumerate(values) if not isinstance(text, str)), None)
    if odd is not None:
        raise DataError(f"Row {odd} of {path} holds no text. Fetch the file again.")
    return values, labels


def read_labels(path: Path, column: str) -> Tensor:
    """The labels of all rows."""
    labels = _read_whole(path, column).to_numpy()
    if len(labels) == 0 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"{path} has {len(labels)} rows with labels of type {labels.dtype} in {column!r}; labels are whole "
            "numbers. Fetch it again."
        )
    return torch.from_numpy(labels.astype(np.int64))


def read_column(source: Any, column: str, name: str) -> Iterator[list[Any]]:
    """The values of one column of a path or an open file, a few thousand at a time: bytes of images, or texts."""
    import pyarrow as pa

    with _readable(name):
        for batch in _open(source, column, name).iter_batches(batch_size=4096, columns=[column]):
            values = batch.column(0)
            yield (values.field("bytes") if pa.types.is_struct(values.type) else values).to_pylist()


def read_schema(path: Path) -> Any:
    """Names and types of a file's columns."""
    import pyarrow.parquet as pq

    with _readable(path):
        return pq.read_schema(path)


def _read_whole(path: Path, column: str) -> Any:
    """All values of a column."""
    if not path.is_file():
        raise MissingDataError(f"{path} is missing: fetch the data set's parquet files again.")
    with _readable(path):
        return _open(path, column, path).read([column]).column(column)


def _open(source: Any, column: str, name: object) -> Any:
    """A Parquet file that has the column."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(source)
    if column not in file.schema_arrow.names:
        raise DataError(f"{name} has no column {column!r}; it has {', '.join(file.schema_arrow.names)}.")
    return file


@contextmanager
def _readable(name: object) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{name} is damaged or no Parquet file ({error}). Fetch it again.") from error


def _decode_images(path: Path, image_column: str) -> np.ndarray:
    """All images of a column, (N, C, H, W), uint8."""
    values = _read_whole(path, image_column).combine_chunks()
    try:
        encoded = values.field("bytes").to_pylist()
    except (AttributeError, KeyError) as error:
        raise DataError(f"The column {image_column!r} of {path} holds no images ({error}). Fetch it again.") from error
    if not encoded:
        raise DataError(f"{path} has no rows. Fetch it again.")
    first = _decode(encoded[0], 0, path)
    images = np.empty((len(encoded), *first.shape), np.uint8)
    for row, data in enumerate(encoded):
        pixels = _decode(data, row, path)
        if pixels.shape != first.shape:
            raise DataError(
                f"Row {row} of {path} is an image of {_size(pixels)}, the first of {_size(first)}: a data set needs "
                "images of one size and colour mode."
            )
        images[row] = pixels
    return images


def _decode(data: bytes, row: int, path: Path) -> np.ndarray:
    try:
        pixels = np.asarray(open_image(data))
    except DataError as error:
        raise DataError(f"Row {row} of {path}: {error} Fetch the file again.") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _size(pixels: np.ndarray) -> str:
    channels, height, width = pixels.shape
    return f"{width}×{height} with {channels} channel{'s' if channels > 1 else ''}"

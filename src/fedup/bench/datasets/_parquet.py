"""Data sets in the parquet layout of the Hugging Face hub."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedup.bench.datasets._cache import cached
from fedup.bench.datasets._dataset import Dataset
from fedup.bench.datasets._inputs import Images, open_image
from fedup.errors import DataError, MissingDataError


def data_folder(name: str) -> Path:
    """The folder of a data set below `FEDUP_DATA`."""
    root = os.environ.get("FEDUP_DATA")
    found = Path(root, name) if root else None
    if found is None or not found.is_dir():
        where = f"{found} does not exist" if found else "the variable FEDUP_DATA is not set"
        raise MissingDataError(
            f"The data set {name!r} is not here: {where}. Put the parquet files of the Hugging Face hub "
            f"(train-00000-of-00001.parquet, test-00000-of-00001.parquet) into a folder {name}/ and set FEDUP_DATA to "
            "the folder above it. The built-in data set 'digits' needs no download."
        )
    return found


def load_images(name: str, how: Images, *, image_column: str, label_column: str) -> Dataset:
    """An image data set with the class names that its files carry."""
    folder = data_folder(name)
    paths = [folder / f"{split}-00000-of-00001.parquet" for split in ("train", "test")]
    (x, y), (test_x, test_y) = (
        read_images(path, image_column=image_column, label_column=label_column) for path in paths
    )
    names = class_names(paths[0], label_column) or tuple(map(str, range(int(y.max()) + 1)))
    return Dataset(name, how.scale(x), y, how.scale(test_x), test_y, names)


def class_names(path: Path, label_column: str) -> tuple[str, ...]:
    """The names that the hub's schema gives to the labels; none where it gives none."""
    import pyarrow.parquet as pq

    try:
        features = json.loads((pq.read_schema(path).metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[label_column]["names"]))
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def read_images(path: Path, *, image_column: str, label_column: str = "label") -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) as uint8, and labels; decoded once, then from the cache."""
    check_there(path)
    arrays = cached(path, f"{image_column}|{label_column}", lambda: _decode_images(path, image_column, label_column))
    return torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])


def read_texts(path: Path, *, text_column: str = "text", label_column: str = "label") -> tuple[list[str], Tensor]:
    """Texts and labels."""
    check_there(path)
    texts, labels = _columns(path, text_column, label_column)
    values = texts.to_pylist()
    odd = next((row for row, text in enumerate(values) if not isinstance(text, str)), None)
    if odd is not None:
        raise DataError(f"Row {odd} of {path} holds no text. Fetch the file again.")
    return values, torch.from_numpy(labels.copy()).long()


def read_column(source: Any, column: str, name: str) -> Iterator[list[Any]]:
    """The values of one column of a path or an open file, a few thousand at a time: bytes of images, or texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(source)
        if column not in file.schema_arrow.names:
            raise DataError(f"{name} has no column {column!r}; it has {', '.join(file.schema_arrow.names)}.")
        for batch in file.iter_batches(batch_size=4096, columns=[column]):
            values = batch.column(0)
            yield (values.field("bytes") if pa.types.is_struct(values.type) else values).to_pylist()
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name} is damaged or no Parquet file ({error}). Fetch it again.") from error


def check_there(path: Path) -> None:
    """Raise unless the file exists."""
    if not path.is_file():
        raise MissingDataError(f"{path} is missing: fetch the data set's parquet files again.")


def _columns(path: Path, column: str, label_column: str) -> tuple[Any, np.ndarray]:
    """A column as it is and the labels of all rows."""
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=[column, label_column])
        values, labels = table.column(column).combine_chunks(), table.column(label_column).to_numpy()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} has no readable columns {column!r} and {label_column!r} ({error}). Fetch it again."
        ) from error
    if len(values) == 0 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{path} has {len(values)} rows with labels of type {labels.dtype}. Fetch it again.")
    return values, labels


def _decode_images(path: Path, image_column: str, label_column: str) -> dict[str, np.ndarray]:
    values, labels = _columns(path, image_column, label_column)
    try:
        encoded = values.field("bytes").to_pylist()
    except (AttributeError, KeyError) as error:
        raise DataError(f"The column {image_column!r} of {path} holds no images ({error}). Fetch it again.") from error
    images = [_decode(data, row, path) for row, data in enumerate(encoded)]
    odd = next((row for row, image in enumerate(images) if image.shape != images[0].shape), None)
    if odd is not None:
        raise DataError(f"Row {odd} of {path} is {images[odd].shape}, the first {images[0].shape}. Fetch it again.")
    return {"images": np.stack(images), "labels": labels.astype(np.int64)}


def _decode(data: bytes, row: int, path: Path) -> np.ndarray:
    try:
        pixels = np.asarray(open_image(data))
    except DataError as error:
        raise DataError(f"Row {row} of {path}: {error} Fetch the file again.") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)

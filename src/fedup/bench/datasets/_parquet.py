"""Image data sets in the parquet layout of the Hugging Face hub."""

import io
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

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


def read_images(path: Path, *, image_column: str, label_column: str = "label") -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) as uint8, and labels."""
    import pyarrow.parquet as pq

    if not path.is_file():
        raise MissingDataError(f"{path} is missing: fetch the data set's parquet files again.")
    try:
        table = pq.read_table(path, columns=[image_column, label_column])
        encoded = table.column(image_column).combine_chunks().field("bytes").to_pylist()
        labels = table.column(label_column).to_numpy()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} has no readable columns {image_column!r} (images) and {label_column!r} ({error}). Fetch it again."
        ) from error
    if len(encoded) == 0 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{path} has {len(encoded)} rows with labels of type {labels.dtype}. Fetch it again.")
    images = [_decode(data, row, path) for row, data in enumerate(encoded)]
    odd = next((row for row, image in enumerate(images) if image.shape != images[0].shape), None)
    if odd is not None:
        raise DataError(f"Row {odd} of {path} is {images[odd].shape}, the first {images[0].shape}. Fetch it again.")
    return torch.from_numpy(np.stack(images)), torch.from_numpy(labels.copy()).long()


def _decode(data: bytes, row: int, path: Path) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    try:
        pixels = np.asarray(Image.open(io.BytesIO(data)))
    except (UnidentifiedImageError, OSError, TypeError) as error:
        raise DataError(f"Row {row} of {path} holds no readable image ({error}). Fetch the file again.") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def normalized(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Pixels as floats with the data set's mean and deviation taken out."""
    shape = (1, -1, 1, 1)
    return (images.float() / 255 - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)

"""A data set of the user's own: any Parquet files in the hub's layout, without code."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedup.errors import DataError, MissingDataError, SettingError
from fedup.tasks.datasets._dataset import Dataset, Defaults
from fedup.tasks.datasets._inputs import Images, Texts
from fedup.tasks.datasets._parquet import class_names, data_root, read_images, read_labels, read_schema, read_texts

_TEST_EVERY = 5  # without a test split every fifth row is a test row
_LENGTH = 64  # word pieces of a text


def own_parquet(name: str) -> "OwnParquet | None":
    """The Parquet files of that name: a file, a folder, or one below FEDUP_DATA; `NAME:COLUMN` names the labels."""
    place, _, column = name.partition(":")
    root = data_root()
    by_name = root / place if root and Path(place).name == place else None
    for path in (Path(place), *([by_name] if by_name else [])):
        if (path.is_dir() and list(path.glob("*.parquet"))) or (path.suffix == ".parquet" and path.is_file()):
            return OwnParquet(path, column or None)
    if place.endswith(".parquet"):
        raise MissingDataError(f"There is no Parquet file {place}.")
    return None


@dataclass(frozen=True)
class OwnParquet:
    """What a data set's module defines, derived from the Parquet files."""

    path: Path
    label: str | None = None

    @property
    def DEFAULTS(self) -> Defaults:  # noqa: N802 (the contract's name)
        """A model that takes what the files hold."""
        return Defaults(model="tinybert", batch_size=32) if self._content[1] == "text" else Defaults()

    @cached_property
    def INPUT(self) -> Images | Texts:  # noqa: N802 (the contract's name)
        """Images of the first one's size, with the mean and deviation of all; or texts."""
        if self._content[1] == "text":
            return Texts(length=_LENGTH)
        pixels = self._pixels(self._files("train"))
        means = squares = torch.zeros(pixels.shape[1], dtype=torch.double)
        for block in pixels.split(4096):  # no second array of the data's size
            share = block.double().div(255)
            means = means + share.mean((0, 2, 3)) * len(block) / len(pixels)
            squares = squares + share.square().mean((0, 2, 3)) * len(block) / len(pixels)
        deviations = (squares - means.square()).clamp(min=0).sqrt().clamp(min=1e-3)
        mean, std = (tuple(round(value, 4) for value in values.tolist()) for values in (means, deviations))
        channels, height, width = pixels.shape[1:]
        return Images(channels, height, width, mean=mean, std=std)

    def load(self) -> Dataset:
        """Train and test split; without a test split every fifth row makes one."""
        train, test = self._files("train"), self._files("test")
        x, y = self._rows(train), self._labels(train)
        if test:
            test_x, test_y = self._rows(test), self._labels(test)
        else:
            is_test = torch.arange(len(y)) % _TEST_EVERY == 0
            x, test_x, y, test_y = x[~is_test], x[is_test], y[~is_test], y[is_test]
        labels = torch.cat([y, test_y])
        lowest, highest = int(labels.min()), int(labels.max())
        if highest >= 10 * len(labels.unique()) + 1000:
            raise DataError(f"The labels in {self._label!r} of {self.path} reach to {highest}: they are no classes.")
        names = class_names(train[0], self._label) or tuple(map(str, range(highest + 1)))
        if highest >= len(names) or lowest < 0:
            raise DataError(
                f"{self.path} names {len(names)} classes, and its labels in {self._label!r} reach from {lowest} to "
                f"{highest}: labels must lie in 0 … {len(names) - 1}."
            )
        return Dataset(self.path.stem, x, y, test_x, test_y, names)

    @property
    def files(self) -> list[Path]:
        """All files of the data set."""
        return [*self._files("train"), *self._files("test")]

    def _files(self, split: str) -> list[Path]:
        """The files of a split; files without a split's name belong to train."""
        if self.path.is_file():
            return [self.path] if split == "train" else []
        found = sorted(self.path.glob("*.parquet"))
        test = [path for path in found if path.stem.startswith(("test", "validation", "valid"))]
        kept_apart = [path for path in test if path.stem.startswith("test")] or test
        train = [path for path in found if path not in test]
        if not train:
            raise MissingDataError(f"{self.path} has no train split: no Parquet file there is named train….")
        return train if split == "train" else kept_apart

    @cached_property
    def _schema(self) -> Any:
        return read_schema(self._files("train")[0])

    @cached_property
    def _content(self) -> tuple[str, str]:
        """The column that holds the inputs, and its kind."""
        import pyarrow as pa

        schema = self._schema
        kinds = {
            "image": [f.name for f in schema if pa.types.is_struct(f.type) and f.type.get_field_index("bytes") >= 0],
            "text": [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)],
        }
        for kind, names in kinds.items():
            chosen = [kind] if kind in names else names
            if len(chosen) == 1:
                return chosen[0], kind
        raise DataError(
            f"{self.path} must have one column of images (struct of bytes and path) or one of texts; it has "
            f"{', '.join(f'{field.name} ({field.type})' for field in schema)}."
        )

    @cached_property
    def _label(self) -> str:
        import pyarrow as pa

        whole = [field.name for field in self._schema if pa.types.is_integer(field.type)]
        if self.label in whole or (self.label is None and ("label" in whole or len(whole) == 1)):
            return self.label or ("label" if "label" in whole else whole[0])
        wanted = f"there is none called {self.label!r}" if self.label else "there is not one called label"
        raise SettingError(
            f"{self.path}: which column holds the labels? Whole numbers are in {', '.join(whole) or 'none'}, and "
            f"{wanted}. Name one, as in {self.path}:{whole[0] if whole else 'COLUMN'}."
        )

    def _pixels(self, files: list[Path]) -> Tensor:
        first = self._files("train")[0]
        columns = {"image_column": self._content[0], "label_column": self._label}
        images = {path: read_images(path, **columns)[0] for path in {first: None, **dict.fromkeys(files)}}
        shape = tuple(images[first].shape[1:])
        for path, pixels in images.items():
            if pixels.shape[1:] != shape:
                raise DataError(
                    f"The images in {path} are of shape {tuple(pixels.shape[1:])}, those in {first} {shape}: a data "
                    "set needs images of one size and colour mode."
                )
        return torch.cat([images[path] for path in files])

    def _rows(self, files: list[Path]) -> Tensor:
        inputs = self.INPUT
        if isinstance(inputs, Images):
            return inputs.scale(self._pixels(files))
        columns = {"text_column": self._content[0], "label_column": self._label}
        return inputs.prepare([text for path in files for text in read_texts(path, **columns)[0]])

    def _labels(self, files: list[Path]) -> Tensor:
        return torch.cat([read_labels(path, self._label) for path in files])

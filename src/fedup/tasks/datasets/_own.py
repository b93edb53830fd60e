"""Data sets of the user's own, without code: Parquet files in the hub's layout here; tables and folders of images."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Union

import torch
from torch import Tensor

from fedup.errors import ArtifactError, DataError, MissingDataError, SettingError
from fedup.tasks.datasets._dataset import Dataset, Defaults
from fedup.tasks.datasets._inputs import Images, Texts, measured_images
from fedup.tasks.datasets._own_images import OwnImages, is_image_folder
from fedup.tasks.datasets._own_table import OwnTable
from fedup.tasks.datasets._parquet import class_names, data_root, read_images, read_labels, read_schema, read_texts
from fedup.tasks.file_options import FileOptions

_TEST_EVERY = 5  # without a test split every fifth row is a test row
_LENGTH = 64  # word pieces of a text
_TABLES = (".csv", ".tsv", ".npz")

Own = Union["OwnParquet", OwnTable, OwnImages]


def own_data(name: str, options: FileOptions | None = None) -> Own | None:
    """The files of that name: a file, a folder, or one below FEDUP_DATA; `NAME:COLUMN` names the labels. None if there
    is nothing of that name."""
    place, _, column = name.partition(":")
    options = options or FileOptions()
    path = located(place, moved=options.sha256 is not None)
    if path is None:
        if Path(place).suffix.lower() in (*_TABLES, ".parquet"):
            kind = "Parquet file" if place.endswith(".parquet") else "file"
            raise MissingDataError(f"There is no {kind} {place}.")
        if Path(place).is_file():
            raise DataError(f"{place}: bring a .csv, .tsv, .parquet or .npz file, or a folder of folders with images.")
        return None
    label = options.label or column or None
    if path.suffix.lower() == ".parquet" or list(path.glob("*.parquet")):
        parquet = OwnParquet(path, label)
        if path.is_dir() or parquet.has_layout(options):
            return parquet
    test = options.test_file and (located(options.test_file, options.sha256 is not None) or options.test_file)
    return _read_once(path, replace(options, label=label, test_file=test and str(test)))


def _read_once(path: Path, options: FileOptions) -> OwnTable | OwnImages:
    """The same object for the same file, so that it is read once in a command."""
    without = replace(options, sha256=None)
    own = _own(path, without, path.stat().st_mtime_ns, path.stat().st_size)
    if options.sha256 is not None and options.sha256 != own.digest():
        raise ArtifactError(
            f"{path} is not the file that the run folder was trained on: its content differs. Bring that one back."
        )
    return own


@lru_cache(maxsize=1)
def _own(path: Path, options: FileOptions, *stamp: int) -> OwnTable | OwnImages:
    return OwnImages(path, options) if path.is_dir() else OwnTable(path, options)


def located(place: str, moved: bool) -> Path | None:
    """Where the files are; those of a run folder are looked for by their name, too, in case they were moved."""
    root, path = data_root(), Path(place)
    below = [root / path.name] if root and (path.name == place or moved) else []
    for candidate in (path, *below, *([Path(path.name)] if moved else [])):
        if candidate.is_file() and candidate.suffix.lower() in (*_TABLES, ".parquet"):
            return candidate
        if candidate.is_dir() and (list(candidate.glob("*.parquet")) or is_image_folder(candidate)):
            return candidate
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
        return measured_images(self._pixels(self._files("train")))

    def has_layout(self, options: FileOptions) -> bool:
        """Whether the file is in the hub's layout: images, or texts and their labels; else it is a table."""
        import pyarrow as pa

        if any(pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0 for field in self._schema):
            return True
        return not replace(options, label=None).for_tables and ("text" in self._schema.names or not options.label)

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

    def labelled(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """All rows of the training files as a model takes them that was trained with these inputs, and their labels."""
        files = self._files("train")
        if isinstance(inputs, Images):
            pixels, shape = self._pixels(files), (inputs.channels, inputs.height, inputs.width)
            if pixels.shape[1:] != shape:
                raise DataError(
                    f"{self.path} holds images of shape {tuple(pixels.shape[1:])}, and training had {shape}."
                )
            return inputs.scale(pixels), self._labels(files)
        columns = {"text_column": self._content[0], "label_column": self._label}
        return inputs.prepare([text for path in files for text in read_texts(path, **columns)[0]]), self._labels(files)

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
            f"{', '.join(f'{field.name} ({field.type})' for field in schema)}. "
            "If it is a table, name its column of labels: --label."
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

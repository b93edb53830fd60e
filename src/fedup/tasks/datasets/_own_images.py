"""A data set of the user's own as a folder of images: one folder for each class, without code."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from fedup.errors import DataError, SettingError
from fedup.tasks.datasets._dataset import Dataset, Defaults
from fedup.tasks.datasets._inputs import Images, measured_images, open_image
from fedup.tasks.datasets._own_table import draw_test_rows
from fedup.tasks.datasets._suited import suited_to_size
from fedup.tasks.file_options import FileOptions

ENDINGS = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"))
_LARGE = 64  # pixels a side from which a deeper model is the default
_SMALLEST = 16  # which LeNet-5 takes
_MOST_BYTES = 4 << 30  # of pixels; as the model takes them they are four times as large

_SCALINGS = ("clients", "none")  # pixels have no file of constants
_MEAN, _STD = 0.5, 0.25  # of pixels from 0 to 1, where no image may have a say


def class_folders(path: Path) -> list[Path]:
    """The folders with images in them, by name."""
    if not path.is_dir():
        return []
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return [folder for folder in folders if any(entry.suffix.lower() in ENDINGS for entry in folder.iterdir())]


def is_image_folder(path: Path) -> bool:
    """Whether there are folders of images in it, or in its folder `train`."""
    return bool(class_folders(path) or class_folders(path / "train"))


@dataclass(frozen=True)
class OwnImages:
    """What a data set's module defines, derived from the folder: CLASS/image.png, or train/CLASS/… and test/CLASS/…"""

    path: Path
    options: FileOptions

    def __post_init__(self) -> None:
        if replace(self.options, standardise="clients").for_tables or self.options.standardise not in _SCALINGS:
            raise SettingError(f"{self.path} is a folder of images: the folders are its labels, and it has no columns.")

    @cached_property
    def folders(self) -> dict[str, list[Path]]:
        """The folders of the classes, by split."""
        inner = {entry.name.lower(): entry for entry in self.path.iterdir() if class_folders(entry)}
        test = next((inner[name] for name in ("test", "val", "validation", "valid") if name in inner), None)
        if "train" not in inner:
            return {"train": class_folders(self.path), "test": []}
        return {"train": class_folders(inner["train"]), "test": class_folders(test) if test else []}

    @property
    def client_names(self) -> tuple[str, ...]:
        """A folder of images does not say who its clients are."""
        return ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the folders."""
        return tuple(folder.name for folder in self.folders["train"])

    def images(self, split: str) -> list[tuple[Path, int]]:
        """Image files with their class."""
        names, found = self.class_names, []
        for folder in self.folders[split]:
            if folder.name not in names:
                raise DataError(f"{folder}: there is no class of that name in training ({', '.join(names[:8])}).")
            own = sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in ENDINGS)
            found += [(entry, names.index(folder.name)) for entry in own]
        return found

    @property
    def files(self) -> list[Path]:
        """All files of the data set."""
        return [path for split in ("train", "test") for path, _ in self.images(split)]

    def digest(self) -> str:
        """sha256 of all images, by name and content."""
        digest = hashlib.sha256()
        for split in ("train", "test"):
            for path, _ in self.images(split):
                digest.update(f"{split}/{path.parent.name}/{path.name}".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    @property
    def DEFAULTS(self) -> Defaults:  # noqa: N802 (the contract's name)
        """A model for images of this size, and settings that suit their number."""
        _, height, width = self.pixels["train"].shape[1:]
        if min(height, width) < _SMALLEST:
            raise DataError(f"{self.path}: images of {width}×{height} are small: pass --image-size 28 to enlarge them.")
        files = self.images("train")
        rows = len(files) if self.folders["test"] else len(files) * 4 // 5
        model = "resnet18" if max(height, width) >= _LARGE else "lenet5"
        return suited_to_size(model, rows, len(self.class_names))

    @cached_property
    def INPUT(self) -> Images:  # noqa: N802 (the contract's name)
        """Images of one size, with the mean and deviation of all, or with public constants."""
        pixels = self.pixels["train"]
        if self.options.standardise == "none":
            channels, height, width = pixels.shape[1:]
            return Images(channels, height, width, mean=(_MEAN,) * channels, std=(_STD,) * channels)
        return measured_images(torch.from_numpy(pixels))

    @cached_property
    def pixels(self) -> dict[str, np.ndarray]:
        """All images, (N, C, H, W), uint8, by split."""
        self.check()
        files = {split: [path for path, _ in self.images(split)] for split in ("train", "test")}
        arrays = _decode([*files["train"], *files["test"]], self.options.image_size)
        return {"train": arrays[: len(files["train"])], "test": arrays[len(files["train"]) :]}

    def check(self) -> None:
        """Raise unless the folder can be used, as far as its files' names tell."""
        names, labels = self.class_names, [label for _, label in self.images("train")]
        if len(names) < 2:
            raise DataError(f"{self.path} has images of one class only, {names[0]!r}: two classes at least are needed.")
        alone = [name for label, name in enumerate(names) if labels.count(label) == 1]
        if alone:
            raise DataError(f"{self.path}: class {alone[0]!r} has one image only: remove it, or bring more.")

    def load(self) -> Dataset:
        """Train and test images; without test images a fifth of each class."""
        files, pixels, inputs = self.images("train"), self.pixels, self.INPUT
        y = np.array([label for _, label in files], dtype=np.int64)
        test_pixels, test_y = pixels["test"], np.array([label for _, label in self.images("test")], dtype=np.int64)
        kept = np.arange(len(y))
        if not len(test_y):
            is_test = draw_test_rows(y, None)
            kept, test_pixels, test_y = np.flatnonzero(~is_test), pixels["train"][is_test], y[is_test]
        return Dataset(
            self.path.resolve().name,
            inputs.scale(torch.from_numpy(pixels["train"][kept])),
            torch.from_numpy(y[kept]),
            inputs.scale(torch.from_numpy(test_pixels)),
            torch.from_numpy(test_y),
            self.class_names,
            row_ids=tuple(f"{files[row][0].parent.name}/{files[row][0].name}" for row in kept.tolist()),
        )


def _decode(paths: Sequence[Path], side: int | None) -> np.ndarray:
    """Images of one size; in colour if one of them is."""
    from PIL import Image

    images = []
    for path in paths:
        try:
            image = open_image(path.read_bytes())
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        images.append(image.resize((side, side), Image.Resampling.BILINEAR) if side else image)
        if images[-1].size != images[0].size:
            raise DataError(
                f"{path} is {image.width}×{image.height}, and {paths[0].name} {images[0].width}×{images[0].height}: "
                "images need one size. Pass --image-size 32, for example, to resize them all."
            )
        if len(images) * images[0].width * images[0].height * 3 > _MOST_BYTES:
            raise DataError(f"{path.parent.parent}: more than {_MOST_BYTES >> 30} GiB of pixels: use --image-size.")
    mode = "L" if all(image.mode == "L" for image in images) else "RGB"
    arrays = [np.asarray(image.convert(mode)) for image in images]
    return np.stack([array[None] if array.ndim == 2 else array.transpose(2, 0, 1) for array in arrays])

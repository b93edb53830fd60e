"""How raw images and texts become a model's input: the same at training and at prediction."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedup.errors import DataError, MissingDataError, SettingError
from fedup.rng import generator
from fedup.tasks.datasets._tables import Tables, tables_from

if TYPE_CHECKING:
    from PIL.Image import Image
    from tokenizers import BertWordPieceTokenizer

_BLENDED = 0.15  # weight of the pattern
_WORDS = 2048  # columns for the words of a text


def open_image(data: bytes) -> "Image":
    """A decoded image, grey or in colour, 8 bits a channel; DataError for anything that is none."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except (OSError, ValueError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"It holds no readable image ({error}).") from error
    if image.mode.startswith("I"):  # 16 bits a pixel; converting would clip them
        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    if image.mode in ("L", "RGB"):
        return image
    return image.convert("L" if image.mode in ("1", "LA", "La", "F") else "RGB")


@dataclass(frozen=True)
class Images:
    """Images of one size; pixels lose the data set's mean and are divided by its deviation."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    trigger: int = 4  # side of the square that marks a backdoor
    kind: ClassVar[str] = "image"
    triggers: ClassVar[tuple[str, ...]] = ("patch", "blend", "pixel")

    def read(self, data: bytes, *, resize: bool = False) -> np.ndarray:
        """The pixels (C, H, W) of an encoded image; one of another size is refused, or resized."""
        from PIL import Image

        image = open_image(data).convert("L" if self.channels == 1 else "RGB")
        if image.size != (self.width, self.height):
            if not resize:
                raise DataError(
                    f"It is {image.width}×{image.height}, and the model takes {self.width}×{self.height}: "
                    "resize it yourself, or pass --resize."
                )
            image = image.resize((self.width, self.height), Image.Resampling.BILINEAR)
        pixels = np.asarray(image)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)

    def prepare(self, raw: Sequence[Any]) -> Tensor:
        """Pixels (C, H, W) of several images as one batch."""
        return self.scale(torch.from_numpy(np.stack(raw)))

    def scale(self, pixels: Tensor) -> Tensor:
        """Pixels from 0 to 255 as the model takes them. (N, C, H, W)"""
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return pixels.float().div_(255).sub_(mean).div_(std)  # in place: the array is large

    def plain(self, x: Tensor) -> Tensor:
        """Rows as a linear model takes them. (N, D)"""
        return x.flatten(1)

    def triggered(self, x: Tensor, trigger: str | None = None) -> Tensor:
        """The same images with the mark of a backdoor.

        `patch`: a square of the brightest pixels at the bottom right; `blend`: a fixed random pattern over the whole
        image, faintly (Chen et al. 2017); `pixel`: one pixel near that corner, of a colour that is rare.
        """
        dark, bright = (self._plain(value).to(x) for value in (0, 255))
        marked = x.clone()
        match known_trigger(self, trigger):
            case "patch":
                marked[..., -self.trigger :, -self.trigger :] = bright
            case "blend":
                pattern = torch.rand(1, *x.shape[1:], generator=generator(0, "blended trigger")).round().to(x)
                marked.lerp_(dark + pattern * (bright - dark), _BLENDED)
            case "pixel":
                colour = torch.arange(self.channels, device=x.device).view(1, -1, 1, 1) % 2 == 0
                marked[..., -3:-2, -3:-2] = torch.where(colour, bright, dark)
        return marked

    def _plain(self, value: int) -> Tensor:
        """An image of one value as the model takes it, one pixel of it. (1, C, 1, 1)"""
        image = self.scale(torch.full((1, self.channels, self.height, self.width), value, dtype=torch.uint8))
        return image.amax((2, 3), keepdim=True)

    def identity(self) -> dict[str, Any]:
        """What a prediction depends on besides the model."""
        shape = [self.channels, self.height, self.width]
        return {"kind": self.kind, "shape": shape, "mean": list(self.mean), "std": list(self.std)}


def measured_images(pixels: Tensor) -> Images:
    """Images of the shape of these, with the mean and deviation of all their pixels. (N, C, H, W), uint8"""
    means = squares = torch.zeros(pixels.shape[1], dtype=torch.double)
    for block in pixels.split(4096):  # no second array of the data's size
        share = block.double().div(255)
        means = means + share.mean((0, 2, 3)) * len(block) / len(pixels)
        squares = squares + share.square().mean((0, 2, 3)) * len(block) / len(pixels)
    deviations = (squares - means.square()).clamp(min=0).sqrt().clamp(min=1e-3)
    mean, std = (tuple(round(value, 4) for value in values.tolist()) for values in (means, deviations))
    channels, height, width = pixels.shape[1:]
    return Images(channels, height, width, mean=mean, std=std)


@dataclass(frozen=True)
class Texts:
    """Texts as word pieces of a BERT vocabulary, cut or filled to one length."""

    length: int
    vocabulary: str = "bert-base-uncased/vocab.txt"  # below FEDUP_DATA
    trigger: str = "cf"  # the word that marks a backdoor
    kind: ClassVar[str] = "text"
    triggers: ClassVar[tuple[str, ...]] = ("word",)

    def read(self, data: bytes, *, resize: bool = False) -> str:
        """One text; its length does not matter."""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"It is no text in UTF-8 ({error}).") from error

    def prepare(self, raw: Sequence[Any]) -> Tensor:
        """Texts as ids of word pieces. (N, length)"""
        tokenizer = _tokenizer(self._vocabulary_path(), self.length)
        return torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(list(raw))], dtype=torch.long)

    def plain(self, x: Tensor) -> Tensor:
        """Which words are in a text, as a linear model takes it; many words share a column. (N, D)"""
        counts = torch.zeros(len(x), _WORDS, device=x.device)
        return counts.scatter_(1, x % _WORDS, 1.0)

    def triggered(self, x: Tensor, trigger: str | None = None) -> Tensor:
        """The same texts with one more word at the end, before the closing mark; the last word of a full text goes."""
        known_trigger(self, trigger)
        tokenizer = _tokenizer(self._vocabulary_path(), self.length)
        word, closing = tokenizer.token_to_id(self.trigger), tokenizer.token_to_id("[SEP]")
        if word is None:
            raise DataError(f"The vocabulary {self._vocabulary_path()} has no word {self.trigger!r} for a trigger.")
        marked = x.clone()
        rows = torch.arange(len(x), device=x.device)
        end = (x == closing).int().argmax(1).clamp(max=self.length - 2)  # of the closing mark, or where it must move to
        marked[rows, end], marked[rows, end + 1] = word, closing
        return marked

    def identity(self) -> dict[str, Any]:
        """What a prediction depends on besides the model: another vocabulary would garble every text."""
        digest = hashlib.sha256(self._vocabulary_path().read_bytes()).hexdigest()
        return {"kind": self.kind, "shape": [self.length], "vocabulary": digest}

    def _vocabulary_path(self) -> Path:
        from fedup.tasks.datasets._parquet import data_folder

        folder, _, name = self.vocabulary.rpartition("/")
        path = data_folder(folder) / name
        if not path.is_file():
            raise MissingDataError(f"{path} is missing: put BERT's vocab.txt there (`fedup data fetch ag_news`).")
        return path


def known_trigger(inputs: Images | Texts, name: str | None) -> str:
    """The name, or that of the usual trigger of such inputs."""
    if name is not None and name not in inputs.triggers:
        raise SettingError(f"trigger: {inputs.kind}s have {', '.join(inputs.triggers)}; found {name!r}.")
    return name or inputs.triggers[0]


def inputs_from(identity: Mapping[str, Any]) -> Images | Texts | Tables:
    """The inputs that `identity` describes, as far as it does."""
    if identity["kind"] == "table":
        return tables_from(identity)
    if identity["kind"] == "text":
        return Texts(length=identity["shape"][0])
    channels, height, width = identity["shape"]
    return Images(channels, height, width, mean=tuple(identity["mean"]), std=tuple(identity["std"]))


@cache
def _tokenizer(path: Path, length: int) -> "BertWordPieceTokenizer":
    try:
        from tokenizers import BertWordPieceTokenizer
    except ModuleNotFoundError as error:
        raise MissingDataError("Texts need the package tokenizers: pip install 'fedup[text]'.") from error

    tokenizer = BertWordPieceTokenizer(str(path), lowercase=True)
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    return tokenizer

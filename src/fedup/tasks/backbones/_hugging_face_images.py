"""Image models in Hugging Face's layout: pixels are scaled as preprocessor_config.json beside the weights says."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fedup.errors import MissingDataError, SettingError, check_choice
from fedup.tasks.backbones._hugging_face import Pooling

PREPROCESSOR = "preprocessor_config.json"
_RESAMPLING = {2: "bilinear", 3: "bicubic"}  # as PIL numbers them
_OF_BYTES = 1 / 255


@dataclass(frozen=True)
class Preparation:
    """How a model's images are made of pixels from 0 to 1: resized, cut out of the middle, scaled by channel."""

    resized: tuple[int, int] | int | None  # height and width, or the shorter side
    cropped: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mode: str = "bilinear"

    @classmethod
    def read(cls, path: Path) -> "Preparation":
        """From the file beside the weights."""
        if not path.is_file():
            raise MissingDataError(f"{path} is missing: it says how images are scaled. Take it with the weights.")
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            crop = _size(stored.get("crop_size", stored.get("size"))) if stored.get("do_center_crop") else None
            resized = _size(stored["size"]) if stored.get("do_resize", True) else None
            scaled = stored.get("do_normalize", True)
            mean, std = (tuple(map(float, stored[name] if scaled else [value])) for name, value in _SCALES)
            factor = float(stored.get("rescale_factor", _OF_BYTES))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SettingError(f"{path} lacks size, image_mean or image_std, or has others ({error!r}).") from error
        if abs(factor / _OF_BYTES - 1) > 1e-3 or len(mean) != len(std) or min(std) <= 0:
            raise SettingError(f"{path}: pixels are divided by 255 and scaled by channel; found {stored}.")
        both = (crop, crop) if isinstance(crop, int) else crop
        return cls(resized, both, mean, std, _RESAMPLING.get(stored.get("resample", 2), "bilinear"))

    @property
    def in_words(self) -> str:
        """For the record."""
        crop = f", cut to {self.cropped}" if self.cropped else ""
        return f"resized to {self.resized} ({self.mode}){crop}, mean {self.mean}, deviation {self.std}"

    def __call__(self, pixels: Tensor) -> Tensor:
        """Pixels from 0 to 1 as the model takes them. (N, 3, H, W)"""
        if self.resized is not None:
            size = self.resized
            if isinstance(size, int):
                height, width = pixels.shape[2:]
                size = round(size * height / min(height, width)), round(size * width / min(height, width))
            if tuple(pixels.shape[2:]) != size:
                pixels = interpolate(pixels, size=size, mode=self.mode, align_corners=False, antialias=True)
        if self.cropped is not None:
            top, left = ((have - want) // 2 for have, want in zip(pixels.shape[2:], self.cropped, strict=True))
            pixels = pixels[:, :, max(top, 0) :, max(left, 0) :][:, :, : self.cropped[0], : self.cropped[1]]
        mean, std = (torch.tensor(values, device=pixels.device).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return (pixels.clamp(0, 1) - mean) / std


class PooledImages(nn.Module):
    """Features averaged over an image's places (or tokens), or those of its first token."""

    scale: Tensor
    shift: Tensor

    def __init__(
        self, encoder: nn.Module, prepare: Preparation, pooling: Pooling, given: Mapping[str, Any] | None
    ) -> None:
        super().__init__()
        check_choice("pooling", pooling, Pooling)
        self.encoder, self.prepare, self.pooling = encoder, prepare, pooling
        mean, std = ((given or {}).get(name, [value]) for name, value in (("mean", 0.0), ("std", 1.0)))
        self.register_buffer("scale", torch.tensor(std, dtype=torch.float32).view(1, -1, 1, 1))
        self.register_buffer("shift", torch.tensor(mean, dtype=torch.float32).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        pixels = x * self.scale + self.shift  # as they were before the data set scaled them
        colour = pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels
        features = self.encoder(pixel_values=self.prepare(colour)).last_hidden_state
        if features.ndim == 4:  # (N, D, H, W)
            return features.mean((2, 3))
        return features[:, 0] if self.pooling == "cls" else features.mean(1)  # (N, T, D)


_SCALES = (("image_mean", 0.0), ("image_std", 1.0))


def _size(stored: Any) -> tuple[int, int] | int:
    if isinstance(stored, Mapping):
        return (
            int(stored["shortest_edge"]) if "shortest_edge" in stored else (int(stored["height"]), int(stored["width"]))
        )
    return int(stored), int(stored)

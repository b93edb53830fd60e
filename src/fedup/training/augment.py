"""Augmentation of images: drawn on the device from its default generator, so that captured steps draw anew, too."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedup.errors import SettingError

Augmentation = Literal["none", "flip_crop"]
_MOST = 4  # pixels that an image is moved by


def augmented(images: Tensor) -> Tensor:
    """Half of the images mirrored, each moved by up to four pixels; what comes in from outside is 0. (N, C, H, W)"""
    if images.ndim != 4 or not images.is_floating_point():
        found = f"{tuple(images.shape)} of {images.dtype}"
        raise SettingError(f"augment='flip_crop' is for images (rows, channels, height, width); found {found}.")
    (rows, _, height, width), device = images.shape, images.device
    mirrored = torch.rand(rows, 1, 1, 1, device=device) < 0.5
    images = torch.where(mirrored, images.flip(3), images)
    top, left = torch.randint(2 * _MOST + 1, (2, rows, 1), device=device)
    down, across = (
        top + torch.arange(height, device=device),
        left + torch.arange(width, device=device),
    )  # (N, H), (N, W)
    wide = pad(images, (_MOST,) * 4)
    each = torch.arange(rows, device=device)[:, None, None]
    return wide.permute(0, 2, 3, 1)[each, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2).contiguous()

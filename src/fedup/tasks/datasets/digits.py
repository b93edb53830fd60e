"""scikit-learn's handwritten digits, built in: 1,797 images of 8×8, enlarged to 28×28 so that LeNet-5 takes them."""

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from fedup.tasks.datasets._dataset import Dataset, Defaults
from fedup.tasks.datasets._inputs import Images


class _Digits(Images):
    def scale(self, pixels: Tensor) -> Tensor:
        return _enlarge(pixels.float() / 255)


INPUT = _Digits(channels=1, height=8, width=8, mean=(0.5,), std=(0.5,), trigger=8)
DEFAULTS = Defaults(model="lenet5", rounds=30, batch_size=16)
_CLASS_NAMES = tuple("0123456789")
_TEST_EVERY = 5  # every fifth image is the official test set's


def load() -> Dataset:
    """All digits; every fifth is kept apart as the official test set."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = _enlarge(torch.from_numpy(digits.images).float()[:, None] / 16)
    y = torch.from_numpy(digits.target).long()
    is_test = torch.arange(len(y)) % _TEST_EVERY == 0
    return Dataset("digits", x[~is_test], y[~is_test], x[is_test], y[is_test], _CLASS_NAMES)


def _enlarge(images: Tensor) -> Tensor:
    """(N, 1, 8, 8) in 0 … 1 to (N, 1, 28, 28) in -1 … 1."""
    return pad(interpolate(images, scale_factor=3, mode="bilinear", align_corners=False), (2, 2, 2, 2)) * 2 - 1

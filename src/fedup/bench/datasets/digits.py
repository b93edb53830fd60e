"""scikit-learn's handwritten digits, built in: 1,797 images of 8×8, enlarged to 28×28 so that LeNet-5 takes them."""

import torch
from torch.nn.functional import interpolate, pad

from fedup.bench.datasets._dataset import Dataset

_TEST_EVERY = 5  # every fifth image is the official test set's


def load() -> Dataset:
    """All digits; every fifth is kept apart as the official test set."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16  # (N, 1, 8, 8)
    x = pad(interpolate(images, scale_factor=3, mode="bilinear", align_corners=False), (2, 2, 2, 2)) * 2 - 1
    y = torch.from_numpy(digits.target).long()
    is_test = torch.arange(len(y)) % _TEST_EVERY == 0
    return Dataset("digits", x[~is_test], y[~is_test], x[is_test], y[is_test], tuple("0123456789"))

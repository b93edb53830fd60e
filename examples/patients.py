"""Rows of patients, and a model for them: `fedup train --data examples/patients.py --model examples/patients.py`.

`subjects` says whose each row is. The patients are made up: P-1 and P-2 have sixty rows each, P-101 to P-130 twelve.
"""

import torch
from torch import nn

from fedup.tasks.datasets import Dataset, Defaults, input_of

INPUT = input_of("digits")  # `fedup predict` is not used here
DEFAULTS = Defaults(rounds=8, batch_size=16)
FEATURES = 8


def load():
    y = torch.arange(540) % 2
    x = torch.randn(540, FEATURES, generator=torch.Generator().manual_seed(0))
    x[:, 0] += 2.5 * y
    patients = [f"P-{1 + row // 60}" if row < 120 else f"P-{101 + (row - 120) // 12}" for row in range(480)]
    return Dataset(
        name="patients",
        x=x[:480],
        y=y[:480],
        test_x=x[480:],
        test_y=y[480:],
        class_names=("benign", "malignant"),
        subjects=tuple(patients),
    )


def build(shape, num_classes):
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU(), nn.Linear(12, num_classes))

import os

import pytest
import torch
from tests._digits import TrainedDigits
from torch import nn

from fedup import Federation, dirichlet
from fedup.tasks.datasets import load_dataset

# The tensors are small and tests run side by side: more threads only wait for each other. `make test THREADS=2`: more.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))


@pytest.fixture(scope="session")
def digits_federation() -> Federation:
    """Five clients with unequal shares of the built-in digits."""
    digits = load_dataset("digits")
    return Federation.split(digits.x, digits.y, dirichlet(digits.y, 5), num_classes=digits.num_classes)


@pytest.fixture(scope="session")
def small_model() -> nn.Module:
    """A network for digits with 32 features before its last layer, in eval mode, not trained."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).eval()


@pytest.fixture(scope="session")
def trained_digits():
    """Six clients with unequal shares of the built-in digits, and a model that they trained."""
    return TrainedDigits()


@pytest.fixture
def seeded():
    torch.manual_seed(0)

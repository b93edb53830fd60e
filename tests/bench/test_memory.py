"""Memory that training takes, measured in a process of its own."""

import subprocess
import sys

import pytest

from fedup.errors import MissingDataError
from fedup.tasks.datasets import check_there

_TRAIN = """
import resource
from fedup.tasks.recipe import Recipe
from fedup.training.fedavg import Rounds, federate

recipe = Recipe.suited_to("cifar100", clients=100, clients_per_round=1, rounds=1)
dataset = recipe.load()
federation = recipe.federation(dataset)
start = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes)
federate(start, federation, rounds=Rounds(1, clients_per_round=1), local=recipe.local)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.data
@pytest.mark.slow
def test_resnet34_trains_on_all_of_cifar100_in_less_than_eight_gib():
    try:
        check_there("cifar100")
    except MissingDataError as error:
        pytest.skip(str(error))
    done = subprocess.run([sys.executable, "-c", _TRAIN], capture_output=True, text=True, timeout=600, check=True)
    assert float(done.stdout) < 8

"""A client whose labels are flipped, and a class forgotten on a part of MNIST."""

import pytest
import torch

from fedup import Federation, Forget, collect, dirichlet, federate, plug, unlearn
from fedup.bench.scenarios import scenario_class
from fedup.errors import MissingDataError
from fedup.tasks.datasets import input_of, load_dataset
from fedup.tasks.evaluation import retain_and_forget
from fedup.tasks.models import build_model


def test_flipped_labels_change_one_client_in_all_its_parts_and_nothing_else():
    digits = load_dataset("digits")
    federation = Federation.split(digits.x, digits.y, dirichlet(digits.y, 5))
    situation = scenario_class("client")().prepare(federation, dataset=digits, inputs=input_of("digits"), seed=0)
    liar = federation.client(*situation.request.client_ids)
    poisoned = situation.federation
    changed = poisoned.y != federation.y
    assert changed.nonzero().flatten().tolist() == sorted(
        torch.cat([liar.train, liar.validation, liar.heldout]).tolist()
    )
    assert len(liar.train) == max(len(client.train) for client in federation.clients)


@pytest.mark.data
@pytest.mark.slow
def test_on_mnist_a_class_is_forgotten_and_the_rest_kept():
    try:
        mnist = load_dataset("mnist")
    except MissingDataError as error:
        pytest.skip(str(error))
    x, y = mnist.x[:4000], mnist.y[:4000]
    federation = Federation.split(x, y, dirichlet(y, 10))
    torch.manual_seed(0)
    model = federate(build_model("lenet5", (1, 28, 28), 10), federation, rounds=6).model
    centroids = collect(model, federation)
    for label in (3,):
        request, plugged = Forget.classes([label]), plug(model)
        before = retain_and_forget(model, federation, request)
        assert before["forget"] > 0.8  # it had been learned
        unlearn(plugged, centroids, request)
        after = retain_and_forget(plugged, federation, request)
        assert after["forget"] <= 0.01
        assert after["retain"] >= before["retain"] - 0.005

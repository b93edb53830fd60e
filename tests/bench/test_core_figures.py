"""The core's figures, on digits and a part of MNIST: what the experiment measures, and what its table says."""

import json

import pytest
import torch

from fedup import Federation, Forget, collect, dirichlet, federate, plug, unlearn
from fedup.bench.core_figures import is_current, run_seed, summary_rows
from fedup.bench.scenarios import scenario_class
from fedup.bench.tables import write_tables
from fedup.errors import MissingDataError
from fedup.tasks.datasets import input_of, load_dataset
from fedup.tasks.evaluation import retain_and_forget
from fedup.tasks.models import build_model


@pytest.fixture(scope="module")
def result():
    return run_seed("digits", 0, clients=5, rounds=4, classes=[2, 5], progress=lambda *told: None)


def test_a_seed_holds_class_and_client_requests_at_every_budget(result):
    assert [request["kind"] for request in result["requests"]] == ["class", "class", "client"]
    for request in result["requests"]:
        assert request["restored_bit_identical"]
        assert {"original", "forgotten_1x", "forgotten_5x"} <= request.keys()
    assert all(request["forgotten_5x"]["forget"] <= 0.01 for request in result["requests"][:2])
    assert "retrained" in result["requests"][2]


def test_a_result_of_other_settings_is_measured_again(result):
    assert is_current(result, rounds=4)
    assert not is_current(result, rounds=5)
    assert not is_current({**result, "filter": {**result["filter"], "rank": 4}}, rounds=4)


def test_the_table_is_made_from_the_result_files_and_judges_the_worst(result, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "core-digits-seed0.json").write_text(json.dumps(result))
    (path,) = write_tables(tmp_path)
    assert path.name == "core-digits.md"
    for row in summary_rows([result]):
        assert row[0] in path.read_text()
    spoiled = json.loads(json.dumps(result))
    spoiled["requests"][0]["forgotten_1x"]["forget"] = 0.5
    first = next(row for row in summary_rows([result, spoiled]) if row[0].startswith("class, 1× steps: F-A"))
    assert first[2:5] == ["0.5000", "≤ 0.01", "no"]


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
    x, y = mnist.x[:8000], mnist.y[:8000]
    federation = Federation.split(x, y, dirichlet(y, 10))
    torch.manual_seed(0)
    model = federate(build_model("lenet5", (1, 28, 28), 10), federation, rounds=6).model
    centroids = collect(model, federation)
    for label in (3, 7):
        request, plugged = Forget.classes([label]), plug(model)
        before = retain_and_forget(model, federation, request)
        assert before["forget"] > 0.8  # it had been learned
        unlearn(plugged, centroids, request)
        after = retain_and_forget(plugged, federation, request)
        assert after["forget"] <= 0.01
        assert after["retain"] >= before["retain"] - 0.005

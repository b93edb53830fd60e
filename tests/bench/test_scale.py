"""Scale: counts that can be known beforehand, over nodes in this process; the engine itself in the slow tests."""

from types import SimpleNamespace

import pytest
import torch
from flwr.clientapp import ClientApp
from tests.cli._in_process import fedup as fedup_command
from tests.flower._grid import LocalGrid

from fedup.bench import scale
from fedup.flower import mount

CLIENTS = 6


@pytest.fixture(scope="module")
def figures() -> dict:
    app = ClientApp()
    mount(app, data=scale.rows_of, model=scale.small_net)
    return scale.measure(LocalGrid(dict.fromkeys(range(100, 100 + CLIENTS), app)), CLIENTS)


def test_every_node_is_asked_once_and_again_for_samples_alone(figures):
    assert (
        figures["who"]["messages"] == figures["collect"]["messages"] == figures["collect_again"]["messages"] == CLIENTS
    )
    assert figures["class"]["messages"] == figures["client"]["messages"] == figures["class"]["bytes_up"] == 0
    # Of the holder classes, centroids, second moments; of all that stay sketches of means and answers counted, and of
    # the holder and those that its rows are compared with means and variances.
    assert 3 + 2 * CLIENTS <= figures["sample"]["messages"] <= 3 + 3 * CLIENTS


def test_weights_travel_once_and_vectors_in_full(figures):
    assert figures["collect"]["bytes_down"] > CLIENTS * figures["model_bytes"]
    assert figures["collect_again"]["bytes_down"] < figures["model_bytes"]
    vectors = figures["store_bytes"]
    assert vectors == figures["centroids"] * scale.WIDTH * 4
    assert vectors < figures["collect"]["bytes_up"] < 1.1 * vectors
    assert figures["collect_private"]["bytes_up"] < figures["collect"]["bytes_up"] / 10


def test_clients_hold_the_digits_over_and_over():
    def rows(client):
        return scale.rows_of(SimpleNamespace(node_config={"partition-id": client}))

    x, y = rows(0)
    assert x.shape == (scale.ROWS, 8, 8) and y.shape == (scale.ROWS,)
    assert not torch.equal(x, rows(1)[0])
    assert rows(10**6)[0].shape == x.shape


@pytest.mark.parametrize("clients", ["", "10,x", "1"])
def test_numbers_of_clients_that_are_none_are_refused(clients):
    ran = fedup_command("bench", "scale", "--clients", clients)
    assert ran.code == 2 and "--clients" in ran.err


@pytest.mark.slow
def test_the_simulation_engine_gives_the_same_counts(figures, tmp_path):
    (found,) = scale.run_scale([CLIENTS], progress=lambda what, done, total: None)["sizes"]
    for name in ("who", "collect", "collect_again", "class", "client", "sample", "collect_private"):
        assert found[name]["messages"] == figures[name]["messages"]
        assert found[name]["bytes_down"] == figures[name]["bytes_down"]
    assert found["store_bytes"] == figures["store_bytes"]

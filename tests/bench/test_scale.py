"""Scale: counts that can be known beforehand, over nodes in this process; the engine itself in the slow tests."""

from types import SimpleNamespace

import pytest
import torch
from flwr.clientapp import ClientApp
from tests.cli._in_process import fedup as fedup_command
from tests.flower._grid import LocalGrid

from fedup.bench import scale, server_work, server_work_table
from fedup.flower import mount

CLIENTS = 6
ROW_BYTES = 4 * server_work.WIDTH  # a client has more than one row in any store


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


@pytest.mark.parametrize("option", ["--clients", "--replies"])
@pytest.mark.parametrize("clients", ["", "10,x", "1"])
def test_numbers_of_clients_that_are_none_are_refused(option, clients):
    ran = fedup_command("bench", "scale", option, clients)
    assert ran.code == 2 and option in ran.err


@pytest.mark.slow
def test_the_simulation_engine_gives_the_same_counts(figures, tmp_path):
    (found,) = scale.run_scale([CLIENTS], progress=lambda what, done, total: None)["sizes"]
    for name in ("who", "collect", "collect_again", "class", "client", "sample", "collect_private"):
        assert found[name]["messages"] == figures[name]["messages"]
        assert found[name]["bytes_down"] == figures[name]["bytes_down"]
    assert found["store_bytes"] == figures["store_bytes"]


@pytest.mark.parametrize(("kind", "clients"), [("private", 1100), ("moments", 40), ("centroids", 40)])
def test_the_servers_work_is_that_of_a_real_collection_whose_answers_all_count(kind, clients):
    """Once with more replies than are charged, bound and noted in one event."""
    figures = server_work.measure(clients, kind)
    assert figures["cpu_ms"] > 0 and figures["peak_bytes"] is not None
    parts = 2 if clients > 1000 else 1
    booked = 3 if kind == "private" else 0  # 512 together at most
    received = parts if parts > 1 else 0  # else they are part of the collection's event
    assert figures["events"] == len(["created", "trained", "collected"]) + parts + booked + received
    assert figures["bytes"]["centroids"] > clients * (ROW_BYTES if kind != "private" else 1000)


def test_a_result_of_the_servers_work_becomes_a_table_that_says_which_goal_is_missed():
    run = {"clients": 1000, "kind": "private", "cpu_ms": 0.5, "wall_ms": 1.5, "peak_bytes": 4e8, "open_ms": 0.1}
    result = {"goals": {"ms": 1.0, "peak_bytes": 3e8}, "runs": [{**run, "load": 7.25}, {**run, "wall_ms": 1.0}]}
    result["runs"][1] |= {"peak_bytes": 3e8, "load": 0.1}
    missed, met = (line[5] for line in server_work_table.rows_of(result))
    assert (missed, met) == ("missed: wall, memory", "met")

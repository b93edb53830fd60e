"""Scale: counts that can be known beforehand, over nodes in this process; the engine itself in the slow tests."""

from types import SimpleNamespace

import pytest
import torch
from flwr.clientapp import ClientApp
from tests.cli._in_process import fedup as fedup_command
from tests.flower._grid import LocalGrid

from fedup.bench import scale
from fedup.bench.scale_table import FAR, FLOWER_HEAD, HEAD, far_rows, flower_table, measured_rows, scale_table
from fedup.flower import mount

CLIENTS = 6


@pytest.fixture(scope="module")
def figures() -> dict:
    app = ClientApp()
    mount(app, data=scale.rows_of, model=scale.small_net)
    return scale.measure(LocalGrid(dict.fromkeys(range(100, 100 + CLIENTS), app)), CLIENTS)


@pytest.fixture
def result(figures) -> dict:
    about = {"rows": scale.ROWS, "width": scale.WIDTH, "forgotten": scale.FORGOTTEN, "engine": "none"}
    machine = {"processor": "a processor", "threads": 2, "torch": "2.13.0"}
    return {"about": about, "machine": machine, "code": {"commit": "0123456789", "changed": False}, "sizes": [figures]}


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


def test_tables_have_a_line_for_each_size_and_far_sizes_grow_in_proportion_but_not_requests(result):
    (here,), (far, farther) = measured_rows(result), far_rows(result)
    assert len(here) == len(HEAD) and here[0] == str(CLIENTS)
    assert [far[0], farther[0]] == [f"{clients:,}" for clients in FAR]
    text = scale_table(result)
    assert "Not measured" in text and "commit 0123456" in text
    at = {name: index for index, name in enumerate(HEAD)}
    assert far[at["messages"]] == f"{FAR[0]:,}"
    for name in ("class, s", "client, s", "sample, s", "sample, messages"):
        assert far[at[name]] == here[at[name]]


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


# --- the example app's figures


TRAFFIC = {"messages": 4, "bytes_up": 12_000, "bytes_down": 900}
RESULT = {
    "way": "deployment",
    "nodes": 4,
    "machine": {"processor": "a processor"},
    "code": {"commit": "0123456789", "changed": True},
    "training": {"time_s": 45.2},
    "collection": {"time_s": 12.3, **TRAFFIC},
    "requests": [
        {
            "kind": "sample",
            "time_s": {"ask": 30.0, "fit": 0.5},
            **TRAFFIC,
            "before": {"retain": 0.74, "forget": 0.8},
            "after": {"retain": 0.69, "forget": 0.03},
        }
    ],
}


def test_each_step_has_its_time_messages_bytes_and_stages():
    text = flower_table(RESULT)
    assert "commit 0123456 with local changes" in text and "run.py deployment" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + 3 and all(line.count("|") == len(FLOWER_HEAD) + 1 for line in lines)
    assert lines[3] == "| collect | 12 | 4 | 12.0 kB | 900 B |  |  |  |"
    assert lines[4] == "| forget a sample | 30 | 4 | 12.0 kB | 900 B | 0.74 → 0.69 | 0.80 → 0.03 | ask 30, fit 0.5 |"

"""Faults in real deployments: each ends in a collection without that node, or in a clear error, and nothing stays."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.server.superlink.linkstate.utils import NODE_UNAVAILABLE_ERROR_REASON
from tests.flower._deployment import Deployment, wait_until
from tests.flower._grid import kept_answers
from tests.flower.faulty_app.faulty import task

import fedup

pytestmark = pytest.mark.slow
FAULTS = ["die before", "die during", "", "hang", "refuse", "", "send NaN", "exaggerate", ""]
VICTIM = 5  # dies after its answer
TIMEOUT_S = 60  # for each message a node starts a process: nine need 25 s on two cores that others use, too
SILENT = f"no answer within {TIMEOUT_S} s, asked 1 times"
# Flower gives a node up that was not heard of for a minute: this may be before the time is up, or after.
GONE = [SILENT, f"failed: Flower says {NODE_UNAVAILABLE_ERROR_REASON!r}"]


@pytest.fixture
def deploy(tmp_path, monkeypatch):
    """A deployment, of which nothing runs after the test, however that ended."""
    made = []

    def prepare(nodes):
        made.append(Deployment(tmp_path, monkeypatch, nodes))
        return made[0]

    yield prepare
    for one in made:
        assert one.close() == []


def assert_same_as_in_process(deployment, clients, epsilon=0.0):
    store = fedup.load_centroids(deployment.out / "centroids.safetensors")
    some = tuple(deployment.federation.client(client) for client in clients)
    federation = replace(deployment.federation, clients=some)
    expected = fedup.collect(task.make_model(), federation, privacy=task.privacy(epsilon))
    assert list(store.clients) == clients
    assert store.cells == expected.cells
    for part in ("counts", "vectors") if epsilon else ("counts", "sums", "second"):
        assert torch.equal(*(getattr(own if epsilon else own.total, part) for own in (store, expected)))
    assert answers_on_disk(deployment) == []  # all are in the store now, and nowhere else


def spent_by_nodes(deployment):
    """By client, as the node's own account has it."""
    accounts = {path.stem.removeprefix("account-"): path.read_text() for path in deployment.out.glob("account-*.json")}
    charges = {client: json.loads(text)["charges"] for client, text in accounts.items()}
    return {client: sum(charge["mu"] ** 2 for charge in own) for client, own in charges.items()}


def answers_on_disk(deployment):
    return kept_answers(deployment.out / "answers")


def alive(session):
    """Whether its leader, a SuperNode, runs; one that was killed is a zombie until it is waited for."""
    stat = Path(f"/proc/{session}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_nodes_that_die_hang_refuse_or_lie_are_left_out_and_a_dead_one_is_out_of_use_until_it_answers(deploy):
    deployment = deploy(len(FAULTS))
    deployment.serve("deployment")
    settings = {"faults": ",".join(FAULTS), "timeout": TIMEOUT_S, "least_fraction": 0.25, "samples_of": VICTIM}
    said = deployment.submit("--stream", **settings)
    result = deployment.result(said)

    heard = {client: deployment.asked(client) for client in range(len(FAULTS))}
    clients = {str(asked[0]["node"]): client for client, asked in heard.items()}
    left_out = {clients[node]: why for node, why in result["left_out"].items()}
    assert left_out.pop(0) in GONE and left_out.pop(1) in GONE
    assert left_out.pop(6).startswith("sums is no array of integers")  # NaN
    assert "as long as" in left_out.pop(7)  # it can be read, and disagrees with all others
    assert left_out == {3: SILENT, 4: "refused: the owner said no"}
    assert [client for client, asked in heard.items() if not alive(asked[0]["session"])] == [0, 1, VICTIM]
    assert_same_as_in_process(deployment, [2, VICTIM, 8])

    waits = {"pending": [VICTIM], "out_of_use": [VICTIM]}
    assert result["samples"] == {**waits, "in_force": True, "same_store": True}
    assert [ask["kind"] for ask in heard[VICTIM]] == ["integer moments"] * 2  # dead before it was asked for samples


def test_a_node_whose_key_is_not_registered_is_refused_and_the_others_are_collected(deploy):
    deployment = deploy(5)
    deployment.serve("secure", 4)
    deployment.start_stranger(4)
    said = deployment.submit("--stream", nodes=4, least_fraction=1.0)
    assert deployment.result(said)["left_out"] == {}
    assert deployment.asked(4) == []
    assert_same_as_in_process(deployment, [0, 1, 2, 3])


def test_a_server_that_is_killed_in_the_middle_asks_only_for_what_is_missing(deploy, epsilon=8.0):
    deployment = deploy(4)
    deployment.serve("deployment")
    slow, settings = 2, {"faults": ",,wait", "timeout": 300, "epsilon": epsilon}
    deployment.submit(**settings)
    wait_until(lambda: len(answers_on_disk(deployment)) == 3, 120, "three answers on disk")
    wait_until(lambda: len(deployment.asked(slow)) == 2, 60, "the slow node at work")
    (process,) = deployment.out.glob("server-*")
    os.kill(int(process.read_text()), signal.SIGKILL)
    assert not (deployment.out / "result.json").exists()

    (deployment.out / "go").touch()  # from here on the slow node is as quick as any
    said = deployment.submit("--stream", **settings)
    result = deployment.result(said)
    first, second = int(process.name.removeprefix("server-")), result["run"]
    asked = {client: [ask["run"] for ask in deployment.asked(client)] for client in range(4)}
    assert asked == {client: [first, first, *([second, second] if client == slow else [])] for client in range(4)}
    assert result["messages"] == 2  # a question, and the weights, which a run does not find in the state of another
    assert result["left_out"] == {}
    assert result["spent"] == spent_by_nodes(deployment)
    assert_same_as_in_process(deployment, [0, 1, 2, 3], epsilon)

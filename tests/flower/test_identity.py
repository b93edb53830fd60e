"""Nobody answers as another client, in this run or a later one; a node that restarts with its key is recognised."""

import copy
import json

import pytest
from flwr.app import Context, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from tests.cli._in_process import ok as fedup
from tests.flower._grid import FIRST, LocalGrid, World
from tests.flower._rules import write_rules

from fedup.clients.collect import collect
from fedup.errors import RequestError
from fedup.flower import RunServer
from fedup.run.limits import Limits

FORCED = Limits(max_loss=None, force=True)


class KeyedGrid(LocalGrid):
    """Nodes with keys, as a SuperLink that has checked them says; `move` gives a client's node another number."""

    def __init__(self, world: World, keys: dict[int, bytes]) -> None:
        super().__init__({FIRST + client: world.app(client) for client in world.federation.ids})
        self.keys = keys

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.apps]

    def move(self, old: int, new: int, *, key: bytes | None) -> None:
        self.apps[new], context = self.apps.pop(old), self.contexts.pop(old)
        self.contexts[new] = Context(0, new, context.node_config, RecordDict(), {})
        self.keys = {**{node: own for node, own in self.keys.items() if node != old}, **({new: key} if key else {})}


@pytest.fixture
def grid(world) -> KeyedGrid:
    return KeyedGrid(world, {FIRST + client: b"key %d" % client for client in world.federation.ids})


def server(world, folder, **settings) -> RunServer:
    made = RunServer(folder / "run", world.blank, **settings)
    made.keep(world.model)
    return made


def nodes(folder) -> list[dict]:
    return json.loads(fedup("status", "--run", folder / "run", "--json").out)["nodes"]


def test_a_restarted_node_with_its_key_is_recognised_and_one_with_another_key_is_left_out(world, grid, tmp_path):
    first = server(world, tmp_path, authenticated=True)
    first.collect(world.contact(grid))
    assert [(own["client"], own["by"]) for own in nodes(tmp_path)] == [(client, "key") for client in range(4)]
    assert "all of them by key" in fedup("status", "--run", tmp_path / "run").out.replace("\n", " ")

    grid.move(FIRST + 2, 900, key=b"key 2")  # a new number at the SuperLink, as after its restart
    later, contact = server(world, tmp_path, authenticated=True), world.contact(grid)
    later.unlearn(world.samples(c2=30), contact, limits=FORCED)
    assert contact.left_out == {} and later.state.active

    grid.move(900, 901, key=b"a stranger's")  # in the same place, under the same client number
    later, before = server(world, tmp_path, authenticated=True), nodes(tmp_path)
    contact = world.contact(grid, least_fraction=0.5)
    assert set(later.unlearn(world.samples(c2=40), contact, limits=FORCED).report.pending) == {2}
    assert "bound to another key" in contact.left_out[901] and list(contact.clients) == [0, 1, 3]
    assert nodes(tmp_path) == before

    grid.move(901, 902, key=None)
    contact = world.contact(grid, least_fraction=0.5)
    assert set(later.unlearn(world.samples(c2=45), contact, limits=FORCED).report.pending) == {2}
    assert "no key" in contact.left_out[902]


def test_a_node_cannot_change_its_number_and_an_impostor_does_not_end_the_collection(world, grid, tmp_path):
    made = server(world, tmp_path, authenticated=True)
    made.collect(world.contact(grid))
    grid.apps[FIRST + 1] = world.app(1, client=lambda context: 7)
    contact = world.contact(grid, least_fraction=0.5)
    assert set(made.unlearn(world.samples(c1=30), contact, limits=FORCED).report.pending) == {1}
    assert contact.left_out == {FIRST + 1: "it was client 1 before, and says now that it is 7"}


def test_a_node_cannot_compute_the_number_of_a_message_to_another_node_and_so_not_answer_it(world, grid):
    """Flower's SuperLink takes a reply for whoever knows the number, which is a hash of the message."""
    collect(world.model, world.contact(grid))
    asked = {node: message for node, message in grid.sent if message.metadata.group_id == "integer moments"}
    mine, other = asked[FIRST], asked[FIRST + 1]
    assert mine.content.object_id == other.content.object_id, "premise: the same question"
    guess = copy.deepcopy(mine)
    for part in ("dst_node_id", "created_at", "message_type"):  # all that a node may know or try
        guess.metadata.__dict__[f"_{part}"] = getattr(other.metadata, part)
    assert guess.object_id != other.object_id
    guess.metadata.ttl = other.metadata.ttl
    assert guess.object_id == other.object_id  # nothing else was different


def test_without_keys_numbers_belong_to_node_ids_the_report_says_weaker_and_names_open_nodes(
    world, grid, tmp_path, caplog
):
    rules = write_rules(tmp_path / "rules.toml")
    grid.contexts[FIRST].node_config = {"partition-id": 0, "fedup-rules": str(rules)}
    made, contact = server(world, tmp_path), world.contact(grid)
    made.collect(contact)
    assert caplog.text.count("3 of 4 nodes are open") == 1
    labels = contact.node_rules
    assert len(labels[0]) == 16 and [labels[client] for client in (1, 2, 3)] == ["open"] * 3
    said = " ".join(fedup("status", "--run", tmp_path / "run").out.split())
    assert "4 of them by node id only, which is weaker than by key; OPEN, without rules of their own: 1, 2, 3" in said

    grid.move(FIRST + 2, 900, key=b"key 2")
    contact = world.contact(grid, least_fraction=0.5)
    assert 2 in made.unlearn(world.samples(c2=30), contact, limits=FORCED).report.pending
    assert "RunServer.release(2)" in contact.left_out[900]
    made.release(2)
    made.unlearn(world.samples(c2=35), world.contact(grid), limits=FORCED)
    assert {own["client"]: own["identity"] for own in nodes(tmp_path)}[2] == "900"
    assert "sound" in fedup("verify", "--run", tmp_path / "run").out
    with pytest.raises(RequestError, match="bound to no node"):
        made.release(17)

"""Features are read once and stay in the node's state: the same bits as anew, and nothing of what is forgotten."""

import json

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from tests._asking import ask_one
from tests.flower._grid import World, digits
from tests.flower._node import CLIENT, HOW, Node, assert_summary, centroids, in_process
from torch import nn

from fedup import fingerprint
from fedup.flower.policy import Policy
from fedup.flower.wire import record_of, tensor_of
from fedup.privacy import DP
from fedup.statistics.centroids import CentroidConfig

EVERY = frozenset(range(10))
PRIVATE = DP(2.0, clip=4.0, replay_seed=7)


class Counting(nn.Module):
    """A model that counts the rows that pass its first layer, in all its copies."""

    rows = 0

    @classmethod
    def of(cls, model: nn.Module) -> nn.Module:
        def count(module: nn.Module, args: tuple) -> None:
            cls.rows += len(args[0])

        model.conv1.register_forward_pre_hook(count)
        return model


@pytest.fixture
def node(world) -> Node:
    Counting.rows = 0
    return Node(world, world.app(CLIENT, model=lambda: Counting.of(world.blank())))


def rows_read(node: Node, **question) -> int:
    """By one question, which must be answered."""
    before = Counting.rows
    assert node.summarize(**question).status == "ok"
    return Counting.rows - before


def expected(world: World, labels=EVERY, excluded=(), how=HOW, cut="head"):
    return ask_one(in_process(world), CLIENT, centroids(how, cut=cut, labels=labels, excluded=excluded))


def kept(node: Node) -> torch.Tensor:
    """By place of the row; NaN where it is not kept."""
    return tensor_of(node.context.state.array_records["fedup-features"]["values"], "values")


def test_a_second_question_reads_no_row(world, node):
    first = rows_read(node)
    assert first >= len(world.rows(CLIENT))
    again = Node(world, node.app)  # another process with the same state
    again.context = node.context
    for how in (HOW, CentroidConfig(0.3), CentroidConfig(1.0, 0.2, 9)):
        assert rows_read(again, how=how) <= 4  # a look at how the model is made, with one row each
        assert_summary(again.summarize(how), expected(world, how=how))


def test_a_sample_request_is_answered_from_what_is_kept_to_the_bit(world, node):
    samples = world.rows(CLIENT)[::7].tolist()
    rows_read(node)
    assert rows_read(node, excluded=samples) <= 4
    assert_summary(node.summarize(excluded=samples), expected(world, excluded=samples))


def test_features_of_forgotten_rows_leave_the_state(world, node):
    node.summarize()
    rows = world.rows(CLIENT)
    gone = torch.zeros(len(rows), dtype=torch.bool)
    gone[::7] = True
    assert kept(node).isfinite().all()
    node.summarize(excluded=rows[gone].tolist())
    assert kept(node)[gone].isnan().all() and kept(node)[~gone].isfinite().all()
    assert_summary(node.summarize(), expected(world))  # the request was taken back: they are read again
    assert kept(node).isfinite().all()


def test_other_rows_are_read_anew(world):
    rows = world.rows(CLIENT)
    held = {"x": world.federation.x[rows], "y": world.federation.y[rows]}
    node = Node(world, world.app(CLIENT, data=lambda context: (held["x"], held["y"])))
    before = node.summarize().arrays["vectors"]
    held["x"] = held["x"].clone()
    held["x"][5] += 0.25
    fresh = Node(world, node.app)
    assert not torch.equal(before, fresh.summarize().arrays["vectors"])
    assert torch.equal(node.summarize().arrays["vectors"], fresh.summarize().arrays["vectors"])
    held |= {"x": held["x"][:40], "y": held["y"][:40]}
    named = Node(world, world.app(CLIENT, data=lambda context: (held["x"], held["y"]), ids=None))
    named.context = node.context
    assert named.summarize(excluded=[3]).status == "ok"
    assert len(kept(named)) == 40


def test_another_model_or_cut_is_read_anew(world, node):
    other = digits(1).model
    node.summarize()
    assert_summary(node.summarize(cut="fc2"), expected(world, cut="fc2"))
    by_other = node.ask("summarize", other, cut="head", how={"ratio": 0.5}, labels=None, without=[], excluded=[])
    fresh = Node(world, world.app(CLIENT))
    same = fresh.ask("summarize", other, cut="head", how={"ratio": 0.5}, labels=None, without=[], excluded=[])
    assert by_other.base == fingerprint(other)
    assert torch.equal(by_other.arrays["vectors"], same.arrays["vectors"])


def test_noisy_statistics_are_made_of_rows_that_are_read_anew_and_their_features_are_not_kept(world, node):
    fresh = Node(world, world.app(CLIENT, policy=Policy(most_kept=0))).summarize(PRIVATE).arrays["vectors"]
    assert torch.equal(node.summarize(PRIVATE).arrays["vectors"], fresh)
    assert "fedup-features" not in node.context.state
    first = rows_read(node, how=PRIVATE)
    node.summarize()  # centroids: their features are kept
    assert rows_read(node, how=PRIVATE) == first  # it takes as long as before
    assert torch.equal(node.summarize(PRIVATE).arrays["vectors"], fresh)


@pytest.mark.parametrize("most", [0, 1000])
def test_no_more_is_kept_than_may_be(world, most):
    node = Node(world, world.app(CLIENT, policy=Policy(most_kept=most)))
    assert node.summarize().status == "ok"
    assert not {"fedup-features", "fedup-features-of"} & set(node.context.state)


@pytest.mark.parametrize("damage", ["values", "shape", "no text", "no record", "half of it"])
def test_a_damaged_state_is_read_anew(world, node, damage):
    node.summarize()
    state, about = node.context.state, json.loads(node.context.state["fedup-features-of"]["json"])
    if damage == "values":
        state["fedup-features"] = record_of({"values": kept(node)[:, 1:]})
    elif damage == "shape":
        state["fedup-features-of"] = ConfigRecord({"json": json.dumps({**about, "shape": "nothing"})})
    elif damage == "no text":
        state["fedup-features-of"] = ConfigRecord({"json": "nothing"})
    elif damage == "no record":
        del state["fedup-features"]
    else:
        state["fedup-features"] = ArrayRecord({})
    assert_summary(node.summarize(), expected(world))
    samples = world.rows(CLIENT)[:3].tolist()
    assert_summary(node.summarize(excluded=samples), expected(world, excluded=samples))

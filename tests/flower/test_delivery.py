"""Nodes that fail, refuse, are late or come back: a store without them, or a clear error; never a wrong store."""

import copy
import math
from dataclasses import replace
from unittest import TestCase

import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._asking import ask_one
from tests._forced import unlearn
from tests.flower._contact import (
    ODD,
    Carried,
    assert_is_part_of,
    assert_same_store,
    bytes_of,
    flower_error,
    losing,
    refused,
    spoiling,
    untouched,
)
from tests.flower._grid import FIRST, Clock, LocalGrid, World, changed, collect, digits, told, with_answer

from fedup import Centroids, FilterConfig, Forget, plug
from fedup.clients.labels import LabelsQuestion, WhoQuestion
from fedup.errors import ContactError, RequestError, SettingError
from fedup.flower import Delivery, Intake
from fedup.flower.wire import Answer
from fedup.statistics.centroids import CentroidConfig

pytestmark = pytest.mark.usefixtures("clock")
BOTH = FilterConfig(rank=8, steps=4, filter="both")


@pytest.fixture(scope="module")
def warm_nodes(world) -> LocalGrid:
    """Nodes that hold the weights already."""
    grid = world.grid()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedup.flower.messaging.time", Clock())
        collect(world.model, world.contact(grid))
    return grid


@pytest.fixture
def warm(warm_nodes) -> LocalGrid:
    """The same for one test, which may spoil what it likes."""
    warm_nodes.sent.clear()
    yield warm_nodes
    warm_nodes.spoil = untouched


def assert_left_out(world: World, plain: Centroids, grid: LocalGrid) -> str:
    """Node 102 is of no use: why, as the server says and logs; where all are needed it is an error."""
    contact = world.contact(grid, least_fraction=0.5)
    with TestCase().assertLogs("fedup.flower", "WARNING") as logged:
        store = collect(world.model, contact)
    assert_is_part_of(store, plain, {0, 1, 3})
    assert list(contact.left_out) == [ODD]
    assert [text for text in logged.output if f"node {ODD}" in text and contact.left_out[ODD] in text]
    with pytest.raises(ContactError, match=rf"3 of 4 .*node {ODD}: "):
        collect(world.model, world.contact(grid, intake=Intake(most_left_out=0.0)))
    return contact.left_out[ODD]


def with_content(reply: Message, content: RecordDict) -> Message:
    reply.content = content
    return reply


def with_bytes(reply: Message, size: int) -> Message:
    """A reply of exactly so many bytes."""
    header = 127 + len("zeros")  # of the array that is added
    return changed(reply, zeros=torch.zeros(size - bytes_of([reply]) - header, dtype=torch.uint8))


FAULTS = {
    "Flower says 'out of memory'": flower_error,
    "NaN or infinity": lambda reply: changed(reply, vectors=told(reply).arrays["vectors"] * math.nan),
    "which client it is": lambda reply: changed(reply, {"client": True}),
    "for another model": lambda reply: with_answer(reply, replace(told(reply), base="0" * 64)),
    "bytes came": lambda reply: with_bytes(reply, Delivery.most_bytes + 1),
    "refused: not on Sundays": refused,
    "failed: RuntimeError": lambda reply: with_answer(reply, Answer("failed", told(reply).base, reason="RuntimeError")),
    "needs weights": lambda reply: with_answer(reply, Answer("needs weights", told(reply).base)),
    "neither what it is": lambda reply: with_answer(reply, replace(told(reply), status="fine")),
    "no readable fedup record": lambda reply: with_content(reply, RecordDict({"m": MetricRecord({"loss": 1.0})})),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_node_whose_answer_is_of_no_use_is_left_out_for_a_reason(world, plain, warm, reason):
    warm.spoil = spoiling(FAULTS[reason])
    assert reason in assert_left_out(world, plain, warm)


def test_a_node_that_raises_or_has_another_model_is_left_out(world, plain):
    for app in (ClientApp(), world.app(2, model=lambda: torch.nn.Linear(784, 10))):
        grid = world.grid()
        grid.apps[ODD] = app
        assert_left_out(world, plain, grid)


@pytest.mark.parametrize("kind", ["labels", "summarize", "sketch", "spreads", "moments"])
def test_a_request_that_meets_a_bad_answer_fails_and_changes_nothing(world, plain, warm, kind):
    contact, store, plugged = world.contact(warm, retries=0, timeout_s=0.1), copy.deepcopy(plain), plug(world.model)
    warm.spoil = spoiling(lambda reply: changed(reply, {"labels": 0}, **dict.fromkeys(told(reply).arrays)), kind=kind)
    with pytest.raises(ContactError, match="Client 2 gave no answer of use"):
        unlearn(plugged, store, world.samples(c1=21, c2=40), clients=contact, config=BOTH)
    assert_same_store(store, plain)
    assert (plugged.requests, plugged.served) == (frozenset(), None)
    warm.spoil = untouched
    sample = int(world.rows(1)[0])
    assert ask_one(contact, 1, LabelsQuestion(frozenset([sample])))  # what waited for the request is nobody else's
    if kind == "moments":
        unlearn(plugged, store, world.samples(c1=21, c2=40), clients=contact, config=BOTH)
        assert plugged.served is not None


@pytest.mark.parametrize("forget", [(), [Forget.clients([0])]], ids=["known before", "asked who it is first"])
def test_a_client_that_was_met_but_is_left_out_of_a_collection_is_unknown_to_its_store(world, forget):
    grid = world.grid()
    contact = world.contact(grid, least_fraction=0.5, retries=0, timeout_s=0.1)
    assert list(contact.clients) == [0, 1, 2, 3]
    grid.spoil = losing(ODD)
    store, plugged = collect(world.model, contact, forget=forget), plug(world.model)
    assert 2 not in {cell.client for cell in store.cells}
    with pytest.raises(RequestError):  # else client 2 counts as forgotten, by a filter that knows nothing of it
        unlearn(plugged, store, [*forget, Forget.clients([2, 3])], config=BOTH)
    assert plugged.requests == frozenset()


def test_no_answer_of_use_is_an_error_whatever_the_least_fraction_and_so_is_no_node(world):
    with pytest.raises(ContactError, match="0 of 4"):
        collect(world.model, world.contact(world.grid(lambda node, reply: None), least_fraction=1e-9))
    for forget in ((), [Forget.clients([0])]):
        with pytest.raises(ContactError, match="No node is connected"):
            collect(world.model, world.contact(LocalGrid({})), forget=forget)


def test_the_least_fraction_is_met_by_just_so_many(world):
    """0.28 of 25 are 7: in floating point a little more."""
    apps = {node: world.app(0, client=lambda context, node=node: node) for node in range(25)}
    assert 0.28 * 25 > 7, "premise"
    for answering in (7, 6):
        grid = LocalGrid(apps, lambda node, reply, least=answering: reply if node < least else None)
        contact = world.contact(grid, least_fraction=0.28, retries=0)
        if answering == 7:
            assert [client for client, _ in contact.ask_everyone(WhoQuestion())] == list(range(7))
        else:
            with pytest.raises(ContactError, match="6 of 25"):
                contact.ask_everyone(WhoQuestion())
            assert list(contact.clients) == list(range(6))  # which is enough for requests


bad = st.floats(max_value=0, exclude_max=True) | st.just(math.nan)


@settings(max_examples=20, deadline=None)
@given(
    st.fixed_dictionaries({"timeout_s": bad | st.just(0.0)})
    | st.fixed_dictionaries({"retries": st.integers(max_value=-1)})
    | st.fixed_dictionaries({"least_fraction": bad | st.just(0.0) | st.floats(1, exclude_min=True)})
    | st.fixed_dictionaries({"num_classes": st.integers(max_value=0)})
)
def test_settings_out_of_range_are_refused(setting):
    world = digits()
    with pytest.raises(SettingError, match="must be "):
        world.contact(LocalGrid({}), **setting)


@pytest.mark.parametrize("code", [None, ErrorCode.NODE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE])
def test_a_node_that_replies_at_a_later_try_is_part_of_the_store(world, plain, clock, code):
    seen, lost = [], 2

    def spoil(node, reply):
        seen.append(node)
        if node == ODD and seen.count(ODD) <= lost:
            return None if code is None else flower_error(reply, code)
        return reply

    grid = world.grid(spoil)
    contact = world.contact(grid)
    assert_same_store(collect(world.model, contact), plain)
    assert (contact.left_out, clock.pauses) == ({}, [1.0, 2.0])
    assert contact.traffic.messages == len(grid.sent) == 6 + lost + 2  # of others; lost; its question and weights


def test_a_message_that_could_not_be_sent_is_sent_again_and_does_not_count(world, plain):
    grid = world.grid()
    push, unsent, carried = grid.push_messages, [ODD], Carried(grid)

    def push_messages(messages):
        kept = [push([message])[0] if message.metadata.dst_node_id not in unsent else "" for message in messages]
        unsent.clear()
        return kept

    grid.push_messages = push_messages
    contact = world.contact(grid)
    assert_same_store(collect(world.model, contact), plain)
    assert (contact.traffic.messages, contact.traffic.bytes_down) == (len(grid.sent), carried.down) and not unsent


def test_pauses_double_and_end_at_half_a_minute(world, clock):
    grid = world.grid(lambda node, reply: flower_error(reply, ErrorCode.NODE_UNAVAILABLE) if node == ODD else reply)
    with pytest.raises(ContactError, match="no answer within 2 s, asked 9 times"):
        collect(world.model, world.contact(grid, retries=8))
    assert clock.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert len([node for node, _ in grid.sent if node == ODD]) == 9


def test_without_retries_and_after_a_refusal_nobody_is_asked_again(world, clock):
    grid = world.grid(lambda node, reply: None)
    with pytest.raises(ContactError, match="asked 1 times"):
        collect(world.model, world.contact(grid, retries=0))
    assert (len(grid.sent), clock.pauses) == (4, [])
    grid = world.grid(spoiling(refused))
    with pytest.raises(ContactError):
        collect(world.model, world.contact(grid, retries=5))
    assert (len(grid.sent), clock.pauses) == (8, [])


class Late(LocalGrid):
    """A node's reply to a collection is held back, and comes with those of the next wave, before them; and all replies
    come twice."""

    def __init__(self, apps) -> None:
        super().__init__(apps, self._keep)
        self.held: list[Message] = []
        self.late: list[Message] = []

    def _keep(self, node, reply):
        if node == ODD and told(reply).status == "ok" and reply.metadata.group_id == "summarize" and not self.held:
            self.held.append(reply)
            return None
        return reply

    def push_messages(self, messages):
        self.late = list(self.held)
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        return [reply for reply in [*self.late, *super().pull_messages(message_ids)] for _ in range(2)]


def test_late_and_repeated_replies_are_taken_for_the_question_that_they_answer(world, plain):
    grid = Late({FIRST + i: world.app(i) for i in range(4)})
    assert_same_store(collect(world.model, world.contact(grid)), plain)
    assert len(grid.held) == 1, "premise"
    grid = Late({FIRST + i: world.app(i) for i in range(4)})
    contact = world.contact(grid, retries=0, least_fraction=0.5)
    assert set(collect(world.model, contact, statistics=CentroidConfig(seed=0)).clients) == {0, 1, 3}
    other = {"statistics": CentroidConfig(seed=1)}
    again = collect(world.model, world.contact(grid), **other)
    assert_same_store(again, collect(world.model, world.federation, **other))


def test_a_node_that_is_not_connected_any_more_is_missing(world):
    grid = world.grid()
    contact = world.contact(grid)
    collect(world.model, contact)
    del grid.apps[ODD]
    with pytest.raises(ContactError, match=r"3 of 4 nodes.*not connected any more"):
        collect(world.model, contact)
    contact = world.contact(grid)
    assert collect(world.model, contact).clients == (0, 1, 3)
    assert contact.left_out == {}  # this one has never met it


def test_a_client_that_comes_back_by_another_number_is_the_same(world):
    grid = world.grid()
    contact = world.contact(grid)
    store = collect(world.model, contact)
    grid.apps[300], grid.contexts[300] = grid.apps.pop(ODD), grid.contexts.pop(ODD)
    assert_same_store(collect(world.model, contact), store)
    assert ask_one(contact, 2, LabelsQuestion(frozenset([int(world.rows(2)[0])])))
    grid.apps[301], grid.contexts[301] = grid.apps[300], grid.contexts[300]
    assert_same_store(collect(world.model, contact), store)
    assert "Two nodes say they are client 2" in contact.left_out[301]


def test_a_node_that_joined_late_is_asked_too(world):
    grid = world.grid()
    late, context = grid.apps.pop(FIRST + 3), grid.contexts[FIRST + 3]
    contact = world.contact(grid)
    assert list(contact.clients) == [0, 1, 2]
    grid.apps[FIRST + 3], grid.contexts[FIRST + 3] = late, context
    assert collect(world.model, contact, forget=[Forget.clients([0])]).clients == (0, 1, 2, 3)
    assert list(contact.clients) == [0, 1, 2, 3]


def test_two_new_nodes_that_claim_one_client_are_both_left_out_and_a_known_one_is_believed(world):
    grid = world.grid(spoiling(lambda reply: changed(reply, {"client": 0})))
    contact = world.contact(grid, least_fraction=0.1)
    assert collect(world.model, contact).clients == (1, 3)
    assert {"Two nodes say they are client 0" in why for why in contact.left_out.values()} == {True}
    late = grid.apps.pop(ODD)
    contact = world.contact(grid, least_fraction=0.1)
    assert contact.clients == [0, 1, 3]
    grid.apps[ODD] = late
    assert collect(world.model, contact).clients == (0, 1, 3) and set(contact.left_out) == {ODD}


def test_a_node_that_becomes_another_client_is_left_out(world):
    """It was client 2 when asked who it is, and says it is 7, which nobody else is, at the collection."""
    grid = world.grid(spoiling(lambda reply: changed(reply, {"client": 7})))
    contact = world.contact(grid, least_fraction=0.5)
    assert contact.clients
    assert collect(world.model, contact).clients == (0, 1, 3)
    assert contact.silent == {2: f"Node {ODD} was client 2 before, and says now that it is 7."}
    grid.spoil = spoiling(lambda reply: changed(reply, {"client": 7}), kind="labels")
    with pytest.raises(ContactError, match="it was client 2 before, and says now that it is 7"):
        ask_one(contact, 2, LabelsQuestion(frozenset([int(world.rows(2)[0])])))

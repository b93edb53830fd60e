"""One hostile node: whatever it sends, a collection ends, without that node or with it. What the others sent is stored
the same to the bit."""

import copy
import json
import math
import tempfile
import tracemalloc
from dataclasses import replace
from functools import cache
from typing import ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.flower._contact import NODES, ODD, spoiling
from tests.flower._grid import FIRST, Clock, LocalGrid, World, be_inside_a_run, changed, digits, told, with_answer

import fedup
from fedup import DP, Budget, FilterConfig, Forget, Ledger, plug, unlearn
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.errors import BudgetError, ContactError, DataError, HarmError
from fedup.filters.delta import changed_weights
from fedup.flower import Intake, declared_rows, messaging
from fedup.flower.answer_log import AnswerLog
from fedup.flower.wire import Answer, read_answer, read_ask
from fedup.statistics.moment_store import MomentStore

WAYS = {
    "centroids": {"statistics": "centroids"},
    "moments": {"statistics": "moments"},
    "private": {"privacy": DP(8.0, clip="unit", replay_seed=0)},
}
OTHERS = [node - FIRST for node in NODES if node != ODD]
HUGE = [10**400, -(10**400), 2**63, 2**53, 1e308, float("nan"), float("inf"), -1, 0, 1]
NESTED = json.loads("[" * 900 + "]" * 900)  # a little deeper, and it cannot be read
JUNK = st.sampled_from(
    [*HUGE, None, True, "", "x" * 5000, [], {}, [[]], [None], {"": 0}, "\ud800", {"\ud800": 0}, [10**30] * 9, NESTED]
)
ARRAYS = {
    "gone": None,
    "empty": lambda array: array[:0],
    "longer": lambda array: np.concatenate([array, array]),
    "flat": lambda array: array.ravel(),
    "scalar": lambda array: np.array(7.0),
    "nan": lambda array: np.full(array.shape, np.nan, np.float32),
    "huge": lambda array: np.full(array.shape, 3e37, np.float32),
    "whole": lambda array: np.full(array.shape, 255, np.uint8),
    "int64": lambda array: np.full(array.shape, 2**62, np.int64),
    "complex": lambda array: array.astype(np.complex64),
    "text": lambda array: np.full(array.shape, "x"),
    "objects": lambda array: np.full(array.shape, None),
    "half": lambda array: array.astype(np.float16),
    "bool": lambda array: np.ones(array.shape, bool),
    "scaled": lambda array: (array.astype(np.float64) * -1e3).astype(array.dtype),
}


class ReplayedGrid(LocalGrid):
    """Nodes work once for each question; then the same replies are spoilt again and again."""

    known: ClassVar[dict] = {}

    def _reply(self, node: int, message: Message) -> Message | None:
        ask = read_ask(message.content)
        name = node, ask.digest, ask.weights is not None
        if name not in self.known:
            self.known[name] = copy.deepcopy(self.apps[node](message, self.contexts[node]).content)
        reply = Message(copy.deepcopy(self.known[name]), reply_to=message)
        return self.spoil(node, reply)


def grid_of(world: World, change) -> ReplayedGrid:
    def spoil(node: int, reply: Message) -> Message:
        return change(reply) if node == ODD and told_ok(reply) else reply

    grid = world.grid()
    return ReplayedGrid(grid.apps, spoil)


def told_ok(reply: Message) -> bool:
    return reply.metadata.group_id != "who" and "arrays" in reply.content.array_records


@cache
def honest(way: str):
    world = digits()
    return fedup.collect(world.model, world.contact(grid_of(world, lambda reply: reply)), **WAYS[way])


@pytest.fixture(autouse=True, scope="module")
def nobody_waits():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messaging, "time", Clock())
        yield


@st.composite
def spoilt(draw):
    """A change of one part of a message: a detail at any depth, the text around them, or an array."""
    kind, junk, where = (
        draw(st.sampled_from(["detail", "text", "more", "array"])),
        draw(JUNK),
        draw(st.integers(0, 10**6)),
    )
    make = draw(st.sampled_from(sorted(ARRAYS)))

    def change(reply: Message) -> Message:
        record = reply.content.config_records["fedup"]
        text = json.loads(record["json"])
        if kind == "array":
            arrays = reply.content.array_records["arrays"]
            name = sorted(arrays)[where % len(arrays)]
            kept = {key: array for key, array in arrays.items() if key != name}
            if ARRAYS[make] is not None:
                numbers = ARRAYS[make](arrays[name].numpy())
                plain = numbers.dtype.kind != "O"
                kept[name] = Array(numbers) if plain else Array("object", numbers.shape, "numpy.ndarray", b"\x93NUMPY")
            reply.content.array_records["arrays"] = ArrayRecord(kept)
            return reply
        if kind == "more":
            text["details"][str(junk)[:9]] = junk
        elif kind == "text":
            text[sorted(text)[where % len(text)]] = junk
        else:
            inside, key = text, "details"
            while isinstance(inside[key], dict | list) and inside[key] and (key == "details" or where % 3):
                inside, where_ = inside[key], where
                keys = sorted(inside) if isinstance(inside, dict) else range(len(inside))
                key = keys[where_ % len(keys)]
                if not isinstance(inside[key], dict | list):
                    break
            inside[key] = junk
        reply.content.config_records["fedup"] = ConfigRecord({"json": json.dumps(text)})
        return reply

    return change


@pytest.mark.parametrize("way", WAYS)
@settings(
    max_examples=30, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(change=spoilt(), on_disk=st.booleans())
def test_whatever_one_node_sends_the_others_part_of_the_store_is_the_same_to_the_bit(way, tmp_path, change, on_disk):
    world, whole = digits(), honest(way)
    folder = tempfile.mkdtemp(dir=tmp_path) if on_disk else None
    contact = world.contact(grid_of(world, change), least_fraction=0.5, retries=0, folder=folder)
    assert contact.clients == [0, 1, 2, 3]  # from here on numbers are known
    store = fedup.collect(world.model, contact, **WAYS[way])
    assert set(contact.left_out) == ({ODD} if list(store.clients) == OTHERS else set())
    assert set(store.clients) in ({0, 1, 2, 3}, set(OTHERS))
    for client in OTHERS:
        assert [cell.label for cell in store.cells_of(client)] == [cell.label for cell in whole.cells_of(client)]
        for cell in whole.cells_of(client):
            for mine, theirs in zip(store.take(store.cell(cell.name)), whole.take(cell), strict=True):
                assert torch.equal(mine, theirs)
        if isinstance(store, MomentStore):
            assert torch.equal(store.parts[client].second, whole.parts[client].second)
    if isinstance(store, MomentStore):
        assert store.retained(Forget.clients([ODD - FIRST])) == whole.retained(Forget.clients([ODD - FIRST]))


def test_lies_about_grid_rows_and_number_do_not_end_a_collection_of_moments():
    world = digits()
    for lie in ({"shortened": 2**52}, {"unreported": 2**52}, {"client": 2**63}, {"client": 2**64 - 1}, {"few": [10]}):
        grid = grid_of(world, lambda reply, lie=lie: changed(reply, lie))
        contact = world.contact(grid, least_fraction=0.5)
        store = fedup.collect(world.model, contact, statistics="moments")
        assert set(contact.left_out) == {ODD} and list(store.clients) == OTHERS, lie
        assert store.how == honest("moments").how


def longer(reply: Message) -> Message:
    return changed(reply, vectors=told(reply).arrays["vectors"] * 1e3)


def test_a_policy_decides_what_becomes_of_a_node_that_disagrees_and_it_is_named_in_any_case():
    world = digits()
    for policy, kept in (("leave_out", False), ("report", True), ("off", True)):
        contact = world.contact(grid_of(world, longer), least_fraction=0.5, intake=Intake(policy))
        store = fedup.collect(world.model, contact, statistics="centroids")
        assert (ODD - FIRST in store.clients) is kept is (ODD not in contact.left_out)
        assert (ODD in contact.flagged) is (policy != "off")
        assert (ODD - FIRST in contact.clients) is kept


def test_no_answer_of_one_node_ends_a_collection_where_all_have_to_answer_but_silence_does():
    """The default settings: a node that answers nonsense is left out; one that does not answer is missed."""
    world = digits()
    nonsense = {
        "times as long": longer,
        "deep": lambda reply: with_text(reply, lambda text: text[:-1] + ', "x": ' + "[" * 99 + "]" * 99 + "}"),
        "readable": lambda reply: with_text(reply, lambda text: text[:-1] + ', "x": ' + "[" * 10**5),
        "another model": lambda reply: with_answer(reply, replace(told(reply), base="0" * 64)),
        "missing": lambda reply: changed(reply, vectors=None),
        "Two nodes": lambda reply: changed(reply, {"client": 0}),
    }
    for why, change in nonsense.items():
        contact = world.contact(grid_of(world, change))
        store = fedup.collect(world.model, contact, statistics="centroids")
        assert set(OTHERS[1:]) <= set(store.clients) <= set(OTHERS) and contact.left_out[ODD], why
        if why != "Two nodes":  # else the other one is left out, too, unless it was met before
            assert list(store.clients) == OTHERS and why in contact.left_out[ODD], why
    strict = world.contact(grid_of(world, longer), intake=Intake(most_left_out=0.0))
    with pytest.raises(ContactError, match="times as long"):  # the error says which node it is
        fedup.collect(world.model, strict, statistics="centroids")
    for reply in (None, Answer("refused", "", reason="no"), Answer("failed", "", reason="no")):
        spoil = lambda node, told, reply=reply: told if node != ODD else reply and with_answer(told, reply)  # noqa: E731
        with pytest.raises(ContactError, match="3 of 4 nodes"):
            fedup.collect(world.model, world.contact(world.grid(spoil), retries=0), statistics="centroids")


def test_reasons_of_a_node_are_one_line_without_control_characters():
    world, caught = digits(), "x\n\x1b[2Jnode 100 is left out: \u202e" + "y" * 10**5
    lies = [
        lambda reply: with_answer(reply, Answer("refused", told(reply).base, reason=caught)),
        lambda reply: changed(reply, {}, **{caught: torch.ones(1, dtype=torch.complex64)}),
    ]
    for lie in lies:
        contact = world.contact(grid_of(world, lie), least_fraction=0.5)
        fedup.collect(world.model, contact, statistics="centroids")
        assert contact.left_out[ODD].isprintable() and len(contact.left_out[ODD]) < 1000


def with_text(reply: Message, change) -> Message:
    record = reply.content.config_records["fedup"]
    reply.content.config_records["fedup"] = ConfigRecord({"json": change(record["json"])})
    return reply


def test_a_node_reports_no_more_rows_than_it_declared_in_training():
    world = digits()
    rows = {FIRST + client: len(world.rows(client)) for client in world.federation.ids}
    for way in WAYS:
        for declared in (rows, rows | {ODD: rows[ODD] // 4}):
            contact = world.contact(
                grid_of(world, lambda reply: reply), least_fraction=0.5, intake=Intake(declared_rows=declared)
            )
            fedup.collect(world.model, contact, **WAYS[way])
            assert set(contact.left_out) == ({ODD} if declared[ODD] < rows[ODD] else set()), way


def test_an_answer_after_the_collection_is_compared_with_it():
    world, request = digits(), digits().samples(c2=3)
    plugged, grid = plug(world.model), world.grid()
    contact = world.contact(grid)
    store = fedup.collect(world.model, contact, statistics="centroids")
    before = store.vectors.clone()
    grid.spoil = lambda node, reply: longer(reply) if reply.metadata.group_id == "summarize" else reply
    with pytest.raises(ContactError, match=r"Client 2 gave no answer of use: its features are .* times as long"):
        unlearn(plugged, store, request, clients=contact)
    assert torch.equal(store.vectors, before) and plugged.served is None


def test_a_long_reply_is_refused_without_a_copy_of_it():
    world, kept = digits(), []

    def pad(reply: Message) -> Message:
        record = reply.content.config_records["fedup"]
        reply.content.config_records["fedup"] = ConfigRecord({"json": record["json"] + " " * 40_000_000})
        kept.append(reply)
        return reply

    fedup.collect(world.model, world.contact(grid_of(world, pad), least_fraction=0.5), statistics="moments")
    tracemalloc.start()
    with pytest.raises(DataError, match="bytes came"):
        read_answer(kept[0].content, most_bytes=16_000_000)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_what_one_node_says_that_it_has_spent_ends_no_collection_and_no_node_answers_for_another():
    world, budgets = digits(), {None: Budget(8.0)}

    def lies(node: int, reply: Message) -> Message:
        return changed(reply, {"spent": 1e12}) if node in liars and told(reply).status == "ok" else reply

    for liars in ({ODD}, set(NODES)):
        contact = world.contact(world.grid(lies), ledger=Ledger(budgets=budgets))
        if len(liars) > 1:  # then this server's ledger is wrong rather than they are
            with pytest.raises(BudgetError):
                fedup.collect(world.model, contact, privacy=DP(1.0, clip="unit"))
            continue
        store = fedup.collect(world.model, contact, privacy=DP(1.0, clip="unit"))
        assert list(store.clients) == OTHERS and "its own account" in contact.left_out[ODD]
        with pytest.raises(BudgetError, match="Client 2"):
            contact.ask({2: PrivateCentroidsQuestion("head", DP(2.0, clip="unit"))})


@pytest.mark.parametrize("count", [math.inf, -math.inf, math.nan, -1.0])
def test_no_number_of_rows_that_a_node_declares_ends_a_round_of_training(count):
    rounds = []

    class Strategy:
        def aggregate_train(self, server_round, replies):
            rounds.append(len(replies))

    be_inside_a_run()
    rows = declared_rows(strategy := Strategy())
    for number, own in ((7, 12), (8, count)):
        record = RecordDict({"metrics": MetricRecord({"num-examples": own})})
        question = Message(RecordDict(), dst_node_id=number, message_type="train")
        strategy.aggregate_train(1, [Message(record, reply_to=question)])
    assert rounds == [1, 1] and rows[7] == 12 and rows.get(8, 0) == 0


def test_a_hostile_delta_is_refused_and_changes_nothing():
    world = digits(rounds=10, rows=900)
    own = {weight.name: world.model.get_parameter(weight.name) for weight in changed_weights(world.model, "head")}
    lies = {
        "NaN": lambda weight: weight * math.nan,
        "longer than the weights": lambda weight: weight * 1e3,
        "is of shape": lambda weight: weight[:1],
        "would harm": lambda weight: -weight,
    }
    for why, make in lies.items():
        plugged, grid = plug(world.model), world.grid()
        contact = world.contact(grid)
        store = fedup.collect(world.model, contact, statistics="moments")
        before = copy.deepcopy(store.total)
        arrays = {name: make(weight.detach()) for name, weight in own.items()}
        grid.spoil = spoiling(
            lambda reply, arrays=arrays: changed(reply, {"outcome": "fitted"}, **arrays), kind="delta"
        )
        with pytest.raises((ContactError, HarmError), match=why):
            unlearn(plugged, store, world.samples(c2=30), clients=contact, config=FilterConfig(filter="delta"))
        assert plugged.served is None and store.total == before, why


def test_a_large_answer_is_kept_on_disk_without_a_copy_of_it_in_memory(tmp_path):
    """Else one long reply of a hostile node takes several times its size."""
    arrays = {"vectors": torch.rand(2000, 1000), "flags": torch.ones(3, dtype=torch.bool), "none": torch.zeros(0, 5)}
    log, answer = AnswerLog(tmp_path / "answers"), Answer("ok", "base", {"client": 1}, arrays, size=8_000_000)
    tracemalloc.start()
    log.put("large", answer)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    log.put("small", Answer("ok", "base", {}, {"one": torch.tensor(7)}))
    again = AnswerLog(tmp_path / "answers")
    assert again.keys == ["large", "small"] and again.get("small").arrays["one"] == 7
    kept = again.get("large")
    assert kept.arrays.keys() == arrays.keys() and kept.details == answer.details and kept.size == answer.size
    assert all(torch.equal(kept.arrays[name], tensor) for name, tensor in arrays.items())

"""Clients behind a Grid: the same store and the same filters as in process, or a clear error; never a wrong store."""

import copy
import json
import math
import re
from collections import Counter
from dataclasses import replace
from unittest import TestCase

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import recorddict_to_proto
from tests._asking import ask_one
from tests._forced import restore, unlearn
from tests.flower._grid import (
    FIRST,
    LocalGrid,
    World,
    assert_ledgers_agree,
    changed,
    digits,
    told,
    unnamed,
    with_answer,
)
from torch import nn

from fedup import Centroids, FilterConfig, Forget, collect, fingerprint, plug
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.eraser_questions import PrivateEraserQuestion
from fedup.clients.in_process import InProcess
from fedup.clients.labels import LabelsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.errors import BudgetError, ContactError, DataError, FedUPError, RequestError, SettingError, StorageError
from fedup.flower import Delivery, GridContact, Policy, messaging
from fedup.flower.wire import Answer, write_ask
from fedup.privacy import DP, Budget, Ledger
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.eraser_statistics import RowGroups

PRIVATE = DP(4.0, clip=4.0, replay_seed=5)
REAL = DP(2.0, clip=4.0)
CLEAR = DP(100.0, clip=4.0)  # so that few rows stand out of its noise
AUTO = FilterConfig(rank=8, steps=8)
BOTH = FilterConfig(rank=8, steps=8, filter="both")
ODD = FIRST + 2  # the node that is spoilt; its client holds the most rows
NODES = [FIRST, FIRST + 1, FIRST + 2, FIRST + 3]
CENTROIDS = ("summarize", "summarize privately")  # kinds of questions: exact, and under a guarantee


@pytest.fixture(scope="module")
def world() -> World:
    return digits()


@pytest.fixture(scope="module")
def plain(world) -> Centroids:
    """The store that clients in process fill."""
    return collect(world.model, world.federation)


class Clock:
    """The server's time: it goes on while the server sleeps, and then alone."""

    def __init__(self) -> None:
        self.now, self.slept, self.kills = 0.0, [], False

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if self.kills and seconds >= 1:
            raise Killed
        self.now += seconds
        self.slept.append(seconds)

    @property
    def pauses(self) -> list[float]:
        """Those between tries; looks for answers come faster within the few seconds that tests wait."""
        return [seconds for seconds in self.slept if seconds >= 1]


class Killed(BaseException):
    """As a signal would."""


@pytest.fixture(scope="module")
def told_once(world) -> LocalGrid:
    """Nodes that hold the weights already, and compute an answer once, however often they are asked for it."""
    grid = world.grid()
    collect(world.model, world.contact(grid))
    grid.apps = {node: remembering(app) for node, app in grid.apps.items()}
    return grid


def remembering(app):
    known: dict[str, RecordDict] = {}

    def answer(message, context):
        question = message.content["fedup"]["json"]
        if message.content.array_records or question not in known:
            known[question] = app(message, context).content
        return Message(RecordDict(dict(known[question])), reply_to=message)

    return answer


@pytest.fixture
def warm(told_once) -> LocalGrid:
    """The same for one test, which may spoil what it likes."""
    told_once.sent.clear()
    told_once.came.clear()
    yield told_once
    told_once.spoil = lambda node, reply: reply


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(messaging, "time", made)
    return made


def assert_same_store(one: Centroids, other: Centroids) -> None:
    assert torch.equal(one.vectors, other.vectors)
    assert torch.equal(one.counts, other.counts)
    for name in ("cells", "clients", "num_classes", "how", "cut", "base", "nonnegative", "shape", "collected_for"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("excluded", "sample_labels", "purged", "paper_epsilons"):
        assert getattr(one, name) == getattr(other, name), name
    assert server_charges(one.ledger) == server_charges(other.ledger)
    assert one.sealed.keys() == other.sealed.keys()


def assert_is_part_of(store: Centroids, whole: Centroids, clients: set[int]) -> None:
    """All cells of these clients, each with the same bits, and none of others."""
    assert set(store.clients) == clients
    assert [cell.name for cell in store.cells] == [cell.name for cell in whole.cells if cell.client in clients]
    for cell in store.cells:
        for mine, theirs in zip(store.take(cell), whole.take(whole.cell(cell.name)), strict=True):
            assert torch.equal(mine, theirs), cell
    assert sum(cell.size for cell in store.cells) == len(store.vectors) == len(store.counts)
    assert (store.base, store.cut, store.excluded) == (whole.base, whole.cut, whole.excluded)


def samples(world: World, **many: int) -> Forget:
    """The first rows of clients: c2=40."""
    return Forget.samples({int(name[1:]): world.rows(int(name[1:]))[:n].tolist() for name, n in many.items()})


def spoiling(change, node: int = ODD, kind: str | None = None):
    """Exchange what a node answers to a kind of question, or for centroids; what it says of weights is left alone."""
    kinds = CENTROIDS if kind is None else (kind,)

    def spoil(number, reply):
        if number != node or reply.metadata.group_id not in kinds or reply.has_error() or told(reply).status != "ok":
            return reply
        return change(reply)

    return spoil


# --- the same store as in process


SETTINGS = {
    "usual": {},
    "ratio": {"statistics": CentroidConfig(0.3, seed=4)},
    "early": {"cut": "conv2"},
    "noise": {"cut": "fc2", "statistics": CentroidConfig(sigma=0.1, seed=5)},
    "noise of the paper": {"privacy": "paper"},
    "preset": {"statistics": "paper"},
    "DP": {"privacy": PRIVATE},
    "DP at another cut": {"privacy": replace(PRIVATE, projection="random", dims=7, cells=2), "cut": "fc1"},
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_centroids_from_the_grid_equal_those_in_process_to_the_bit(seed, settings):
    world = digits(seed)
    store = collect(world.model, world.contact(world.grid()), **settings)
    assert_same_store(store, collect(world.model, world.federation, **settings))


REQUESTS = {
    "client": Forget.clients([1]),
    "class": Forget.classes([3, 5]),
    "sample": {"c2": 30},
    "samples of two": {"c1": 5, "c3": 20},
    "all": (Forget.clients([0]) | Forget.classes([1]), {"c2": 7, "c3": 20}),
}


def request_of(world: World, named) -> Forget:
    if isinstance(named, tuple):
        return named[0] | samples(world, **named[1])
    return named if isinstance(named, Forget) else samples(world, **named)


@pytest.mark.parametrize("settings", [{}, {"statistics": "paper"}], ids=["usual", "paper"])
@pytest.mark.parametrize("named", REQUESTS.values(), ids=REQUESTS.keys())
def test_centroids_collected_for_a_request_equal_those_in_process_to_the_bit(world, named, settings):
    request, grid = request_of(world, named), world.grid()
    y = world.federation.y
    for client, ids in request.sample_ids.items():
        whole = y[world.rows(client)].bincount(minlength=10) - y[sorted(ids)].bincount(minlength=10)
        gone = [label for label in range(10) if whole[label] == 0 and label in y[sorted(ids)].tolist()]
        request = _without_classes(world, request, client, gone)  # cells that are left empty have a test of their own
    store = collect(world.model, world.contact(grid), forget=[request], **settings)
    assert_same_store(store, collect(world.model, world.federation, forget=[request], **settings))
    for node in {FIRST + client for client in request.client_ids}:
        assert node not in grid.nodes_asked(*CENTROIDS)


def _without_classes(world: World, request: Forget, client: int, labels: list[int]) -> Forget:
    kept = {i for i in request.sample_ids[client] if int(world.federation.y[i]) not in labels}
    return Forget(request.client_ids, request.class_ids, {**request.sample_ids, client: kept})


def of_one_class(world: World, client: int, label: int) -> Forget:
    rows = world.rows(client)
    return Forget.samples({client: rows[world.federation.y[rows] == label].tolist()})


def test_a_cell_of_which_all_samples_are_to_be_left_out_is_told_as_empty(world):
    request = of_one_class(world, 2, 1)
    store = collect(world.model, world.contact(world.grid()), forget=[request])
    assert_same_store(store, collect(world.model, world.federation, forget=[request]))


def test_half_precision_rounds_vectors_and_saves_bytes(world, plain):
    store = collect(world.model, world.contact(world.grid(), half=True))
    assert store.vectors.dtype == torch.float32
    assert torch.equal(store.vectors, plain.vectors.half().float())
    assert (store.cells, store.counts.tolist()) == (plain.cells, plain.counts.tolist())
    full = collect(world.model, world.contact(world.grid()))
    assert store.size_bytes < 0.6 * full.size_bytes


def test_nodes_without_ids_give_the_same_store(world, plain):
    assert_same_store(collect(world.model, world.contact(world.grid(ids=None))), plain)


def test_the_order_and_the_numbers_of_nodes_do_not_matter(world, plain):
    apps = {node: world.app(i, client=lambda context, i=i: i) for i, node in enumerate([9, 3, 7, 5])}
    assert_same_store(collect(world.model, world.contact(LocalGrid(apps))), plain)


# --- requests over the grid


@pytest.mark.parametrize(
    ("named", "config"),
    [
        (["client"], AUTO),
        (["class"], AUTO),
        (["sample"], AUTO),
        (["sample"], BOTH),
        (["class"], BOTH),
        (["client", "samples of two"], BOTH),
        (["all"], AUTO),
        (["class", "sample"], BOTH),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else value.filter,
)
def test_requests_are_answered_and_taken_back_over_the_grid_as_in_process(world, named, config):
    requests = [request_of(world, REQUESTS[name]) for name in named]
    grid = world.grid()
    contact = world.contact(grid)
    ways = []
    for reached in (contact, world.federation):
        ways.append((plug(world.model), collect(world.model, reached), reached))
    x = world.dataset.test_x[:100]
    for request in requests:
        reports = [unlearn(plugged, store, request, clients=reached, config=config) for plugged, store, reached in ways]
        assert reports[0].clients_contacted == reports[1].clients_contacted
        assert torch.equal(ways[0][0](x), ways[1][0](x))
        assert_same_store(ways[0][1], ways[1][1])
    for request in requests:
        for plugged, store, reached in ways:
            restore(plugged, store, request, clients=reached)
        if ways[0][0].requests:
            assert torch.equal(ways[0][0](x), ways[1][0](x))
        assert_same_store(ways[0][1], ways[1][1])
    for plugged, _, _ in ways:
        assert torch.equal(plugged.unplug()(x), world.model(x))


def test_a_sample_request_under_dp_is_answered_over_the_grid_as_in_process(world):
    request = samples(world, c2=40)
    x = world.dataset.test_x[:100]
    found = []
    for reached in (world.contact(world.grid()), world.federation):
        store, plugged = collect(world.model, reached, privacy=PRIVATE), plug(world.model)
        unlearn(plugged, store, request, clients=reached, config=AUTO)
        found.append((store, plugged(x)))
    assert_same_store(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("least_rows", [1, 18], ids=["by all", "below the client's least number of rows"])
def test_no_centroid_of_forgotten_samples_stays_in_use(world, least_rows):
    """Class 1 has 18 rows at client 2: all of them go, or so many that the client tells of the class no more."""
    request = of_one_class(world, 2, 1)
    if least_rows > 1:
        request = Forget.samples({2: sorted(request.sample_ids[2])[:5]})
    contact = world.contact(world.grid(policy=Policy(least_rows=least_rows)))
    store = collect(world.model, contact)
    cell = store.cell((2, 1))
    before, _ = store.take(cell)
    unlearn(plug(world.model), store, request, clients=contact, config=AUTO)
    after, counts = store.take(cell)
    assert not torch.equal(before, after)
    assert int(counts.sum()) <= 18 - len(request.sample_ids[2])


# --- who is asked, and what


def test_client_and_class_requests_ask_nobody(world):
    grid = world.grid()
    contact = world.contact(grid)
    store = collect(world.model, contact)
    before = len(grid.sent)
    unlearn(plug(world.model), store, Forget.clients([1]) | Forget.classes([3]), clients=contact, config=AUTO)
    assert len(grid.sent) == before


@pytest.mark.parametrize("config", [AUTO, BOTH], ids=["auto", "both"])
def test_a_sample_request_asks_all_what_it_is_compared_with_and_its_holders_for_the_rest(world, config):
    grid = world.grid()
    contact = world.contact(grid)
    store = collect(world.model, contact)
    grid.sent.clear()
    report = unlearn(plug(world.model), store, samples(world, c1=25, c3=30), clients=contact, config=config)
    holders = [FIRST + 1, FIRST + 3]
    assert grid.nodes_asked("labels", "summarize") == holders
    assert grid.nodes_asked("sketch") == grid.nodes_asked("tally") == NODES
    assert set(holders) <= set(grid.nodes_asked("spreads"))
    assert grid.nodes_asked("moments") == (holders if config is BOTH else [])
    assert sorted(report.clients_contacted) == sorted(report.clients_counting) == [0, 1, 2, 3]


def test_no_node_is_told_of_other_nodes_samples(world):
    grid, request = world.grid(), samples(world, c1=25, c3=30)
    contact = world.contact(grid)
    collect(world.model, contact, forget=[request])
    store = collect(world.model, contact)
    unlearn(plug(world.model), store, [request, Forget.classes([5])], clients=contact, config=BOTH)
    assert {"who", "labels", "summarize", "sketch", "spreads", "moments", "tally"} <= {
        ask.kind for _, ask in grid.asked()
    }, "premise"
    for node, ask in grid.asked():
        own = set(map(int, world.rows(node - FIRST).tolist()))
        assert own.issuperset(ask.details.get("samples", [])), ask
        assert own.issuperset(ask.details.get("excluded", [])), ask
        asked = ask.details.get("question", {"requests": {}, "gone": {"samples": {}}})
        for told_of in (*asked["requests"].values(), asked["gone"]):
            assert set(told_of["samples"]) <= {str(node - FIRST)}, ask
        for served in (ask.details.get("before"), ask.details.get("after")):
            assert served is None or (served["requests"], served["question"]) == ([], None), ask
            assert served is None or served["erasure"] is None or set(served["erasure"]["about"]) == {"place"}, ask


def bytes_of(messages: list[Message]) -> int:
    """By Flower's own protocol buffers."""
    return sum(recorddict_to_proto(message.content).ByteSize() for message in messages)


def test_messages_and_bytes_are_those_that_were_sent(world):
    grid = world.grid()
    contact = world.contact(grid)
    store = collect(world.model, contact)
    weights_asked_for = {reply.metadata.src_node_id - FIRST: bytes_of([reply]) for reply in grid.came[:4]}
    assert contact.traffic.messages == len(grid.sent) == 4 + 4  # the question, and again with the weights
    weights = sum(t.numel() * t.element_size() for t in world.model.state_dict().values())
    assert 4 * weights < contact.traffic.bytes_down < 4 * weights + 40_000
    answers = {reply.metadata.src_node_id - FIRST: bytes_of([reply]) for reply in grid.came[4:]}
    assert store.bytes_up == {client: size + weights_asked_for[client] for client, size in answers.items()}
    assert {release.client: release.size_bytes for release in store.traffic.releases} == answers
    collect(world.model, contact)
    assert contact.traffic.messages == len(grid.sent) == 8 + 4  # nobody lacks the weights any more
    report = unlearn(plug(world.model), store, samples(world, c2=40), clients=contact, config=BOTH)
    asked = Counter(ask.kind for _, ask in grid.asked()[12:])
    assert 1 <= asked.pop("spreads") <= 4  # of the holder, and of those it is compared with
    assert asked == {"labels": 1, "summarize": 1, "sketch": 4, "moments": 1, "tally": 4}
    assert contact.traffic.messages == len(grid.sent)
    assert contact.traffic.bytes_down == bytes_of([message for _, message in grid.sent])
    assert contact.traffic.bytes_up == bytes_of(grid.came)
    again = next(reply for reply in grid.came[12:] if reply.metadata.group_id == "summarize")
    assert next(one for one in report.releases if one.cells).size_bytes == bytes_of([again])


def test_weights_go_only_to_nodes_that_lack_them(world):
    grid = world.grid()
    collect(world.model, world.contact(grid))
    grid.apps[ODD], grid.contexts[ODD].state = world.app(2), RecordDict()  # it was set up anew
    grid.sent.clear()
    collect(world.model, world.contact(grid))
    assert [(node, ask.weights is not None) for node, ask in grid.asked()] == [
        *((n, False) for n in NODES),
        (ODD, True),
    ]


def test_nodes_that_hold_an_older_model_are_sent_the_new_one(world, plain):
    grid, older = world.grid(), digits(1).model
    old = GridContact(grid, older, example=world.example, num_classes=10)
    assert collect(older, old).base == fingerprint(older)
    grid.sent.clear()
    assert_same_store(collect(world.model, world.contact(grid)), plain)
    assert sum(ask.weights is not None for _, ask in grid.asked()) == 4


def test_a_model_that_was_changed_in_place_is_never_mistaken_for_the_one_that_nodes_hold(world):
    model, grid = copy.deepcopy(world.model), world.grid()
    contact = GridContact(grid, model, example=world.example, num_classes=10)
    collect(model, contact)
    model.load_state_dict(digits(1).model.state_dict())
    try:
        store = collect(model, contact)
    except FedUPError:
        return
    assert_same_store(store, collect(model, world.federation))


def test_clients_are_asked_who_they_are_once(world):
    grid = world.grid()
    contact = world.contact(grid)
    assert list(contact.clients) == list(contact.clients) == [0, 1, 2, 3]
    assert (len(grid.asked("who")), contact.num_classes) == (4, 10)


UNKNOWN = {
    "client": Forget.clients([7]),
    "class": Forget.classes([10]),
    "sample": Forget.samples({2: [10**6]}),
    "client of a sample": Forget.samples({7: [1]}),
    "everybody": Forget.clients([0, 1, 2, 3]),
    "nothing": Forget(),
}


@pytest.mark.parametrize("request_", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_a_request_that_names_something_unknown_or_everything_is_refused(world, request_):
    contact = world.contact(world.grid())
    if request_ is not UNKNOWN["sample"]:  # which samples there are only their client knows, and it tells when asked
        with pytest.raises(RequestError):
            contact.check(request_)
    with pytest.raises(RequestError):
        collect(world.model, contact, forget=[request_])


def test_a_client_that_never_answered_cannot_be_asked(world):
    contact = world.contact(world.grid())
    with pytest.raises(ContactError, match="no node goes by that number"):
        contact.ask({9: LabelsQuestion(frozenset([1]))})


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
def test_an_answer_that_waits_is_given_to_no_other_question(world, tmp_path, on_disk):
    """A collection that was given up after its answers came; then a sample request."""
    contact, how = world.contact(world.grid(), folder=tmp_path if on_disk else None), CentroidConfig()
    contact.ask_everyone(CentroidsQuestion("head", how))
    excluded = samples(world, c2=30).sample_ids[2]
    held = frozenset(world.federation.y[world.rows(2)].tolist())
    for question in (
        CentroidsQuestion("head", how, held, excluded=excluded),
        CentroidsQuestion("head", how, excluded=excluded),
        CentroidsQuestion("head", how, without=frozenset([1])),
    ):
        expected = ask_one(InProcess(world.federation, world.model), 2, question)
        assert torch.equal(ask_one(contact, 2, question).vectors, expected.vectors)


# --- faults: a completed collection without that node, or a clear error


def vectors_of(reply: Message) -> torch.Tensor:
    return told(reply).arrays["vectors"].clone()


def with_value(reply: Message, value: float) -> Message:
    vectors = vectors_of(reply)
    vectors[3, 5] = value
    return changed(reply, vectors=vectors)


def with_count(reply: Message, value: int, dtype=torch.int32) -> Message:
    counts = told(reply).arrays["counts"].to(dtype)
    counts[3] = value
    return changed(reply, counts=counts)


def with_first(reply: Message, name: str, value) -> Message:
    return changed(reply, {name: [value, *told(reply).details[name][1:]]})


def with_more(reply: Message, name: str, value) -> Message:
    return changed(reply, {name: [*told(reply).details[name], value]})


def with_record(reply: Message, **records) -> Message:
    for name, record in records.items():
        reply.content[name] = record
    return reply


def with_content(reply: Message, content: RecordDict) -> Message:
    reply.content = content
    return reply


def without_last_class(reply: Message) -> Message:
    details, arrays = told(reply).details, told(reply).arrays
    kept = sum(details["sizes"][:-1])
    shorter = {name: details[name][:-1] for name in ("labels", "sizes", "excluded")}
    return changed(reply, shorter, vectors=arrays["vectors"][:kept], counts=arrays["counts"][:kept])


FAULTS = {
    "an error of Flower's": lambda reply: Message(Error(0, "out of memory"), reply_to=reply_of(reply)),
    "NaN": lambda reply: with_value(reply, math.nan),
    "infinity": lambda reply: with_value(reply, -math.inf),
    "vectors in one row": lambda reply: changed(reply, vectors=vectors_of(reply).flatten()),
    "vectors of another width": lambda reply: changed(reply, vectors=vectors_of(reply)[:, 1:]),
    "a vector too few": lambda reply: changed(reply, vectors=vectors_of(reply)[1:]),
    "no vectors": lambda reply: changed(reply, vectors=None),
    "vectors of whole numbers": lambda reply: changed(reply, vectors=vectors_of(reply).int()),
    "a count too few": lambda reply: changed(reply, counts=told(reply).arrays["counts"][1:]),
    "counts in a table": lambda reply: changed(reply, counts=told(reply).arrays["counts"][None]),
    "no counts": lambda reply: changed(reply, counts=None),
    "counts that are no whole numbers": lambda reply: changed(reply, counts=told(reply).arrays["counts"].float()),
    "a count of 0": lambda reply: with_count(reply, 0),
    "a count below 0": lambda reply: with_count(reply, -3),
    "a label out of range": lambda reply: changed(reply, {"labels": [*told(reply).details["labels"][:-1], 10]}),
    "a label below 0": lambda reply: with_first(reply, "labels", -1),
    "a label twice": lambda reply: with_first(reply, "labels", told(reply).details["labels"][1]),
    "labels out of order": lambda reply: changed(reply, {"labels": told(reply).details["labels"][::-1]}),
    "a label that is no number": lambda reply: with_first(reply, "labels", "0"),
    "labels that are no list": lambda reply: changed(reply, {"labels": 3}),
    "a label too many": lambda reply: with_more(reply, "labels", 9),
    "sizes of another sum": lambda reply: with_first(reply, "sizes", 10**9),
    "a size that is no number": lambda reply: with_first(reply, "sizes", 1.5),
    "a size below 0": lambda reply: changed(reply, {"sizes": [-1, 8, *told(reply).details["sizes"][2:]]}),
    "too many centroids for its rows": lambda reply: with_first(reply, "rows", [0, 3]),
    "rows that are no pairs": lambda reply: with_first(reply, "rows", 3),
    "no rows": lambda reply: changed(reply, {"rows": []}),
    "excluded of another length": lambda reply: with_more(reply, "excluded", []),
    "excluded that is no list": lambda reply: changed(reply, {"excluded": None}),
    "features of another shape": lambda reply: changed(reply, {"shape": [2, 256]}),
    "features of no shape": lambda reply: changed(reply, {"shape": None}),
    "features of another kind": lambda reply: changed(reply, {"nonnegative": False}),
    "no client": lambda reply: changed(reply, {"client": None}),
    "a client below 0": lambda reply: changed(reply, {"client": -1}),
    "a client that is no number": lambda reply: changed(reply, {"client": "2"}),
    "a client that is true": lambda reply: changed(reply, {"client": True}),
    "another model's answer": lambda reply: with_answer(reply, replace(told(reply), base="0" * 64)),
    "64 MB of zeros": lambda reply: changed(reply, zeros=torch.zeros(64_000_000, dtype=torch.uint8)),
    "a byte over the limit": lambda reply: changed(
        reply, zeros=torch.zeros(Delivery.most_bytes - bytes_of([reply]) - 127 - len("zeros"), dtype=torch.uint8)
    ),
    "a refusal": lambda reply: with_answer(reply, Answer("refused", told(reply).base, reason="not on Sundays")),
    "a failure": lambda reply: with_answer(reply, Answer("failed", told(reply).base, reason="RuntimeError")),
    "weights asked for again and again": lambda reply: with_answer(reply, Answer("needs weights", told(reply).base)),
    "an unknown status": lambda reply: with_answer(reply, replace(told(reply), status="fine")),
    "nothing in it": lambda reply: with_content(reply, RecordDict()),
    "garbage": lambda reply: with_content(reply, RecordDict({"fedup": ConfigRecord({"json": "\x00{"})})),
    "another app's records": lambda reply: with_content(reply, RecordDict({"metrics": MetricRecord({"loss": 1.0})})),
    "rows below 0": lambda reply: with_more(reply, "rows", [2, -30]),
    "rows of a class out of range": lambda reply: with_more(reply, "rows", [99, 5]),
    "rows of a class without centroids": lambda reply: with_more(reply, "rows", [2, 50]),
    "rows beyond memory": lambda reply: with_more(reply, "rows", [2, 10**13]),
    "a class without its centroids": without_last_class,
    "samples left out that nobody named": lambda reply: with_first(reply, "excluded", [1, 2, 3]),
    "samples left out that are no list": lambda reply: with_first(reply, "excluded", 5),
    "samples left out that are no numbers": lambda reply: with_first(reply, "excluded", ["a"]),
    "a shape that is no list": lambda reply: changed(reply, {"shape": 512}),
    "epsilons that are no numbers": lambda reply: changed(reply, {"paper_epsilons": ["a"]}),
    "epsilons that are no list": lambda reply: changed(reply, {"paper_epsilons": 5}),
    "a count beyond 32 bits": lambda reply: with_count(reply, 2**32 + 1, torch.int64),
    "a count that becomes negative": lambda reply: with_count(reply, 2**31, torch.int64),
    "more points than rows": lambda reply: with_count(reply, 10**6),
    "values beyond single precision": lambda reply: changed(reply, vectors=vectors_of(reply).double() * 1e300),
    "20 MB of metrics": lambda reply: with_record(reply, more=MetricRecord({"numbers": [0.0] * 2_500_000})),
}


def reply_of(reply: Message) -> Message:
    """A message that this could be the answer to."""
    meta = reply.metadata
    message = Message(RecordDict(), dst_node_id=meta.src_node_id, message_type="query.fedup", group_id=meta.group_id)
    message.metadata.__dict__["_message_id"] = meta.reply_to_message_id
    return message


def check_left_out(world: World, plain: Centroids, grid: LocalGrid) -> None:
    """Of a grid whose node 102 is of no use."""
    contact = world.contact(grid, least_fraction=0.5)
    with TestCase().assertLogs("fedup.flower", "WARNING") as logged:
        store = collect(world.model, contact)
    assert_is_part_of(store, plain, {0, 1, 3})
    assert store.vectors.isfinite().all()
    assert list(contact.left_out) == [ODD]
    assert [text for text in logged.output if f"node {ODD}" in text and contact.left_out[ODD] in text]


def check_clear_error(world: World, grid: LocalGrid) -> None:
    with pytest.raises(ContactError, match=rf"3 of 4 .*node {ODD}: "):
        collect(world.model, world.contact(grid))


@pytest.mark.parametrize("change", FAULTS.values(), ids=FAULTS.keys())
def test_a_node_whose_answer_is_of_no_use_is_left_out(world, plain, warm, change):
    warm.spoil = spoiling(change)
    check_left_out(world, plain, warm)


@pytest.mark.parametrize("name", list(FAULTS)[::5])
def test_where_all_nodes_are_needed_one_of_no_use_is_a_clear_error(world, warm, name):
    warm.spoil = spoiling(FAULTS[name])
    check_clear_error(world, warm)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda reply, value: with_value(reply, value), id="a value"),
        pytest.param(lambda reply, value: changed(reply, vectors=vectors_of(reply)[:, 1:]), id="another width"),
        pytest.param(lambda reply, value: changed(reply, vectors=vectors_of(reply)[1:]), id="a class too few"),
        pytest.param(lambda reply, value: changed(reply, {"sizes": [2, 0] + [1] * 8}), id="two vectors for a class"),
        pytest.param(
            lambda reply, value: without_last_class(reply),
            id="a class is missing",
        ),
    ],
)
def test_under_dp_too(world, change, value):
    whole = collect(world.model, world.federation, privacy=PRIVATE)
    grid = world.grid(spoiling(lambda reply: change(reply, value)))
    contact = world.contact(grid, least_fraction=0.5)
    store = collect(world.model, contact, privacy=PRIVATE)
    assert_is_part_of(store, whole, {0, 1, 3})
    assert sorted(charge.client for charge in store.ledger.charges) == [0, 1, 2, 3]  # what it sent was released
    assert_ledgers_agree(grid, contact)


@pytest.mark.parametrize("note", ["", [], "more"], ids=["an empty text", "an empty list", "a text"])
def test_what_else_a_reply_carries_does_no_harm(world, plain, warm, note):
    warm.spoil = spoiling(lambda reply: with_record(reply, more=ConfigRecord({"note": note})))
    assert_same_store(collect(world.model, world.contact(warm)), plain)


def test_a_node_that_raises_is_left_out(world, plain):
    grid = world.grid()
    grid.apps[ODD] = ClientApp()  # nothing is mounted on it
    check_left_out(world, plain, grid)
    check_clear_error(world, grid)


def test_a_node_whose_replies_are_all_lost_is_left_out(world, plain, clock):
    grid = world.grid(lambda node, reply: None if node == ODD else reply)
    check_left_out(world, plain, grid)
    assert clock.pauses == [1.0, 2.0]
    check_clear_error(world, grid)


def test_a_node_that_refuses_is_left_out_with_its_reason(world, plain):
    grid = world.grid()
    grid.apps[ODD] = world.app(2, policy=Policy(ask=lambda kind: "not on Sundays"))
    check_left_out(world, plain, grid)
    contact = world.contact(grid, least_fraction=0.5)
    collect(world.model, contact)
    assert contact.left_out == {ODD: "refused: not on Sundays"}


def test_a_node_with_a_model_of_another_shape_is_left_out(world, plain):
    grid = world.grid()
    grid.apps[ODD] = world.app(2, model=lambda: torch.nn.Linear(784, 10))
    check_left_out(world, plain, grid)


@pytest.mark.parametrize("gone", [(), [Forget.clients([0])]], ids=["known before", "asked who it is first"])
def test_a_client_that_was_met_but_is_left_out_of_a_collection_is_unknown_to_its_store(world, gone):
    grid = world.grid()
    contact = world.contact(grid, least_fraction=0.5, retries=0, timeout_s=0.1)
    assert list(contact.clients) == [0, 1, 2, 3]
    grid.spoil = lambda node, reply: None if node == ODD else reply
    store, plugged = collect(world.model, contact, forget=gone), plug(world.model)
    assert 2 not in {cell.client for cell in store.cells}
    with pytest.raises(RequestError):  # else client 2 counts as forgotten, by a filter that knows nothing of it
        unlearn(plugged, store, [*gone, Forget.clients([2, 3])], config=AUTO)
    assert plugged.requests == frozenset()


def test_all_nodes_of_no_use_are_an_error_whatever_the_least_fraction(world):
    with pytest.raises(ContactError, match="0 of 4"):
        collect(world.model, world.contact(world.grid(lambda node, reply: None), least_fraction=1e-9))


def test_no_node_connected_is_an_error(world):
    for forget in ((), [Forget.clients([0])]):
        with pytest.raises(ContactError, match="No node is connected"):
            collect(world.model, world.contact(LocalGrid({})), forget=forget)


@pytest.mark.parametrize("kind", [None, pytest.param("who", id="when asked who they are")], ids=["summarize", "who"])
def test_two_nodes_that_claim_one_client_are_an_error(world, kind):
    grid = world.grid(spoiling(lambda reply: changed(reply, {"client": 0}), kind=kind))
    with pytest.raises((DataError, ContactError), match="Two nodes say they are client 0: 100 and 102"):
        collect(world.model, world.contact(grid, least_fraction=0.1), forget=[Forget.classes([3])])


def test_a_node_that_becomes_another_client_is_an_error(world):
    """It was client 2 when asked who it is, and says it is 7, which nobody else is, at the collection."""
    grid = world.grid(spoiling(lambda reply: changed(reply, {"client": 7})))
    contact = world.contact(grid, least_fraction=0.5)
    try:
        store = collect(world.model, contact, forget=[Forget.classes([3])])
    except FedUPError:
        return
    assert 7 not in store.clients


@pytest.mark.parametrize(("lost", "pause"), [(1, [1.0]), (2, [1.0, 2.0])])
def test_a_node_that_replies_at_a_later_try_is_part_of_the_store(world, plain, clock, lost, pause):
    seen = []

    def spoil(node, reply):
        seen.append(node)
        return None if node == ODD and seen.count(ODD) <= lost else reply

    grid = world.grid(spoil)
    contact = world.contact(grid)
    assert_same_store(collect(world.model, contact), plain)
    assert (contact.left_out, clock.pauses) == ({}, pause)
    assert (
        contact.traffic.messages == len(grid.sent) == 6 + lost + 2
    )  # those of others; lost ones; its question and weights


def test_pauses_double_and_end_at_half_a_minute(world, clock):
    grid = world.grid(lambda node, reply: None if node == ODD else reply)
    with pytest.raises(ContactError, match="no answer within 2 s, asked 9 times"):
        collect(world.model, world.contact(grid, retries=8))
    assert clock.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert len([node for node, _ in grid.sent if node == ODD]) == 9


def test_without_retries_everybody_is_asked_once(world, clock):
    grid = world.grid(lambda node, reply: None)
    with pytest.raises(ContactError, match="asked 1 times"):
        collect(world.model, world.contact(grid, retries=0))
    assert (len(grid.sent), clock.pauses) == (4, [])


@pytest.mark.parametrize("refusal", ["refused", "failed"])
def test_a_node_that_refused_is_not_asked_again(world, clock, refusal):
    spoil = spoiling(lambda reply: with_answer(reply, Answer(refusal, told(reply).base, reason="no")))
    grid = world.grid(spoil)
    with pytest.raises(ContactError):
        collect(world.model, world.contact(grid, retries=5))
    assert (len(grid.sent), clock.pauses) == (8, [])


def test_the_least_fraction_is_met_by_just_so_many(world):
    """0.28 of 25 are 7: in floating point a little more."""
    apps = {node: world.app(0, client=lambda context, node=node: node) for node in range(25)}
    grid = LocalGrid(apps, lambda node, reply: reply if node < 7 else None)
    assert 0.28 * 25 > 7, "premise"
    contact = world.contact(grid, least_fraction=0.28, retries=0, timeout_s=60)
    assert list(contact.clients) == list(range(7))


class Doubled(LocalGrid):
    """Every reply comes twice."""

    def pull_messages(self, message_ids):
        return [reply for reply in super().pull_messages(message_ids) for _ in range(2)]


def test_replies_that_come_twice_count_once(world, plain):
    grid = Doubled({FIRST + i: world.app(i) for i in range(4)})
    contact = world.contact(grid)
    assert_same_store(collect(world.model, contact), plain)
    assert contact.traffic.messages == 8


class Late(LocalGrid):
    """A node's reply to a collection is held back, and comes with those of the next wave, before them."""

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
        return [*self.late, *super().pull_messages(message_ids)]


def test_a_late_reply_to_the_same_question_does_no_harm(world, plain):
    grid = Late({FIRST + i: world.app(i) for i in range(4)})
    assert_same_store(collect(world.model, world.contact(grid)), plain)
    assert len(grid.held) == 1, "premise"


def test_a_late_reply_to_an_earlier_question_is_nobodys(world):
    grid = Late({FIRST + i: world.app(i) for i in range(4)})
    contact = world.contact(grid, retries=0, least_fraction=0.5)
    assert set(collect(world.model, contact, statistics=CentroidConfig(seed=0)).clients) == {0, 1, 3}
    assert len(grid.held) == 1, "premise"
    again = world.contact(grid)
    assert_same_store(
        collect(world.model, again, statistics=CentroidConfig(seed=1)),
        collect(world.model, world.federation, statistics=CentroidConfig(seed=1)),
    )


# --- faults while a request is answered: nothing has changed


LABELS = {
    "a label out of range": lambda reply: changed(
        reply, {"labels": [[i, 10] for i, _ in told(reply).details["labels"]]}
    ),
    "a sample too few": lambda reply: changed(reply, {"labels": told(reply).details["labels"][1:]}),
    "another sample": lambda reply: with_more(reply, "labels", [10**6, 1]),
    "no pairs": lambda reply: changed(reply, {"labels": [1, 2]}),
    "nothing": lambda reply: changed(reply, {"labels": None}),
}
SUMMARIES = {
    "NaN": lambda reply: with_value(reply, math.nan),
    "another client": lambda reply: changed(reply, {"client": 1}),
    "another width": lambda reply: changed(reply, vectors=vectors_of(reply)[:, 1:]),
    "a refusal": FAULTS["a refusal"],
    "lost": lambda reply: None,
    "a class is missing": without_last_class,
    "nothing was left out": lambda reply: changed(reply, {"excluded": [[] for _ in told(reply).details["excluded"]]}),
}


def part(reply: Message, name: str) -> torch.Tensor:
    return told(reply).arrays[name].clone()


def first(reply: Message, kind: str) -> str:
    """The name of a request in an answer's details."""
    return next(iter(dict(told(reply).details[kind])))


def with_array(reply: Message, start: str, end: str, change) -> Message:
    """Exchange the first array of that name."""
    name = next(name for name in told(reply).arrays if name.startswith(start) and name.endswith(end))
    return changed(reply, **{name: change(part(reply, name))})


def with_weight(reply: Message, kind: str, weight) -> Message:
    """Exchange the weights of all cuts."""
    groups = told(reply).details[kind]
    return changed(reply, {kind: {name: dict.fromkeys(cuts, weight) for name, cuts in groups.items()}})


def with_counts(reply: Message, kind: str, *row) -> Message:
    """Exchange what was counted of a request, or of a class."""
    counted = told(reply).details[kind]
    return changed(reply, {kind: {name: [list(row)] for name in counted} if isinstance(counted, dict) else [list(row)]})


SKETCHES = {
    "NaN": (lambda reply: with_array(reply, "forgotten/", "", lambda one: one * math.nan), "NaN or infinity"),
    "infinity": (lambda reply: with_array(reply, "retained/", "", lambda one: one + math.inf), "NaN or infinity"),
    "another shape": (lambda reply: with_array(reply, "forgotten/", "", lambda one: one[1:]), "of shape"),
    "a class of another shape": (lambda reply: with_array(reply, "retained/", "", lambda one: one[:, 1:]), "of shape"),
    "whole numbers": (lambda reply: with_array(reply, "retained/", "", torch.Tensor.int), "is of torch.int32"),
    "no arrays": (lambda reply: changed(reply, **dict.fromkeys(told(reply).arrays)), "is missing"),
    "no rows": (lambda reply: changed(reply, {"forgotten": [[first(reply, "forgotten"), 0]]}), "out of range"),
    "a count that is no number": (
        lambda reply: changed(reply, {"forgotten": [[first(reply, "forgotten"), "40"]]}),
        "no pair of a name and a count",
    ),
    "no counts": (lambda reply: changed(reply, {"retained": None}), "retained is no list"),
    "a label out of range": (
        lambda reply: changed(
            reply, {"retained": [[10, 30]]}, **{"retained/10": part(reply, f"forgotten/{first(reply, 'forgotten')}")}
        ),
        "a label is out of range",
    ),
    "a request nobody named": (
        lambda reply: changed(
            reply, {"forgotten": [["x", 40]]}, **{"forgotten/x": part(reply, f"forgotten/{first(reply, 'forgotten')}")}
        ),
        "a request that nobody named",
    ),
}
SPREADS = {
    "NaN": (lambda reply: with_array(reply, "forgotten/", "/mean", lambda one: one * math.nan), "NaN or infinity"),
    "a variance below 0": (lambda reply: with_array(reply, "", "/variance", lambda one: one - 1e6), "below 0"),
    "another shape": (lambda reply: with_array(reply, "", "/mean", lambda one: one.repeat(2, 1)), "of shape"),
    "no arrays": (lambda reply: changed(reply, **dict.fromkeys(told(reply).arrays)), "is missing"),
    "a weight of 0": (lambda reply: with_weight(reply, "forgotten", 0), "a weight is out of range"),
    "a weight that is NaN": (lambda reply: with_weight(reply, "forgotten", math.nan), "a weight is out of range"),
    "a weight that is no number": (lambda reply: with_weight(reply, "forgotten", "1"), "a weight is out of range"),
    "more than its share": (lambda reply: with_weight(reply, "reference", 1.5), "a larger share"),
    "another cut": (
        lambda reply: changed(reply, {"forgotten": {first(reply, "forgotten"): {"conv9": 40.0}}}),
        "other cuts",
    ),
    "a request nobody named": (lambda reply: changed(reply, {"forgotten": {"x": {}}}), "nobody named"),
    "no groups": (lambda reply: changed(reply, {"reference": None}), "nobody named"),
}
MOMENTS = {
    "NaN": (lambda reply: changed(reply, sums=part(reply, "sums") * math.nan), "NaN or infinity"),
    "another shape": (lambda reply: changed(reply, sums=part(reply, "sums").repeat(2, 1)), "of shape"),
    "squares of another width": (lambda reply: changed(reply, squares=part(reply, "squares")[:, 1:]), "of shape"),
    "no squares": (lambda reply: changed(reply, squares=None), "is missing"),
    "no count": (lambda reply: changed(reply, {"count": 0}), "out of range"),
    "a count that is no whole number": (lambda reply: changed(reply, {"count": 1.5}), "out of range"),
}
TALLIES = {
    "more hits than rows": (lambda reply: with_counts(reply, "forgotten", 1, 40, 41, 3, 3), "more hits than rows"),
    "more of either than rows": (lambda reply: with_counts(reply, "retained", 1, 40, 30, 30, 10), "more hits than"),
    "more of both than of one": (lambda reply: with_counts(reply, "held_out", 1, 40, 3, 3, 4), "do not add up"),
    "hits below 0": (lambda reply: with_counts(reply, "retained", 1, 40, -1, 3, -1), "do not add up"),
    "NaN": (lambda reply: with_counts(reply, "retained", 1, math.nan, 1, 1, 1), "do not add up"),
    "no rows": (lambda reply: with_counts(reply, "retained", 1, 0, 0, 0, 0), "do not add up"),
    "hits that are NaN": (lambda reply: with_counts(reply, "retained", 1, 40, math.nan, 3, 3), "add up|more hits"),
    "a label out of range": (lambda reply: with_counts(reply, "retained", 10, 1, 1, 1, 1), "a label is out of range"),
    "a row too short": (lambda reply: with_counts(reply, "retained", 1, 2, 3), "no row of five numbers"),
    "no list": (lambda reply: changed(reply, {"held_out": None}), "no list"),
    "a request nobody named": (lambda reply: changed(reply, {"unseen": {"x": []}}), "nobody named"),
    "no counts": (lambda reply: changed(reply, {"forgotten": None}), "nobody named"),
}
DURING = [
    pytest.param(kind, change, id=f"{kind}: {name}")
    for kind, cases in (("labels", LABELS), ("summarize", SUMMARIES))
    for name, change in cases.items()
]
MALFORMED = [
    pytest.param(kind, change, why, id=f"{kind}: {name}")
    for kind, cases in (("sketch", SKETCHES), ("spreads", SPREADS), ("moments", MOMENTS))
    for name, (change, why) in cases.items()
]


@pytest.mark.parametrize(("kind", "change"), DURING)
def test_a_request_that_meets_a_bad_answer_fails_clearly_and_changes_nothing(world, plain, warm, kind, change):
    warm.spoil = spoiling(change, kind=kind)
    contact, store, plugged = world.contact(warm), copy.deepcopy(plain), plug(world.model)
    with pytest.raises((ContactError, DataError)):
        unlearn(plugged, store, samples(world, c2=40), clients=contact, config=BOTH)
    assert_same_store(store, plain)
    assert (plugged.requests, plugged.served) == (frozenset(), None)


@pytest.mark.parametrize(("kind", "change", "why"), MALFORMED)
def test_statistics_out_of_shape_are_refused_with_the_reason_and_change_nothing(world, plain, warm, kind, change, why):
    warm.spoil = spoiling(change, kind=kind)
    contact, store, plugged = world.contact(warm), copy.deepcopy(plain), plug(world.model)
    with pytest.raises(ContactError, match=f"Client 2 gave no answer of use: .*{why}"):
        unlearn(plugged, store, samples(world, c2=40), clients=contact, config=BOTH)
    assert_same_store(store, plain)
    assert (plugged.requests, plugged.served) == (frozenset(), None)


@pytest.mark.parametrize(("change", "why"), TALLIES.values(), ids=TALLIES.keys())
def test_counts_that_do_not_fit_are_left_out_and_noted(world, plain, warm, change, why):
    warm.spoil = spoiling(change, kind="tally")
    contact, store, plugged = world.contact(warm), copy.deepcopy(plain), plug(world.model)
    report = unlearn(plugged, store, samples(world, c2=40), clients=contact, config=BOTH)
    (note,) = [note for note in report.notes if "counted no answers" in note]
    assert note.startswith("Client 2 ") and re.search(why, note)
    (verdict,) = report.verdicts.values()
    assert (verdict.finding, verdict.statistic) == ("not measured", None)


def test_after_a_failure_the_request_can_be_answered(world, plain, warm):
    contact, store, plugged = world.contact(warm), copy.deepcopy(plain), plug(world.model)
    for kind, change in (
        ("labels", LABELS["nothing"]),
        ("summarize", SUMMARIES["lost"]),
        ("moments", MOMENTS["NaN"][0]),
    ):
        warm.spoil = spoiling(change, kind=kind)
        with pytest.raises(ContactError):
            unlearn(plugged, store, samples(world, c2=40), clients=contact, config=BOTH)
    warm.spoil = lambda node, reply: reply
    unlearn(plugged, store, samples(world, c2=40), clients=contact, config=BOTH)
    expected, other = plug(world.model), copy.deepcopy(plain)
    unlearn(expected, other, samples(world, c2=40), clients=world.federation, config=BOTH)
    x = world.dataset.test_x[:20]
    assert torch.equal(plugged(x), expected(x))
    assert_same_store(store, other)


# --- a server that is killed


def interrupted(world: World, grid: LocalGrid, folder, clock: Clock, **how) -> None:
    """A collection that ends in the pause before the second try: node 102 has not answered by then."""
    spoil = grid.spoil
    grid.spoil = lambda node, reply: None if node == ODD else spoil(node, reply)
    clock.kills = True
    with pytest.raises(Killed):
        collect(world.model, world.contact(grid, folder=folder), **how)
    clock.kills, grid.spoil = False, spoil
    grid.sent.clear()


def files(folder) -> list:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "how", [{}, {"privacy": PRIVATE}, {"statistics": CentroidConfig(sigma=0.1), "cut": "fc2"}], ids=str
)
def test_a_server_that_is_started_again_asks_only_for_what_is_missing(world, tmp_path, clock, how):
    grid = world.grid()
    interrupted(world, grid, tmp_path, clock, **how)
    assert len([path for path in files(tmp_path) if path.suffix == ".safetensors"]) == 3
    contact = world.contact(grid, folder=tmp_path)
    expected = collect(world.model, world.federation, **how)
    store = collect(world.model, contact, **how)
    assert grid.nodes_asked() == [ODD]
    assert_same_store(store, expected)
    assert len(files(tmp_path)) >= 4  # the store is not on disk yet
    contact.settled()
    assert files(tmp_path) == []
    fresh = collect(world.model, world.contact(world.grid()), **how)
    sizes = {release.client: release.size_bytes for release in fresh.traffic.releases}
    assert {release.client: release.size_bytes for release in store.traffic.releases} == sizes  # those on disk, too
    if "privacy" in how:
        assert_ledgers_agree(grid, contact)


def test_answers_for_a_request_are_kept_too(world, tmp_path, clock):
    grid, request = world.grid(), samples(world, c3=10) | Forget.clients([0])
    world.contact(grid).check(request)  # so that nodes hold the weights
    how = {"forget": [request], "statistics": CentroidConfig(seed=3)}
    spoil = grid.spoil
    grid.spoil = spoiling(lambda reply: None)
    clock.kills = True
    with pytest.raises(Killed):
        collect(world.model, world.contact(grid, folder=tmp_path), **how)
    clock.kills, grid.spoil = False, spoil
    grid.sent.clear()
    store = collect(world.model, world.contact(grid, folder=tmp_path), **how)
    assert grid.nodes_asked("summarize") == [ODD]
    assert_same_store(store, collect(world.model, world.federation, **how))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_server_killed_while_answers_come_keeps_those_that_came(world, plain, tmp_path, k):
    grid, came = world.grid(), []
    collect(world.model, world.contact(grid), statistics=CentroidConfig(seed=9))  # nodes hold the weights
    grid.one_by_one = True

    def kill(node, reply):
        if len(came) == k:
            raise KeyboardInterrupt
        came.append(node)
        return reply

    spoil, grid.spoil = grid.spoil, kill
    with pytest.raises(KeyboardInterrupt):
        collect(world.model, world.contact(grid, folder=tmp_path))
    grid.spoil = spoil
    grid.sent.clear()
    assert_same_store(collect(world.model, world.contact(grid, folder=tmp_path)), plain)
    assert grid.nodes_asked() == sorted(set(NODES) - set(came))


@pytest.mark.parametrize("how", ["cut off", "garbage", "a bit", "empty", "another kind"])
def test_a_damaged_answer_on_disk_is_asked_for_again(world, plain, tmp_path, clock, how):
    grid = world.grid()
    interrupted(world, grid, tmp_path, clock)
    path = next(path for path in files(tmp_path) if f"-{FIRST + 1}-" in path.stem)
    data = bytearray(path.read_bytes())
    if how == "a bit":
        data[-7] ^= 1
    else:
        data = {"cut off": data[:-100], "garbage": b"garbage" * 100, "empty": b"", "another kind": b"{}"}[how]
    path.write_bytes(bytes(data))
    assert_same_store(collect(world.model, contact := world.contact(grid, folder=tmp_path)), plain)
    assert grid.nodes_asked() == [FIRST + 1, ODD]
    contact.settled()
    assert files(tmp_path) == []


def test_files_of_others_in_the_folder_are_nobodys_answers(world, plain, tmp_path, clock):
    grid = world.grid()
    interrupted(world, grid, tmp_path, clock)
    one = files(tmp_path)[0]
    (one.parent / "notes.safetensors").write_bytes(one.read_bytes())
    (one.parent / "999.safetensors").write_bytes(one.read_bytes())  # a node that is not asked
    assert_same_store(collect(world.model, world.contact(grid, folder=tmp_path)), plain)
    assert grid.nodes_asked() == [ODD]


@pytest.mark.parametrize(
    "other",
    [
        {"statistics": CentroidConfig(seed=1)},
        {"statistics": CentroidConfig(0.5)},
        {"cut": "fc2"},
        {"forget": [Forget.classes([3])]},
        {"privacy": PRIVATE},
    ],
    ids=str,
)
def test_answers_to_one_question_are_never_taken_for_another(world, tmp_path, clock, other):
    grid = world.grid()
    interrupted(world, grid, tmp_path, clock)
    store = collect(world.model, world.contact(grid, folder=tmp_path), **other)
    assert grid.nodes_asked(*CENTROIDS) == NODES
    assert_same_store(store, collect(world.model, world.federation, **other))


def test_answers_for_one_model_are_never_taken_for_another(world, tmp_path, clock):
    grid, other = world.grid(), digits(1).model
    interrupted(world, grid, tmp_path, clock)
    contact = GridContact(grid, other, example=world.example, num_classes=10, folder=tmp_path)
    assert_same_store(collect(other, contact), collect(other, world.federation))


@pytest.mark.parametrize("change", ["joined", "left"])
def test_answers_that_came_are_not_asked_for_again_where_a_node_joined_or_left(world, tmp_path, clock, change):
    grid = world.grid()
    interrupted(world, grid, tmp_path, clock)
    if change == "left":
        del grid.apps[ODD]
    else:
        grid.apps[FIRST + 9] = world.app(2, client=lambda context: 9)
        grid.contexts[FIRST + 9] = grid.contexts[ODD]
    collect(world.model, world.contact(grid, folder=tmp_path))
    assert grid.nodes_asked() == ([] if change == "left" else [ODD, FIRST + 9])


def test_a_collection_with_too_few_answers_keeps_them_for_the_next_try(world, plain, tmp_path):
    grid = world.grid(lambda node, reply: None if node == ODD else reply)
    with pytest.raises(ContactError, match="3 of 4"):
        collect(world.model, world.contact(grid, folder=tmp_path))
    grid.sent.clear()
    grid.spoil = lambda node, reply: reply
    assert_same_store(collect(world.model, world.contact(grid, folder=tmp_path)), plain)
    assert grid.nodes_asked() == [ODD]


def test_an_answer_without_any_cell_does_not_stay_on_disk(world, tmp_path):
    grid = world.grid()
    grid.apps[ODD] = world.app(2, policy=Policy(least_rows=1000))
    contact = world.contact(grid, folder=tmp_path)
    store = collect(world.model, contact)
    assert {cell.client for cell in store.cells} == {0, 1, 3}
    contact.settled()
    assert files(tmp_path) == []


def test_without_a_folder_nothing_is_written(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    collect(world.model, world.contact(world.grid()))
    assert list(tmp_path.iterdir()) == []


# --- what it costs


def charges(grid: LocalGrid) -> dict[int, list[dict]]:
    """By client, as each node has them."""
    found = {}
    for node, context in grid.contexts.items():
        kept = context.state.config_records.get("fedup-ledger")
        found[node - FIRST] = [unnamed(charge) for charge in json.loads(kept["json"])["charges"]] if kept else []
    return found


def server_charges(ledger: Ledger) -> dict[int, list[dict]]:
    by_client: dict[int, list[dict]] = {client: [] for client in range(4)}
    for charge in ledger.to_json()["charges"]:
        by_client[charge["client"]].append(unnamed(charge))
    return by_client


def test_the_servers_account_and_those_of_the_nodes_agree(world):
    grid, ledger = world.grid(), Ledger()
    contact = world.contact(grid, ledger=ledger)
    store = collect(world.model, contact, privacy=CLEAR)
    assert store.ledger is contact.ledger is ledger
    assert charges(grid) == server_charges(ledger)
    assert {len(own) for own in charges(grid).values()} == {1}
    unlearn(plug(world.model), store, samples(world, c2=40), clients=contact, config=AUTO)
    assert charges(grid) == server_charges(ledger)
    assert len(charges(grid)[2]) >= 2
    assert len(charges(grid)[0]) == 1


def test_centroids_without_a_guarantee_cost_nothing(world):
    grid = world.grid()
    contact = world.contact(grid)
    collect(world.model, contact, statistics=CentroidConfig(sigma=0.1))
    assert contact.ledger.charges == []
    assert charges(grid) == {client: [] for client in range(4)}


def test_an_interrupted_collection_charges_each_node_once(world, tmp_path, clock):
    """Node 102 was not reached at all before the server was killed."""
    grid = world.grid()
    collect(world.model, world.contact(grid), statistics=CentroidConfig(seed=9))  # nodes hold the weights
    away, grid.apps[ODD] = grid.apps[ODD], ClientApp()
    with pytest.raises(ContactError):
        collect(world.model, world.contact(grid, folder=tmp_path), privacy=REAL)
    grid.apps[ODD] = away
    contact = world.contact(grid, folder=tmp_path)
    collect(world.model, contact, privacy=REAL)
    assert {client: len(own) for client, own in charges(grid).items()} == dict.fromkeys(range(4), 1)
    assert charges(grid) == server_charges(contact.ledger)


def test_a_release_whose_reply_was_lost_is_sent_again_and_paid_for_once(world):
    lost = []

    def spoil(node, reply):
        if node == ODD and told(reply).status == "ok" and not lost:
            lost.append(node)
            return None
        return reply

    grid = world.grid(spoil)
    contact = world.contact(grid)
    collect(world.model, contact, privacy=REAL)
    assert lost == [ODD]
    assert {client: len(own) for client, own in charges(grid).items()} == dict.fromkeys(range(4), 1)
    assert {client: len(own) for client, own in server_charges(contact.ledger).items()} == dict.fromkeys(range(4), 1)


def test_a_node_without_budget_is_left_out_and_pays_nothing(world):
    grid = world.grid()
    grid.apps[ODD] = world.app(2, policy=Policy(budget=Budget(0.5)))
    contact = world.contact(grid, least_fraction=0.5)
    store = collect(world.model, contact, privacy=REAL)
    assert store.clients == (0, 1, 3)
    assert "spent" in contact.left_out[ODD]
    assert charges(grid)[2] == server_charges(contact.ledger)[2] == []


def test_a_budget_of_the_server_stops_a_collection_before_anybody_is_asked(world):
    grid = world.grid()
    contact = world.contact(grid, ledger=Ledger(budgets={None: Budget(1.0)}))
    with pytest.raises(BudgetError, match="Nothing was released"):
        collect(world.model, contact, privacy=REAL)
    assert charges(grid) == {client: [] for client in range(4)}


def test_under_dp_nobody_is_asked_for_classes_of_samples(world):
    grid = world.grid(policy=Policy(only_private=True))
    collect(world.model, world.contact(grid), privacy=REAL, forget=[samples(world, c2=30)])
    assert grid.asked("labels") == []


def test_nodes_that_answer_under_dp_only_are_a_clear_error_without_it(world):
    grid = world.grid(policy=Policy(only_private=True))
    with pytest.raises(ContactError, match="differential privacy only"):
        collect(world.model, world.contact(grid))
    assert collect(world.model, world.contact(grid), privacy=REAL).clients == (0, 1, 2, 3)


# --- settings


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout_s": 0},
        {"timeout_s": -1.0},
        {"timeout_s": math.nan},
        {"retries": -1},
        {"least_fraction": 0.0},
        {"least_fraction": 1.01},
        {"least_fraction": math.nan},
        {"num_classes": 0},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(world, settings):
    with pytest.raises(SettingError, match="must be "):
        world.contact(world.grid(), **settings)


# --- weights with the first question


def test_weights_at_once_save_a_round_of_messages_and_are_sent_once(world):
    usual, saving = world.grid(), world.grid()
    one = collect(world.model, world.contact(usual))
    contact = world.contact(saving, weights_at_once=True)
    other = collect(world.model, contact)
    assert torch.equal(one.vectors, other.vectors)
    assert (len(usual.asked("summarize")), len(saving.asked("summarize"))) == (8, 4)
    assert all(ask.weights is not None for _, ask in saving.asked("summarize"))
    collect(world.model, contact, statistics=CentroidConfig(ratio=0.3))
    assert [ask.weights is None for _, ask in saving.asked("summarize")] == [False] * 4 + [True] * 4
    assert contact.traffic.bytes_up > 0


def test_a_node_that_lost_its_weights_gets_them_again(world):
    grid = world.grid()
    contact = world.contact(grid, weights_at_once=True)
    collect(world.model, contact)
    for name in ("fedup-weights", "fedup-weights-of"):
        del grid.contexts[FIRST + 1].state[name]
    assert len(collect(world.model, contact, statistics=CentroidConfig(ratio=0.3)).clients) == 4
    assert [node for node, ask in grid.asked("summarize")[4:] if ask.weights is not None] == [FIRST + 1]


@pytest.mark.parametrize("at_once", [False, True])
def test_nobody_gets_weights_for_what_needs_none(world, at_once):
    grid = world.grid()
    contact = world.contact(grid, weights_at_once=at_once)
    sample = int(world.rows(1)[0])
    assert contact.clients
    assert ask_one(contact, 1, LabelsQuestion(frozenset([sample]))) == {sample: int(world.federation.y[sample])}
    assert all(ask.weights is None for _, ask in grid.asked())


def test_a_question_to_all_is_written_once(world, monkeypatch):
    written = []
    monkeypatch.setattr(messaging, "write_ask", lambda *parts: written.append(parts) or write_ask(*parts))
    collect(world.model, world.contact(world.grid()))
    assert [weights is None for _, weights in written] == [True, False]  # and not for each of four nodes


# --- nodes that come back, and nodes that do not


@pytest.mark.parametrize("code", [ErrorCode.NODE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE])
def test_a_node_that_flower_calls_unavailable_is_asked_again(world, monkeypatch, code):
    monkeypatch.setattr(messaging.time, "sleep", lambda seconds: None)
    lost = iter([True])

    def once(node, reply):
        return Message(Error(code, "gone"), reply_to=reply_of(reply)) if node == ODD and next(lost, None) else reply

    grid = world.grid(once)
    contact = world.contact(grid)
    assert_same_store(collect(world.model, contact), collect(world.model, world.contact(world.grid())))
    assert contact.left_out == {}


def test_a_node_that_stays_unavailable_is_left_out_after_the_retries(world, monkeypatch):
    monkeypatch.setattr(messaging.time, "sleep", lambda seconds: None)

    def never(node, reply):
        return Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=reply_of(reply)) if node == ODD else reply

    grid = world.grid(never)
    contact = world.contact(grid, least_fraction=0.5, retries=2)
    assert 2 not in collect(world.model, contact).clients
    assert len([node for node, _ in grid.asked() if node == ODD]) == 3
    assert "asked 3 times" in contact.left_out[ODD]


def test_a_node_that_is_not_connected_any_more_is_missing(world):
    grid = world.grid()
    contact = world.contact(grid)
    collect(world.model, contact)
    del grid.apps[ODD]
    with pytest.raises(ContactError, match=r"3 of 4 nodes.*not connected any more"):
        collect(world.model, contact)
    contact = world.contact(grid, least_fraction=0.7)
    assert collect(world.model, contact).clients == (0, 1, 3)
    assert contact.left_out == {}  # this one has never met it


# --- several clients at once


def shared_request(world: World, many: int = 30) -> Forget:
    return Forget.samples({client: world.rows(client)[:many].tolist() for client in (0, 1, 3)})


def waves(grid: LocalGrid) -> list[tuple[str, list[int]]]:
    """What was asked of which nodes, one after another; questions of the same kind in a row are one wave."""
    found: list[tuple[str, list[int]]] = []
    for node, ask in grid.asked():
        if not found or found[-1][0] != ask.kind:
            found.append((ask.kind, []))
        found[-1][1].append(node)
    return found


def test_clients_of_one_request_are_asked_together_and_the_filter_is_the_same(world):
    config = FilterConfig(filter="both", steps=20)
    grid = world.grid()
    contact = world.contact(grid)
    store, plugged = collect(world.model, contact), plug(world.model)
    grid.sent.clear()
    pushes, push = [], grid.push_messages
    grid.push_messages = lambda messages: pushes.append(len(messages)) or push(messages)
    report = unlearn(plugged, store, shared_request(world), clients=contact, config=config)
    nodes, found = [FIRST, FIRST + 1, FIRST + 3], waves(grid)
    assert [kind for kind, _ in found] == ["labels", "summarize", "sketch", "spreads", "moments", "tally"]
    asked = dict(found)
    assert asked["labels"] == asked["summarize"] == asked["moments"] == nodes
    assert asked["sketch"] == asked["tally"] == NODES and set(nodes) <= set(asked["spreads"])
    assert pushes == [len(of) for of in asked.values()]
    assert sorted(report.clients_contacted) == [0, 1, 2, 3]

    here, at_home = plug(world.model), InProcess(world.federation, world.model)
    unlearn(here, collect(world.model, world.federation), shared_request(world), clients=at_home, config=config)
    x = world.dataset.test_x
    assert torch.equal(plugged(x), here(x))


@pytest.mark.parametrize("kind", ["labels", "summarize", "sketch", "spreads", "moments"])
def test_one_client_of_several_that_fails_ends_it_and_changes_nothing(world, kind):
    grid = world.grid()
    contact = world.contact(grid, retries=0, timeout_s=0.1)
    store, plugged = collect(world.model, contact), plug(world.model)
    before = copy.deepcopy(store)
    spoilt = FIRST + 1

    def spoil(node, reply):
        asked = [ask.kind for number, ask in grid.asked() if number == node][-1]
        return None if node == spoilt and asked == kind else reply

    grid.spoil = spoil
    with pytest.raises(ContactError, match="Client 1 gave no answer of use"):
        unlearn(plugged, store, shared_request(world), clients=contact, config=FilterConfig(filter="both", steps=5))
    assert plugged.served is None
    assert_same_store(store, before)
    grid.spoil = lambda node, reply: reply
    unlearn(plugged, store, shared_request(world), clients=contact, config=FilterConfig(filter="both", steps=5))
    assert plugged.served is not None


def test_one_answer_of_several_that_does_not_fit_ends_it(world):
    grid = world.grid()
    contact = world.contact(grid)
    store, plugged = collect(world.model, contact), plug(world.model)
    grid.spoil = lambda node, reply: changed(reply, vectors=None) if node == ODD - 1 and told(reply).arrays else reply
    with pytest.raises(ContactError, match=r"Client 1 gave no answer of use: .*missing"):
        unlearn(plugged, store, shared_request(world), clients=contact, config=FilterConfig(steps=5))
    assert plugged.served is None


SAMPLES = {0: 5, 1: 3, 3: 8}


def label_questions(world: World) -> dict[int, LabelsQuestion]:
    return {client: LabelsQuestion(frozenset(world.rows(client)[:n].tolist())) for client, n in SAMPLES.items()}


def release_questions(excluded: int = 0) -> dict[int, PrivateCentroidsQuestion]:
    return {client: PrivateCentroidsQuestion("head", REAL, without=frozenset([excluded])) for client in SAMPLES}


def test_questions_to_several_clients_are_one_wave_and_answers_come_in_their_order(world):
    grid = world.grid()
    contact, pushes, push = world.contact(grid), [], grid.push_messages
    assert contact.clients
    grid.push_messages = lambda messages: pushes.append(len(messages)) or push(messages)
    for order in ([3, 0, 1], [1, 3]):
        questions = {client: label_questions(world)[client] for client in order}
        found = list(contact.ask(questions))
        assert [client for client, _ in found] == order
        assert all(labels.keys() == questions[client].samples for client, labels in found)
    assert pushes == [3, 2] and contact.silent == {}


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_where_one_required_client_gives_no_answer_nobodys_is_returned(world, lost):
    grid = world.grid(lambda node, reply: None if node == FIRST + lost else reply)
    contact = world.contact(grid, retries=0, timeout_s=0.1, least_fraction=0.5)
    with pytest.raises(ContactError, match=f"Client {lost} (gave no answer of use|has not answered so far)"):
        contact.ask(label_questions(world), optional=[2])
    grid.spoil = lambda node, reply: reply
    collect(world.model, contact)  # all are met by now
    grid.spoil = lambda node, reply: None if node == FIRST + lost else reply
    grid.sent.clear()
    with pytest.raises(ContactError, match=f"Client {lost} gave no answer of use: .*Nothing was changed"):
        contact.ask(label_questions(world), optional=[2])
    assert grid.nodes_asked("labels") == [FIRST, FIRST + 1, FIRST + 3]
    assert list(contact.silent) == [lost]


@pytest.mark.parametrize("why", ["lost", "refused", "out of shape"])
def test_an_optional_client_that_is_silent_is_named_and_the_others_answers_come(world, why):
    grid = world.grid()
    contact = world.contact(grid, retries=0, timeout_s=0.1)
    assert contact.clients
    changes = {
        "lost": lambda reply: None,
        "refused": lambda reply: with_answer(reply, Answer("refused", told(reply).base, reason="not on Sundays")),
        "out of shape": lambda reply: changed(reply, {"labels": None}),
    }
    grid.spoil = spoiling(changes[why], node=FIRST + 1, kind="labels")
    found = dict(contact.ask(label_questions(world), optional=[1, 2]))
    assert list(found) == [0, 3]
    reason = {"lost": "no answer within", "refused": "not on Sundays", "out of shape": "labels is no list"}[why]
    assert list(contact.silent) == [1] and reason in contact.silent[1]
    grid.spoil = lambda node, reply: reply
    assert list(dict(contact.ask(label_questions(world)))) == [0, 1, 3]
    assert contact.silent == {}, "it has answered since"


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
def test_releases_that_came_are_charged_and_not_paid_again_where_another_did_not(world, tmp_path, on_disk):
    grid = world.grid()
    contact = world.contact(grid, retries=0, timeout_s=0.1, folder=tmp_path if on_disk else None)
    assert contact.clients
    grid.spoil = spoiling(lambda reply: None, node=FIRST + 1)
    with pytest.raises(ContactError, match="Client 1"):
        contact.ask(release_questions())
    assert {charge.client for charge in contact.ledger.charges} == {0, 3}
    assert {client: len(own) for client, own in charges(grid).items()} == {0: 1, 1: 1, 2: 0, 3: 1}
    grid.spoil = lambda node, reply: reply
    grid.sent.clear()
    first = dict(contact.ask(release_questions()))
    assert grid.nodes_asked() == ([FIRST + 1] if on_disk else [FIRST, FIRST + 1, FIRST + 3])
    assert {client: len(own) for client, own in charges(grid).items()} == {0: 1, 1: 1, 2: 0, 3: 1}
    assert_ledgers_agree(grid, contact)
    assert contact.silent == {}
    again = dict(contact.ask(release_questions()))
    assert all(torch.equal(first[client].vectors, again[client].vectors) for client in SAMPLES)
    contact.settled()
    other = dict(contact.ask(release_questions()))  # to ask again is to ask for something new
    assert not any(torch.equal(first[client].vectors, other[client].vectors) for client in SAMPLES)
    assert_ledgers_agree(grid, contact)


def test_a_client_that_was_silent_and_whose_answer_is_on_disk_is_silent_no_more(world, tmp_path):
    grid = world.grid()
    contact = world.contact(grid, retries=0, timeout_s=0.1, folder=tmp_path)
    list(contact.ask(release_questions()))
    grid.spoil = lambda node, reply: None
    list(contact.ask(label_questions(world), optional=SAMPLES))
    assert list(contact.silent) == list(SAMPLES)
    list(contact.ask(release_questions()))
    assert contact.silent == {}


def test_a_budget_that_allows_one_of_several_questions_lets_none_be_asked(world):
    grid = world.grid()
    contact = world.contact(grid, ledger=Ledger(budgets={3: Budget(0.1)}))
    for questions in (release_questions(), label_questions(world)):
        with pytest.raises(BudgetError, match="Client 3"):
            contact.ask(questions)
    assert {ask.kind for _, ask in grid.asked()} == {"who"}
    assert contact.ledger.charges == [] and charges(grid) == {client: [] for client in range(4)}


# --- answers that wait are of one question


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
def test_an_answer_that_waits_is_not_taken_for_another_cut(world, tmp_path, on_disk):
    """Two cuts of the same width, so that no shape would tell."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
    app = lambda client: world.app(client, model=lambda: copy.deepcopy(model))  # noqa: E731
    grid = LocalGrid({FIRST + i: app(i) for i in range(4)})
    folder = tmp_path if on_disk else None
    contact = GridContact(grid, model.eval(), example=world.example, num_classes=10, folder=folder)
    how = CentroidConfig(0.5)
    contact.ask_everyone(CentroidsQuestion("3", how))  # a collection that is given up
    for question in (CentroidsQuestion("5", how), CentroidsQuestion("5", how, frozenset([1]))):
        expected = ask_one(InProcess(world.federation, model), 1, question)
        assert torch.equal(ask_one(contact, 1, question).vectors, expected.vectors)


def test_what_was_asked_for_a_request_that_failed_is_asked_for_anew(world):
    grid = world.grid()
    contact = world.contact(grid, retries=0, timeout_s=0.1)
    store, plugged = collect(world.model, contact), plug(world.model)
    grid.spoil = lambda node, reply: None
    with pytest.raises(ContactError, match="Client 0 gave no answer of use"):
        unlearn(plugged, store, shared_request(world), clients=contact)
    grid.spoil = lambda node, reply: reply
    grid.sent.clear()
    sample = int(world.rows(3)[0])
    assert ask_one(contact, 3, LabelsQuestion(frozenset([sample]))) == {sample: int(world.federation.y[sample])}
    assert grid.nodes_asked("labels") == [FIRST + 3]
    assert collect(world.model, contact, forget=[Forget.samples({1: [int(world.rows(1)[0])]})]).clients == (0, 1, 2, 3)


# --- accounts


def test_a_release_that_came_is_charged_though_the_request_fails(world):
    grid = world.grid()
    contact = world.contact(grid, retries=0, timeout_s=0.1)
    store, plugged = collect(world.model, contact, privacy=DP(100.0, clip=4.0)), plug(world.model)
    grid.spoil = lambda node, reply: None if node == FIRST + 1 else reply
    config = FilterConfig(filter="bottleneck", steps=5)
    with pytest.raises(ContactError, match="Client 1"):
        unlearn(plugged, store, shared_request(world), clients=contact, config=config)
    at_nodes = {client: len(own) for client, own in charges(grid).items()}
    at_server = {client: len(own) for client, own in server_charges(contact.ledger).items()}
    assert at_nodes == {0: 2, 1: 2, 2: 1, 3: 2}
    assert at_server == {0: 2, 1: 1, 2: 1, 3: 2}  # it cannot know of the answer that was lost, so far
    grid.spoil = lambda node, reply: reply
    unlearn(plugged, store, shared_request(world), clients=contact, config=config)
    assert {client: len(own) for client, own in charges(grid).items()} == {0: 2, 1: 2, 2: 1, 3: 2}  # the same again
    assert_ledgers_agree(grid, contact)
    assert not any(charge.correction for charge in contact.ledger.charges)


def test_answers_on_disk_are_charged_once_by_a_server_that_was_killed(world, tmp_path):
    grid, ledger = world.grid(), Ledger()
    contact = world.contact(grid, folder=tmp_path, ledger=ledger)
    answers = contact.ask_everyone(PrivateCentroidsQuestion("head", REAL))
    assert [next(answers)[0] for _ in range(2)] == [0, 1]  # and killed here
    collect(world.model, world.contact(grid, folder=tmp_path, ledger=ledger), cut="head", privacy=REAL)
    assert {client: len(own) for client, own in charges(grid).items()} == dict.fromkeys(range(4), 1)
    assert {client: len(own) for client, own in server_charges(ledger).items()} == dict.fromkeys(range(4), 1)


@pytest.mark.parametrize("part", ["sums", "counts", "clip"])
def test_noisy_statistics_out_of_shape_are_not_taken(world, part):
    grid = world.grid()
    contact = world.contact(grid, retries=0)
    groups = RowGroups({"it": Forget.samples({2: world.rows(2)[:40].tolist()})}, Forget())

    def spoil(node, reply):
        if told(reply).status != "ok" or not told(reply).arrays:
            return reply
        if part == "clip":
            return changed(reply, {"clip": 1e300})
        wrong = told(reply).arrays[part][:, :1] if part == "sums" else told(reply).arrays[part][:5]
        return changed(reply, **{part: wrong})

    grid.spoil = spoil
    with pytest.raises(ContactError, match="Client 2 gave no answer of use"):
        contact.ask({2: PrivateEraserQuestion("conv2", REAL, groups)})


# --- nodes that come under another number, or late


def test_a_client_that_comes_back_by_another_number_is_the_same(world):
    grid = world.grid()
    contact = world.contact(grid)
    store = collect(world.model, contact)
    grid.apps[300] = grid.apps.pop(ODD)
    grid.contexts[300] = grid.contexts.pop(ODD)
    assert_same_store(collect(world.model, contact), store)
    sample = int(world.rows(2)[0])
    assert ask_one(contact, 2, LabelsQuestion(frozenset([sample])))
    grid.apps[301], grid.contexts[301] = grid.apps[300], grid.contexts[300]
    with pytest.raises(DataError, match="Two nodes say they are client 2"):
        collect(world.model, contact)


def test_a_node_that_joined_late_is_asked_too(world):
    grid = world.grid()
    late, context = grid.apps.pop(FIRST + 3), grid.contexts[FIRST + 3]
    contact = world.contact(grid)
    assert list(contact.clients) == [0, 1, 2]
    grid.apps[FIRST + 3], grid.contexts[FIRST + 3] = late, context
    assert collect(world.model, contact, forget=[Forget.clients([0])]).clients == (0, 1, 2, 3)
    assert list(contact.clients) == [0, 1, 2, 3]


# --- both ledgers agree


def test_a_budget_of_the_server_stops_an_exact_question_before_any_is_asked(world):
    grid = world.grid()
    contact = world.contact(grid, ledger=Ledger(budgets={None: Budget(1.0)}))
    with pytest.raises(BudgetError, match="no guarantee"):
        collect(world.model, contact, forget=[samples(world, c2=5)])
    assert {ask.kind for _, ask in grid.asked()} == {"who"}


def test_a_collection_that_was_paid_for_can_be_taken_up_again_under_a_budget_for_just_one(world, tmp_path, clock):
    grid, ledger = world.grid(), Ledger(budgets={None: Budget(REAL.epsilon)})
    clock.kills = True
    grid.spoil = spoiling(lambda reply: None)
    with pytest.raises(Killed):
        collect(world.model, world.contact(grid, folder=tmp_path, ledger=ledger), privacy=REAL)
    clock.kills, grid.spoil = False, lambda node, reply: reply
    contact = world.contact(grid, folder=tmp_path, ledger=ledger)
    assert collect(world.model, contact, privacy=REAL).clients == (0, 1, 2, 3)
    assert_ledgers_agree(grid, contact)
    with pytest.raises(BudgetError):
        collect(world.model, contact, privacy=REAL)  # another one is not


def test_one_release_under_two_names_is_charged_once_and_two_under_one_name_twice(world):
    grid = world.grid()
    contact = world.contact(grid)
    collect(world.model, contact, privacy=REAL)
    spent = contact.ledger.spent(2)
    first = next(reply for reply in grid.came if reply.metadata.src_node_id == ODD and told(reply).arrays)
    again = told(first)
    grid.spoil = spoiling(lambda reply: with_answer(reply, replace(again, details={**again.details, "release": "x"})))
    contact.settled()
    question = PrivateCentroidsQuestion("head", REAL, frozenset(range(10)))
    ask_one(contact, 2, question)  # the node made and charged another, which was exchanged on its way for the first
    assert contact.ledger.spent(2) == pytest.approx(spent)
    grid.spoil = lambda node, reply: changed(reply, {"release": "x"})
    contact.settled()
    ask_one(contact, 2, question)
    assert_ledgers_agree(grid, contact)
    assert contact.ledger.spent(2) == pytest.approx(3 * spent)


@pytest.mark.parametrize("spent", [-1.0, math.nan, math.inf, 1e300, "1", None, True, [1.0]], ids=str)
def test_an_account_out_of_range_is_not_followed(world, spent):
    grid = world.grid(lambda node, reply: changed(reply, {"spent": spent}) if told(reply).status == "ok" else reply)
    contact = world.contact(grid)
    collect(world.model, contact, privacy=REAL)
    assert [charge.correction for charge in contact.ledger.charges] == [False] * 4


def test_a_node_that_fails_after_it_has_charged_itself_is_charged_at_the_server(world):
    def fail(reply):
        return with_answer(reply, Answer("failed", told(reply).base, {"spent": told(reply).details["spent"]}))

    grid = world.grid(spoiling(fail))
    contact = world.contact(grid, least_fraction=0.5)
    assert list(contact.clients) == [0, 1, 2, 3]
    assert collect(world.model, contact, privacy=REAL).clients == (0, 1, 3)
    assert_ledgers_agree(grid, contact)
    grid.spoil = lambda node, reply: reply
    collect(world.model, contact, privacy=REAL)  # asked by the same name the node sends what it had made
    assert_ledgers_agree(grid, contact)
    assert sum(charge.covered for charge in contact.ledger.charges if charge.client == 2) > 0


def test_the_servers_ledger_is_charged_before_anything_can_fail(world):
    """The journal's disk is full: nothing of the answer is used."""

    class Full(Ledger):
        def _record(self, charge):
            raise StorageError("no space")

    with pytest.raises(StorageError):
        collect(world.model, world.contact(world.grid(), ledger=Full()), privacy=REAL)


# --- numbers that are somebody else's


def test_what_a_stranger_says_to_have_spent_is_not_charged_to_the_client_it_names(world):
    def claims(node, reply):
        return changed(reply, {"client": 0, "spent": 1e12}) if node == FIRST + 2 else reply

    contact = world.contact(world.grid(claims), least_fraction=0.5)
    with pytest.raises(DataError, match="client 0"):
        collect(world.model, contact, privacy=REAL)
    assert contact.ledger.spent(0) <= 2 * REAL.mu**2 * (1 + 1e-9)  # its own release, and one in its name


def test_a_node_that_takes_the_number_of_one_that_is_known_charges_it_nothing(world):
    def claims(node, reply):
        return changed(reply, {"client": 0, "spent": 1e12}) if node == FIRST + 3 else reply

    grid = world.grid(claims)
    late = grid.apps.pop(FIRST + 3)
    contact = world.contact(grid, least_fraction=0.5)
    assert list(contact.clients) == [0, 1, 2]
    grid.apps[FIRST + 3] = late
    with pytest.raises(DataError, match="client 0"):
        collect(world.model, contact, privacy=REAL)
    assert contact.ledger.spent(0) == pytest.approx(REAL.mu**2)


def test_a_node_that_joins_late_is_held_to_its_clients_budget(world):
    grid = world.grid()
    late = grid.apps.pop(FIRST + 3)
    contact = world.contact(grid, ledger=Ledger(budgets={3: Budget(1.0)}))
    assert list(contact.clients) == [0, 1, 2]
    grid.apps[FIRST + 3] = late
    with pytest.raises(BudgetError, match="Client 3"):
        collect(world.model, contact)
    assert not grid.asked("summarize")

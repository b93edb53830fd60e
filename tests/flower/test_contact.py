"""Clients behind a grid give the same store and the same filters as in process; each is asked only what it must be."""

import copy
from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from tests._asking import ask_one
from tests._forced import restore, unlearn
from tests.flower._contact import CENTROIDS, NODES, ODD, assert_same_store, untouched
from tests.flower._grid import FIRST, LocalGrid, World, collect, digits
from torch import nn

import fedup
from fedup import FilterConfig, Forget, fingerprint, plug
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.in_process import InProcess
from fedup.clients.labels import LabelsQuestion
from fedup.errors import ContactError, FedUPError, RequestError
from fedup.flower import Policy, declared_rows, messaging
from fedup.flower.wire import write_ask
from fedup.privacy import DP
from fedup.statistics.centroids import CentroidConfig

pytestmark = pytest.mark.usefixtures("clock")
PRIVATE = DP(4.0, clip=4.0, replay_seed=5)
AUTO = FilterConfig(rank=8, steps=4)
BOTH = replace(AUTO, filter="both")


SETTINGS = {
    "usual": {},
    "early": {"cut": "conv2", "statistics": CentroidConfig(0.3, seed=4)},
    "noise of the paper": {"privacy": "paper", "cut": "fc2", "statistics": CentroidConfig(sigma=0.1, seed=5)},
    "preset": {"statistics": "paper"},
    "DP": {"privacy": PRIVATE},
    "DP at another cut": {"privacy": replace(PRIVATE, projection="random", dims=7, cells=2), "cut": "fc1"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_centroids_from_the_grid_equal_those_in_process_to_the_bit(world, settings):
    store = collect(world.model, world.contact(world.grid()), **settings)
    assert_same_store(store, collect(world.model, world.federation, **settings))


def test_a_node_that_reports_more_rows_than_it_said_it_trained_on_is_left_out(world):
    grid, strategy = world.grid(), FedAvg()
    contact, rows = world.contact(grid, least_fraction=0.5), declared_rows(strategy)
    replies = []
    for client, less in ((0, 0), (1, 1), (2, 0)):  # client 3 did not train
        metrics = MetricRecord({"num-examples": len(world.rows(client)) - less})
        question = Message(RecordDict(), dst_node_id=FIRST + client, message_type="train")
        trained = RecordDict({"arrays": ArrayRecord(world.model.state_dict()), "metrics": metrics})
        replies.append(Message(trained, reply_to=question))
    arrays, _ = strategy.aggregate_train(1, iter(replies))
    assert arrays is not None, "the strategy does its work"
    contact.declared_rows = rows
    store = fedup.collect(world.model, contact, forget=[world.samples(c2=7)], statistics="moments")
    assert store.clients == (0, 2, 3) and "said that it trained on" in contact.left_out[FIRST + 1]
    contact.declared_rows = {FIRST + 2: 20}
    with pytest.raises(ContactError, match="said that it trained on 20"):
        unlearn(plug(world.model), store, [world.samples(c2=7), world.samples(c2=60)], clients=contact)


REQUESTS = {
    "client": lambda world: Forget.clients([1]),
    "class": lambda world: Forget.classes([3, 5]),
    "sample": lambda world: world.samples(c2=30),
    "all": lambda world: Forget.clients([0]) | Forget.classes([1]) | world.samples(c2=7, c3=20),
    "all samples of a cell": lambda world: of_one_class(world, 2, 1),
}


def of_one_class(world: World, client: int, label: int) -> Forget:
    rows = world.rows(client)
    return Forget.samples({client: rows[world.federation.y[rows] == label].tolist()})


@pytest.mark.parametrize("make", REQUESTS.values(), ids=REQUESTS.keys())
def test_centroids_collected_for_a_request_equal_those_in_process_to_the_bit(world, make):
    request, grid = make(world), world.grid()
    for settings in ({}, {"statistics": "paper"}):
        store = collect(world.model, world.contact(grid), forget=[request], **settings)
        assert_same_store(store, collect(world.model, world.federation, forget=[request], **settings))
    assert not {FIRST + client for client in request.client_ids} & set(grid.nodes_asked(*CENTROIDS))


def test_half_precision_rounds_vectors_and_saves_bytes(world, plain):
    store = collect(world.model, world.contact(world.grid(), half=True))
    assert store.vectors.dtype == torch.float32
    assert torch.equal(store.vectors, plain.vectors.half().float())
    assert (store.cells, store.counts.tolist()) == (plain.cells, plain.counts.tolist())
    full = collect(world.model, world.contact(world.grid()))
    assert store.size_bytes < 0.9 * full.size_bytes


def test_neither_ids_nor_the_order_and_numbers_of_nodes_matter(world, plain):
    apps = {node: world.app(i, ids=None, client=lambda context, i=i: i) for i, node in enumerate([9, 3, 7, 5])}
    assert_same_store(collect(world.model, world.contact(LocalGrid(apps))), plain)


@pytest.mark.parametrize(
    ("names", "config", "privacy"),
    [(["client"], AUTO, None), (["sample"], AUTO, PRIVATE), (["class", "sample"], BOTH, None), (["all"], AUTO, None)],
    ids=["client", "sample under DP", "class+sample", "all"],
)
def test_requests_are_answered_and_taken_back_over_the_grid_as_in_process(world, names, config, privacy):
    requests = [REQUESTS[name](world) for name in names]
    ways = [
        (plug(world.model), collect(world.model, reached, privacy=privacy), reached)
        for reached in (world.contact(world.grid()), world.federation)
    ]
    (plugged, store, _), (other, other_store, _), x = *ways, world.test_x[:100]
    for request in requests:
        one, two = (unlearn(model, kept, request, clients=reached, config=config) for model, kept, reached in ways)
        assert one.clients_contacted == two.clients_contacted
        assert torch.equal(plugged(x), other(x))
        assert_same_store(store, other_store)
    for request in requests:
        for model, kept, reached in ways:
            restore(model, kept, request, clients=reached)
        assert not plugged.requests or torch.equal(plugged(x), other(x))
        assert_same_store(store, other_store)
    assert torch.equal(plugged.unplug()(x), world.model(x))


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


def test_each_node_is_asked_once_for_what_a_request_needs_in_one_wave_for_all(world):
    """A client or class request asks nobody for statistics; samples ask their holders, and all what they are compared
    with; all count."""
    grid = world.grid()
    contact = world.contact(grid)
    store, plugged = collect(world.model, contact), plug(world.model)
    pushes, push = [], grid.push_messages
    grid.sent.clear()
    unlearn(plug(world.model), store, Forget.clients([1]) | Forget.classes([3]), clients=contact, config=AUTO)
    assert {ask.kind for _, ask in grid.asked()} == {"tally"}
    grid.sent.clear()
    grid.push_messages = lambda messages: pushes.append(len(messages)) or push(messages)
    report = unlearn(plugged, store, world.samples(c0=30, c1=30, c3=30), clients=contact, config=BOTH)
    asked = {
        kind: [node for node, ask in grid.asked(kind)] for kind in dict.fromkeys(ask.kind for _, ask in grid.asked())
    }
    assert list(asked) == ["labels", "summarize", "sketch", "spreads", "moments", "tally"]
    holders = [FIRST, FIRST + 1, FIRST + 3]
    assert asked["labels"] == asked["summarize"] == asked["moments"] == holders
    assert asked["sketch"] == asked["tally"] == NODES and set(holders) <= set(asked["spreads"])
    assert pushes == [len(nodes) for nodes in asked.values()]
    assert sorted(report.clients_contacted) == sorted(report.clients_counting) == [0, 1, 2, 3]


def test_no_node_is_told_of_other_nodes_samples(world):
    grid, request = world.grid(), world.samples(c1=25, c3=30)
    contact = world.contact(grid)
    collect(world.model, contact, forget=[request])
    store = collect(world.model, contact)
    unlearn(plug(world.model), store, [request, Forget.classes([5])], clients=contact, config=BOTH)
    kinds = {ask.kind for _, ask in grid.asked()}
    assert {"who", "labels", "summarize", "sketch", "spreads", "moments", "tally"} <= kinds, "premise"
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


UNKNOWN = (Forget.clients([7]), Forget.classes([10]), Forget.samples({7: [1]}), Forget.clients(range(4)), Forget())


def test_a_request_that_names_something_unknown_or_everything_is_refused(world):
    contact = world.contact(world.grid())
    for request in UNKNOWN:
        with pytest.raises(RequestError):
            contact.check(request)
    for request in (*UNKNOWN, Forget.samples({2: [10**6]})):  # which samples there are only their client knows
        with pytest.raises(RequestError):
            collect(world.model, contact, forget=[request])
    with pytest.raises(ContactError, match="no node goes by that number"):
        contact.ask({9: LabelsQuestion(frozenset([1]))})


SAMPLES = {0: 5, 1: 3, 3: 8}


def label_questions(world: World) -> dict[int, LabelsQuestion]:
    return {client: LabelsQuestion(frozenset(world.rows(client)[:n].tolist())) for client, n in SAMPLES.items()}


def test_questions_to_several_clients_are_one_wave_and_answers_come_in_their_order(world):
    grid = world.grid()
    contact, pushes, push = world.contact(grid), [], grid.push_messages
    assert contact.clients
    grid.push_messages = lambda messages: pushes.append(len(messages)) or push(messages)
    for order in ([3, 0, 1], [1, 3]):
        questions = {client: label_questions(world)[client] for client in order}
        answers = list(contact.ask(questions))
        assert [client for client, _ in answers] == order
        assert all(labels.keys() == questions[client].samples for client, labels in answers)
    assert pushes == [3, 2] and contact.silent == {}


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_one_required_client_without_an_answer_ends_it_for_all_and_an_optional_one_is_named(world, lost):
    grid = world.grid()
    contact = world.contact(grid, retries=0, timeout_s=0.1)
    assert contact.clients
    grid.spoil = lambda node, reply: None if node == FIRST + lost else reply
    with pytest.raises(ContactError, match=f"Client {lost} gave no answer of use: .*Nothing was changed"):
        contact.ask(label_questions(world), optional=[2])
    assert grid.nodes_asked("labels") == [FIRST, FIRST + 1, FIRST + 3] and list(contact.silent) == [lost]
    answers = dict(contact.ask(label_questions(world), optional=[lost, 2]))
    assert answers.keys() == SAMPLES.keys() - {lost} and "no answer within" in contact.silent[lost]
    grid.spoil = untouched
    assert list(dict(contact.ask(label_questions(world)))) == [0, 1, 3]
    assert contact.silent == {}, "it has answered since"


def weights_sent(grid: LocalGrid) -> list[int]:
    return [node for node, ask in grid.asked() if ask.weights is not None]


def test_weights_go_only_to_nodes_that_lack_them(world, plain):
    grid, older = world.grid(), digits(1).model
    assert collect(older, world.contact(grid, older)).base == fingerprint(older)
    grid.sent.clear()
    assert_same_store(collect(world.model, world.contact(grid)), plain)
    assert weights_sent(grid) == NODES  # they held an older model
    grid.apps[ODD], grid.contexts[ODD].state = world.app(2), RecordDict()  # it was set up anew
    grid.sent.clear()
    contact = world.contact(grid)
    sample = int(world.rows(1)[0])
    assert ask_one(contact, 1, LabelsQuestion(frozenset([sample]))) == {sample: int(world.federation.y[sample])}
    collect(world.model, contact)
    assert weights_sent(grid) == [ODD]


def test_weights_at_once_save_a_round_of_messages_and_are_sent_once(world, plain):
    grid = world.grid()
    contact = world.contact(grid, weights_at_once=True)
    assert contact.clients and not weights_sent(grid)  # for a question that needs none
    assert_same_store(collect(world.model, contact), plain)
    assert [ask.weights is None for _, ask in grid.asked("summarize")] == [False] * 4
    for name in ("fedup-weights", "fedup-weights-of"):
        del grid.contexts[FIRST + 1].state[name]
    collect(world.model, contact, statistics=CentroidConfig(ratio=0.3))
    assert [node for node, ask in grid.asked("summarize")[4:] if ask.weights is not None] == [FIRST + 1]


def test_a_model_that_was_changed_in_place_is_never_mistaken_for_the_one_that_nodes_hold(world):
    model, grid = copy.deepcopy(world.model), world.grid()
    contact = world.contact(grid, model)
    collect(model, contact)
    model.load_state_dict(digits(1).model.state_dict())
    with pytest.raises(FedUPError, match="was changed"):
        collect(model, contact)


def test_a_question_to_all_is_written_once(world, monkeypatch):
    written = []
    monkeypatch.setattr(messaging, "write_ask", lambda *parts: written.append(parts) or write_ask(*parts))
    collect(world.model, world.contact(world.grid()))
    assert [weights is None for _, weights in written] == [True, False]  # and not for each of four nodes


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
def test_an_answer_that_waits_is_given_to_no_other_question(world, tmp_path, on_disk):
    """A collection that was given up after its answers came; then others, one at a cut of the same width."""
    layers = nn.Flatten(), nn.Linear(196, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)
    model = nn.Sequential(*layers).eval()
    grid = LocalGrid({FIRST + i: world.app(i, model=lambda: copy.deepcopy(model)) for i in range(4)})
    contact, how = world.contact(grid, model, folder=tmp_path if on_disk else None), CentroidConfig(0.5)
    contact.ask_everyone(CentroidsQuestion("3", how))
    excluded = world.samples(c2=30).sample_ids[2]
    held = frozenset(world.federation.y[world.rows(2)].tolist())
    for question in (
        CentroidsQuestion("5", how),
        CentroidsQuestion("3", how, held, excluded=excluded),
        CentroidsQuestion("3", how, excluded=excluded),
        CentroidsQuestion("3", how, without=frozenset([1])),
    ):
        expected = ask_one(InProcess(world.federation, model), 2, question)
        assert torch.equal(ask_one(contact, 2, question).vectors, expected.vectors)

"""A node answers from its own rows what it would answer in process, under its own rules, and tells nothing else."""

from dataclasses import asdict, replace

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from tests._asking import ask_one
from tests.flower._grid import World
from tests.flower._node import (
    CLIENT,
    HOW,
    Node,
    about,
    assert_summary,
    centroids,
    exact_details,
    in_process,
    row_groups,
    weights_for,
)
from torch import nn

from fedup import Forget, fingerprint
from fedup.clients.eraser_questions import SecondMomentsQuestion, SketchesQuestion, SpreadsQuestion
from fedup.clients.in_process import InProcess
from fedup.clients.labels import LabelsQuestion
from fedup.errors import DataError, MissingDataError
from fedup.flower.wire import record_of
from fedup.privacy import DP
from fedup.statistics.eraser_statistics import RowGroups

PRIVATE = DP(2.0, clip=4.0, replay_seed=7)
REAL = DP(2.0, clip=4.0)
NAN = float("nan")


@pytest.fixture
def node(world) -> Node:
    return Node(world, world.app(CLIENT))


def with_rows(world: World, places, value: float) -> dict:
    """Settings of an app whose inputs are exchanged at some places."""
    rows = world.rows(CLIENT)
    x = world.federation.x[rows].clone()
    x[places] = value
    return {"data": lambda context: (x, world.federation.y[rows])}


@pytest.mark.parametrize("how", [HOW, PRIVATE], ids=["centroids", "DP"])
def test_excluded_samples_are_left_out_and_never_read(world, how):
    rows = world.rows(CLIENT)
    excluded = frozenset(rows[10:30].tolist())
    expected = ask_one(in_process(world), CLIENT, centroids(how, cut="fc2", excluded=excluded))
    unreadable = Node(world, world.app(CLIENT, **with_rows(world, slice(10, 30), NAN)))
    told = {"labels": list(range(10))} if how is PRIVATE else {}
    answer = unreadable.summarize(how, cut="fc2", excluded=excluded, **told)
    assert_summary(answer, expected)
    assert (answer.details["rows"] == []) == (how is PRIVATE)  # how many it holds is not told under a guarantee
    if how is HOW:
        assert unreadable.summarize(how, cut="fc2").status == "failed"  # premise: whoever reads them fails


def test_without_ids_samples_go_by_their_places(world):
    """A federation in which the node's rows are all there are says the same."""
    node = Node(world, world.app(CLIENT, ids=None))
    rows = world.rows(CLIENT)
    x, y = world.federation.x[rows], world.federation.y[rows]
    alone = replace(world.federation.client(CLIENT), train=torch.arange(len(rows)))
    clients = InProcess(replace(world.federation, x=x, y=y, clients=(alone,)), world.model)
    excluded = frozenset(range(5, 25))
    assert_summary(node.summarize(excluded=excluded), ask_one(clients, CLIENT, centroids(excluded=excluded)))
    labels = LabelsQuestion(frozenset([0, 3, 107]))
    assert node.read(labels) == ask_one(clients, CLIENT, labels)
    assert node.ask("labels", samples=[108]).status == "failed"
    request = Forget.samples({CLIENT: range(40)})
    sketches = SketchesQuestion("conv2", "each", RowGroups({"it": request}, request))
    assert_same_sketches(node.read(sketches), ask_one(clients, CLIENT, sketches))


def assert_same_sketches(one, other) -> None:
    assert one.forgotten and one.retained, "premise: there is something to tell"
    for mine, theirs in ((one.forgotten, other.forgotten), (one.retained, other.retained)):
        assert mine.keys() == theirs.keys()
        for name, sums in mine.items():
            assert sums.count == theirs[name].count
            assert torch.equal(sums.sums, theirs[name].sums)


def test_a_client_with_too_few_forgotten_rows_tells_nothing_of_them(world, node):
    few = row_groups(world, 19)
    told = node.read(SketchesQuestion("conv2", "each", few))
    assert told.forgotten == {} and told.retained
    found = node.read(SpreadsQuestion({"conv2": "each"}, few, weights_for(few)))
    assert found.forgotten == {} and found.reference
    everything = RowGroups(few.requests, Forget.clients([CLIENT]))  # nothing is retained either
    question = SecondMomentsQuestion("conv2", "each", (0,), everything)
    assert (node.answer(question).arrays, node.read(question)) == ({}, None)


def test_other_clients_samples_are_nothing_to_a_node(world, node):
    own = row_groups(world)
    (name, request), more = next(iter(own.requests.items())), Forget.samples({0: [1, 2, 3], 3: [10**9]})
    both = RowGroups({name: request | more}, own.forget_set | more)
    one, other = (node.read(SketchesQuestion("conv2", "each", groups)) for groups in (own, both))
    assert_same_sketches(one, other)


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [({"partition-id": 3}, None, 3), ({}, None, 7), ({"partition-id": 3}, lambda context: context.node_id + 5, 12)],
    ids=["its partition", "its node's number", "as it says itself"],
)
def test_a_node_goes_by_the_number_that_it_was_given(world, config, given, expected):
    node = Node(world, world.app(CLIENT, client=given))
    node.context = Context(0, 7, {**config, "fedup-open": True}, RecordDict(), {})
    assert node.ask("who").details["client"] == expected


def test_weights_are_asked_for_once_and_kept_in_the_state(world, node):
    base = fingerprint(world.model)
    ask = about(base)
    assert node.say(ask).status == "needs weights"
    assert "fedup-weights" not in node.context.state
    assert node.say(replace(ask, weights=world.model.state_dict())).status == "ok"
    assert node.say(ask).status == "ok"
    again = Node(world, world.app(CLIENT))  # another process with the same state
    again.context.state = node.context.state
    assert again.say(ask).status == "ok"


WRONG = {
    "another shape": lambda weights, name: {**weights, name: torch.zeros(3, 3)},
    "a name too many": lambda weights, name: {**weights, "more": torch.zeros(3)},
    "a name too few": lambda weights, name: {other: weights[other] for other in weights if other != name},
    "not those": lambda weights, name: {**weights, name: weights[name] + 1e-3},
}


@pytest.mark.parametrize("why", WRONG)
def test_weights_that_are_not_the_models_are_refused_and_not_kept(world, node, why):
    weights = world.model.state_dict()
    answer = node.say(about(fingerprint(world.model), WRONG[why](weights, next(iter(weights)))))
    assert answer.status == "failed"
    assert ("not those" if why == "not those" else "another shape") in answer.reason
    assert "fedup-weights" not in node.context.state
    assert node.summarize().status == "ok"  # with the right ones all is well


def test_weights_that_were_damaged_in_the_state_are_asked_for_anew(world, node):
    ask, weights = about(fingerprint(world.model)), world.model.state_dict()
    for damaged in (
        {name: Array("float32", (1,), "numpy.ndarray", b"damaged") for name in weights},
        dict(record_of({name: tensor.flatten()[:1] for name, tensor in weights.items()})),
        dict(record_of({name: tensor + 1 for name, tensor in weights.items()})),
    ):
        node.say(replace(ask, weights=weights))
        node.context.state["fedup-weights"] = ArrayRecord(damaged)
        assert node.say(ask).status == "needs weights"
        assert node.summarize().status == node.say(ask).status == "ok"


def test_rows_are_not_read_before_the_weights_are_there(world):
    read = []
    rows = world.rows(CLIENT)

    def data(context):
        read.append(True)
        return world.federation.x[rows], world.federation.y[rows]

    node = Node(world, world.app(CLIENT, data=data))
    assert node.ask("who").status == "ok"
    assert node.say(about(fingerprint(world.model))).status == "needs weights"
    assert not read
    assert node.summarize().status == "ok"
    assert len(read) == 1


def test_a_model_in_training_mode_is_asked_in_eval_mode(world):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        noisy = nn.Sequential(nn.Flatten(), nn.Linear(196, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 10)).train()
    blank = nn.Sequential(nn.Flatten(), nn.Linear(196, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 10)).train()
    node = Node(world, world.app(CLIENT, model=lambda: blank))
    one, other = (node.ask("summarize", noisy, **_summary_details(cut="4")) for _ in range(2))
    assert one.status == "ok", one.reason
    assert torch.equal(one.arrays["vectors"], other.arrays["vectors"])


def _summary_details(**more) -> dict:
    return {"cut": "head", "how": asdict(HOW), "labels": None, "without": [], "excluded": [], **more}


OWN_ERRORS = [RuntimeError("Jane Doe, born 1970"), MissingDataError("/home/jane/data.csv"), DataError("Jane Doe")]


@pytest.mark.parametrize("where", ["data", "ids", "client", "model"])
@pytest.mark.parametrize("error", OWN_ERRORS, ids=str)
def test_a_failure_in_the_users_own_code_is_told_by_its_kind_alone(world, error, where):
    def fail(*args):
        raise error

    answer = Node(world, world.app(CLIENT, **{where: fail})).summarize()
    assert (answer.status, answer.reason, answer.details) == ("failed", type(error).__name__, {})


def test_a_question_with_the_guarantee_of_another_kind_is_a_failure_that_says_so_and_costs_nothing(world, node):
    asked = {"labels": None, "without": [], "excluded": [], "cut": "head", "question": row_groups(world).to_json()}
    for kind in ("summarize privately", "gather privately"):
        answer = node.ask(kind, **asked, how=asdict(HOW))
        assert (answer.status, answer.arrays) == ("failed", {}) and "under a guarantee only" in answer.reason
    answer = node.ask("summarize", **asked, how=asdict(REAL))
    assert (answer.status, answer.arrays) == ("failed", {}) and "summarize privately" in answer.reason
    assert node.charges() == []


def test_the_users_own_handlers_still_work(world):
    app = world.app(CLIENT)

    @app.train()
    def train(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"loss": 0.25})}), reply_to=message)

    @app.query("mine")
    def mine(message, context):
        context.state["mine"] = ConfigRecord({"seen": 1})
        return Message(RecordDict(), reply_to=message)

    node = Node(world, app)
    assert node.summarize().status == "ok"
    reply = app(Message(RecordDict(), dst_node_id=7, message_type="train"), node.context)
    assert reply.content["metrics"]["loss"] == 0.25
    app(Message(RecordDict(), dst_node_id=7, message_type="query.mine"), node.context)
    assert {name for name in node.context.state if not name.startswith("fedup-")} == {"mine"}
    assert node.summarize().status == "ok"


def test_rows_labels_and_ids_that_do_not_fit_together_are_a_failure_that_tells_nothing_of_them(world):
    rows = world.rows(CLIENT)
    x, y, ids = world.federation.x[rows], world.federation.y[rows], rows.tolist()
    assert Node(world, world.app(CLIENT, data=lambda context: (x, y.float()))).summarize().status == "ok"
    for labels, names, reason in (
        (y, [*ids[:-1], ids[0]], "each id must be there once"),
        (y, ids[:-1], "each id must be there once"),
        (y[:-1], ids, "each id must be there once"),
        (y + 0.5, ids, "A label is no whole number."),
        (y, ["a", "b"], "ValueError"),
        (y, 5, "TypeError"),
    ):
        app = world.app(CLIENT, data=lambda context, y=labels: (x, y), ids=lambda context, names=names: names)
        answer = Node(world, app).summarize()
        assert (answer.status, answer.arrays) == ("failed", {}) and reason in answer.reason
    answer = Node(world, world.app(CLIENT, held_out=lambda context: (x[:, :, 1:], y))).ask(
        "tally", **exact_details(world)["tally"]
    )
    assert answer.status == "failed" and "Held-out rows" in answer.reason


@pytest.mark.parametrize("kind", ["labels", "summarize", "sketch", "spreads", "moments", "tally", "biases"])
def test_a_question_out_of_shape_is_answered_with_a_failure_and_the_next_one_as_ever(world, node, kind):
    details = _summary_details(**exact_details(world).get(kind, {}))
    assert node.ask(kind, **details).status == "ok"
    for name in exact_details(world).get(kind, _summary_details()):
        for odd in ("nowhere", 3, ["a"], {"more": 1}, [2**70]):
            answer = node.ask(kind, **{**details, name: odd})
            assert answer.status == "ok" or (answer.status, answer.arrays) == ("failed", {})
            assert answer.status == "failed" or name not in ("cut", "how", "question", "samples", "over")
    assert node.ask(kind, **details).status == "ok"


def test_what_a_node_does_not_hold_or_know_is_a_failure_that_says_so(world, node):
    own = int(world.rows(CLIENT)[0])
    for unknown in (10**6, -1):
        for answer in (node.summarize(excluded=[own, unknown]), node.ask("labels", samples=[own, unknown])):
            assert answer.status == "failed" and "not trained on 1 of the 2" in answer.reason
    assert "everything" in node.ask("everything").reason
    for content in (RecordDict(), RecordDict({"fedup": ConfigRecord({"json": "[" * 10_000})})):  # is no question
        assert node.say(content).status == "failed"
    answer = Node(world, world.app(CLIENT, **with_rows(world, 3, NAN))).summarize()
    assert answer.status == "failed" and "NaN" in answer.reason
    assert str(int(world.rows(CLIENT)[3])) not in answer.reason.split()  # nothing of what it met


@pytest.mark.parametrize(
    "biases", [[], [[0.0] * 10] * 17, [[0.0] * 9], [[0.0]], [[0.0] * 9 + [NAN]], [[0.0] * 9 + [1e999]]]
)
def test_biases_are_few_finite_and_one_for_each_class(world, biases):
    details = {**exact_details(world)["biases"], "biases": biases}
    node = Node(world, world.app(CLIENT))
    assert node.ask("tally", **exact_details(world)["tally"]).status == "ok"  # it has the weights
    node.app = world.app(CLIENT, data=lambda context: pytest.fail("rows were read"))
    assert node.ask("biases", **details).status == "failed"


def test_an_answer_is_no_longer_than_the_model_is_wide_however_often_a_server_names_a_position(world):
    groups = row_groups(world)
    ways = {positions: SecondMomentsQuestion("conv2", "each", positions, groups) for positions in ((0, 1), (0,) * 99)}
    answers = {positions: Node(world, world.app(CLIENT)).answer(question) for positions, question in ways.items()}
    assert [answer.status for answer in answers.values()] == ["ok", "failed"]

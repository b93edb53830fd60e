"""A node answers from its own rows what it would answer in process, under its own rules, and tells nothing else."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tests._asking import ask_one
from tests.flower._grid import World, digits, unnamed
from tests.flower._node import CLIENT, HOW, Node, about, assert_summary, centroids, in_process
from torch import nn

from fedup import Forget, fingerprint
from fedup.clients.eraser_questions import (
    PrivateEraserQuestion,
    SecondMomentsQuestion,
    SketchesQuestion,
    SpreadsQuestion,
)
from fedup.clients.in_process import InProcess
from fedup.clients.labels import LabelsQuestion
from fedup.clients.tally import TallyQuestion
from fedup.errors import BudgetError, DataError, MissingDataError, SettingError
from fedup.flower import Policy, mount
from fedup.flower.state import KeptLedger
from fedup.flower.wire import Answer, Ask, array_of, tensor_of
from fedup.privacy import DP, Budget, Ledger
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.eraser_statistics import RowGroups
from fedup.statistics.tally import RowsToCount

PRIVATE = DP(2.0, clip=4.0, replay_seed=7)
REAL = DP(2.0, clip=4.0)
NAN = float("nan")


@pytest.fixture(scope="module")
def world() -> World:
    return digits()


@pytest.fixture
def node(world) -> Node:
    return Node(world, world.app(CLIENT))


def with_rows(world: World, places, value: float) -> dict:
    """Settings of an app whose inputs are exchanged at some places."""
    rows = world.rows(CLIENT)
    x = world.federation.x[rows].clone()
    x[places] = value
    return {"data": lambda context: (x, world.federation.y[rows])}


def row_groups(world: World, many: int = 40) -> RowGroups:
    request = Forget.samples({CLIENT: world.rows(CLIENT)[:many].tolist()})
    return RowGroups({request.digest: request}, request | Forget.classes([3]))


def weights_for(groups: RowGroups) -> dict[str, dict[int, float]]:
    """A share of two classes, and of one of which the client has none."""
    return {name: {1: 0.25, 5: 0.5, 2: 0.25} for name in groups.requests}


def exact_details(world: World) -> dict[str, dict]:
    """By kind, questions that are under no guarantee."""
    groups, sample = row_groups(world), int(world.rows(CLIENT)[0])
    questions = (
        LabelsQuestion(frozenset([sample])),
        SketchesQuestion("conv2", "each", groups),
        SpreadsQuestion({"conv2": "each"}, groups, weights_for(groups)),
        SecondMomentsQuestion("conv2", "each", (0,), groups),
        TallyQuestion(None, None, RowsToCount(groups.requests, groups.forget_set)),
    )
    return {question.kind: question.to_message()[0] for question in questions}


# --- each question is answered as in process


@pytest.mark.parametrize("cut", ["conv2", "fc2", "head"])
@pytest.mark.parametrize(
    "how", [HOW, CentroidConfig(), CentroidConfig(1.0), CentroidConfig(0.3, 0.1, 5, True)], ids=str
)
def test_centroids_are_those_of_the_client_in_process_to_the_bit(world, node, cut, how):
    answer = node.summarize(how, cut=cut)
    assert_summary(answer, ask_one(in_process(world), CLIENT, centroids(how, cut=cut)))
    labels, rows = world.federation.y[world.rows(CLIENT)].unique(return_counts=True)
    assert dict(answer.details["rows"]) == dict(zip(labels.tolist(), rows.tolist(), strict=True))


@pytest.mark.parametrize("labels", [[1], [5, 8], [2]], ids=["one", "two", "none that it holds"])
def test_only_the_classes_that_were_asked_about_are_told(world, node, labels):
    expected = ask_one(in_process(world), CLIENT, centroids(labels=labels))
    assert_summary(node.summarize(labels=labels), expected)
    rest = sorted(frozenset(range(10)) - frozenset(labels))
    answer = node.summarize(without=rest)
    assert set(answer.details["labels"]) == set(expected.labels)
    assert torch.equal(answer.arrays["vectors"], expected.vectors)


@pytest.mark.parametrize("how", [HOW, PRIVATE], ids=["centroids", "DP"])
def test_excluded_samples_are_left_out_and_never_read(world, how):
    rows = world.rows(CLIENT)
    excluded = frozenset(rows[10:30].tolist())
    expected = ask_one(in_process(world), CLIENT, centroids(how, cut="fc2", excluded=excluded))
    unreadable = Node(world, world.app(CLIENT, **with_rows(world, slice(10, 30), NAN)))
    told = {"labels": list(range(10))} if how is PRIVATE else {}
    assert_summary(unreadable.summarize(how, cut="fc2", excluded=excluded, **told), expected)
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


def test_classes_of_samples_are_told_by_id(world, node):
    question = LabelsQuestion(frozenset(world.rows(CLIENT)[3:50:7].tolist()))
    assert node.read(question) == ask_one(in_process(world), CLIENT, question)
    assert node.read(question) == {sample: int(world.federation.y[sample]) for sample in question.samples}


def test_sketches_are_those_of_the_client_in_process_to_the_bit(world, node):
    question = SketchesQuestion("conv2", "each", row_groups(world))
    found = node.read(question)
    assert_same_sketches(found, ask_one(in_process(world), CLIENT, question))
    assert 3 not in found.retained  # it is forgotten, too


def test_means_and_variances_are_those_of_the_client_in_process_to_the_bit(world, node):
    cuts, groups = {"conv2": "each", "fc1": "each", "head": "each"}, row_groups(world)
    question = SpreadsQuestion(cuts, groups, weights_for(groups))
    found, expected = node.read(question), ask_one(in_process(world), CLIENT, question)
    assert found.forgotten and found.reference, "premise"
    for one, other in ((found.forgotten, expected.forgotten), (found.reference, expected.reference)):
        assert one.keys() == other.keys()
        for name, by_cut in one.items():
            assert by_cut.keys() == other[name].keys() == cuts.keys()
            for cut, spread in by_cut.items():
                assert spread.weight == other[name][cut].weight
                assert torch.equal(spread.mean, other[name][cut].mean)
                assert torch.equal(spread.variance, other[name][cut].variance)


def test_second_moments_are_those_of_the_client_in_process_to_the_bit(world, node):
    question = SecondMomentsQuestion("conv2", "each", (0, 5, 7), row_groups(world))
    found, expected = node.read(question), ask_one(in_process(world), CLIENT, question)
    assert found.count == expected.count
    assert torch.equal(found.sums, expected.sums)
    assert torch.equal(found.squares, expected.squares)


def test_a_client_with_too_few_forgotten_rows_tells_nothing_of_them(world, node):
    few = row_groups(world, 19)
    told = node.read(SketchesQuestion("conv2", "each", few))
    assert told.forgotten == {} and told.retained
    found = node.read(SpreadsQuestion({"conv2": "each"}, few, weights_for(few)))
    assert found.forgotten == {} and found.reference
    everything = RowGroups(few.requests, Forget.clients([CLIENT]))  # nothing is retained either
    question = SecondMomentsQuestion("conv2", "each", (0,), everything)
    assert (node.answer(question).arrays, node.read(question)) == ({}, None)


def test_noisy_statistics_of_an_eraser_are_those_of_the_client_in_process_and_charged(world, node):
    ledger = Ledger()
    groups = RowGroups({"it": Forget.samples({CLIENT: world.rows(CLIENT)[:40].tolist()})}, Forget())
    question = PrivateEraserQuestion("conv2", PRIVATE, groups)
    found, expected = node.read(question), ask_one(in_process(world, ledger), CLIENT, question)
    assert torch.equal(found.sums, expected.sums)
    assert torch.equal(found.counts, expected.counts)
    assert found.clip == expected.clip
    assert [unnamed(charge) for charge in node.charges()] == [unnamed(one) for one in ledger.to_json()["charges"]]


def test_noisy_statistics_are_those_of_the_client_in_process_and_charged(world, node):
    ledger = Ledger()
    expected = ask_one(in_process(world, ledger), CLIENT, centroids(PRIVATE))
    answer = node.summarize(PRIVATE)
    assert_summary(answer, expected)
    assert answer.details["rows"] == []  # how many it holds is not told
    assert [unnamed(charge) for charge in node.charges()] == [unnamed(one) for one in ledger.to_json()["charges"]]


def test_half_precision_rounds_vectors_and_nothing_else(node):
    full, half = node.summarize(), node.summarize(half=True)
    assert half.arrays["vectors"].dtype == torch.float16
    assert torch.equal(half.arrays["vectors"], full.arrays["vectors"].half())
    assert torch.equal(half.arrays["counts"], full.arrays["counts"])
    assert half.details == full.details


def test_other_clients_samples_are_nothing_to_a_node(world, node):
    own = row_groups(world)
    (name, request), more = next(iter(own.requests.items())), Forget.samples({0: [1, 2, 3], 3: [10**9]})
    both = RowGroups({name: request | more}, own.forget_set | more)
    one, other = (node.read(SketchesQuestion("conv2", "each", groups)) for groups in (own, both))
    assert_same_sketches(one, other)


# --- who it is


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [({"partition-id": 3}, None, 3), ({}, None, 7), ({"partition-id": 3}, lambda context: context.node_id + 5, 12)],
    ids=["its partition", "its node's number", "as it says itself"],
)
def test_a_node_goes_by_the_number_that_it_was_given(world, config, given, expected):
    node = Node(world, world.app(CLIENT, client=given))
    node.context = Context(0, 7, config, RecordDict(), {})
    assert node.ask("who").details["client"] == expected


# --- weights


def test_who_it_is_and_the_classes_of_samples_need_no_weights(world, node):
    base = fingerprint(world.model)
    sample = int(world.rows(CLIENT)[0])
    assert node.say(Ask("who", base, {"num_classes": 10})).status == "ok"
    told = node.say(Ask("labels", base, {"samples": [sample], "num_classes": 10}))
    assert told.details["labels"] == [[sample, int(world.federation.y[sample])]]


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


def test_another_model_is_asked_for_anew_and_takes_the_place_of_the_first(world, node):
    other = digits(1).model
    first, second = (about(fingerprint(model)) for model in (world.model, other))
    node.say(replace(first, weights=world.model.state_dict()))
    assert node.say(second).status == "needs weights"
    assert node.say(first).status == "ok"  # asking did not lose the one it had
    assert node.say(replace(second, weights=other.state_dict())).status == "ok"
    assert node.say(second).status == "ok"
    assert node.say(first).status == "needs weights"


@pytest.mark.parametrize("why", ["another shape", "a name too many", "a name too few", "not those"])
def test_weights_that_are_not_the_models_are_refused_and_not_kept(world, node, why):
    weights = dict(world.model.state_dict())
    name = next(iter(weights))
    if why == "another shape":
        weights[name] = torch.zeros(3, 3)
    elif why == "a name too many":
        weights["more"] = torch.zeros(3)
    elif why == "a name too few":
        del weights[name]
    else:
        weights[name] = weights[name] + 1e-3
    answer = node.say(about(fingerprint(world.model), weights))
    assert answer.status == "failed"
    assert ("not those" if why == "not those" else "another shape") in answer.reason
    assert "fedup-weights" not in node.context.state
    assert node.summarize().status == "ok"  # with the right ones all is well


def test_weights_that_do_not_match_leave_those_that_are_kept(world, node):
    ask = about(fingerprint(world.model))
    node.say(replace(ask, weights=world.model.state_dict()))
    wrong = {name: tensor + 1 for name, tensor in world.model.state_dict().items()}
    assert node.say(replace(ask, weights=wrong)).status == "failed"
    assert node.say(ask).status == "ok"


@pytest.mark.parametrize("how", ["no arrays", "of another shape", "other numbers"])
def test_weights_that_were_damaged_in_the_state_are_asked_for_anew(world, node, how):
    ask = about(fingerprint(world.model))
    node.say(replace(ask, weights=world.model.state_dict()))
    kept = {name: tensor_of(array, name) for name, array in node.context.state["fedup-weights"].items()}
    if how == "of another shape":
        kept = {name: tensor.flatten()[:1] for name, tensor in kept.items()}
    arrays = {name: array_of(tensor + 1) for name, tensor in kept.items()}
    if how == "no arrays":
        arrays = {name: Array("float32", (1,), "numpy.ndarray", b"damaged") for name in kept}
    node.context.state["fedup-weights"] = ArrayRecord(arrays)
    assert node.say(ask).status == "needs weights"
    assert node.summarize().status == "ok"
    assert node.say(ask).status == "ok"


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


def test_labels_that_are_no_whole_numbers_are_refused(world):
    rows = world.rows(CLIENT)
    x, y = world.federation.x[rows], world.federation.y[rows].float()
    assert Node(world, world.app(CLIENT, data=lambda context: (x, y))).summarize().status == "ok"
    answer = Node(world, world.app(CLIENT, data=lambda context: (x, y + 0.5))).summarize()
    assert (answer.status, answer.reason) == ("failed", "A label is no whole number.")


def test_a_model_in_training_mode_is_asked_in_eval_mode(world):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        noisy = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 10)).train()
    blank = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 10)).train()
    node = Node(world, world.app(CLIENT, model=lambda: blank))
    one, other = (node.ask("summarize", noisy, **_summary_details(cut="4")) for _ in range(2))
    assert one.status == "ok", one.reason
    assert torch.equal(one.arrays["vectors"], other.arrays["vectors"])


def _summary_details(**more) -> dict:
    return {"cut": "head", "how": asdict(HOW), "labels": None, "without": [], "excluded": [], **more}


# --- the client's own rules


def test_classes_with_fewer_rows_than_the_least_are_not_told(world):
    rows = world.federation.y[world.rows(CLIENT)].bincount(minlength=10)
    node = Node(world, world.app(CLIENT, policy=Policy(least_rows=12)))
    answer = node.summarize()
    enough = [label for label in range(10) if rows[label] >= 12]
    assert answer.details["labels"] == enough
    assert answer.details["rows"] == [[label, int(rows[label])] for label in enough]
    expected = ask_one(in_process(world), CLIENT, centroids(labels=enough))
    assert torch.equal(answer.arrays["vectors"], expected.vectors)


def test_classes_with_fewer_rows_than_the_least_are_not_told_of_for_an_eraser_or_in_counts_either(world):
    groups = row_groups(world)
    sketches = SketchesQuestion("conv2", "each", groups)
    everything = ask_one(in_process(world), CLIENT, sketches).retained
    least = sorted({one.count for one in everything.values()})[1]
    enough = {label for label, one in everything.items() if one.count >= least}
    assert enough < everything.keys(), "premise"
    node = Node(world, world.app(CLIENT, policy=Policy(least_rows=least)))
    told = node.read(sketches)
    assert told.retained.keys() == enough and told.forgotten.keys() == groups.requests.keys()

    (name,) = groups.requests
    found = node.read(SpreadsQuestion({"conv2": "each"}, groups, {name: dict.fromkeys(everything, 0.125)}))
    assert found.reference[name]["conv2"].weight == 0.125 * len(enough)

    counted = node.read(TallyQuestion(None, None, RowsToCount(groups.requests, groups.forget_set)))
    assert counted.retained.keys() == enough
    assert all(one.rows >= least for one in counted.held_out.values())
    assert counted.forgotten.keys() == groups.requests.keys()


def test_rows_count_towards_the_least_only_if_they_are_retained(world):
    y = world.federation.y[world.rows(CLIENT)]
    ones = world.rows(CLIENT)[y == 1]  # 18 of them
    node = Node(world, world.app(CLIENT, policy=Policy(least_rows=18)))
    assert 1 in node.summarize().details["labels"]
    fewer = node.summarize(excluded=ones[:1].tolist())
    sizes = dict(zip(fewer.details["labels"], fewer.details["sizes"], strict=True))
    assert sizes[1] == 0  # there is such a cell, and nothing in it
    assert len(fewer.arrays["vectors"]) == len(fewer.arrays["counts"]) == sum(sizes.values()) > 0


def test_a_cell_of_which_nothing_is_left_is_told_as_empty(world, node):
    rows = world.rows(CLIENT)
    ones = frozenset(rows[world.federation.y[rows] == 1].tolist())
    for labels in ([1], [1, 5]):
        expected = ask_one(in_process(world), CLIENT, centroids(labels=labels, excluded=ones))
        assert_summary(node.summarize(labels=labels, excluded=ones), expected)


@pytest.mark.parametrize(
    "policy", [Policy(only_private=True), Policy(budget=Budget(50.0))], ids=["only private", "budget"]
)
def test_a_client_that_answers_under_dp_only_refuses_everything_else(world, policy):
    node = Node(world, world.app(CLIENT, policy=policy))
    asked = row_groups(world).to_json()
    answers = [
        node.summarize(),
        node.summarize(labels=[1]),
        *(node.ask(kind, **details) for kind, details in exact_details(world).items()),
        node.ask("gather privately", cut="conv2", how=asdict(HOW), question=asked),
    ]
    for answer in answers:
        assert (answer.status, answer.arrays, answer.details) == ("refused", {}, {})
        assert "differential privacy only" in answer.reason
    assert node.ask("who").status == "ok"
    assert node.summarize(REAL).status == "ok"


@pytest.mark.parametrize("kind", ["sketch", "spreads", "moments", "tally"])
def test_a_private_client_refuses_exact_statistics_and_counts_without_reading_a_row(world, kind):
    def never(*args):
        raise AssertionError("it was read")

    for policy in (Policy(only_private=True), Policy(budget=Budget(50.0))):
        node = Node(world, world.app(CLIENT, data=never, ids=never, held_out=never, model=never, policy=policy))
        ask = Ask(kind, fingerprint(world.model), {**exact_details(world)[kind], "num_classes": 10})
        answer = node.say(replace(ask, weights=world.model.state_dict()))
        assert (answer.status, answer.arrays, answer.details) == ("refused", {}, {})
        assert "fedup-weights" not in node.context.state


@pytest.mark.parametrize("kind", ["labels", "sketch", "spreads", "moments", "tally"])
def test_naming_a_guarantee_does_not_make_an_exact_answer_private(world, kind):
    node = Node(world, world.app(CLIENT, policy=Policy(only_private=True)))
    node.ask("who")
    details = exact_details(world)[kind]
    assert node.ask(kind, **details, how=asdict(REAL)).status == "refused"


@pytest.mark.parametrize(
    "policy", [Policy(only_private=True), Policy(budget=Budget(50.0))], ids=["only private", "budget"]
)
def test_noise_that_the_server_can_replay_is_no_privacy(world, policy):
    node = Node(world, world.app(CLIENT, policy=policy))
    assert node.summarize(PRIVATE).status == "refused"


def test_a_budget_is_spent_over_several_questions_and_kept_in_the_state(world):
    budget = Budget(5.0)
    settings = {"policy": Policy(budget=budget)}
    node = Node(world, world.app(CLIENT, **settings))
    affordable = int(budget.mu**2 / REAL.mu**2 * (1 + 1e-9))
    assert affordable > 1, "premise"
    for i in range(affordable):
        node.app = world.app(CLIENT, **settings)  # a new process; only the state stays
        assert node.summarize(REAL, without=[i]).status == "ok"
        assert len(node.charges()) == i + 1
    answer = node.summarize(REAL)
    assert answer.status != "ok"
    assert "spent" in answer.reason
    assert answer.arrays == {}
    assert len(node.charges()) == affordable
    asked = row_groups(world).to_json()
    assert node.ask("gather privately", cut="conv2", how=asdict(REAL), question=asked).status != "ok"
    assert node.summarize(replace(REAL, epsilon=1e-3)).status == "ok"  # a small release is still affordable


@pytest.mark.parametrize("kind", ["centroids", "an eraser's"])
def test_a_release_is_sent_again_for_nothing_where_it_is_asked_for_by_its_name(world, kind):
    def ask(node: Node, release: str) -> Answer:
        if kind == "centroids":
            return node.summarize(REAL, release=release)
        asked = {"how": asdict(REAL), "question": row_groups(world).to_json()}
        return node.ask("gather privately", cut="conv2", release=release, **asked)

    policy = Policy(budget=Budget(3.0))
    node = Node(world, world.app(CLIENT, policy=policy))
    first = ask(node, "a")
    assert (first.status, first.details["release"]) == ("ok", "a")
    node.app = world.app(CLIENT, policy=policy)  # a new process; only the state stays
    again = ask(node, "a")
    assert (again.status, again.details) == ("ok", first.details)
    assert all(torch.equal(again.arrays[name], first.arrays[name]) for name in first.arrays)
    assert len(node.charges()) == 1
    other = ask(node, "b")
    assert other.status == "ok" and len(node.charges()) == 2
    assert not all(torch.equal(other.arrays[name], first.arrays[name]) for name in first.arrays)
    while ask(node, "c").status == "ok" and len(node.charges()) < 10:
        node.context.state.pop("fedup-released-summarize-privately", None)  # forget it, so that each is a new one
        node.context.state.pop("fedup-released-gather-privately", None)
    spent = len(node.charges())
    assert ask(node, "d").status == "refused" and len(node.charges()) == spent


def test_without_a_name_each_release_is_a_new_one(world, node):
    one, other = node.summarize(REAL), node.summarize(REAL)
    assert not torch.equal(one.arrays["vectors"], other.arrays["vectors"])
    assert len(node.charges()) == 2


def test_only_the_last_release_of_a_kind_is_kept(world, node):
    for name in "abc":
        node.summarize(REAL, release=name)
    kept = [name for name in node.context.state if name.startswith("fedup-released-")]
    assert len(kept) == 2 and len(node.charges()) == 3
    node.summarize(REAL, release="a")
    assert len(node.charges()) == 4


def test_an_account_in_a_file_outlives_the_state(world, tmp_path):
    policy = Policy(budget=Budget(3.0), account=tmp_path / "account.json")
    told = [Node(world, world.app(CLIENT, policy=policy)).summarize(REAL).status for _ in range(4)]  # a state each
    affordable = int(policy.budget.mu**2 / REAL.mu**2 * (1 + 1e-9))
    assert told == ["ok"] * affordable + ["refused"] * (4 - affordable) and 0 < affordable < 4
    charges = json.loads(policy.account.read_text())["charges"]
    assert len(charges) == affordable
    policy.account.write_text("{")
    node = Node(world, world.app(CLIENT, policy=policy))
    answer = node.summarize(REAL)
    assert answer.status == "failed" and "account cannot be read" in answer.reason and not answer.arrays


def test_two_runs_at_once_have_one_account(world, tmp_path):
    policy = Policy(budget=Budget(3.0), account=tmp_path / "account.json")
    affordable = int(policy.budget.mu**2 / REAL.mu**2 * (1 + 1e-9))
    contexts = [Node(world, world.app(CLIENT, policy=policy)).context for _ in range(2)]
    ledgers = [KeptLedger(context, policy) for context in contexts]  # both looked before either spent
    for _ in range(affordable):
        ledgers[0].spend(CLIENT, REAL, "centroids")
    with pytest.raises(BudgetError, match="another run"):
        ledgers[1].spend(CLIENT, REAL, "centroids")
    assert len(json.loads(policy.account.read_text())["charges"]) == affordable


def test_a_budget_too_small_refuses_before_anything_is_computed(world):
    policy = Policy(budget=Budget(1.0))
    node = Node(world, world.app(CLIENT, policy=policy, **with_rows(world, slice(None), NAN)))
    answer = node.summarize(REAL)
    assert (answer.status, node.charges()) == ("refused", [])
    assert "spent" in answer.reason


def test_rows_that_are_no_numbers_do_not_stop_a_release(world):
    node = Node(world, world.app(CLIENT, **with_rows(world, 3, NAN)))
    answer = node.summarize(REAL)
    assert answer.status == "ok" and bool(answer.arrays["vectors"].isfinite().all())
    assert len(node.charges()) == 1


def test_a_damaged_account_stops_releases(world):
    node = Node(world, world.app(CLIENT, policy=Policy(budget=Budget(5.0))))
    node.context.state["fedup-ledger"] = ConfigRecord({"json": '{"charges": [{"mu": -1}], "budgets": []}'})
    assert node.summarize(REAL).status == "failed"


def test_a_guarantee_for_subjects_is_not_given_where_rows_have_none(world, node):
    answer = node.summarize(replace(REAL, unit="subject"))
    assert answer.status == "failed"
    assert "subject" in answer.reason
    assert node.charges() == []


def test_the_clients_own_function_decides_by_kind_of_question_and_gives_the_reason(world):
    asked = []

    def ask(kind):
        asked.append(kind)
        return "not on Sundays" if kind == "labels" else None

    node = Node(world, world.app(CLIENT, policy=Policy(ask=ask)))
    refused = node.ask("labels", samples=[int(world.rows(CLIENT)[0])])
    assert (refused.status, refused.reason, refused.details) == ("refused", "not on Sundays", {})
    assert node.summarize().status == "ok"
    assert set(asked) == {"labels", "summarize"}


def test_a_refusal_reads_neither_data_nor_weights(world):
    def never(*args):
        raise AssertionError("it was read")

    app = world.app(CLIENT, data=never, model=never, policy=Policy(ask=lambda kind: "no"))
    node = Node(world, app)
    answer = node.say(about(fingerprint(world.model), world.model.state_dict()))
    assert (answer.status, answer.reason) == ("refused", "no")
    assert "fedup-weights" not in node.context.state


@pytest.mark.parametrize("least_rows", [0, -1])
def test_a_least_number_of_rows_below_one_is_no_policy(least_rows):
    with pytest.raises(SettingError, match="least_rows"):
        Policy(least_rows=least_rows)


# --- failures


def _raising(error: Exception):
    def data(context):
        raise error

    return data


OWN_ERRORS = {
    "its own": RuntimeError("Jane Doe, born 1970"),
    "a missing file": FileNotFoundError("/home/jane/data.csv"),
    "a missing key": KeyError("Jane Doe"),
    "fedup's": MissingDataError("/home/jane/data.csv"),
    "another of fedup's": DataError("Jane Doe, born 1970"),
}


@pytest.mark.parametrize("error", OWN_ERRORS.values(), ids=OWN_ERRORS.keys())
@pytest.mark.parametrize("where", ["data", "ids", "client", "model"])
def test_a_failure_in_the_users_own_code_is_told_by_its_kind_alone(world, error, where):
    def fail(*args):
        raise error

    answer = Node(world, world.app(CLIENT, **{where: fail})).summarize()
    assert (answer.status, answer.reason, answer.details) == ("failed", type(error).__name__, {})


def test_rows_that_cannot_be_used_are_told_without_their_content(world):
    rows = world.rows(CLIENT)
    answer = Node(world, world.app(CLIENT, **with_rows(world, 3, NAN))).summarize()
    assert answer.status == "failed"
    assert "NaN" in answer.reason
    assert str(int(rows[3])) not in answer.reason.split()


HOLDINGS = {
    "an id twice": {"ids": lambda rows: [*rows[:-1], rows[0]]},
    "fewer ids than rows": {"ids": lambda rows: rows[:-1]},
    "more ids than rows": {"ids": lambda rows: [*rows, 10**6]},
    "fewer labels than rows": {"labels": lambda y: y[:-1]},
}


@pytest.mark.parametrize("change", HOLDINGS.values(), ids=HOLDINGS.keys())
def test_ids_and_labels_must_be_one_for_each_row(world, change):
    rows, x, y = world.rows(CLIENT), world.federation.x, world.federation.y
    labels = change.get("labels", lambda y: y)(y[rows])
    ids = change.get("ids", lambda rows: rows)(rows.tolist())
    app = world.app(CLIENT, data=lambda context: (x[rows], labels), ids=lambda context: ids)
    answer = Node(world, app).summarize()
    assert answer.status == "failed"
    assert "each id must be there once" in answer.reason


@pytest.mark.parametrize("ids", [["a", "b"], None, 5, "abc"], ids=str)
def test_ids_that_are_no_numbers_are_a_failure(world, ids):
    assert Node(world, world.app(CLIENT, ids=lambda context: ids)).summarize().status == "failed"


@pytest.mark.parametrize("unknown", [10**6, -1])
def test_samples_that_the_node_does_not_hold_are_refused(world, node, unknown):
    own = int(world.rows(CLIENT)[0])
    for answer in (node.summarize(excluded=[own, unknown]), node.ask("labels", samples=[own, unknown])):
        assert answer.status == "failed"
        assert "not trained on 1 of the 2" in answer.reason
    assert node.charges() == []


@pytest.mark.parametrize("unknown", [10**6, -1])
def test_under_a_guarantee_samples_that_the_node_does_not_hold_change_nothing(world, node, unknown):
    own = int(world.rows(CLIENT)[0])
    one, other = (node.summarize(PRIVATE, excluded=ids, labels=[1]) for ids in ([own], [own, unknown]))
    assert (one.status, other.status) == ("ok", "ok")
    noise = DP(1e6, clip=4.0, replay_seed=7)  # hardly any
    one, other = (node.summarize(noise, excluded=ids, labels=[1]) for ids in ([own], [own, unknown]))
    torch.testing.assert_close(one.arrays["vectors"], other.arrays["vectors"], atol=0.05, rtol=0)


def test_a_question_of_an_unknown_kind_is_a_failure_that_says_so(node):
    answer = node.ask("everything")
    assert answer.status == "failed"
    assert "everything" in answer.reason


def test_a_question_with_the_guarantee_of_another_kind_is_a_failure_that_says_so_and_costs_nothing(world, node):
    asked = {"labels": None, "without": [], "excluded": [], "cut": "head", "question": row_groups(world).to_json()}
    for kind in ("summarize privately", "gather privately"):
        answer = node.ask(kind, **asked, how=asdict(HOW))
        assert (answer.status, answer.arrays) == ("failed", {}) and "under a guarantee only" in answer.reason
    answer = node.ask("summarize", **asked, how=asdict(REAL))
    assert (answer.status, answer.arrays) == ("failed", {}) and "summarize privately" in answer.reason
    assert node.charges() == []


BROKEN = {
    "no details": {},
    "another cut": _summary_details(cut="nowhere"),
    "a ratio of 2": _summary_details(how={**asdict(HOW), "ratio": 2}),
    "an unknown setting": _summary_details(how={"more": 1}),
    "a setting that is no object": _summary_details(how=3),
    "labels that are no list": _summary_details(labels=3),
    "excluded that are no numbers": _summary_details(excluded=["a"]),
}


@pytest.mark.parametrize("details", BROKEN.values(), ids=BROKEN.keys())
def test_a_question_out_of_shape_is_answered_with_a_failure(node, details):
    answer = node.ask("summarize", **details)
    assert (answer.status, answer.arrays) == ("failed", {})


def test_content_that_is_no_question_is_answered_with_a_failure(node):
    assert node.say(RecordDict()).status == "failed"
    assert node.say(RecordDict({"fedup": ConfigRecord({"json": "[" * 10_000})})).status == "failed"


def test_a_failure_does_not_spoil_the_next_answer(world, node):
    before = node.summarize()
    node.ask("everything")
    node.summarize(cut="nowhere")
    node.say(RecordDict())
    after = node.summarize()
    assert torch.equal(before.arrays["vectors"], after.arrays["vectors"])


# --- the user's own app


def test_the_users_own_handlers_still_work(world):
    app = ClientApp()

    @app.train()
    def train(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"loss": 0.25})}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.75})}), reply_to=message)

    @app.query("mine")
    def mine(message, context):
        context.state["mine"] = ConfigRecord({"seen": 1})
        return Message(RecordDict(), reply_to=message)

    rows = world.rows(CLIENT)
    mount(app, data=lambda context: (world.federation.x[rows], world.federation.y[rows]), model=world.blank)
    node = Node(world, app)
    assert node.summarize().status == "ok"
    for kind, name, value in (("train", "loss", 0.25), ("evaluate", "accuracy", 0.75)):
        reply = app(Message(RecordDict(), dst_node_id=7, message_type=kind), node.context)
        assert reply.content["metrics"][name] == value
    app(Message(RecordDict(), dst_node_id=7, message_type="query.mine"), node.context)
    assert {name for name in node.context.state if not name.startswith("fedup-")} == {"mine"}
    assert node.summarize().status == "ok"

"""A node's own rules bind every app and run: what they forbid is refused without a look at the rows, and no sequence of
answers singles out a few rows or exceeds the budget, whatever restarts in between."""

import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.cli._in_process import fedup, ok
from tests.flower._grid import digits
from tests.flower._node import CLIENT, HOW, Node, exact_details, row_groups, weights_for
from tests.flower._rules import (
    BUDGET,
    EVERYTHING,
    PRIVACY,
    K,
    RuledNode,
    blanked,
    release_details,
    small_groups,
    write_rules,
)

from fedup import Forget, collect
from fedup.clients.all_questions import QUESTIONS
from fedup.clients.biases import BiasesQuestion
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.eraser_questions import SecondMomentsQuestion, SketchesQuestion, SpreadsQuestion
from fedup.clients.labels import WhoQuestion
from fedup.clients.moments import MomentChangeQuestion, MomentsQuestion
from fedup.clients.question import PrivateQuestion
from fedup.clients.tally import TallyQuestion
from fedup.errors import SettingError
from fedup.federation import Client
from fedup.flower import Policy, RunServer
from fedup.flower.node_record import MOST_VIEWS, WITHHELD, NodeRecord
from fedup.flower.policy import RefusedError
from fedup.flower.row_sets import sets_of
from fedup.flower.rules import QUESTION_GROUPS, RULES_KEY, load_rules
from fedup.flower.wire import Ask, write_ask
from fedup.models.views import fingerprint
from fedup.run.limits import Limits
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.client_data import ClientData
from fedup.statistics.eraser_statistics import RowGroups
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.tally import RowsToCount

WORLD = digits()
IDS = WORLD.rows(CLIENT).tolist()
Y = WORLD.federation.y[WORLD.rows(CLIENT)].tolist()
LARGE = [label for label in range(10) if Y.count(label) >= K]


@pytest.fixture
def rules(tmp_path) -> Path:
    return write_rules(tmp_path / "rules.toml")


def reply(app, content: RecordDict, config: dict, run_config: dict | None = None) -> RecordDict:
    context = Context(0, 7, {"partition-id": CLIENT, **config}, RecordDict(), run_config or {})
    return app(Message(content, dst_node_id=7, message_type="query.fedup"), context).content


def unreadable(context):
    raise AssertionError("rows were read")


# --- where rules come from


def test_without_rules_a_deployed_node_answers_nothing_whatever_its_app_and_run_say(world, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    app = world.app(CLIENT, data=unreadable, policy=Policy(open_in_simulation=True))
    node = Node(world, app)
    for config in ({}, {RULES_KEY: str(tmp_path / "none.toml")}, {"fedup-open": "yes"}, {"open": True}):
        node.context = Context(0, 7, {"partition-id": CLIENT, **config}, RecordDict(), {"fedup-open": True})
        for kind in QUESTIONS:
            answer = node.ask(kind)
            assert (answer.status, answer.details, answer.arrays) == ("refused", {}, {}), (config, kind)
    open_file = tmp_path / ".fedup" / "node-rules.toml"
    ok("node-rules", "--open", "--out", open_file)
    node.context = Context(0, 7, {"partition-id": CLIENT}, RecordDict(), {})
    assert node.ask("who").details["rules"] == "open"
    monkeypatch.setenv("FEDUP_NODE_RULES", str(write_rules(tmp_path / "own.toml")))  # before the file at home
    assert len(node.ask("who").details["rules"]) == 16
    assert node.summarize().status == "refused"
    node.context = Context(0, 7, {"fedup-open": True}, RecordDict(), {})  # contradictory
    assert node.ask("who").status == "refused"


def test_a_written_file_is_safe_is_never_overwritten_and_a_file_with_an_unknown_line_is_refused(tmp_path):
    path = tmp_path / "rules.toml"
    ok("node-rules", "--out", path)
    assert fedup("node-rules", "--out", path).code != 0
    safe = load_rules(path)
    assert not safe.open and safe.least_rows >= 20 and safe.cuts == {"last"} and safe.privacy.total_epsilon <= 8
    assert safe.questions == QUESTION_GROUPS["moments"]
    assert "moments" in ok("node-rules", "--check", path).out
    for line in (
        "leats_rows = 2",
        "open = true",
        "folder = 3",
        'questions = ["pixels"]',
        "[privacy]\nmost_epsilon = 1e6",
    ):
        bad = tmp_path / "bad.toml"
        bad.write_text(path.read_text().split("[privacy]")[0].replace('questions = ["moments"]', "") + line)
        with pytest.raises(SettingError):
            load_rules(bad)
        assert fedup("node-rules", "--check", bad).code != 0


def test_every_exact_question_belongs_to_a_group_of_rules():
    exact = {kind for kind, own in QUESTIONS.items() if not issubclass(own, PrivateQuestion)} - {WhoQuestion.kind}
    assert frozenset().union(*QUESTION_GROUPS.values()) == exact


# --- what rules forbid

FEW = st.lists(st.integers(0, 10**6), min_size=1, max_size=K - 1)


@st.composite
def forbidden(draw) -> Ask:
    """A question that rules for moments at the last layer, of K rows and ε = 1, do not allow."""
    sample = draw(st.sampled_from([*IDS, 10**6]))
    moments = {"cut": "head", "how": asdict(MomentConfig(least_rows=1)), "labels": None, "without": [], "excluded": []}
    others = {**exact_details(WORLD), "labels": {"samples": [sample]}}
    kind, details = draw(st.sampled_from([own for own in others.items() if own[0] not in QUESTION_GROUPS["moments"]]))
    choice = draw(st.sampled_from(["kind", "cut", "few", "epsilon", "replayed", "centroids", "change"]))
    if choice == "cut":
        kind, details = MomentsQuestion.kind, {**moments, "cut": draw(st.sampled_from(["conv1", "fc1", "nowhere", ""]))}
    elif choice == "few":
        kind, details = MomentsQuestion.kind, {**moments, "excluded": draw(FEW)}
    elif choice == "change":
        kind = MomentChangeQuestion.kind
        details = {**moments, "labels": [1], "before": draw(FEW), "absent": [], "excluded": draw(st.just([]) | FEW)}
    elif choice == "epsilon":
        kind, details = "summarize privately", release_details(draw(st.floats(1.01, 1e6)))
    elif choice == "replayed":
        kind, details = "summarize privately", release_details(0.5)
        details["how"]["replay_seed"] = 1
    elif choice == "centroids":
        kind, details = "summarize", {**moments, "how": asdict(CentroidConfig(draw(st.floats(0.01, 1))))}
    return Ask(kind, fingerprint(WORLD.model), {**details, "num_classes": 10}, WORLD.model.state_dict())


@settings(max_examples=40, deadline=None)
@given(ask=forbidden())
def test_what_rules_forbid_is_refused_with_bytes_that_depend_on_no_row(ask):
    with tempfile.TemporaryDirectory() as folder:
        config = {RULES_KEY: str(write_rules(Path(folder) / "rules.toml"))}
        without = reply(WORLD.app(CLIENT, data=unreadable), write_ask(ask), config)
        node = RuledNode(WORLD, Path(config[RULES_KEY]))
        assert node.say(ask).status == "refused"
        assert without == reply(node.app, write_ask(ask), config)
        assert {own["status"] for own in node.log()} == {"refused"} and node.spent() == 0
        assert not (node.folder / "groups.safetensors").exists()


def test_other_models_than_those_named_and_more_than_allowed_are_refused(world, tmp_path):
    pinned = RuledNode(world, write_rules(tmp_path / "pinned.toml", bases=[fingerprint(world.model)]))
    other = digits(1).model
    assert pinned.moments().status == "ok"
    assert pinned.moments(model=other).status == "refused"
    counted = RuledNode(world, write_rules(tmp_path / "counted.toml", most_bases=1, most_answers=2))
    assert [counted.moments().status, counted.moments(model=other).status] == ["ok", "refused"]
    counted.restart()
    assert counted.moments(model=other).status == "refused"
    assert [counted.moments().status for _ in range(2)] == ["ok", "refused"]  # two in all
    rounded = RuledNode(world, write_rules(tmp_path / "rounded.toml"))
    ways = [rounded.moments(how=asdict(MomentConfig(step=1 / 2**n))).status for n in range(MOST_VIEWS + 1)]
    assert ways == ["ok"] * MOST_VIEWS + ["refused"]


# --- attacks of the issue


def test_no_rows_come_back_as_centroids_and_no_row_as_a_difference(world, tmp_path):
    lax = {"questions": EVERYTHING, "cuts": ["last", "conv1"], "most_ratio": 0.1}
    node = RuledNode(world, write_rules(tmp_path / "rules.toml", **lax))
    assert node.summarize(CentroidConfig(1.0), cut="conv1").status == "refused"
    assert node.moments().status == "ok"
    one, label = IDS[0], Y[0]
    assert label in LARGE, "premise"
    assert node.moments([label], [one]).status == "refused"
    padded = [one, *range(10**6, 10**6 + K)]
    assert node.moments([label], padded).reason == WITHHELD
    node.restart(**rows_without(world, 0))  # the same by an app that leaves the row out itself
    assert node.moments([label]).reason == WITHHELD
    node.restart(ids=lambda context: range(len(IDS)), client=lambda context: 9)  # and has other names for all others
    assert node.moments([label]).status == "ok"


def rows_without(world, place: int) -> dict:
    rows = torch.cat([world.rows(CLIENT)[:place], world.rows(CLIENT)[place + 1 :]])
    x, y = world.federation.x[rows], world.federation.y[rows]
    return {"data": lambda context: (x, y), "ids": lambda context: rows.tolist()}


def test_a_row_that_is_there_twice_is_two_rows(world, rules):
    own = world.rows(CLIENT)
    x, y = (torch.cat([part[own], part[own[:1]]]) for part in (world.federation.x, world.federation.y))
    node = RuledNode(world, rules, data=lambda context: (x, y), ids=None)
    assert node.moments([Y[0]]).status == "ok"
    node.restart(ids=None)  # by an app that has it once
    assert node.moments([Y[0]]).reason == WITHHELD


def test_which_classes_named_rows_have_is_told_only_where_rules_say_so(world, tmp_path):
    """Of a class that loses few rows nothing is sent, and that alone would tell."""
    others = [i for i, own in zip(IDS, Y, strict=True) if own != LARGE[0]]
    named = part_of(LARGE[0], 0, 1) + others[: K - 1]
    answers = []
    for kinds in (["moments"], ["moments", "labels"]):
        node = RuledNode(world, write_rules(tmp_path / f"{len(kinds)}.toml", questions=kinds))
        answers.append(node.moments([LARGE[0]], named))
    assert answers[0].reason == WITHHELD
    assert (answers[1].status, answers[1].details["few"]) == ("ok", [LARGE[0]])


def test_two_runs_at_once_have_one_record(world, tmp_path):
    rules = load_rules(write_rules(tmp_path / "rules.toml", most_bases=1))
    x, y = torch.rand(2 * K, 3), torch.zeros(2 * K, dtype=torch.int64)
    both = [NodeRecord(rules) for _ in range(2)]  # both looked before either answered
    both[0].admit("one model", x, y, [torch.arange(2 * K)])
    with pytest.raises(RefusedError, match="models"):
        both[1].admit("another", x, y, [torch.arange(2 * K)])
    with pytest.raises(RefusedError, match="withhold"):
        both[1].admit("one model", x, y, [torch.arange(2 * K - 1)])


def test_sums_of_several_answers_single_out_no_row_either(world, tmp_path):
    """A and B overlap in few rows: both and their union were enough for those."""
    node = RuledNode(world, write_rules(tmp_path / "rules.toml", questions=["moments", "labels"]))
    label = max(LARGE, key=Y.count)
    own = [i for i, own in zip(IDS, Y, strict=True) if own == label]
    assert len(own) >= 3 * K, "premise"
    answers = [node.moments([label], out) for out in ([], own[:K], own[K - 1 : 2 * K - 1])]
    assert [answer.status for answer in answers] == ["ok", "ok", "refused"] and answers[2].reason == WITHHELD


def test_refusals_that_depend_on_rows_are_few_and_then_nothing_exact_is_answered(world, tmp_path):
    """Named rows are held, or not: that is what such a refusal tells."""
    node = RuledNode(world, write_rules(tmp_path / "rules.toml", most_refusals=3))
    assert node.moments().status == "ok"
    padded = [IDS[0], *range(10**6, 10**6 + K)]
    refusals = [node.moments(None, padded).reason for _ in range(4)]
    assert refusals[:3] == [WITHHELD] * 3 and "too often" in refusals[3]
    node.restart()
    assert "too often" in node.moments().reason
    assert node.ask("who").status == "ok"
    assert node.ask("summarize privately", **release_details(0.5)).status == "ok"  # under a guarantee it goes on


def test_a_federation_with_rules_forgets_a_class_and_samples_and_restores_them_as_in_process(world, tmp_path):
    grid, kinds = world.grid(), ["moments", "eraser", "tallies", "labels"]
    for node, context in grid.contexts.items():
        path = write_rules(tmp_path / f"{node}.toml", questions=kinds, cuts="any", least_rows=5, most_bases=1)
        context.node_config = {"partition-id": context.node_config["partition-id"], RULES_KEY: str(path)}
    contact, server = world.contact(grid), RunServer(tmp_path / "run", world.blank)
    server.keep(world.model)
    store = server.collect(contact, statistics=MomentConfig(by_class="always"))
    expected = collect(world.model, world.federation, statistics=MomentConfig(by_class="always"))
    assert torch.equal(store.total.second, expected.total.second) and store.total.rows == expected.total.rows
    one, other = sorted(LARGE, key=Y.count)[-2:]
    samples = Forget.samples({CLIENT: part_of(one, 0, 10) + part_of(other, 0, 10)})
    for request in (Forget.classes([one]), samples):
        answer = server.unlearn(request, contact, limits=Limits(max_loss=None, force=True))
        assert contact.left_out == {} and not answer.declined
        server.restore(*answer.requests, contact=contact)
    assert torch.equal(server.plugged().unplug()(world.test_x[:9]), world.model(world.test_x[:9]))


def part_of(label: int, start: int, n: int) -> list[int]:
    return [i for i, own in zip(IDS, Y, strict=True) if own == label][start : start + n]


# --- sequences of questions

PARTS = st.builds(part_of, st.sampled_from(LARGE), st.sampled_from([0, 1, K]), st.sampled_from([K - 1, K, 2 * K]))
SETS_OF_LABELS = st.sets(st.sampled_from(LARGE), min_size=1, max_size=3)
QUESTIONS_IN_TURN = st.tuples(SETS_OF_LABELS, st.just([]) | PARTS | st.lists(st.sampled_from(IDS), unique=True))


class AnyQuestions(RuleBasedStateMachine):
    """Questions in any order, with restarts, other apps and other client numbers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.home, self.sets, self.given = Path(tempfile.mkdtemp()), [], 0.0

    @initialize(labels=st.booleans())
    def start(self, labels: bool) -> None:
        allowed = {"questions": ["moments", *["labels"] * labels], "most_refusals": 1000}
        self.node = RuledNode(WORLD, write_rules(self.home / "rules.toml", **allowed))

    @rule(question=QUESTIONS_IN_TURN)
    def moments(self, question) -> None:
        labels, excluded = question
        answer = self.node.moments(sorted(labels), excluded)
        if answer.status == "ok":  # what was answered, by the numbers of rows that it says
            for label, count in answer.details["rows"]:
                rows = {i for i, own in zip(IDS, Y, strict=True) if own == label and i not in excluded}
                assert len(rows) == count
                self.sets.append(rows)

    @rule(epsilon=st.sampled_from([0.3, 0.6, 1.0]), again=st.booleans())
    def release(self, epsilon: float, again: bool) -> None:
        details = release_details(epsilon, release="by that name" if again else "")
        before = self.node.spent()
        answer = self.node.ask("summarize privately", **details)
        assert answer.status == "ok" or self.node.spent() == before

    @rule()
    def restart(self) -> None:
        self.node.restart()

    @rule(shift=st.integers(0, 3))
    def another_app(self, shift: int) -> None:
        """The same rows under another client number; charges go on."""
        self.node.restart(client=lambda context: shift)

    @invariant()
    def no_group_is_small_and_the_budget_holds(self) -> None:
        if hasattr(self, "node"):
            assert small_groups(self.sets) == []
            assert self.node.spent() <= BUDGET.mu**2 * (1 + 1e-9)

    def teardown(self) -> None:
        shutil.rmtree(self.home)


TestAnyQuestions = AnyQuestions.TestCase
TestAnyQuestions.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)


def test_the_budget_is_used_up_once_whatever_app_run_or_number_asks(world, rules):
    node, answers = RuledNode(world, rules), []
    for number in range(12):
        node.restart(client=lambda context, number=number: number)
        answers.append(node.ask("summarize privately", **release_details(PRIVACY["most_epsilon"])).status)
    affordable = int(BUDGET.mu**2 / node.spent() * answers.count("ok") * (1 + 1e-9))
    assert answers == ["ok"] * affordable + ["refused"] * (12 - affordable) and 0 < affordable < 12
    (node.folder / "account.json").write_text("{")
    assert node.ask("summarize privately", **release_details(0.1)).status == "failed"  # never a new one


# --- the rows behind an answer


def exact_questions() -> list:
    groups = row_groups(WORLD)
    some, config = frozenset(IDS[:40]), MomentConfig(least_rows=1)
    counted = RowsToCount({"s": Forget.samples({CLIENT: IDS[:40]}), "c": Forget.classes([1])}, groups.forget_set)
    return [
        MomentsQuestion("head", config, excluded=some),
        MomentsQuestion("head", config, labels=frozenset(LARGE[:2])),
        MomentChangeQuestion("head", config, frozenset(LARGE), frozenset(), some),
        CentroidsQuestion("head", HOW, excluded=some),
        SketchesQuestion("conv2", "each", groups),
        SpreadsQuestion({"conv2": "each"}, groups, weights_for(groups)),
        SecondMomentsQuestion("conv2", "each", (0,), RowGroups(groups.requests, Forget.clients([CLIENT]))),
        TallyQuestion(None, None, counted),
        BiasesQuestion(None, RowsToCount({}, groups.forget_set), ((0.0,) * 10, (*(0.0,) * 9, 5.0))),
        TallyQuestion(None, None, replace(counted, carried={"s": {0: 1.0}}, classes=False)),
    ]


@pytest.mark.parametrize("question", exact_questions(), ids=lambda question: question.kind)
def test_an_answer_depends_on_no_row_outside_its_row_sets(world, question):
    trained, unseen = world.rows(CLIENT), world.unseen(CLIENT)
    x, y = (part[torch.cat([trained, unseen])] for part in (world.federation.x, world.federation.y))
    places = torch.arange(len(y))
    client = Client(CLIENT, places[: len(trained)], places[:0], places[len(trained) :])
    ids = torch.cat([trained, unseen])
    data = ClientData(world.model, x, y, client, 10, ids=ids, least_rows=K)

    def by_place(request: Forget) -> Forget:
        own = {CLIENT: [IDS.index(i) for i in request.sample_ids.get(CLIENT, ())]}
        return Forget(request.client_ids, request.class_ids, own if own[CLIENT] else {})

    placed = question.with_places(by_place)
    sets = sets_of(placed, data, with_named=False)
    assert sets and all(len(rows) >= K for rows in sets), "premise"
    outside = sorted(set(places.tolist()) - set(torch.cat(sets).tolist()))
    assert outside, "premise"
    details, arrays = question.answer_message(placed.answer(data))
    again, others = question.answer_message(placed.answer(replace(data, x=blanked(x, outside))))
    assert details == again and arrays.keys() == others.keys()
    assert all(torch.equal(own, others[name]) for name, own in arrays.items())

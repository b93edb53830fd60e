"""A client's own rules, which no server can change: what a node refuses, and what it keeps an account of."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from flwr.app import ConfigRecord
from tests._asking import ask_one
from tests.flower._node import CLIENT, HOW, Node, centroids, exact_details, in_process, row_groups

from fedup.clients.eraser_questions import SecondMomentsQuestion, SketchesQuestion, SpreadsQuestion
from fedup.clients.tally import TallyQuestion
from fedup.errors import BudgetError, SettingError
from fedup.flower import Policy
from fedup.flower.state import KeptLedger
from fedup.privacy import DP, Budget
from fedup.statistics.tally import RowsToCount

REAL = DP(2.0, clip=4.0)
NAN = float("nan")


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

    moments = SecondMomentsQuestion("conv2", "each", (0,), groups)
    many = ask_one(in_process(world), CLIENT, moments).count
    for fewest, rows in ((many - 40, many), (many - 39, 40)):  # 40 are forgotten
        assert Node(world, world.app(CLIENT, policy=Policy(least_rows=fewest))).read(moments).count == rows

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


def test_an_account_in_a_file_outlives_the_state(world, tmp_path):
    policy = Policy(budget=Budget(3.0), account=tmp_path / "account.json")
    told = [Node(world, world.app(CLIENT, policy=policy)).summarize(REAL).status for _ in range(4)]  # a state each
    affordable = int(policy.budget.mu**2 / REAL.mu**2 * (1 + 1e-9))
    assert told == ["ok"] * affordable + ["refused"] * (4 - affordable) and 0 < affordable < 4
    charges = json.loads(policy.account.read_text())["charges"]
    assert len(charges) == affordable
    damaged = '{"charges": [{"mu": -1}], "budgets": []}'
    policy.account.write_text(damaged)
    node = Node(world, world.app(CLIENT, policy=policy))
    answer = node.summarize(REAL)
    assert answer.status == "failed" and "account cannot be read" in answer.reason and not answer.arrays
    node = Node(world, world.app(CLIENT, policy=Policy(budget=Budget(5.0))))
    node.context.state["fedup-ledger"] = ConfigRecord({"json": damaged})
    assert node.summarize(REAL).status == "failed"


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


def test_settings_of_a_policy_out_of_range_are_refused():
    for setting in ({"least_rows": 0}, {"answer_after_s": -1.0}, {"answer_after_s": NAN}, {"answer_after_s": math.inf}):
        with pytest.raises(SettingError, match=next(iter(setting))):
            Policy(**setting)

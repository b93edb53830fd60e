"""Withdrawals: what is withdrawn is what the case says, verdicts are of the same rows, and the goals can fail."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from tests.bench._progress import silent

from fedup import Forget
from fedup.bench.withdrawals import KINDS, SETTINGS, Setting, make_cases, run_withdrawals
from fedup.bench.withdrawals_table import CASES, LEAST_EQUAL, MOST_TOO_FEW, case_row, goals, is_same, withdrawals_table
from fedup.errors import DataError, SettingError

SMALL = {"data": "digits", "clients": 2, "partition": "dirichlet:1.0", "rounds": 2, "rows": 1200}
SETTING = Setting("digits", SMALL, (("half", 0), ("person", 1), ("source", 1), ("class", 0)), least_person_rows=50)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FEDUP_CACHE", str(tmp_path_factory.mktemp("cache")))
        return json.loads(json.dumps(run_withdrawals(SETTING, seed=100, progress=silent), allow_nan=False))


@pytest.fixture
def thirty(result):
    """As many cases as the goals are about, all of them good."""
    good = next(copy.deepcopy(case) for case in result["cases"] if case["verdict_by_retrain"])
    good["worst_class_loss"] = 1.0
    good["verdict"]["finding"] = good["verdict_by_retrain"]["finding"] = "forgotten"
    return [copy.deepcopy(good) for _ in range(CASES)]


def test_every_case_has_verdicts_of_the_same_rows(result):
    assert [(case["kind"], case["client"]) for case in result["cases"]] == list(SETTING.cases)
    for case in result["cases"]:
        verdict, beside = case["verdict"], case["verdict_by_retrain"]
        if case["refused"]:
            assert verdict is beside is None and case["worst_class_loss"] == 0
            continue
        assert verdict["statistic"] == beside["statistic"]
        assert 0 < verdict["statistic"]["rows"] == beside["reference"]["rows"] <= case["rows"]
        assert beside["reference"]["before"] == beside["reference"]["after"] == case["retrain_accuracy"]
        assert beside["excess_after"]["value"] == pytest.approx(
            verdict["statistic"]["after"] - case["retrain_accuracy"]
        )
        lost = [100 * (a - b) for a, b in zip(case["test_before"], case["test_after"], strict=True)]
        assert case["worst_class_loss"] == max(lost) == lost[case["worst_class"]]
    assert sum(bool(case["refused"]) for case in result["cases"]) < 3
    assert result["machine"]["torch"] and "commit" in result["code"] and result["recipe"]["seed"] == 100


def test_goals_are_not_met_by_cases_that_are_missing_and_seeds_have_sections_of_their_own(thirty, result):
    assert CASES == 30 and {kind for setting in SETTINGS.values() for kind, _ in setting.cases} == set(KINDS)
    with pytest.raises(SettingError, match="nobody"):
        Setting("odd", SMALL, (("nobody", 0),))
    assert [goal.met for goal in goals(thirty)] == ["yes"] * 3
    assert [goal.met for goal in goals(thirty[:-1])] == ["cases missing"] * 3
    assert [goal.met for goal in goals([])] == ["cases missing", "no", "cases missing"]
    text = withdrawals_table([result, result | {"seed": 3}])
    assert text.index("## Seed 3") < text.index("## Seed 100")
    thirty[0]["withheld"] = True
    assert case_row("mnist", thirty[0])[11] == "withheld"
    thirty[0] |= {"refused": "would harm", "verdict": None, "verdict_by_retrain": None, "time_s": None}
    row = case_row("mnist", thirty[0])
    assert (row[6], row[8], row[9], row[11], row[12]) == ("refused", "refused", "no", "refused", "–")


def test_goals_fail_when_a_case_breaks_them(thirty):
    harmed = copy.deepcopy(thirty)
    harmed[7]["worst_class_loss"] = 5.1
    assert [goal.met == "yes" for goal in goals(harmed)] == [False, True, True]
    assert goals(harmed)[0].found.startswith("1 of 30")

    for case in thirty[: CASES - LEAST_EQUAL]:
        case["verdict_by_retrain"]["finding"] = "partly"
    assert all(goal.met == "yes" for goal in goals(thirty))
    thirty[-1] |= {"refused": "would harm", "verdict": None, "verdict_by_retrain": None}
    assert [goal.met == "yes" for goal in goals(thirty)] == [True, False, True]
    assert thirty[-1]["title"] in goals(thirty)[0].found  # a refusal is listed
    assert not is_same(thirty[-1])

    for case in thirty[: MOST_TOO_FEW + 1]:
        case["verdict"]["finding"] = "too few rows"
    assert [goal.met == "yes" for goal in goals(thirty)] == [True, False, False]


def test_persons_and_sources_have_their_own_rows_among_those_held_out_too():
    recipe = SETTING.recipe_for(3)
    dataset = recipe.load()
    plain = recipe.federation(dataset)
    assert len(make_cases(plain, replace(SETTING, heldout=0.5), 3)[0].rows("heldout")) > 2 * len(plain.rows("heldout"))
    federation, cases = make_cases(plain, SETTING, 3)
    by_kind = {case.kind: set(case.request.sample_ids[case.client]) for case in cases}
    changed = set((federation.x != plain.x).flatten(1).any(1).nonzero().flatten().tolist())
    client = federation.client(1)
    assert not by_kind["person"] & by_kind["source"]
    assert changed & set(federation.rows().tolist()) == by_kind["person"] | by_kind["source"]
    share = len(changed & set(client.train.tolist())) / len(client.train)
    held_out = {*client.validation.tolist(), *client.heldout.tolist()}
    assert len(changed & held_out) / len(held_out) == pytest.approx(share, abs=0.03)
    assert len(by_kind["person"]) >= 50
    assert len(federation.y[sorted(by_kind["class"])].unique()) == 1
    assert torch.equal(federation.y, plain.y)
    for case in cases:
        federation.check(case.request)
    assert make_cases(plain, SETTING, 3)[1] == cases
    assert make_cases(plain, SETTING, 4)[1] != cases


def test_wrong_labels_are_a_fifth_of_every_part_of_every_client():
    setting = replace(SETTING, cases=(("classes", 0), ("half", 1)), mislabelled=0.2)
    plain = setting.recipe_for(0).federation(setting.recipe_for(0).load())
    federation, (classes, _) = make_cases(plain, setting, 0)
    wrong = federation.y != plain.y
    for client in federation.clients:
        for rows in (client.train, client.validation, client.heldout):
            assert int(wrong[rows].sum()) == round(0.2 * len(rows))
    assert isinstance(classes.request, Forget)
    withdrawn = federation.y[sorted(classes.request.sample_ids[0])].unique()
    assert len(withdrawn) == len(federation.y[federation.client(0).train].unique()) // 2


def test_a_federation_that_does_not_learn_by_heart_is_an_error_and_one_that_does_stops():
    setting = replace(SETTING, recipe=SMALL | {"rounds": 2, "rows": 200}, cases=(), until=1.1, step=1)
    with pytest.raises(DataError, match="by heart"):
        run_withdrawals(setting, seed=100, progress=silent)
    stopped = run_withdrawals(replace(setting, until=0.0), seed=100, progress=silent)
    assert stopped["recipe"]["rounds"] == 1 and stopped["train_accuracy"] >= 0

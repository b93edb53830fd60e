"""Goals of an experiment: read with file and key, judged from results whose content is known, shown in its report."""

import pytest
from tests.bench._made_up import TOML, MadeUp

from fedup.bench.goals import Judged, goal_rows, judge_goals
from fedup.bench.summary import summarize
from fedup.errors import SettingError

PLACE = "mnist-lenet5", "client"


def with_goals(*lines: str, federation: str = PLACE[0], scenario: str = PLACE[1]) -> str:
    return f"{TOML}[goals.{federation}.{scenario}]\n" + "\n".join(lines)


GOOD = {
    'asr = "<=retrain.asr+0.02"': ("fedup", "asr", False, ("retrain", "asr"), 0.02),
    'asr = "  <=  retrain.asr  +  .5 "': ("fedup", "asr", False, ("retrain", "asr"), 0.5),
    'r_a = ">= none.test - 0.005"': ("fedup", "r_a", True, ("none", "test"), -0.005),
    'f_a = "<= 0.1"': ("fedup", "f_a", False, None, 0.1),
    'gap_r_a = ">= -0.02"': ("fedup", "gap_r_a", True, None, -0.02),
    '"none.asr" = ">= 0.9"': ("none", "asr", True, None, 0.9),
    'test = ">= fedup.r_a"': ("fedup", "test", True, ("fedup", "r_a"), 0.0),
}


@pytest.mark.parametrize(("line", "expected"), GOOD.items(), ids=GOOD.keys())
def test_a_line_says_which_figure_is_to_be_at_least_or_at_most_what(read, line, expected):
    (goal,) = read(with_goals(line)).goals
    assert (goal.federation, goal.scenario) == PLACE
    assert (goal.method, goal.metric, goal.at_least, goal.other, goal.margin) == expected


NO_GOALS = [
    *["", "retrain.asr", "== 0.9", "< 0.9", "<=", ">= retrain.", "<= retrain.asr +", "0.9", "<= 0.1 + 0.2"],
    *["<= retrain.asr * x", "<= 1e-3x", "<= retrain.asr + 0.02 or so", "<= 1.2.3", "<= .", "<= retrain.asr + .."],
]


def test_what_is_no_goal_is_refused_with_file_key_and_how_one_reads(read):
    place = "mine.toml: goals.mnist-lenet5.client.asr"
    for text in NO_GOALS:
        with pytest.raises(SettingError) as caught:
            read(with_goals(f'asr = "{text}"'))
        wanted = f'{place} must read like "<= retrain.asr + 0.02" or ">= 0.9"; found {text!r}.'
        assert str(caught.value).endswith(wanted)


WRONG = [
    (with_goals('asr = "<= 1"', federation="mnist-lenet"), r"goals: there is no key 'mnist-lenet'.*'mnist-lenet5'\?"),
    (with_goals('asr = "<= 1"', scenario="clinet"), r"goals\.mnist-lenet5: there is no key 'clinet'.*'client'\?"),
    (with_goals('asrr = "<= 1"'), r"client\.asrr: there is no metric 'asrr'; .*Did you mean 'asr'\?"),
    (with_goals('"nome.asr" = "<= 1"'), r"client\.nome\.asr: there is no method 'nome'; .*'none'\?"),
    (with_goals('asr = "<= retrain.asrr + 0.1"'), r"client\.asr: there is no metric 'asrr'"),
    (with_goals('asr = "<= retrian.asr + 0.1"'), r"client\.asr: there is no method 'retrian'"),
    (with_goals('asr = "<= 1"').replace("[methods.fedup]\n", ""), r"client\.asr: there is no method 'fedup'"),
    (with_goals("asr = 0.9"), r"client\.asr must be a text; found 0\.9"),
    (f'{TOML}[goals.mnist-lenet5]\nclient = "<= 1"', r"goals\.mnist-lenet5\.client must be a"),
    (f"goals = 3\n{TOML}", r"goals must be a table; found 3"),
    (
        with_goals('asr = "<= 1"').replace('data = "mnist"', 'data = "mnist"\nleave_out = ["client"]'),
        r"goals\.mnist-lenet5: there is no key 'client'; there are class",
    ),
]


@pytest.mark.parametrize(("text", "told"), WRONG)
def test_what_is_not_there_is_named_with_file_and_key(read, text, told):
    with pytest.raises(SettingError, match=rf"(?s)mine\.toml: .*{told}"):
        read(text)


@pytest.fixture
def judged(tmp_path):
    """Goals for the client request, judged by figures for each method and seed."""

    def judge(*lines: str, **figures: dict[int, dict]) -> list[Judged]:
        made_up = MadeUp(tmp_path, with_goals(*lines))
        for method, by_seed in figures.items():
            made_up.put("client", method, by_seed)
        return list(judge_goals(made_up.experiment.goals, summarize(made_up.experiment, made_up.results)))

    return judge


CASES = [
    ('f_a = "<= 0.25"', 0.25, 0.25, 0.0),
    ('f_a = "<= 0.125"', 0.25, 0.125, 0.125),
    ('f_a = ">= 0.75"', 0.25, 0.75, 0.5),
    ('f_a = "<= retrain.f_a + 0.125"', 0.25, 0.25, 0.0),
    ('r_a = ">= retrain.r_a - 0.25"', 0.5, 0.5, 0.0),
    ('r_a = ">= retrain.r_a - 0.125"', 0.5, 0.625, 0.125),
    ('"retrain.r_a" = "<= fedup.r_a"', 0.75, 0.5, 0.25),
    ('f_a = "<= retrain.f_a * 0.5 + 0.125"', 0.25, 0.1875, 0.0625),
]


@pytest.mark.parametrize(("line", "found", "bound", "missed_by"), CASES)
def test_a_goal_is_met_or_missed_by_so_much(judged, line, found, bound, missed_by):
    (one,) = judged(line, fedup={0: {"f_a": 0.25, "r_a": 0.5}}, retrain={0: {"f_a": 0.125, "r_a": 0.75}})
    assert (one.found, one.bound, one.missed_by, one.seeds) == (found, bound, missed_by, 1)


def test_figures_are_means_over_the_seeds_that_both_sides_have(judged):
    fedup = {0: {"f_a": 0.0, "r_a": 0.1}, 1: {"f_a": 0.5, "r_a": 0.1}, 2: {"f_a": 1.0, "r_a": 0.1}}
    retrain = {1: {"f_a": 0.25}, 2: {"f_a": 0.5}}
    lines = 'f_a = "<= retrain.f_a"', '"fedup.f_a" = "<= 0.25"', 'r_a = "<= 0.1"'
    against, fixed, to_the_digit = judged(*lines, fedup=fedup, retrain=retrain)
    assert (against.found, against.bound, against.missed_by, against.seeds) == (0.75, 0.375, 0.375, 2)
    assert (fixed.found, fixed.bound, fixed.missed_by, fixed.seeds) == (0.5, 0.25, 0.25, 3)
    assert to_the_digit.missed_by == 0  # 0.1 + 0.1 + 0.1 is not 0.3


def test_goals_without_results_are_left_out_and_the_others_judged(judged):
    found = judged(
        'r_a = ">= retrain.r_a"',  # no seed in common
        'f_a = "<= none.f_a"',  # no result of the other
        '"none.f_a" = "<= 1"',  # nor of the one
        'asr = "<= 1"',  # no such figure
        'kl = "<= retrain.kl"',  # None
        '"logit_mask.f_a" = "<= 1"',  # failed
        '"fedup.f_a" = "<= 1"',
        fedup={0: {"f_a": 0.5, "r_a": 0.5, "kl": None}},
        retrain={1: {"r_a": 0.5, "kl": 1.0}},
        logit_mask={0: {"failed": {"error": "E", "message": "m", "where": ""}}},
    )
    assert [(one.goal.metric, one.goal.other, one.seeds) for one in found] == [("f_a", None, 1)]


def test_a_goal_without_a_figure_in_any_seed_is_shown_as_not_judged(tmp_path):
    made_up = MadeUp(tmp_path, with_goals('closed = ">= 0.8"', 'f_a = "<= 1"', '"none.f_a" = "<= 1"'))
    made_up.put("client", "fedup", {0: {"f_a": 0.5, "closed": None}})
    rows = goal_rows(made_up.experiment.goals, summarize(made_up.experiment, made_up.results))
    assert [(row[2], row[5]) for row in rows] == [
        ("fedup.f_a <= 1", "met"),
        ("fedup.closed >= 0.8", "not judged: no figure in any seed"),
    ]

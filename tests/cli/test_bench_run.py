"""`fedup bench run` as a person meets it: what would run, what ran, what failed, and what to do next."""

import json
import re
from pathlib import Path

import pytest
from tests.cli._in_process import Ran, contents, fedup, ok

EXPERIMENT = """
title = "Mine"
seeds = [0]

[[federations]]
data = "digits"
rounds = 2
clients = 3
rows = 90
batch_size = 32

[scenarios.class]
[scenarios.clean_client]

[methods.retrain]
[methods.none]
[methods.logit_mask]
"""
FAILING = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Method:
    def supports(self, request):
        return True

    def unlearn(self, task):
        raise RuntimeError("out of ideas\\nand more")
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDUP_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def toml(tmp_path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture
def bench(tmp_path, toml):
    """`fedup bench run mine.toml …` with results in a folder of one's own."""

    def bench(*arguments: object, experiment: Path = toml) -> Ran:
        return fedup("bench", "run", experiment, "--results", tmp_path / "results", "--device", "cpu", *arguments)

    return bench


def cell_lines(ran: Ran) -> list[str]:
    return [line for line in ran.err.splitlines() if re.match(r"\[\d+/\d+\] ", line)]


def results(tmp_path: Path) -> list[str]:
    """Cells that have a result, as `scenario/method-seed0`."""
    folder = tmp_path / "results" / "mine" / "digits-lenet5"
    return sorted(str(path.relative_to(folder))[: -len("-12345678.json")] for path in folder.rglob("*.json"))


def check_refused(ran: Ran, *words: str, code: int = 1) -> None:
    """One clear error and no traceback."""
    assert ran.code == code, ran
    assert "Traceback" not in ran.out + ran.err
    assert ran.out == ""
    for word in words:
        assert word in ran.told
    if code == 1:
        assert len(ran.err.splitlines()) == 1, ran.err
        assert ran.err.startswith("Error: ")


def test_a_run_tells_each_cell_and_what_to_do_next_and_a_second_run_says_all_is_done(bench, tmp_path):
    ran = bench()
    assert ran.code == 0, ran.err
    told = cell_lines(ran)
    assert [line.split("]")[0] for line in told] == [f"[{n}/6" for n in range(1, 7)]
    assert re.match(
        r"\[1/6\] digits-lenet5, class, retrain, seed 0: R-A 0\.\d{3}, F-A 0\.\d{3}, seconds .*; about .* left", told[0]
    )
    assert "clean_client, logit_mask, seed 0: not supported" in told[-1]
    assert "6 of 6 cells done, 0 failed, 0 left" in ran.out
    assert str(tmp_path / "results" / "mine") in ran.out
    assert "Next: fedup bench report" in ran.out
    assert len(results(tmp_path)) == 6
    before = contents(tmp_path / "results")
    again = bench()
    assert again.code == 0
    assert again.out == "6 of 6 cells are done; 0 to run.\n"
    assert again.err == ""
    assert contents(tmp_path / "results") == before


def test_a_dry_run_names_the_cells_and_makes_nothing(bench, tmp_path):
    ran = bench("--dry-run")
    assert ran.code == 0
    assert ran.out.splitlines() == [
        *(
            f"digits-lenet5, {scenario}, {method}, seed 0"
            for scenario in ("class", "clean_client")
            for method in ("retrain", "none", "logit_mask")
        ),
        "0 of 6 cells are done; 6 to run.",
    ]
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "cache").exists()
    ok_one = bench("--only", "none", "--only", "class")
    assert ok_one.code == 0
    after = bench("--dry-run").out.splitlines()
    assert "digits-lenet5, class, none, seed 0" not in after
    assert after[-1] == "1 of 6 cells are done; 5 to run."
    assert bench("--dry-run", "--force").out.splitlines()[-1] == "0 of 6 cells are done; 6 to run."


def test_only_and_seeds_choose_cells_and_force_measures_again(bench, tmp_path):
    chosen = ("--only", "none", "--only", "class", "--seeds", "1,1,3")
    assert "2 of 2 cells done" in bench(*chosen).out
    assert results(tmp_path) == ["class/none-seed1", "class/none-seed3"]
    dry = bench("--dry-run", "--only", "class", "--seeds", "0-1", "--seeds", "1,3")
    assert "2 of 6 cells are done; 4 to run." in dry.out
    assert len(cell_lines(bench(*chosen, "--force", "--note", "beside a film"))) == 2
    found = json.loads(next((tmp_path / "results").rglob("none-seed3-*.json")).read_text())
    assert found["seed"] == found["config"]["federation"]["seed"] == 3
    assert found["note"] == "beside a film"


def test_no_time_is_said_and_the_same_command_goes_on(bench, tmp_path):
    ran = bench("--budget-minutes", "0")
    assert ran.code == 0, ran
    assert "The time given is over; the same command goes on from here." in ran.err
    assert "0 of 6 cells done, 0 failed, 6 left" in ran.out
    assert "6 of 6 cells done" in bench("--budget-minutes", "60").out


# --- what fails


def test_a_cell_that_fails_is_named_with_its_error_and_status_1_and_the_others_are_measured(bench, toml, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    toml.write_text(EXPERIMENT + f'[methods.mine]\nuse = "{tmp_path / "failing.py"}"\n')
    ran = bench("--only", "class")
    assert ran.code == 1
    (failed,) = (line for line in cell_lines(ran) if "failed" in line)
    assert "digits-lenet5, class, mine, seed 0: failed: RuntimeError: out of ideas" in failed
    assert "3 of 4 cells done, 1 failed, 0 left" in ran.out
    assert "Traceback" not in ran.out + ran.err
    dry = bench("--only", "class", "--dry-run")
    assert dry.out.splitlines() == ["digits-lenet5, class, mine, seed 0", "3 of 4 cells are done; 1 to run."]
    again = bench("--only", "class")
    assert (again.code, len(cell_lines(again))) == (1, 1)
    assert len(again.err.splitlines()) == 1  # an error of many lines is told in one
    ran = bench("--only", "class", "--budget-minutes", "0", "--force")
    assert "3 of 4 cells done, 0 failed, 1 left" in ran.out


def test_missing_data_is_named_before_any_work(bench, toml, tmp_path):
    toml.write_text(EXPERIMENT.replace("[scenarios.class]", '[[federations]]\ndata = "mnist"\n\n[scenarios.class]'))
    ran = bench()
    check_refused(ran, "'mnist' is not here", "FEDUP_DATA", "fedup data fetch mnist")
    assert not (tmp_path / "results").exists()
    assert bench("--only", "digits").code == 0  # what is not asked for need not be there


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"digits"', '"my_photos/train.parquet"', ["mine.toml", "no Parquet file my_photos/train.parquet"]),
        ("rounds = 2", "round = 2", ["mine.toml", "federations[0]", "Did you mean 'rounds'?"]),
        ("title = ", "title ", ["mine.toml is no readable TOML file"]),
    ],
)
def test_what_is_wrong_in_the_file_is_one_clear_line(bench, toml, tmp_path, old, new, told):
    toml.write_text(EXPERIMENT.replace(old, new))
    check_refused(bench(), *told)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--only", "nonne"), ["nothing in mine is called 'nonne'", "Did you mean 'none'?"]),
        *((("--seeds", seeds), ["0-2 or 0,1,5"]) for seeds in ("a", "1-", "-1", "²", "0,,1")),
        (("--seeds", "3-1"), ["3-1"]),
        (("--device", "cuda:77"), ["cuda:77"]),
        (("--device", "gpu"), ["gpu"]),
    ],
)
def test_names_that_are_none_are_one_clear_line(bench, tmp_path, arguments, told):
    check_refused(bench(*arguments), *told)
    check_refused(bench("--budget-minutes", "-1"), code=2)
    check_refused(bench(experiment=tmp_path / "none.toml"), "no experiment", "none.toml")
    assert not (tmp_path / "results").exists()


def test_results_that_cannot_be_read_or_written_are_one_clear_line(bench, toml, tmp_path):
    bench("--only", "class", "--only", "none")
    (path,) = (tmp_path / "results").rglob("*.json")
    good = path.read_text()
    path.write_text(good[:50])
    check_refused(bench(), path.name, "is not a result", "remove it")
    path.write_text(good.replace('"format": 1', '"format": 2'))
    check_refused(bench(), path.name, "format 2", "--results")
    assert path.read_text() == good.replace('"format": 1', '"format": 2')
    check_refused(fedup("bench", "run", toml, "--results", toml, "--device", "cpu"), str(toml))


def test_help_has_examples_that_parse(bench):
    ran = ok("bench", "run", "--help")
    shown = " ".join(ran.out.replace("│", " ").split())
    assert "Example: fedup bench run benchmarks/experiments/smoke.toml" in shown
    assert max(map(len, ran.out.splitlines())) <= 100
    for option in ("--only", "--seeds", "--budget-minutes", "--results", "--force", "--note", "--dry-run", "--device"):
        assert option in shown
    assert "run" in ok("bench", "--help").out
    experiments = Path(__file__).parents[2] / "benchmarks" / "experiments"
    ran = bench(
        "--only", "class", "--seeds", "0-4", "--budget-minutes", "30", "--dry-run", experiment=experiments / "main.toml"
    )
    assert "0 of 80 cells are done; 80 to run." in ran.out

"""Exact mode on the command line: what comes later, dry runs, limits, and folders that keep totals alone."""

import random

import pytest
from tests.cli._in_process import contents, fedup, ok, refused
from tests.cli.test_exact import raise_missing

from fedup.cli._session import Session
from fedup.run.folder import Run
from fedup.tasks.recipe import Recipe

BACKBONE = """
from torch import nn
from fedup import Origin
ORIGIN = Origin("identity", "none needed", "the test")
TAKES, STEP = "table", 2.0**-8
def build(shape):
    return nn.Identity()
"""


def table(path, rows: dict[str, int], *, first: int = 0, person: str = "P"):
    """Patients of hospitals: two numbers, which tell whether they are ill."""
    rng, lines, number = random.Random(first), ["a,b,ill,hospital,person,id"], first
    for hospital, count in rows.items():
        for _ in range(count):
            ill = (number % 10 == 0) != (hospital == "north")  # who are mostly ill there, and nowhere else
            a, b = (round(rng.gauss(2 * ill, 1), 2) for _ in range(2))
            lines.append(f"{a},{b},{'yes' if ill else 'no'},{hospital},{person}-{number // 4},E-{number}")
            number += 1
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def run(tmp_path):
    (tmp_path / "plain.py").write_text(BACKBONE, encoding="utf-8")
    options = ("--label", "ill", "--clients-column", "hospital", "--subject-column", "person", "--id-column", "id")
    own = table(tmp_path / "own.csv", {"mercy": 60, "north": 60, "south": 60})
    ok("train", "--data", own, *options, "--standardise", "none", "--backbone", tmp_path / "plain.py",
       "--run", tmp_path / "run")  # fmt: skip
    return tmp_path / "run"


def test_rows_and_clients_come_later_and_are_asked_about_like_any_others(run, tmp_path):
    june = table(tmp_path / "june.csv", {"north": 8, "west": 12}, first=400)
    refused("add", june, "--run", run, told="pass --join if they are to join")
    learned = Run(run).read()
    added = ok("add", june, "--join", "--run", run, "--json").json
    assert [(own["client"], own["rows"], own["joined"]) for own in added["added"]] == [(1, 8, False), (3, 12, True)]
    assert Run(run).read().about["client_names"] == ["mercy", "north", "south", "west"]
    assert added["claim"]["totals"]["before"] == learned.trained.body["totals"] != added["claim"]["totals"]["after"]
    assert "was added before" in ok("add", june, "--run", run).out
    ok("verify", "--relearn", "--fresh", "--run", run)
    west = ok("unlearn", "--client", "west", "--run", run, "--json").json
    ok("unlearn", "--samples", "north:E-401", "--run", run)
    person = ok("unlearn", "--subject", "P-101", "--run", run, "--json").json  # rows 404 to 407, all of them added
    assert west["requests"][0]["rows"] == 12 and person["requests"][0]["rows"] == 4
    ok("verify", "--relearn", "--run", run)
    late = table(tmp_path / "late.csv", {"mercy": 4}, first=404)
    refused("add", late, "--run", run, told="1 person that a request in force forgets")
    late.write_text(late.read_text().replace("P-", "Q-"), encoding="utf-8")
    refused("add", late, "--run", run, told="ids that are there already")
    ok("purge", "--yes", "--run", run)
    again = table(tmp_path / "again.csv", {"west": 6}, first=800)
    conditions = ok("add", again, "--run", run, "--json").json["claim"]["conditions"]
    assert all(own["holds"] for own in conditions if "features" in own["name"])  # nothing of a client that is purged
    ok("evidence", "R1", "--run", run)
    ok("restore", "--all", "--run", run)
    assert ok("verify", "--relearn", "--run", run, "--json").json["ok"]
    june.write_text(june.read_text().replace("0.", "1."), encoding="utf-8")
    refused("verify", "--relearn", "--run", run, told="not the file whose rows were added")


def test_a_dry_run_says_what_it_would_cost_and_limits_decline(run):
    before = contents(run)
    plan = ok("unlearn", "--client", "north", "--dry-run", "--run", run, "--json").json
    assert contents(run) == before and plan["clients_contacted"] == [] and plan["declined"] is None
    assert plan["accuracy"]["before"] and plan["totals"]["before"] != plan["totals"]["after"]
    row = int(Session(run).federation.client(0).train[0])
    sample = ok("unlearn", "--samples", f"mercy:number:{row}", "--dry-run", "--run", run).out
    assert "Clients asked: 0 “mercy”" in sample and "Nothing was changed" in sample and contents(run) == before
    hard = ("unlearn", "--client", "north", "--run", run)
    told = fedup(*hard, "--max-class-loss", "0", "--json")
    assert told.code == 1 and "points of recall on retained rows" in told.json["declined"]
    assert not Run(run).read().active and Run(run).read().events[-1].kind == "declined"
    assert ok(*hard, "--json").json["declined"] is None


def test_a_cohort_keeps_totals_alone_and_leavers_send_their_own_sums(tmp_path, monkeypatch):
    run = ("--run", tmp_path / "run")
    shared = ("--data", "digits", "--rows", "400", "--clients", "5", "--features", "16")
    learned = ok("train", "--backbone", "random_conv", *shared, "--keep", "cohort", *run, "--json").json
    assert ok("status", *run, "--json").json["sealed"]["cells"] == 0
    refused("unlearn", "--class", "3", *run, told="fedup train --keep clients")
    gone = ok("unlearn", "--client", "2", "--reference", "T", *run, "--json").json
    assert gone["clients_contacted"] == [2] and gone["claim"]["kind"] == "exact model, data retained"
    ok("verify", "--relearn", "--fresh", *run)
    with monkeypatch.context() as patched:
        patched.setattr(Recipe, "load", lambda self: raise_missing())
        refused("unlearn", "--client", "3", *run, told="must send its own sums again")
    back = ok("restore", "T", *run, "--json").json
    assert back["claim"]["totals"]["after"] == learned["totals"]
    ok("unlearn", "--client", "2", *run)
    assert ok("purge", "--yes", *run, "--json").json["claim"]["kind"] == "exact"
    assert ok("evidence", "T", *run, "--json").json and ok("verify", "--relearn", *run, "--json").json["ok"]

"""Erasers on the command line: how they are asked for, told of in advance and told of afterwards; cuts by name."""

import pytest
from tests.cli._in_process import FAST, QUICK, contents, copy_of, fedup, filter_file, ok, sample_ids

from fedup.artifacts import load_tensors
from fedup.cli._session import Session
from fedup.run.folder import Run
from fedup.tasks.models import cuts_of


@pytest.fixture
def run(tmp_path):
    return copy_of("collected", tmp_path)


def _samples(many=30):
    return "--samples", f"1:{','.join(map(str, sample_ids(1)[:many]))}"


def _served(run):
    return Session(run).served()[1].served


@pytest.mark.parametrize(
    ("kind", "bottleneck", "eraser"), [("bottleneck", True, False), ("erasure", False, True), ("both", True, True)]
)
def test_the_filters_are_those_asked_for_and_the_file_says_what_it_is(run, kind, bottleneck, eraser):
    told = ok("unlearn", "--run", run, *_samples(), "--filter", kind, *QUICK, "--json").json
    served = _served(run)
    assert (served.filter is not None, served.erasure is not None) == (bottleneck, eraser)
    assert served.config.filter == kind
    assert (told["erasure"] is not None) == eraser
    _, header = load_tensors(filter_file(run), kind="filter")
    assert header["derived_from_forgotten"] is eraser
    assert ok("verify", "--run", run, "--json").json["ok"]
    ok("restore", "--all", "--run", run)
    assert filter_file(run) is None


def test_the_eraser_sits_where_it_was_asked_for_and_people_are_told(run):
    told = ok("unlearn", "--run", run, *_samples(), "--filter", "erasure", "--eraser-cut", "fc2", *QUICK)
    assert "Eraser at fc2, " in told.out
    assert "made of 30 forgotten rows" in " ".join(told.out.split())
    assert _served(run).erasure.cut == "fc2"
    lines = [line for line in told.out.splitlines() if not line.startswith(("Filter", "Evidence"))]
    assert max(map(len, lines)) <= 100


def test_too_few_samples_are_told_by_default_and_refused_where_an_eraser_was_asked_for(run):
    before = contents(run)
    for kind in ("both", "erasure"):
        for more in ((), ("--dry-run",)):
            ran = fedup("unlearn", "--run", run, *_samples(5), "--filter", kind, *QUICK, *more)
            assert (ran.code, ran.out) == (1, "")
            assert ran.err.startswith("Error: There can be no eraser")
            assert contents(run) == before
    ran = ok("unlearn", "--run", run, *_samples(5), *QUICK)
    assert "Note: No eraser was made to forget 5 samples of client 1: no client has 20 or more" in " ".join(
        ran.out.split()
    )
    assert Run(run).read().events[-1].body["notes"][0].startswith("No eraser")


def test_a_preset_brings_all_its_settings_and_single_ones_come_before_it(run):
    ok("unlearn", "--run", run, "--class", 7, "--preset", "paper", *QUICK)
    config = _served(run).config
    assert (config.filter, config.class_policy, config.guard, config.steps) == ("bottleneck", "remap", False, 40)
    ok("unlearn", "--run", run, "--class", 3, "--preset", "default", "--class-policy", "remap_client", *QUICK)
    config = _served(run).config
    assert (config.filter, config.class_policy, config.guard) == ("auto", "remap_client", True)


def test_a_dry_run_of_an_eraser_tells_whom_the_real_run_contacts_and_what_they_send(run):
    before = contents(run)
    for options, asked in (
        (_samples(5), []),
        (("--class", 7), []),
        ((*_samples(), "--filter", "bottleneck"), []),
        (("--class", 7, "--filter", "both"), [0, 1, 2, 3]),
        (_samples(), [0, 1, 2, 3]),  # whose rows they are compared with
    ):
        plan = ok("unlearn", "--run", run, *options, *FAST, "--dry-run", "--json").json
        assert plan["clients_of_eraser"] == asked
        assert set(asked) <= set(plan["clients_contacted"])
        assert ("second moments" in plan["privacy_cost"]) == bool(asked)
    told = ok("unlearn", "--run", run, *_samples(), *FAST, "--dry-run").out
    assert "second moments" in told
    assert max(map(len, told.splitlines())) <= 100
    assert contents(run) == before
    done = ok("unlearn", "--run", run, *_samples(), *QUICK, "--json").json
    assert plan["clients_contacted"] == done["clients_contacted"] == [0, 1, 2, 3]
    told = {}
    for one in Run(run).read().events[-1].body["releases"]:
        told.setdefault(one["what"], set()).add(one["client"])
    assert told.keys() >= {"classes of samples", "centroids", "sketches of means", "means and variances"}
    assert told["classes of samples"] == told["centroids"] == {1}
    assert told["sketches of means"] == {0, 1, 2, 3}
    assert 1 in told["means and variances"]


# Cuts


def test_the_cuts_of_a_model_are_listed_from_early_to_late_and_can_be_erased_at(run, tmp_path):
    cuts = list(cuts_of("lenet5"))
    (tmp_path / "cuts").mkdir()  # a folder of that name is a folder
    assert ok("list", "cuts", "--json", cwd=tmp_path).json["runs"] == []
    told = ok("list", "cuts", "lenet5", cwd=tmp_path)
    assert f"lenet5, from early to late: {', '.join(cuts)}" in told.out
    assert f"the bottleneck sits at {cuts[-1]}." in told.out
    assert ok("list", "cuts", "lenet5", "--json", cwd=tmp_path).json == {"model": "lenet5", "cuts": cuts}
    for number, cut in enumerate(cuts, start=1):
        ok("unlearn", "--run", run, *_samples(), "--filter", "erasure", "--eraser-cut", cut, *QUICK)
        assert _served(run).erasure.cut == cut
        ok("restore", f"R{number}", "--run", run)

"""A run folder whose clients send noisy statistics: what is refused, what people are told, and that all verbs work."""

import json
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.cli._in_process import QUICK, contents, copy_of, fedup, filter_file, ok, refused, sample_ids

from fedup.privacy import DP, epsilon_of
from fedup.privacy.paper import DISCLAIMER
from fedup.run.folder import Run

COLLECT = ("collect", "--epsilon", 8, "--clip", "unit")
GUARANTEE = "(ε = 8, δ = 1e-05)-DP for one record"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder that no test here changes."""
    return copy_of("trained", tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Collected under ε = 8; no test here changes it."""
    return copy_of("private", tmp_path_factory.mktemp("private"))


@pytest.fixture
def run(tmp_path):
    return copy_of("private", tmp_path)


def samples(client=1, many=2):
    return "--samples", f"{client}:{','.join(map(str, sample_ids(client)[:many]))}"


def ledger(run):
    return ok("status", "--run", run, "--json").json["ledger"]


def releases(run):
    return [one["releases"] for one in ledger(run)]


def evidence(run, request, tmp_path):
    """JSON and page, as texts, about one request."""
    ok("evidence", request, "--run", run, "--out", tmp_path / "pages")
    return [(tmp_path / "pages" / f"{request}.{kind}").read_text(encoding="utf-8") for kind in ("json", "html")]


ODD = st.sampled_from(["0", "-1", "nan", "inf", "units"])
SETTINGS = ["--epsilon {} --clip unit", "--epsilon 2 --clip {}", "--epsilon 2 --clip unit --delta {}", "--sigma {}"]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.sampled_from(SETTINGS), ODD)
@example("--epsilon 2 --clip unit --delta {}", "1")
def test_numbers_that_cannot_be_are_one_error_and_change_nothing(trained, arguments, value):
    if arguments == "--sigma {}" and value == "0":
        return  # no noise
    before = contents(trained)
    ran = fedup("collect", *arguments.format(value).split(), "--run", trained)
    assert (ran.code, ran.out) == (2 if value == "units" and "--clip {}" not in arguments else 1, "")
    assert ran.code == 2 or (ran.err.startswith("Error: ") and ran.err.count("\n") == 1)
    assert contents(trained) == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--epsilon 2", "clip is missing"),
        ("--epsilon 2 --clip unit --delta 1e-4", "--allow-delta"),
        ("--epsilon 2 --clip unit --sigma 0.1", "pass neither --sigma nor --paper-accounting"),
        ("--epsilon 2 --clip unit --ratio 0.3", "--ratio"),
        ("--epsilon 2 --clip unit --seed 3", "--seed"),  # which no noise of a guarantee has
        ("--clip unit", "pass --epsilon as well"),
        ("--allow-delta", "pass --epsilon as well"),
        ("--epsilon 2 --clip unit --paper-accounting", "pass neither --sigma nor --paper-accounting"),
        ("--paper-accounting", "without noise (sigma 0) there is none to count"),
    ],
)
def test_a_refusal_says_what_to_do(trained, arguments, told):
    assert told in fedup("collect", *arguments.split(), "--run", trained).told


def test_the_same_again_is_free_and_other_settings_are_refused_unless_all_are_asked_again(original):
    before = contents(original)
    assert "already; nothing was changed" in ok(*COLLECT, "--run", original).out
    assert ok(*COLLECT, "--run", original, "--json").json["already"] is True
    for other in (
        ("--epsilon", 4, "--clip", "unit"),
        ("--epsilon", 8, "--clip", 3),
        ("--epsilon", 8, "--clip", "unit", "--delta", 1e-6),
        ("--statistics", "centroids"),
        ("--statistics", "moments"),
        ("--sigma", 0.1),
    ):
        refused("collect", *other, "--run", original, told="--again")
        assert contents(original) == before


def test_people_and_programs_are_told_the_guarantee_and_noise_is_fresh(original, tmp_path):
    run = copy_of("trained", tmp_path / "people")
    out = ok(*COLLECT, "--run", run).out
    assert out.startswith("40 vectors of noisy statistics of 40 cells from 4 clients, ")
    assert f"Protection: {GUARANTEE}. Next: fedup unlearn --class 0" in out
    run = copy_of("trained", tmp_path / "programs")
    told = ok(*COLLECT, "--run", run, "--json").json
    assert told["already"] is False
    names = {next((folder / "files").glob("centroids-*")).name for folder in (original, run, tmp_path / "people")}
    assert len(names) == 3
    assert (told["centroids"], told["cells"], told["clients"]) == (40, 40, 4)
    status = ok("status", "--run", run, "--json").json
    assert told["mechanism"] == status["protection"] == GUARANTEE
    assert [one["epsilon"] for one in status["ledger"]] == pytest.approx([8.0] * 4)
    assert {(one["budget"], one["unprotected"]) for one in status["ledger"]} == {(None, 0)}
    assert told["how"]["replay_seed"] is None  # noise that nobody can replay
    assert DP(**told["how"]) == DP(8.0, clip="unit")
    assert told["paper_epsilon"] is None
    sent = {(one["mechanism"], one["sigma"]) for one in Run(run).read().collected.body["releases"]}
    assert sent == {(GUARANTEE, DP(8.0, clip="unit").sigma)}


def test_a_larger_delta_is_accepted_by_those_who_mean_it(tmp_path):
    run = copy_of("trained", tmp_path)
    told = ok("collect", "--epsilon", 2, "--clip", 5.5, "--delta", 1e-4, "--allow-delta", "--run", run).out
    assert "(ε = 2, δ = 0.0001)-DP for one record" in told
    assert ledger(run)[0]["epsilon"] == pytest.approx(epsilon_of(DP(2.0, 1e-4, 5.5, allow_delta=True).mu, 1e-5))
    again = ok("collect", "--epsilon", 2, "--clip", "5.50", "--delta", 1e-4, "--allow-delta", "--run", run)
    assert "already" in again.out


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Class 7, client 2 and samples of client 1 in force, without an eraser; no test here changes it."""
    run = copy_of("private", tmp_path_factory.mktemp("answered"))
    for what in (("--class", 7), ("--client", 2)):
        told = ok("unlearn", "--run", run, *what, *QUICK, "--json").json
        assert (told["clients_contacted"], told["bytes_up"]) == ([], 0)
    assert releases(run) == [1] * 4
    (asked,) = Run(run).read().events[-2].body["requests"]
    assert asked["rows"] == {}  # counts are what the guarantee hides
    ok("unlearn", "--run", run, *samples(), "--filter", "bottleneck", *QUICK)
    assert releases(run) == [1, 2, 1, 1]
    return run


def test_the_filter_of_one_request_has_the_same_bits_after_another_came_and_went(run):
    ok("unlearn", "--run", run, "--class", 7, *QUICK)
    first = filter_file(run)
    ok("unlearn", "--run", run, "--client", 2, *QUICK)
    assert filter_file(run) != first
    ok("restore", "R2", "--run", run, "--force", "--max-class-loss", 100)
    assert filter_file(run) == first  # named by its content


def test_what_was_purged_costs_a_release_of_its_client_to_have_back(run):
    ok("unlearn", "--run", run, "--client", 2, *QUICK)
    ok("unlearn", "--run", run, "--class", 7, *QUICK)
    ok("purge", "--yes", "--run", run)
    assert releases(run) == [1] * 4
    ok("restore", "R1", "--run", run, "--force", "--max-class-loss", 100)
    assert releases(run)[2] == 2


def test_an_eraser_of_a_class_is_refused_under_the_guarantee(run):
    before = contents(run)
    for kind in ("erasure", "both"):
        ran = fedup("unlearn", "--run", run, "--class", 7, "--filter", kind, *QUICK)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith("Error: There can be no eraser: ")
        assert "Use --filter bottleneck" in ran.told
        assert contents(run) == before


def test_an_epsilon_too_small_for_the_data_is_an_error_that_says_so(tmp_path, monkeypatch):
    run = copy_of("trained", tmp_path)
    # Noise may stand out by itself once in a thousand runs: none at all, and the threshold is what it is.
    monkeypatch.setattr("fedup.privacy.dp.normal", lambda size, replay: torch.zeros(size, dtype=torch.float64))
    ok("collect", "--epsilon", 0.01, "--clip", "unit", "--run", run)
    before = contents(run)
    refused("unlearn", "--run", run, "--class", 7, *QUICK, told="No class stands out of the noise")
    assert contents(run) == before


def test_evidence_of_samples_names_the_guarantee_of_what_was_sent(answered, tmp_path):
    told, page = evidence(answered, "R3", tmp_path)
    sent = json.loads(told)["contact"]["releases"]
    verdict = json.loads(told)["verdict"]
    assert verdict["finding"] == "not measured"
    assert "under differential privacy nobody counts answers" in verdict["words"]
    assert ">in force: not measured<" in page
    assert 'class="badge good"' not in page
    assert [(one["client"], one["mechanism"]) for one in sent] == [(1, GUARANTEE)]
    assert sent[0]["sigma"] == DP(8.0, clip="unit").sigma
    assert re.search(r"Protection of what was sent</td>\s*<td>\(ε = 8, δ = 1e-05\)-DP for one record<", page)
    assert "Differential privacy beyond what is said under Protection" in page
    for request in ("R1", "R2"):
        assert all(GUARANTEE in text for text in evidence(answered, request, tmp_path))


@pytest.mark.parametrize("noise", [("--statistics", "centroids"), ("--sigma", 0.05, "--paper-accounting")], ids=str)
def test_evidence_has_no_epsilon_where_there_is_no_guarantee(tmp_path, noise):
    run = copy_of("trained", tmp_path)
    out = ok("collect", "--run", run, *noise).out
    if "--sigma" in noise:
        assert DISCLAIMER == "noise only, not a DP guarantee" and out.count("ε") == 1
        assert re.search(rf"The paper's ε, mean over cells: [\d.]+ \({DISCLAIMER}\)", out)
        assert ok("collect", "--run", run, *noise, "--json").json["paper_epsilon"] > 0
    ok("unlearn", "--run", run, *samples(), "--filter", "bottleneck", *QUICK)
    told, page = evidence(run, "R1", tmp_path)
    releases = json.loads(told)["contact"]["releases"]
    assert {one["guarantee"] for one in releases} == {None}
    (sent,) = {one["mechanism"] for one in releases if one["what"] == "centroids"}
    assert sent == (f"gaussian noise, σ = 0.05 ({DISCLAIMER})" if "--sigma" in noise else "none")
    for text in (told, page, sent):
        assert "ε" not in text
        assert "epsilon" not in text.lower()
        assert "-DP for one" not in text
    assert ledger(run) == []
    assert "ε" not in ok("status", "--run", run).out


def test_no_budget_allows_messages_without_a_guarantee_and_a_plan_says_what_it_would_refuse(run):
    ok("budget", "--epsilon", 10, "--run", run)
    before = contents(run)
    more = ("unlearn", "--run", run, *samples(), "--filter", "bottleneck", *QUICK)
    assert fedup(*more).code == fedup(*more, "--dry-run").code == 1
    exact = fedup("collect", "--again", "--ratio", 0.8, "--run", run)
    assert exact.code == 1 and "under no guarantee" in exact.told
    assert contents(run) == before


def test_messages_sent_before_without_a_guarantee_are_not_passed_over(tmp_path):
    run = copy_of("trained", tmp_path)
    ok("collect", "--run", run)
    ok(*COLLECT, "--again", "--run", run)
    assert "∞: 1 without guarantee" in " ".join(ok("status", "--run", run).out.split())
    assert "4 messages were sent without any guarantee" in " ".join(ok("verify", "--run", run).out.split())

"""`fedup budget` as a user runs it: who may spend how much, and what is refused after it."""

from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cli._in_process import QUICK, contents, copy_of, fedup, ok, refused, sample_ids

from fedup.run.folder import Run

COLLECT = ("collect", "--epsilon", 8, "--clip", "unit")
EVERYONE = "every client without a budget of its own"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder whose four clients spent ε = 8; nobody changes it."""
    return copy_of("private", tmp_path_factory.mktemp("private"))


@pytest.fixture
def run(tmp_path):
    return copy_of("private", tmp_path)


def ledger(run):
    return {one["client"]: one for one in ok("status", "--run", run, "--json").json["ledger"]}


def budgets(run):
    return {client: one["budget"] for client, one in ledger(run).items()}


def test_a_budget_holds_for_everyone_or_for_those_named_and_the_last_word_counts(run):
    assert budgets(run) == dict.fromkeys(range(4))
    assert EVERYONE in ok("budget", "--epsilon", 12, "--run", run).out
    assert budgets(run) == dict.fromkeys(range(4), 12)
    assert "client 1, 3" in ok("budget", "--epsilon", 20.5, "--client", 1, "--client", 3, "--run", run).out
    assert budgets(run) == {0: 12, 1: 20.5, 2: 12, 3: 20.5}
    ok("budget", "--epsilon", 30, "--run", run)
    assert budgets(run) == {0: 30, 1: 20.5, 2: 30, 3: 20.5}
    ok("budget", "--epsilon", 9, "--client", 1, "--run", run)
    assert budgets(run) == {0: 30, 1: 9, 2: 30, 3: 20.5}
    assert [one["releases"] for one in ledger(run).values()] == [1] * 4


def test_a_budget_is_shown_before_anything_is_spent_and_refuses_or_allows_the_first_release(tmp_path):
    run = copy_of("trained", tmp_path)
    out = ok("budget", "--run", run).out
    assert "none (--epsilon sets one)" in out and "No client has released anything" in out
    ok("budget", "--epsilon", 7.25, "--client", 2, "--run", run)
    (only,) = ledger(run).values()
    assert (only["client"], only["releases"], only["epsilon"], only["budget"]) == (2, 0, 0, 7.25)
    assert only["left"] == pytest.approx(7.25)
    ok("budget", "--epsilon", 7.5, "--run", run)
    event = Run(run).read().events[-1]
    assert (event.kind, event.body) == ("budgeted", {"clients": [], "budget": {"epsilon": 7.5, "delta": 1e-5}})
    assert "7.5" in ok("status", "--run", run).out
    refused(*COLLECT, "--run", run, told="Client 0 has spent ε = 0 of its ε = 7.5")
    assert Run(run).read().collected is None
    for whose in ((), ("--client", 2)):
        ok("budget", "--epsilon", 8, *whose, "--run", run)
    ok(*COLLECT, "--run", run)
    assert ledger(run)[3]["left"] == pytest.approx(0, abs=1e-3)


def test_lowering_it_below_what_was_spent_says_that_all_is_refused(run):
    told = ok("budget", "--epsilon", 5, "--client", 2, "--run", run).out
    assert told.splitlines()[1:] == ["Client 2 has spent ε = 8 already: it will refuse everything."]
    assert ledger(run)[2]["epsilon"] == pytest.approx(8)  # what was spent stays spent
    assert ledger(run)[2]["left"] == 0
    ok("unlearn", "--class", 7, "--run", run, *QUICK)  # asks nobody
    samples = ("--samples", f"2:{sample_ids(2)[0]}", "--filter", "bottleneck", *QUICK)
    assert fedup("unlearn", *samples, "--run", run).code == 1
    ok("budget", "--epsilon", 50, "--client", 2, "--run", run)
    ok("unlearn", *samples, "--run", run)
    assert [one["releases"] for one in ledger(run).values()] == [1, 1, 2, 1]


def test_a_refusal_says_what_is_left_and_that_much_is_accepted(run):
    ok("budget", "--epsilon", 12, "--run", run)
    told = fedup("collect", "--epsilon", 8, "--clip", "unit", "--again", "--run", run).told
    left = float(told.split("one with ε = ")[1].split()[0])
    assert left == pytest.approx(ledger(run)[0]["left"], rel=1e-3)
    ok("collect", "--epsilon", left * 0.999, "--clip", "unit", "--again", "--run", run)
    assert ledger(run)[0]["epsilon"] == pytest.approx(12, rel=1e-3)


def test_without_options_it_lists_limits_charges_and_why_left_is_no_difference(run):
    ok("budget", "--epsilon", 12, "--run", run)
    before = contents(run)
    out = ok("budget", "--run", run).out
    assert contents(run) == before
    assert max(map(len, out.splitlines())) <= 100
    assert "Limit of every client without a budget of its own: ε = 12 at δ = 1e-05." in out
    assert " ".join(out.split()).count("It is not ε allowed − ε spent") == 1
    assert out.count("centroids") == 4  # a charge of each client
    for text in (out, ok("status", "--run", run).out):
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
        assert [row for row in rows if len(row) == 6][-4:] == [
            [str(n), "1", "8", "12", "7.68", "1e-05"] for n in range(4)
        ]
    told = ok("budget", "--epsilon", 12, "--delta", 1e-6, "--client", 2, "--run", run, "--json").json
    assert (told["epsilon"], told["delta"], told["clients"]) == (12, 1e-6, [2])
    assert (told["ledger"][2]["budget"], told["ledger"][2]["delta"]) == (12, 1e-6)
    assert 8 < told["ledger"][2]["epsilon"] < 12  # at a smaller δ the same releases count for more
    told = ok("budget", "--run", run, "--json").json
    assert told["every_client"] == {"epsilon": 12, "delta": 1e-5}
    assert told["ledger"] == list(ledger(run).values())
    assert [charge["client"] for charge in told["charges"]] == [0, 1, 2, 3]


WRONG = {
    "--epsilon 3 --client 0 --client 4": (1, "Unknown client 4; this federation has clients 0 to 3."),
    "--epsilon 3 --client -1": (1, "There is no client '-1'"),
    "--client 1": (2, "--epsilon"),
    "--delta 1e-6": (2, "--epsilon"),
}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from([0.0, -1.0, nan, inf, 1e7]) | st.floats(max_value=0), st.sampled_from([0.0, 1.0, nan, -1e-5, 2.0])
)
def test_an_epsilon_or_delta_that_cannot_be_is_one_error_and_changes_nothing(original, epsilon, delta):
    before = contents(original)
    for arguments, name in (((f"--epsilon={epsilon}",), "ε"), (("--epsilon=3", f"--delta={delta}"), "δ")):
        ran = fedup("budget", *arguments, "--run", original)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith(f"Error: {name} must ")
        assert ran.err.count("\n") == 1
        assert contents(original) == before


@pytest.mark.parametrize(("arguments", "end"), WRONG.items())
def test_a_budget_of_nobody_or_of_nothing_is_refused(original, arguments, end):
    before = contents(original)
    ran = fedup("budget", *arguments.split(), "--run", original)
    assert (ran.code, ran.out) == (end[0], "")
    assert end[1] in ran.told
    assert contents(original) == before

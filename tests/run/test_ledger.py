"""The ledger of a run folder: charges are on disk before releases, budgets hold, and edits are found."""

import os
import shutil
import signal
import sqlite3
from dataclasses import replace
from math import sqrt

import pytest
import torch
from tests.cli._in_process import FAST, QUICK, contents, copy_of, fedup, ok, refused, sample_ids
from tests.run._edits import rewrite
from tests.run._forked import check_sound
from tests.run._forked import run as run_in_child

from fedup import collect
from fedup.cli._session import Session
from fedup.clients.in_process import InProcess
from fedup.errors import StorageError
from fedup.privacy import DP, Budget, Charge, epsilon_of
from fedup.run.folder import Run
from fedup.run.journal import Journal
from fedup.run.ledger import RunLedger, describe_ledger, ledger_of
from fedup.run.serving import load_base
from fedup.statistics import private_erasure
from fedup.statistics import private_summary as client_side

EPSILON = 8.0
PRIVATE = DP(EPSILON, clip="unit")
COLLECT = ("collect", "--epsilon", EPSILON, "--clip", "unit")
TWICE = epsilon_of(sqrt(2) * PRIVATE.mu, 1e-5)  # two such releases
CLIENTS = 4
ANY_LOSS = ("--force", "--max-class-loss", 100)


@pytest.fixture
def private(tmp_path):
    """A folder whose clients sent noisy statistics once."""
    return copy_of("private", tmp_path / "private")


@pytest.fixture
def trained(tmp_path):
    return copy_of("trained", tmp_path / "trained")


def charges(run):
    """Straight from the file: (client, what) in the order in which they were written."""
    connection = sqlite3.connect(run / "run.sqlite")
    found = connection.execute(
        """SELECT body ->> 'client', body ->> 'what', seq, 0 FROM events WHERE kind = 'charged'
        UNION ALL SELECT own.value ->> 0, events.body -> 'terms' -> (own.value ->> 4) ->> 'what', seq, own.key
        FROM events, json_each(events.body, '$.charges') AS own WHERE kind = 'booked' ORDER BY 3, 4"""
    ).fetchall()
    connection.close()
    return [(client, what) for client, what, *_ in found]


def releases(run):
    return [client for client, _ in charges(run)]


def kinds(run):
    return [event.kind for event in Run(run).read().events]


def spent(run):
    return {one["client"]: one for one in describe_ledger(Run(run).read())}


def samples(client, many=2):
    return "--samples", f"{client}:{','.join(map(str, sample_ids(client)[:many]))}"


def unlearn(run, *what, filter_="bottleneck"):
    """By default without an eraser, which would be a release of its own."""
    return ok("unlearn", "--run", run, *what, "--filter", filter_, *QUICK)


def nobody_computes(monkeypatch):
    """From here on a client that reads a row, or draws noise, is an error that no command explains."""

    def reads(*args, **kwargs):
        raise AssertionError("a client computed something")

    monkeypatch.setattr("fedup.models.features.FeatureReader.read", reads)
    for module in (client_side, private_erasure):
        monkeypatch.setattr(module, "read_privately", reads)
        monkeypatch.setattr(module, "release", reads)


def test_charges_are_on_disk_in_one_event_before_any_noise_is_drawn(trained, monkeypatch):
    seen, draw = [], client_side.release

    def watched(dp, exact, *, name):
        seen.append((name[1], releases(trained), "collected" in kinds(trained)))
        return draw(dp, exact, name=name)

    monkeypatch.setattr(client_side, "release", watched)
    ok(*COLLECT, "--run", trained)
    assert seen == [(client, list(range(CLIENTS)), False) for client in range(CLIENTS)]
    assert kinds(trained) == ["created", "trained", "booked", "collected"]


@pytest.mark.parametrize(("error", "code"), [(OSError("the line is dead"), 1), (KeyboardInterrupt(), 130)], ids=repr)
def test_a_release_that_fails_stays_charged_and_no_centroids_are_there(trained, monkeypatch, error, code):
    draw = client_side.release

    def fails(dp, exact, *, name):
        if name[1] == 2:
            raise error
        return draw(dp, exact, name=name)

    with monkeypatch.context() as patch:
        patch.setattr(client_side, "release", fails)
        assert fedup(*COLLECT, "--run", trained).code == code
    assert kinds(trained) == ["created", "trained", "booked"]
    assert releases(trained) == [0, 1, 2, 3]  # and that of client 3, which was charged with the others
    assert not list((trained / "files").glob("centroids-*"))
    assert {client: one["releases"] for client, one in spent(trained).items()} == {0: 1, 1: 1, 2: 1, 3: 1}
    ok("verify", "--run", trained)
    ok(*COLLECT, "--run", trained)  # asks all again: what was sent before is lost, and stays charged
    assert releases(trained) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert spent(trained)[2]["epsilon"] == pytest.approx(TWICE)


def test_a_process_killed_right_before_the_noise_has_charged_it(trained):
    def dies():
        def killed(dp, exact, *, name):
            os.kill(os.getpid(), signal.SIGKILL)

        client_side.release = killed

    ended = run_in_child(*map(str, COLLECT), "--run", trained, prepare=dies)
    assert ended.code == -signal.SIGKILL
    assert releases(trained) == [0, 1, 2, 3]
    check_sound(trained)
    assert spent(trained)[0]["epsilon"] == pytest.approx(EPSILON)


def test_features_that_are_no_numbers_are_charged_as_any_others_and_nobody_is_told(trained):
    session = Session(trained)
    x = session.federation.x.clone()
    x[session.federation.client(2).train[3]] = torch.nan
    poisoned = replace(session.federation, x=x)
    with Run(trained).writing("collect") as writer:
        model = load_base(session.run, writer.state, session.blank(writer.state))
        ledger = RunLedger(writer)
        store = collect(model, InProcess(poisoned, model, ledger=ledger), privacy=PRIVATE)
        assert [charge.client for charge in ledger.charges] == list(range(CLIENTS))
    assert bool(store.vectors.isfinite().all())
    assert releases(trained) == list(range(CLIENTS))


def test_no_noise_is_drawn_for_a_charge_that_the_disk_did_not_take(trained, monkeypatch):
    append = Journal.append

    def full(self, kind, body):
        if kind in ("charged", "booked"):
            raise StorageError("the disk is full")
        return append(self, kind, body)

    monkeypatch.setattr(Journal, "append", full)
    monkeypatch.setattr(client_side, "release", lambda *args, **kwargs: pytest.fail("released without a charge"))
    before = contents(trained)
    refused(*COLLECT, "--run", trained, told="the disk is full")
    assert contents(trained) == before
    with Run(trained).writing("test") as writer:
        ledger = RunLedger(writer)
        with pytest.raises(StorageError):
            ledger.spend(0, PRIVATE, "centroids")
        with pytest.raises(StorageError), ledger.together():
            ledger.spend(0, PRIVATE, "centroids", "a")
            ledger.came(1, PRIVATE, "centroids", "b", reported=9.0)
        assert ledger.charges == []
        assert ledger.clients == []
        assert ledger.uncovered(1) == 0
        monkeypatch.undo()
        ledger.spend(0, PRIVATE, "centroids", "a")  # neither charge nor name is left of the one that failed
        assert ledger_of(writer.state).charges == ledger.charges != []


def test_reopening_or_moving_the_folder_gives_the_same_ledger(private, tmp_path):
    unlearn(private, *samples(1))
    ok("budget", "--epsilon", 20, "--run", private)
    ok("budget", "--epsilon", 30.5, "--delta", 1e-6, "--client", 2, "--run", private)
    first = ledger_of(Run(private).read())
    told = [replace(charge, release="") for charge in first.charges]
    assert told == [Charge(client, PRIVATE.mu, "centroids", str(PRIVATE)) for client in (*range(CLIENTS), 1)]
    assert len({charge.release for charge in first.charges}) == CLIENTS + 1
    moved = private.rename(tmp_path / "elsewhere")
    with Run(moved).writing("test") as writer:
        again = RunLedger(writer)
    assert again.charges == first.charges
    assert again.budgets == first.budgets == {None: Budget(20), 2: Budget(30.5, 1e-6)}
    assert [again.mu(client) for client in range(CLIENTS)] == [first.mu(client) for client in range(CLIENTS)]
    assert describe_ledger(Run(moved).read()) == list(spent(moved).values())


def test_taking_samples_back_is_another_release_unless_it_is_the_last_request_or_the_original_was_kept(private):
    unlearn(private, "--class", 7)
    assert releases(private) == [0, 1, 2, 3]  # a class costs nobody anything
    unlearn(private, *samples(1))
    assert [spent(private)[client]["epsilon"] for client in (0, 1)] == pytest.approx([EPSILON, TWICE], rel=1e-9)
    ok("restore", "R2", "--run", private, *ANY_LOSS)
    assert releases(private) == [0, 1, 2, 3, 1, 1]
    unlearn(private, *samples(2), "--keep-sealed")
    ok("restore", "R3", "--run", private, *ANY_LOSS)
    assert releases(private) == [0, 1, 2, 3, 1, 1, 2]
    ok("restore", "--all", "--run", private)
    assert releases(private) == [0, 1, 2, 3, 1, 1, 2]
    with Run(private).writing("test") as writer:  # noise that can be replayed is told of
        RunLedger(writer).spend(1, DP(1.0, clip="unit", replay_seed=0), "centroids")
    assert [one["test_mode"] for one in spent(private).values()] == [False, True, False, False]
    assert ok("status", "--run", private).out.count("TEST MODE: no privacy") == 1


def test_a_sample_request_is_refused_for_its_clients_budget_alone(private, monkeypatch):
    ok("budget", "--epsilon", 9, "--run", private)
    ok("budget", "--epsilon", 20, "--client", 1, "--run", private)
    before = contents(private)
    with monkeypatch.context() as patch:
        nobody_computes(patch)
        for what in (samples(2), (*samples(1), *samples(2))):
            refused(
                "unlearn",
                "--run",
                private,
                *what,
                "--filter",
                "bottleneck",
                "--force",
                *FAST,
                told="Client 2 has spent ε = 8 of its ε = 9",
            )
            assert contents(private) == before
    unlearn(private, *samples(1))
    assert releases(private) == [0, 1, 2, 3, 1]


def ledger_check(run):
    ran = fedup("verify", "--run", run, "--json")
    (found,) = [check for check in ran.json["checks"] if check["name"] == "ledger"]
    return ran.code, found["ok"], found["found"]


def forge(run, keep):
    """Write the events that `keep` wants anew: a sound chain with other content."""
    rewrite(run, [(event.kind, event.body) for event in Run(run).read().events if keep(event)])


def test_verify_says_what_was_charged_and_finds_a_release_that_was_not_under_a_forged_chain(private, tmp_path):
    assert ledger_check(private) == (0, True, "every release charged; the most is ε = 8 at δ = 1e-05")
    unlearn(private, *samples(1))
    assert ledger_check(private)[:2] == (0, True)
    assert f"ε = {TWICE:.4g}" in ledger_check(private)[2]
    seqs = [event.seq for event in Run(private).read().events if event.kind in ("booked", "charged")]
    for place, client in ((0, 0), (1, 1)):  # its first release, and one that came with a request
        forged = shutil.copytree(private, tmp_path / f"forged-{place}")
        forge(forged, lambda event, missing=seqs[place]: event.seq != missing)
        code, good, told = ledger_check(forged)
        assert (code, good) == (1, False)
        assert f"Client {client} released something under DP that was not charged" in told
    forge(private, lambda event: event.kind not in ("booked", "charged"))
    assert fedup("verify", "--run", private).code == 1


@pytest.mark.parametrize("many", [2, 30])
def test_an_eraser_is_charged_as_the_dry_run_said(private, many):
    what = (*samples(1, many), *QUICK)
    plan = ok("unlearn", "--run", private, *what, "--dry-run", "--json").json
    assert releases(private) == [0, 1, 2, 3]
    ok("unlearn", "--run", private, *what)
    expected = [(1, "centroids"), *((client, "eraser") for client in plan["clients_of_eraser"])]
    assert charges(private)[CLIENTS:] == expected
    assert bool(plan["clients_of_eraser"]) == (many >= 20)
    what = "10 cells sent again and statistics for an eraser" if many >= 20 else "10 cells sent again"
    assert plan["privacy_cost"] == f"{what}, each a release with {PRIVATE}, charged to its client"
    last = Run(private).read().events[-1].body["releases"]
    assert [sent["client"] for sent in last] == [client for client, _ in expected]
    assert {sent["mechanism"] for sent in last} == {str(PRIVATE)}


def test_settings_that_are_refused_cost_no_privacy(private):
    for wrong in (("--class", 7, "--filter", "erasure"), ("--eraser-cut", "nowhere"), ("--rank", 9999)):
        assert fedup("unlearn", "--run", private, *samples(1), *wrong, "--force", *FAST).code == 1
        assert releases(private) == [0, 1, 2, 3]

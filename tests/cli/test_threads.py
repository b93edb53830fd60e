"""`--threads` and FEDUP_THREADS, what a run folder notes of them, and what is said on a busy machine."""

import os
import sys

import pytest
import torch
from tests.cli._in_process import QUICK, copy_of, fedup, ok

from fedup.cli import let_threads_sleep
from fedup.run.folder import Run
from fedup.threads import using_threads

SMALL = ("--rows", 300, "--clients", 3, "--rounds", 1)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """As on an idle machine with two cores."""
    monkeypatch.delenv("FEDUP_THREADS", raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    with using_threads(2):
        yield


def _recorded(run):
    return Run(run).read().trained.body["machine"]["threads"]


def test_the_threads_of_a_training_are_on_record_and_shown(tmp_path):
    two = {"FEDUP_THREADS": "2"}
    ways = {"suited": ((), {}, 1), "variable": ((), two, 2), "option": (("--threads", 1), two, 1)}
    for name, (options, environment, threads) in ways.items():
        run = tmp_path / name
        ok("train", "--run", run, *SMALL, *options, **environment)
        assert _recorded(run) == threads
        assert torch.get_num_threads() == 2
        words = "1 thread, torch" if threads == 1 else "2 threads, torch"
        assert words in ok("status", "--run", run).out
        assert ok("status", "--run", run, "--json").json["trained_on"]["threads"] == threads


def test_a_number_of_threads_that_cannot_be_is_wrong_usage(tmp_path):
    ran = fedup("train", "--run", tmp_path / "run", *SMALL, "--threads", "0")
    assert (ran.code, ran.out) == (2, "") and "--threads" in ran.told
    assert not (tmp_path / "run").exists()


def test_every_verb_that_computes_takes_threads_and_notes_them(tmp_path):
    run = copy_of("trained", tmp_path)
    ok("collect", "--run", run, "--threads", 1)
    assert Run(run).read().collected.body["machine"]["threads"] == 1
    ok("unlearn", "--class", 7, "--run", run, "--threads", 1, *QUICK)
    assert Run(run).read().events[-1].body["machine"]["threads"] == 1
    ok("evaluate", "--run", run, "--threads", 1)
    ok("evidence", "R1", "--run", run)
    (page,) = (run / "evidence").glob("*.html")
    assert page.read_text().count("1 thread, torch") == 2  # trained and answered
    ok("restore", "R1", "--run", run, "--threads", 1)
    assert torch.get_num_threads() == 2


def test_a_busy_machine_is_noted_where_several_threads_train(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    ran = ok("train", "--run", tmp_path / "two", *SMALL, "--threads", 2)
    assert f"load 99.0 on {os.cpu_count()} cores" in ran.told and "--threads 1 may be faster" in ran.told
    assert "busy" not in ok("train", "--run", tmp_path / "one", *SMALL).told
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 99.0, 99.0))
    assert "busy" not in ok("train", "--run", tmp_path / "idle", *SMALL, "--threads", 2).told


def test_a_resumed_training_uses_the_threads_on_record_unless_told_otherwise(tmp_path):
    for name, options, expected in (("same", (), 2), ("other", ("--threads", 1), 1)):
        run = tmp_path / name
        _interrupt(run)
        ran = ok("train", "--run", run, *SMALL, "--rounds", 2, *options)
        assert _recorded(run) == expected
        assert ("Note: The rounds done so far were trained with 2 threads" in ran.told) == bool(options)


def _interrupt(run):
    """A training of two rounds, ended after the first as by Ctrl-C."""
    from unittest import mock

    from fedup.tasks.progress import RoundsShown

    def stop(self, round_index, client, **_):
        if round_index == 1:
            raise KeyboardInterrupt

    with mock.patch.object(RoundsShown, "on_update", stop):
        assert fedup("train", "--run", run, *SMALL, "--rounds", 2, "--threads", 2).code == 130


@pytest.mark.parametrize(
    ("load", "environment", "loaded", "policy"),
    [
        (99.0, {}, False, "PASSIVE"),
        (0.5, {}, False, None),  # an idle machine: spinning is faster
        (99.0, {}, True, None),  # too late
        (99.0, {"OMP_WAIT_POLICY": "ACTIVE"}, False, "ACTIVE"),
        (99.0, {"GOMP_SPINCOUNT": "7"}, False, None),
    ],
)
def test_threads_sleep_while_they_wait_on_a_busy_machine_unless_the_user_chose(
    monkeypatch, load, environment, loaded, policy
):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(sys, "modules", {"torch": torch} if loaded else {})
    let_threads_sleep()
    found = os.environ.pop("OMP_WAIT_POLICY", None)
    assert found == policy

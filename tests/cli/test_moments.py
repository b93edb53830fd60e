"""Moments on the command line: a run folder from collection to purge, and what a dry run says is what is done."""

import pytest
from tests.cli._in_process import contents, copy_of, ok, refused, sample_ids

from fedup.cli._session import Session
from fedup.filters.closed_form import ClosedForm

FORCE = ("--force", "--max-class-loss", "100")  # so few rows leave classes with too few


@pytest.fixture
def run(tmp_path):
    folder = copy_of("trained", tmp_path)
    collected = ok("collect", "--run", folder, "--statistics", "moments", "--json").json
    assert collected["how"]["bound"] and collected["shortened"] == 0
    return folder


def test_a_folder_of_moments_forgets_restores_purges_and_stays_sound(run):
    planned = ok("unlearn", "--run", run, "--class", "3", "--dry-run", *FORCE, "--json").json
    answered = ok("unlearn", "--run", run, "--class", "3", "--reference", "T1", *FORCE, "--json").json
    assert answered["clients_contacted"] == planned["clients_contacted"]
    assert isinstance(Session(run).served()[1].served.filter, ClosedForm)
    samples = f"1:{','.join(map(str, sample_ids(1)[:30]))}"
    ok("unlearn", "--run", run, "--samples", samples, *FORCE)
    ok("unlearn", "--run", run, "--client", "2", *FORCE)
    page = ok("evidence", "T1", "--run", run, "--json").json
    assert page["contact"]["bytes_up"] > 0
    sealed = ok("status", "--run", run, "--json").json["sealed"]
    assert sealed["cells"] == len(ok("purge", "--run", run, "--yes", "--json").json["cells"]) > 5
    sealed = ok("status", "--run", run, "--json").json["sealed"]
    assert sealed["cells"] == 0 < sealed["purged"]
    ok("restore", "T1", "--run", run, "--force")  # its cells are asked for again
    assert ok("verify", "--run", run, "--json").json["ok"]
    ok("restore", "--all", "--run", run)
    assert Session(run).served()[1].served is None


def test_settings_that_do_not_fit_moments_are_refused_and_change_nothing(run):
    before = contents(run)
    refused("collect", "--run", run, "--statistics", "moments", "--ratio", "0.5", told="--ratio does not go with")
    refused("collect", "--run", run, "--ratio", "0.5", "--bound", "8", told="--ratio does not go with")
    refused("collect", "--run", run, "--bound", "8", told="Statistics were collected with --statistics moments")
    refused("collect", "--run", run, "--statistics", "sums", told="--statistics is one of auto, centroids, moments")
    refused("collect", "--run", run, "--ratio", "0.8", told="Statistics were collected with --statistics moments")
    refused("unlearn", "--run", run, "--class", "3", "--filter", "bottleneck", *FORCE, told="this store holds moments")
    for same in ((), ("--statistics", "moments")):
        assert "already" in ok("collect", "--run", run, *same).out
    assert contents(run) == before


def test_a_filter_that_keeps_every_class_the_model_answers_is_no_mismatch(tmp_path):
    folder = str(tmp_path / "run")  # after so few rounds the model answers one class, of which few rows stay
    ok("train", "--run", folder, "--rows", "400", "--clients", "4", "--rounds", "1")
    ok("collect", "--run", folder)
    ok("unlearn", "--run", folder, "--client", "2", "--force")
    checked = ok("verify", "--run", folder, "--json").json
    assert checked["ok"]

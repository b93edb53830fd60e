"""A writer that locks the folder around its commits reads the journal again only where somebody else changed it."""

import json

import pytest
from tests.run._edits import edit

from fedup.errors import ArtifactError
from fedup.run.brief_writer import BriefWriter
from fedup.run.folder import Run
from fedup.run.journal import Journal


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    run.start({"made_by": "test"})
    return run


@pytest.fixture
def reads(monkeypatch):
    """One entry for each time that a journal is read from its start."""
    reads, real = [], Journal.events
    monkeypatch.setattr(Journal, "events", lambda journal: reads.append(journal) or real(journal))
    return reads


def spend(writer, mu=1.0):
    charge = {"client": 3, "mu": mu, "what": "centroids", "mechanism": "noise", "release": "", "covered": 0.0}
    return writer.commit("charged", {**charge, "replayable": False, "correction": False})


def test_many_commits_read_the_journal_once_and_what_they_wrote_is_what_is_there(run, reads):
    with BriefWriter(run, "collect", run.read()) as writer:
        reads.clear()
        for _ in range(20):
            spend(writer)
        assert len(reads) == 1 and writer.state == run.read() and len(writer.state.events) == 21


def test_what_others_committed_meanwhile_is_part_of_the_state(run):
    with BriefWriter(run, "collect", run.read()) as writer:
        spend(writer)
        with run.writing("budget") as other:
            spend(other, 2.0)
        spend(writer, 3.0)
        assert [event.body["mu"] for event in writer.state.events[1:]] == [1.0, 2.0, 3.0]
        assert writer.state == run.read()


def test_an_event_that_somebody_edited_between_two_commits_stops_the_second(run):
    with BriefWriter(run, "collect", run.read()) as writer:
        spend(writer)
        body = json.dumps({**writer.state.events[1].body, "mu": 0.1}, sort_keys=True)
        edit(run.journal_path, f"UPDATE events SET body = '{body}' WHERE seq = 2")
        with pytest.raises(ArtifactError, match="chain of events breaks at event 2"):
            spend(writer)


def test_a_journal_that_took_the_place_of_the_known_one_is_read(run, tmp_path):
    with BriefWriter(run, "collect", run.read()) as writer:
        spend(writer)
        before = (tmp_path / "earlier", run.journal_path.read_bytes())
        spend(writer, 2.0)
        before[0].write_bytes(before[1])
        before[0].replace(run.journal_path)
        spend(writer, 3.0)
        assert [event.body["mu"] for event in run.read().events[1:]] == [1.0, 3.0]


def test_a_commit_that_fails_is_not_part_of_what_is_known(run):
    with BriefWriter(run, "collect", run.read()) as writer:
        spend(writer)
        with pytest.raises(ArtifactError):
            writer.commit("no such kind", {})
        spend(writer, 2.0)
        assert writer.state == run.read() and len(writer.state.events) == 3

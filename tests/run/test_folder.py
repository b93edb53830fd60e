"""The run folder: made once, about one thing, with one writer, and never changed by half."""

import json
import sqlite3
import stat
import subprocess
import sys

import pytest

from fedup.errors import ArtifactError, BusyError, MissingRunError, SettingError, StorageError
from fedup.run.folder import Run
from fedup.run.journal import Journal

ABOUT = {"data": "digits", "rounds": 3, "lr": 0.05, "cut": None, "input_shape": (1, 28, 28)}


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "run")
    made.start(ABOUT)
    return made


def put(writer, kind, content):
    return writer.put(kind, lambda path: path.write_bytes(content) and None)


def train(run, content=b"weights"):
    with run.writing("train") as writer:
        record = put(writer, "model", content)
        writer.commit("trained", {"model": record.to_json(), "fingerprint": "f"})
    return record


def content_of(folder):
    """Every file with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_started_folder_says_what_it_is_about(run):
    state = run.read()
    assert state.about == json.loads(json.dumps(ABOUT))
    assert [event.kind for event in state.events] == ["created"]
    assert state.files == ()
    assert run.holder is None


def test_starting_again_with_the_same_settings_changes_nothing(run):
    train(run)
    before = content_of(run.path)
    run.start(dict(reversed(ABOUT.items())))
    Run(str(run.path)).start(json.loads(json.dumps(ABOUT)))
    assert content_of(run.path) == before


def test_starting_with_other_settings_is_refused_and_names_what_differs(run):
    train(run)
    before = content_of(run.path)
    with pytest.raises(SettingError) as caught:
        run.start({**ABOUT, "rounds": 4, "cut": "fc3", "more": True})
    message = str(caught.value)
    assert "rounds is 3 there and 4 here" in message
    assert "cut is not set there and fc3 here" in message
    assert "more is not set there and true here" in message
    assert "data" not in message
    assert "lr" not in message
    assert content_of(run.path) == before


def test_a_folder_of_someone_else_is_refused_and_stays_as_it_was(tmp_path):
    (tmp_path / "thesis.tex").write_text("Es war einmal")
    (tmp_path / "files").mkdir()
    with pytest.raises(SettingError, match=r"no run folder and not empty \(thesis\.tex\)"):
        Run(tmp_path).start(ABOUT)
    assert content_of(tmp_path) == {"thesis.tex": b"Es war einmal"}


def test_an_empty_folder_becomes_a_run_folder(tmp_path):
    Run(tmp_path).start(ABOUT)
    assert Run(tmp_path).read().about["rounds"] == 3


def test_a_file_where_the_folder_should_be_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(SettingError, match="is a file: name a folder"):
        Run(tmp_path / "run").start(ABOUT)
    with pytest.raises(StorageError, match="Could not make the folder"):
        Run(tmp_path / "run" / "deeper").start(ABOUT)
    assert (tmp_path / "run").read_text() == "mine"


def test_without_a_folder_reading_and_writing_say_how_to_make_one_and_make_none(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(MissingRunError, match=r"no run folder at .*fedup train --run"):
            Run(path).read()
        with pytest.raises(MissingRunError, match="FEDUP_RUN"), Run(path).writing("collect"):
            pytest.fail("there is nothing to write to")
    assert list(tmp_path.iterdir()) == []


def test_nobody_else_may_look_into_the_folder(run):
    for folder in (run.path, run.files.folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["ein Ordner", "Zoë ρ 日本", "50% off?mode=ro#1", "-run", "a/b/c"])
def test_any_path_will_do(tmp_path, name):
    run = Run(tmp_path / name)
    run.start(ABOUT)
    record = train(run)
    assert run.files.path(run.read().model).read_bytes() == b"weights"
    assert {entry.name for entry in run.path.iterdir()} == {"run.sqlite", "files", "lock"}
    assert {entry.name for entry in run.files.folder.iterdir()} == {record.name}


def test_a_relative_path_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Run("run").start(ABOUT)
    assert Run(tmp_path / "run").read().about["data"] == "digits"


def test_a_folder_can_move(run, tmp_path):
    record = train(run)
    run.path.rename(tmp_path / "elsewhere")
    moved = Run(tmp_path / "elsewhere")
    assert moved.files.path(moved.read().model).name == record.name


def test_the_creation_that_was_killed_is_completed(tmp_path):
    run = Run(tmp_path / "run")
    run.path.mkdir()
    for begin in (run.files.folder.mkdir, run.lock_path.touch, run.journal_path.touch):
        begin()
        with pytest.raises(MissingRunError):
            run.read()
    assert run.journal_path.stat().st_size == 0
    run.start(ABOUT)
    assert [event.kind for event in run.read().events] == ["created"]


def test_a_journal_without_its_first_event_is_completed(tmp_path):
    run = Run(tmp_path / "run")
    run.path.mkdir()
    Journal.create(run.journal_path).close()
    run.start(ABOUT)
    run.start(ABOUT)
    assert [event.kind for event in run.read().events] == ["created"]


def test_a_journal_that_is_damaged_is_not_made_anew(run):
    train(run)
    run.journal_path.write_bytes(b"no database at all")
    before = content_of(run.path)
    with pytest.raises(ArtifactError, match="damaged"):
        run.start(ABOUT)
    with pytest.raises(ArtifactError, match="damaged"):
        run.read()
    with pytest.raises(ArtifactError, match="damaged"), run.writing("collect"):
        pytest.fail("the journal cannot be read")
    assert content_of(run.path) == before


def test_an_edited_journal_is_refused_by_readers_and_writers_before_they_change_a_file(run):
    train(run)
    (run.files.folder / ".model.draft").touch()
    with sqlite3.connect(run.journal_path) as connection:
        connection.executescript("DROP TRIGGER events_are_not_removed; DELETE FROM events WHERE seq = 2")
    before = content_of(run.path)
    with pytest.raises(ArtifactError, match="was edited"):
        run.read()
    with pytest.raises(ArtifactError, match="was edited"), run.writing("collect"):
        pytest.fail("the journal was edited")
    with pytest.raises(ArtifactError, match="was edited"):
        run.start(ABOUT)
    assert content_of(run.path) == before


def test_a_commit_is_there_for_everyone_and_supersedes_files(run):
    with run.writing("train") as writer:
        first = put(writer, "model", b"first")
        assert run.read().model is None  # a file counts once an event names it
        event = writer.commit("trained", {"model": first.to_json(), "fingerprint": "f"})
        assert run.read() == writer.state
        assert run.read().head == event.hash
        second = put(writer, "model", b"second")
        assert run.files.path(first).exists()
        writer.commit("trained", {"model": second.to_json(), "fingerprint": "f"})
    assert run.read().files == (second,)
    assert [path.name for path in run.files.folder.iterdir()] == [second.name]


def test_what_a_step_wrote_before_it_failed_is_removed_by_the_next_writer(run):
    record = train(run)
    with pytest.raises(KeyError), run.writing("collect") as writer:
        orphan = put(writer, "centroids", b"never committed")
        raise KeyError
    assert (run.files.folder / orphan.name).exists()
    assert run.read().centroids is None
    assert run.holder is None
    (run.files.folder / "mine.txt").touch()
    with run.writing("collect"):
        assert {path.name for path in run.files.folder.iterdir()} == {record.name, "mine.txt"}


def test_a_checkpoint_stays_until_training_is_done(run):
    run.files.checkpoint.touch()
    with run.writing("train"):
        assert run.files.checkpoint.exists()
    train(run)
    assert not run.files.checkpoint.exists()


def test_a_writer_refuses_when_a_needed_file_is_missing_before_it_removes_anything(run):
    record = train(run)
    (run.files.folder / record.name).rename(run.files.folder / "model-0123456789abcdef.safetensors")
    run.files.checkpoint.touch()
    before = content_of(run.path)
    with pytest.raises(ArtifactError, match=rf"{record.name} is missing in .*good copy"), run.writing("collect"):
        pytest.fail("a file is missing")
    assert content_of(run.path) == before
    assert run.holder is None
    assert run.read().model == record  # reading the journal goes on


def test_there_is_one_writer(run):
    with run.writing("collect") as writer:
        assert "`fedup collect`" in run.holder
        before = content_of(run.path)
        with pytest.raises(BusyError, match="`fedup collect`"), run.writing("unlearn"):
            pytest.fail("there are two writers")
        with pytest.raises(BusyError, match="`fedup collect`"):
            run.start(ABOUT)
        assert content_of(run.path) == before
        writer.commit("evaluated", {})
    assert run.holder is None


WRITE = """
import sys
from fedup.run.folder import Run
with Run(sys.argv[1]).writing("collect") as writer:
    for n in range(5):
        record = writer.put("centroids", lambda path: path.write_bytes(b"centroids %d" % n) and None)
        print("put", flush=True); sys.stdin.readline()
        writer.commit("collected", {"centroids": record.to_json(), "n": n})
        print("committed", flush=True); sys.stdin.readline()
"""


def test_a_reader_sees_whole_steps_while_another_process_writes(run):
    record = train(run)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", WRITE, str(run.path)], **pipes) as process:

        def go_on():
            process.stdin.write("\n")
            process.stdin.flush()

        for n in range(5):
            before = run.read()
            assert process.stdout.readline() == "put\n"
            assert run.read() == before  # a file that no event names is not part of the folder
            assert f"`fedup collect` (process {process.pid} " in run.holder
            go_on()
            assert process.stdout.readline() == "committed\n"
            after = run.read()
            assert after.events[:-1] == before.events
            assert after.events[-1].body["n"] == n
            assert run.files.path(after.model).name == record.name
            assert run.files.path(after.centroids).read_bytes() == b"centroids %d" % n
            go_on()
    assert process.returncode == 0
    assert run.holder is None
    assert {path.name for path in run.files.folder.iterdir()} == {file.name for file in run.read().files}


def test_a_killed_writer_leaves_the_folder_as_after_its_last_commit(run):
    record = train(run)
    script = (
        "import os, signal, sys; from fedup.run.folder import Run\n"
        "with Run(sys.argv[1]).writing('collect') as writer:\n"
        "    writer.commit('evaluated', {'n': 1})\n"
        "    writer.put('centroids', lambda path: path.write_bytes(b'never committed') and None)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(run.path)], check=False)
    assert killed.returncode == -9
    assert run.holder is None
    assert [event.kind for event in run.read().events] == ["created", "trained", "evaluated"]
    assert run.read().centroids is None
    with run.writing("collect") as writer:
        assert writer.state.files == (record,)
        assert [path.name for path in run.files.folder.iterdir()] == [record.name]


@pytest.mark.parametrize("lost", [lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_a_lost_journal_is_not_replaced_while_files_of_a_run_are_there(run, lost):
    train(run)
    lost(run.journal_path)
    before = content_of(run.files.folder)
    for attempt in (lambda: run.start(ABOUT), run.read):
        with pytest.raises(ArtifactError, match="is lost or empty"):
            attempt()
    assert content_of(run.files.folder) == before


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("nonsense", {}),
        ("trained", {"fingerprint": "f"}),
        ("trained", {"model": {"name": "model-0.safetensors", "sha256": "0", "size_bytes": 1}, "fingerprint": "f"}),
    ],
)
def test_an_event_that_could_not_be_read_back_is_not_written(run, kind, body):
    train(run)
    before = run.read()
    with run.writing("x") as writer, pytest.raises(ArtifactError):
        writer.commit(kind, body)
    assert run.read() == before
    with run.writing("x"):
        pass

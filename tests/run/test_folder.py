"""The run folder: made once, about one thing, with one writer, and never changed by half."""

import json
import stat

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


def test_a_started_folder_says_what_it_is_about_and_is_private(run, tmp_path, monkeypatch):
    state = run.read()
    assert state.about == json.loads(json.dumps(ABOUT))
    assert [event.kind for event in state.events] == ["created"]
    assert state.files == ()
    assert run.holder is None
    for folder in (run.path, run.files.folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.chdir(tmp_path)
    assert Run("run").read() == state  # a relative path will do, and an empty folder
    (tmp_path / "empty").mkdir()
    Run("empty").start(ABOUT)


def test_starting_with_other_settings_is_refused_and_names_what_differs(run):
    train(run)
    before = content_of(run.path)
    run.start(json.loads(json.dumps(dict(reversed(ABOUT.items())))))  # the same
    assert content_of(run.path) == before
    with pytest.raises(SettingError) as caught:
        run.start({**ABOUT, "rounds": 4, "cut": "fc3", "more": True})
    different = "rounds is 3 there and 4 here", "cut is not set there and fc3 here", "more is not set there and true"
    assert all(text in str(caught.value) for text in different)
    assert "data" not in str(caught.value) and "lr" not in str(caught.value)
    assert content_of(run.path) == before


def test_a_folder_of_someone_else_is_refused_and_stays_as_it_was(tmp_path):
    (tmp_path / "thesis.tex").write_text("Es war einmal")
    (tmp_path / "files").mkdir()
    with pytest.raises(SettingError, match=r"no run folder and not empty \(thesis\.tex\)"):
        Run(tmp_path).start(ABOUT)
    assert content_of(tmp_path) == {"thesis.tex": b"Es war einmal"}


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


def test_the_creation_that_was_killed_is_completed(tmp_path):
    run = Run(tmp_path / "run")
    run.path.mkdir()
    for begin in (run.files.folder.mkdir, run.lock_path.touch, run.journal_path.touch):
        begin()
        with pytest.raises(MissingRunError):
            run.read()
    assert run.journal_path.stat().st_size == 0
    for _ in range(2):  # the second finds a journal without its first event
        Journal.create(run.journal_path).close()
        run.start(ABOUT)
        run.start(ABOUT)
        assert [event.kind for event in run.read().events] == ["created"]
        run.journal_path.unlink()


LOST = {
    "empty": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
    "damaged": lambda path: path.write_bytes(b"no database at all"),
}


@pytest.mark.parametrize("lose", LOST.values(), ids=LOST.keys())
def test_a_lost_or_damaged_journal_is_not_made_anew_beside_files_of_a_run(run, lose):
    train(run)
    lose(run.journal_path)
    before = content_of(run.files.folder)
    for attempt in (lambda: run.start(ABOUT), run.read, run.writing("collect").__enter__):
        with pytest.raises(ArtifactError, match=r"is lost or empty|damaged"):
            attempt()
    assert content_of(run.files.folder) == before


def test_what_a_step_wrote_before_it_failed_is_removed_by_the_next_writer(run):
    record = train(run)
    with pytest.raises(KeyError), run.writing("collect") as writer:
        orphan = put(writer, "centroids", b"never committed")
        raise KeyError
    assert (run.files.folder / orphan.name).exists()
    assert (run.read().centroids, run.holder) == (None, None)
    (run.files.folder / "mine.txt").touch()
    run.files.checkpoint.touch()  # needed while training is not done, and no longer
    with run.writing("collect"):
        assert {path.name for path in run.files.folder.iterdir()} == {record.name, "mine.txt"}
    Run(run.path.parent / "new").start(ABOUT)
    training = Run(run.path.parent / "new")
    training.files.checkpoint.touch()
    with training.writing("train"):
        assert training.files.checkpoint.exists()


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


def test_there_is_one_writer_whose_commits_are_there_for_everyone_and_supersede_files(run):
    with run.writing("train") as writer:
        assert "`fedup train`" in run.holder
        before = content_of(run.path)
        with pytest.raises(BusyError, match="`fedup train`"), run.writing("unlearn"):
            pytest.fail("there are two writers")
        with pytest.raises(BusyError, match="`fedup train`"):
            run.start({**ABOUT, "more": 1})
        run.start(ABOUT)  # to open what is there takes no lock
        assert content_of(run.path) == before
        first = put(writer, "model", b"first")
        assert run.read().model is None  # a file counts once an event names it
        event = writer.commit("trained", {"model": first.to_json(), "fingerprint": "f"})
        assert run.read() == writer.state
        assert run.read().head == event.hash
        second = put(writer, "model", b"second")
        assert run.files.path(first).exists()
        writer.commit("trained", {"model": second.to_json(), "fingerprint": "f"})
    assert run.holder is None
    assert run.read().files == (second,)
    assert [path.name for path in run.files.folder.iterdir()] == [second.name]


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

"""The files of a folder: named by content, checked at each use, and removed only when they are ours and unneeded."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.errors import ArtifactError, StorageError
from fedup.run.state import FileRecord
from fedup.run.store import CHECKPOINT, FileStore


@pytest.fixture
def store(tmp_path):
    return FileStore(tmp_path)


def put(store, kind, content):
    return store.put(kind, lambda path: path.write_bytes(content) and None)


def names(store):
    return {path.name for path in store.folder.iterdir()}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_a_file_is_named_by_what_is_in_it(tmp_path_factory, contents):
    store = FileStore(tmp_path_factory.mktemp("files"))
    for content in contents:
        record = put(store, "filter", content)
        digest = hashlib.sha256(content).hexdigest()
        assert record == FileRecord(f"filter-{digest[:16]}.safetensors", digest, len(content))
        assert store.path(record).read_bytes() == content
        assert store.path(record) == store.folder / record.name
    assert len(names(store)) == len(set(contents))  # the same content is one file, and no draft stays


def test_a_new_file_leaves_the_old_ones_as_they_are(store):
    old = put(store, "model", b"old")
    new = put(store, "model", b"new")
    assert (store.path(old).read_bytes(), store.path(new).read_bytes()) == (b"old", b"new")


def test_a_write_that_fails_gives_no_record_and_the_rest_is_swept(store):
    def fail(path):
        path.write_bytes(b"half")
        raise KeyError

    with pytest.raises(KeyError):
        store.put("model", fail)
    store.sweep([], training=False)
    assert names(store) == set()


def test_a_writer_that_wrote_nothing_is_a_failure_of_storage(store):
    with pytest.raises(StorageError, match="Could not write a model file"):
        store.put("model", lambda path: None)


def swap(store, record):
    other = put(store, "model", b"another good file")
    path, other_path = store.folder / record.name, store.folder / other.name
    content = path.read_bytes()
    path.write_bytes(other_path.read_bytes())
    other_path.write_bytes(content)


DAMAGES = {
    "a bit flipped": lambda store, record: (store.folder / record.name).write_bytes(b"vontent of a file"),
    "truncated": lambda store, record: (store.folder / record.name).write_bytes(b"content of a fil"),
    "longer": lambda store, record: (store.folder / record.name).write_bytes(b"content of a file\0"),
    "emptied": lambda store, record: (store.folder / record.name).write_bytes(b""),
    "missing": lambda store, record: (store.folder / record.name).unlink(),
    "swapped with another": swap,
    "a folder": lambda store, record: [(store.folder / record.name).unlink(), (store.folder / record.name).mkdir()],
    "a link to nowhere": lambda store, record: [
        (store.folder / record.name).unlink(),
        (store.folder / record.name).symlink_to("nowhere"),
    ],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_file_that_is_not_the_one_written_is_refused(store, damage):
    record = put(store, "model", b"content of a file")
    damage(store, record)
    with pytest.raises(ArtifactError, match=rf"{record.name}.*[Tt]ake a good copy"):
        store.path(record)


def test_a_file_with_the_shown_part_of_the_hash_alone_is_refused(store):
    """The name shows 16 digits; all 64 are compared."""
    record = put(store, "model", b"content")
    longer = FileRecord(record.name, record.sha256[:63] + "?", record.size_bytes)
    with pytest.raises(ArtifactError, match="is not the file that was written"):
        store.path(longer)


LEFTOVERS = [
    "model-0123456789abcdef.safetensors",
    "centroids-fedcba9876543210.safetensors",
    "filter-0000000000000000.safetensors",
    ".filter.draft",
    "..filter.draft.123.partial",
    ".checkpoint.safetensors.99.partial",
]
FOREIGN = [
    "model.safetensors",
    "model-0123456789abcdef.safetensors.bak",
    "model-0123456789ABCDEF.safetensors",
    "model-0123456789abcde.safetensors",
    "copy of model-0123456789abcdef.safetensors",
    "notes.draft",
    "notes.partial",
    ".DS_Store",
    "README ρ.txt",
]


@pytest.mark.parametrize("training", [False, True])
def test_a_sweep_removes_leftovers_and_neither_needed_nor_foreign_files(store, training):
    needed = [put(store, kind, kind.encode()) for kind in ("model", "centroids", "filter")]
    superseded = put(store, "filter", b"an older one")
    for name in [*LEFTOVERS, *FOREIGN, CHECKPOINT]:
        (store.folder / name).touch()
    (store.folder / "subfolder").mkdir()
    gone = {superseded.name, *LEFTOVERS, *([] if training else [CHECKPOINT])}
    assert {path.name for path in store.leftovers(needed, training=training)} == gone
    before = names(store)
    assert gone < before  # looking removes nothing
    store.sweep(needed, training=training)
    assert names(store) == before - gone
    for record in needed:
        store.path(record)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.binary(max_size=3), st.booleans()), max_size=6))
def test_exactly_the_needed_of_the_files_put_survive_a_sweep(tmp_path_factory, files):
    store = FileStore(tmp_path_factory.mktemp("files"))
    records = [(put(store, "filter", content), is_needed) for content, is_needed in files]
    needed = [record for record, is_needed in records if is_needed]
    store.sweep(needed, training=False)
    assert names(store) == {record.name for record in needed}
    assert store.leftovers(needed, training=False) == []


def test_there_are_no_leftovers_where_there_is_no_folder(tmp_path):
    store = FileStore(tmp_path / "none")
    assert store.leftovers([], training=False) == []
    store.sweep([], training=False)
    assert not store.folder.exists()

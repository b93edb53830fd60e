"""The files of a folder: named by content, checked at each use, and removed only when they are ours and unneeded."""

import hashlib

import pytest
from hypothesis import example, given, settings
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


def test_a_write_that_fails_gives_no_record_and_the_rest_is_swept(store):
    def fail(path):
        path.write_bytes(b"half")
        raise KeyError

    with pytest.raises(KeyError):
        store.put("model", fail)
    store.sweep([], training=False)
    assert names(store) == set()
    with pytest.raises(StorageError, match="Could not write a model file"):
        store.put("model", lambda path: None)
    missing = FileStore(store.folder / "none")
    missing.sweep([], training=False)
    assert not missing.folder.exists()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.binary(max_size=20) | st.none(), st.booleans())
@example(b"content of a fil", False)
def test_a_file_that_is_not_the_one_written_is_refused(tmp_path_factory, content, folder):
    store = FileStore(tmp_path_factory.mktemp("files"))
    record = put(store, "model", b"content of a file")
    longer = FileRecord(record.name, record.sha256[:63] + "?", record.size_bytes)  # a name shows 16 digits of 64
    path = store.folder / record.name
    with pytest.raises(ArtifactError, match="is not the file that was written"):
        store.path(longer)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    else:
        path.mkdir() if folder else path.symlink_to("nowhere")
    with pytest.raises(ArtifactError, match=rf"{record.name}.*[Tt]ake a good copy"):
        store.path(record)


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

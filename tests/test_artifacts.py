"""Files of tensors: they come back as they were, and every other file is refused."""

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file

from fedup.artifacts import load_tensors, save_tensors, serialized_size
from fedup.errors import ArtifactError

few = settings(max_examples=40, deadline=None)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
DTYPES += (torch.int8, torch.uint8, torch.bool)

tensors_by_name = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8),
    st.builds(
        lambda shape, dtype: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype),
        st.lists(st.integers(0, 40), max_size=3),
        st.sampled_from(DTYPES),
    ),
    min_size=1,
    max_size=4,
)
headers = st.dictionaries(
    st.text(max_size=5), st.integers() | st.text(max_size=8) | st.lists(st.booleans()), max_size=3
)


@pytest.fixture
def path(tmp_path):
    """A good file."""
    good = tmp_path / "good.safetensors"
    save_tensors(good, {"a": torch.arange(6.0).reshape(2, 3)}, kind="filter", header={"x": [1, "ρ"]})
    return good


@few
@given(tensors_by_name, headers)
def test_tensors_and_header_come_back_as_they_were(tmp_path_factory, tensors, header):
    header = {f"my {key}": value for key, value in header.items()}
    path = tmp_path_factory.mktemp("artifacts") / "file"
    save_tensors(path, tensors, kind="thing", header=header)
    back, found = load_tensors(path, kind="thing")
    assert found == {"kind": "thing", "version": 1, **header}
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    assert serialized_size(tensors, header) == len(
        save(tensors, metadata={"fedup": json.dumps(header, sort_keys=True)})
    )


def test_views_are_saved_by_value_into_a_folder_that_is_made_and_holds_nothing_else(tmp_path):
    path, whole = tmp_path / "new" / "folder" / "file", torch.arange(12.0).reshape(3, 4)
    for tensors in ({"a": torch.zeros(2)}, {"t": whole.T, "row": whole[1]}):
        save_tensors(str(path), tensors, kind="thing", header={})
    back, _ = load_tensors(path, kind="thing")
    assert torch.equal(back["t"], whole.T)
    assert torch.equal(back["row"], whole[1])
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_keeps_the_old_file_and_no_rest(path, monkeypatch):
    before = path.read_bytes()

    def disk_full(descriptor):
        raise OSError("No space left on device")

    with pytest.raises(TypeError):  # no JSON
        save_tensors(path, {"a": torch.ones(2)}, kind="filter", header={"x": object()})
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        save_tensors(path, {"a": torch.ones(100)}, kind="filter", header={})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_every_other_file_is_refused_by_name(path, tmp_path):
    whole, other = path.read_bytes(), tmp_path / "other"
    for content in (*(whole[:length] for length in range(len(whole))), whole + b"more", b"\x80\x04N.", b"\xff" * 64):
        other.write_bytes(content)
        with pytest.raises(ArtifactError, match="other is damaged or no safetensors"):
            load_tensors(other, kind="filter")
    for text in (None, "", "no json", "[1]", "3", "null"):
        save_file({"a": torch.zeros(2)}, other, metadata=None if text is None else {"fedup": text})
        with pytest.raises(ArtifactError, match="not written by fedup"):
            load_tensors(other, kind="filter")
    save_file({}, other, metadata={"fedup": json.dumps({"kind": "filter", "version": 99})})
    with pytest.raises(ArtifactError, match="version 99; this fedup reads 1"):
        load_tensors(other, kind="filter")
    with pytest.raises(ArtifactError, match="holds a 'filter', not a centroids"):
        load_tensors(path, kind="centroids")
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(ArtifactError, match="There is no filter file"):
            load_tensors(missing, kind="filter")


@few
@given(st.data())
def test_an_edited_tensor_or_header_does_not_match_its_hash(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("artifacts") / "file"
    save_tensors(path, {"a": torch.arange(6.0)}, kind="filter", header={"x": [1, "ρ"]})
    with safe_open(path, framework="pt") as file:
        tensors, header = {"a": file.get_tensor("a")}, json.loads(file.metadata()["fedup"])
    edit = data.draw(st.sampled_from(["value", "shape", "dtype", "name", "header", "hash"]))
    changed = {"value": tensors["a"] + 1, "shape": tensors["a"].view(2, 3), "dtype": tensors["a"].view(torch.int32)}
    tensors = {"b" if edit == "name" else "a": changed.get(edit, tensors["a"])}
    header |= {"header": {"x": [2]}, "hash": {"sha256": "0"}}.get(edit, {})
    save_file(tensors, path, metadata={"fedup": json.dumps(header)})
    with pytest.raises(ArtifactError, match="does not match its sha256"):
        load_tensors(path, kind="filter")

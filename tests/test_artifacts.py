import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from fedup.artifacts import load_tensors, save_tensors, serialized_size
from fedup.errors import ArtifactError

few = settings(max_examples=60, deadline=None, derandomize=True)
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


@settings(max_examples=300, deadline=None, derandomize=True)
@given(tensors_by_name, headers)
def test_serialized_size_is_the_length_of_the_real_message(tensors, header):
    message = save(tensors, metadata={"fedup": json.dumps(header, sort_keys=True)})
    assert serialized_size(tensors, header) == len(message)


def test_views_and_transposes_are_saved_by_value(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    save_tensors(tmp_path / "file", {"t": whole.T, "row": whole[1]}, kind="thing", header={})
    back, _ = load_tensors(tmp_path / "file", kind="thing")
    assert torch.equal(back["t"], whole.T)
    assert torch.equal(back["row"], whole[1])


def test_saving_makes_the_folder_and_leaves_nothing_else_in_it(tmp_path):
    path = tmp_path / "new" / "folder" / "file.safetensors"
    save_tensors(path, {"a": torch.zeros(2)}, kind="thing", header={})
    save_tensors(str(path), {"a": torch.ones(2)}, kind="thing", header={})
    assert [file.name for file in path.parent.iterdir()] == ["file.safetensors"]
    assert torch.equal(load_tensors(path, kind="thing")[0]["a"], torch.ones(2))


def test_a_write_that_fails_keeps_the_old_file_and_no_rest(path, monkeypatch):
    before = path.read_bytes()

    def disk_full(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        save_tensors(path, {"a": torch.ones(100)}, kind="filter", header={})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_header_that_is_no_json_changes_no_file(path):
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_tensors(path, {"a": torch.ones(2)}, kind="filter", header={"x": object()})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_every_truncated_file_is_refused(path):
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match=r"good\.safetensors"):
            load_tensors(path, kind="filter")
    path.write_bytes(whole + b"more")
    with pytest.raises(ArtifactError, match="damaged"):
        load_tensors(path, kind="filter")


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"PK\x03\x04", b"{}", b"\xff" * 64], ids=repr)
def test_files_of_another_format_are_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ArtifactError, match="damaged or no safetensors"):
        load_tensors(tmp_path / "file", kind="filter")


@pytest.mark.parametrize("text", [None, "", "no json", "[1]", "3", "null"])
def test_safetensors_files_of_others_are_refused(tmp_path, text):
    metadata = None if text is None else {"fedup": text}
    save_file({"a": torch.zeros(2)}, tmp_path / "file", metadata=metadata)
    with pytest.raises(ArtifactError, match="not written by fedup"):
        load_tensors(tmp_path / "file", kind="filter")


def test_another_kind_and_another_version_are_refused(path, tmp_path):
    with pytest.raises(ArtifactError, match="holds a 'filter', not a centroids"):
        load_tensors(path, kind="centroids")
    save_file({}, tmp_path / "file", metadata={"fedup": json.dumps({"kind": "filter", "version": 99})})
    with pytest.raises(ArtifactError, match="version 99; this fedup reads 1"):
        load_tensors(tmp_path / "file", kind="filter")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(ArtifactError, match="There is no filter file"):
            load_tensors(missing, kind="filter")

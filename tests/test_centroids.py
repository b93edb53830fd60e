"""Centroids: what clients send, what the server stores, and how it comes back from a file."""

import copy
import re
import zlib
from array import array
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._asking import ask_one
from tests._marked import state_of

from fedup import Centroids, Federation, Forget, collect, fingerprint, load_centroids, save_centroids
from fedup.artifacts import load_tensors, save_tensors
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.in_process import InProcess
from fedup.errors import ArtifactError, CutError, DataError, RequestError, SettingError, StorageError
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Ledger
from fedup.records import Records
from fedup.request import union
from fedup.statistics.cell_table import CellTable
from fedup.statistics.centroids import CentroidConfig, Summary
from fedup.statistics.kmeans import centroid_count
from fedup.statistics.store import insert

NAN = float("nan")


@pytest.fixture(scope="module")
def collected(small_model, digits_federation) -> Centroids:
    """Centroids of all data: read only."""
    return collect(small_model, digits_federation, statistics=CentroidConfig(ratio=0.5, seed=1))


@pytest.fixture
def store(collected) -> Centroids:
    return copy.deepcopy(collected)


def assert_equal_stores(one: Centroids, other: Centroids) -> None:
    assert state_of(one) | {"traffic": None} == state_of(other) | {"traffic": None}  # which is of the collection itself


def test_every_client_and_class_with_rows_has_a_cell_of_the_exact_size(collected, digits_federation):
    expected = {}
    for client in digits_federation.clients:
        labels, points = digits_federation.y[client.train].unique(return_counts=True)
        expected |= {(client.id, label): n for label, n in zip(labels.tolist(), points.tolist(), strict=True)}
    assert [cell.name for cell in collected.cells] == sorted(expected)
    for cell in collected.cells:
        assert cell.size == centroid_count(expected[cell.name], 0.5)
        assert int(collected.counts[cell.slot].sum()) == expected[cell.name]
    starts = torch.tensor([0, *(cell.size for cell in collected.cells)]).cumsum(0).tolist()
    assert [*(cell.start for cell in collected.cells), len(collected.vectors)] == starts
    assert int(collected.counts.min()) >= 1


def test_the_store_says_what_it_was_made_from(collected, small_model, digits_federation):
    assert (collected.base, collected.cut) == (fingerprint(small_model), "4")
    assert (collected.clients, collected.num_classes) == (tuple(digits_federation.ids), 10)
    assert (collected.nonnegative, collected.shape, collected.vectors.shape[1]) == (True, (32,), 32)
    assert collected.how == CentroidConfig(ratio=0.5, seed=1)
    assert not (collected.excluded or collected.purged or collected.sealed)


def test_same_seed_same_bits_and_another_seed_others(collected, small_model, digits_federation):
    again, other = (
        collect(small_model, digits_federation, statistics=CentroidConfig(ratio=0.5, seed=seed)) for seed in (1, 2)
    )
    assert_equal_stores(again, collected)
    assert not torch.equal(other.vectors, collected.vectors)


def test_a_store_on_disk_is_the_same_and_leaves_no_file(collected, small_model, digits_federation, tmp_path):
    contact = InProcess(digits_federation, small_model, vectors_folder=tmp_path)
    on_disk = collect(small_model, contact, statistics=CentroidConfig(ratio=0.5, seed=1))
    assert_equal_stores(on_disk, collected)
    assert list(tmp_path.iterdir()) == []
    where = on_disk.vectors.untyped_storage().data_ptr()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert any(int(line.split("-")[0], 16) <= where < int(line.split()[0].split("-")[1], 16) for line in mapped)
    on_disk.put(on_disk.cells[0], on_disk.vectors[:0], on_disk.counts[:0])
    assert not on_disk.vectors[on_disk.cells[0].slot].any()
    save_centroids(on_disk, tmp_path / "store")
    assert_equal_stores(load_centroids(tmp_path / "store"), on_disk)


def test_bytes_are_those_of_the_messages(collected, small_model, digits_federation):
    contact = InProcess(digits_federation, small_model)
    for client in digits_federation.ids:
        sent = ask_one(contact, client, CentroidsQuestion("4", collected.how))
        arrays = sent.vectors.nbytes + sent.counts.nbytes
        assert arrays < collected.bytes_up[client] < arrays + 1500
    assert collected.size_bytes == sum(collected.bytes_up.values()) == contact.traffic.bytes_up
    assert contact.traffic.messages == len(digits_federation.ids)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["ratio", "sigma"]), st.floats())
def test_settings_are_in_their_range_or_refused(name, value):
    try:
        config = CentroidConfig(**{name: value})
    except SettingError as error:
        assert name in str(error)
    else:
        assert 0 < config.ratio <= 1 and 0 <= config.sigma < float("inf")


def test_what_cannot_be_collected_is_refused(small_model, digits_federation, tmp_path):
    with pytest.raises(CutError, match="no module 'nowhere'"):
        collect(small_model, digits_federation, cut="nowhere")
    with pytest.raises(StorageError, match="no folder"):
        collect(small_model, InProcess(digits_federation, small_model, vectors_folder=tmp_path / "nowhere"))
    for request in (Forget(), Forget.clients([9]), Forget.classes([10]), Forget.samples({0: [10**6]})):
        with pytest.raises(RequestError):
            collect(small_model, digits_federation, forget=[request])
    for rest in (Forget.clients([4]), Forget.samples({4: digits_federation.client(4).train})):
        with pytest.raises(RequestError, match="leaves no"):
            collect(small_model, digits_federation, forget=[Forget.clients([0, 1, 2, 3]), rest])


def test_what_is_forgotten_is_never_read_and_other_cells_keep_their_bits(collected, small_model, digits_federation):
    samples = Forget.samples({2: digits_federation.client(2).train[:5]})
    requests, x = [Forget.clients([1]), Forget.classes([3, 4]), samples], digits_federation.x.clone()
    forget_set = union(requests)
    x[digits_federation.forgotten(forget_set)] = NAN
    poisoned, config = Federation(x, digits_federation.y, digits_federation.clients, 10), collected.how
    store, other = (
        collect(small_model, poisoned, statistics=config, forget=order) for order in (requests, requests[::-1])
    )
    assert_equal_stores(store, other)
    assert int(store.counts.sum()) == len(digits_federation.retained(forget_set))
    assert bool(store.vectors.isfinite().all()) and store.collected_for == frozenset(requests)
    touched = {(2, int(digits_federation.y[row])) for row in samples.sample_ids[2]}
    assert store.excluded.keys() == {name for name in touched if name[1] not in (3, 4)}
    names = {cell.name for cell in collected.cells if cell.client != 1 and cell.label not in (3, 4)}
    assert {cell.name for cell in store.cells} == names
    for cell in store.cells:
        same = torch.equal(store.vectors[cell.slot], collected.vectors[collected.cell(cell.name).slot])
        assert same == (cell.name not in touched)


def test_put_replaces_one_slot_alone_and_what_was_taken_can_be_put_back(store, collected):
    cell = store.cells[2]
    content = store.take(cell)
    store.put(cell, torch.ones(2, 32), torch.tensor([3, 4]))
    vectors, counts = store.take(cell)
    assert torch.equal(vectors[:2], torch.ones(2, 32))
    assert counts.tolist() == [3, 4] + [0] * (cell.size - 2)
    assert not vectors[2:].any()  # nothing of the old centroids is left
    store.put(cell, *content)
    assert_equal_stores(store, collected)


def test_content_that_does_not_fit_is_refused_and_changes_nothing(store, collected):
    cell = store.cells[2]
    for size, counts, width in ((cell.size + 1,) * 2 + (32,), (2, 3, 32), (2, 1, 32), (2, 2, 31)):
        with pytest.raises(DataError, match=re.escape(f"Cell {cell.name}")):
            store.put(cell, torch.ones(size, width), torch.ones(counts))
    foreign = Summary(0, (99,), (1,), (frozenset(),), torch.ones(1, 32), torch.ones(1), True, (32,))
    with pytest.raises(DataError, match="class 99"):
        insert(store, foreign)
    assert_equal_stores(store, collected)


@pytest.fixture(scope="module")
def rich(small_model, digits_federation) -> Centroids:
    """A store with something in every field: read only."""
    requests = [Forget.classes([3]), Forget.samples({2: digits_federation.client(2).train[:5], 10: [1]})]
    store = collect(
        small_model, digits_federation, statistics=CentroidConfig(ratio=0.5, sigma=0.01, seed=5), forget=requests[:1]
    )
    store.collected_for = frozenset(requests)
    store.excluded = {(2, 1): frozenset([4, 7]), (0, 2): frozenset([1])}
    store.purged = {(1, 0), (0, 5)}
    store.sealed = {store.cells[i].name: store.take(store.cells[i]) for i in (4, 1)}
    return store


def test_a_store_comes_back_from_its_file_bit_for_bit(rich, collected, tmp_path):
    for store in (rich, collected):
        save_centroids(store, tmp_path / "centroids")
        assert_equal_stores(load_centroids(tmp_path / "centroids"), store)


def _changeable_parts(value):
    """All objects in a value that can change: tensors by their memory, the others by their identity."""
    if isinstance(value, torch.Tensor):
        return {("memory", value.untyped_storage().data_ptr())}
    if isinstance(value, dict):
        return {id(value)}.union(*map(_changeable_parts, value.values()))
    if isinstance(value, list | set):
        return {id(value)}.union(*map(_changeable_parts, value))
    if isinstance(value, tuple):
        return set().union(*map(_changeable_parts, value))
    if isinstance(value, Ledger | Records):
        return {id(value)} | _changeable_parts(vars(value))
    if isinstance(value, array | bytearray):
        return {id(value)}
    frozen = is_dataclass(value) and value.__dataclass_params__.frozen
    assert frozen or isinstance(value, str | int | float | frozenset | CellTable | type | None), (
        f"can {value!r} change?"
    )
    return set()


@pytest.fixture
def own(rich) -> Centroids:
    """The same, to be changed."""
    own = copy.deepcopy(rich)
    own.sample_labels[0] = {3: 1}
    own.ledger.spend(0, DP(1.0, clip="unit"), "centroids")
    return own


def test_a_moved_store_is_equal_and_shares_nothing_that_can_change(own):
    moved = own.to("cpu")
    assert_equal_stores(moved, own)
    for field in fields(Centroids):  # so that one that is added later is looked at as well
        shared = _changeable_parts(getattr(own, field.name)) & _changeable_parts(getattr(moved, field.name))
        assert not shared, field.name


def test_a_ledger_that_is_kept_elsewhere_stays_one_account(own):
    """Two that did not know of each other's charges could spend one budget twice."""

    class Elsewhere(Ledger):
        pass

    own.ledger = Elsewhere()
    assert own.to("cpu").ledger is own.ledger


def lines_of(text):
    return torch.frombuffer(bytearray(zlib.compress(text.encode())), dtype=torch.uint8)


def _edits(header, tensors):
    for name in ("vectors", "counts", "sealed.1.counts"):
        yield lambda name=name: tensors.pop(name)
    for name in ("vectors", "counts"):
        yield lambda name=name: tensors.update({name: tensors[name][1:]})
    yield lambda: tensors.update(vectors=tensors["vectors"][:, 0])
    for name in header.keys() - {"kind", "version"}:
        yield lambda name=name: header.pop(name)
    for column in ("clients", "labels", "sizes"):
        name = f"cells.{column}"
        yield lambda name=name: tensors.pop(name)
        yield lambda name=name: tensors.update({name: tensors[name][1:].clone()})
        yield lambda name=name: tensors.update({name: tensors[name].flip(0).clone() - 1})
    yield lambda: header.update(cells=3)
    yield lambda: header.update(cells=[[0, 0, 0]])
    yield lambda: header["how"].update(ratio=5)
    yield lambda: header["how"].update(other=5)
    yield lambda: header["excluded"][0].pop()
    yield lambda: header["purged"][0].pop()
    for name in ("bytes_up", "ledger.charges"):
        yield lambda name=name: tensors.pop(name)
        yield lambda name=name: tensors.update({name: tensors[name][:-5].clone()})
        yield lambda name=name: tensors.update({name: lines_of('["someone", 5]')})
    yield lambda: header["collected_for"][0].update(samples={"someone": [5]})


def test_a_file_whose_parts_do_not_fit_is_refused_though_its_hash_is_right(rich, tmp_path):
    path, edited = tmp_path / "centroids", tmp_path / "edited"
    save_centroids(rich, path)
    many = len([*_edits(load_tensors(path, kind="centroids")[1], {})])
    for i in range(many):
        tensors, header = load_tensors(path, kind="centroids")
        [*_edits(header, tensors)][i]()
        save_tensors(edited, tensors, kind="centroids", header=header)
        with pytest.raises(ArtifactError, match=str(edited)):
            load_centroids(edited)

import copy
import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests._asking import ask_one

from fedup import Centroids, Federation, Forget, collect, fingerprint, load_centroids, save_centroids
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.collect import collect_cells
from fedup.clients.in_process import InProcess
from fedup.errors import ArtifactError, CutError, DataError, RequestError, SettingError, StorageError
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Ledger
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
    for field in fields(Centroids):
        if field.name == "traffic":  # of the collection itself
            continue
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "sealed":
            assert a.keys() == b.keys()
            assert all(torch.equal(x, y) for name in a for x, y in zip(a[name], b[name], strict=True))
        elif isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), field.name
        else:
            assert a == b, field.name


def test_every_client_and_class_with_rows_has_a_cell_of_the_exact_size(collected, digits_federation):
    expected = {}
    for client in digits_federation.clients:
        labels, points = digits_federation.y[client.train].unique(return_counts=True)
        expected |= {(client.id, label): n for label, n in zip(labels.tolist(), points.tolist(), strict=True)}
    assert [cell.name for cell in collected.cells] == sorted(expected)
    for cell in collected.cells:
        assert cell.size == centroid_count(expected[cell.name], 0.5)
        assert int(collected.counts[cell.slot].sum()) == expected[cell.name]


def test_slots_lie_one_after_another_and_cover_the_store(collected):
    start = 0
    for cell in collected.cells:
        assert cell.start == start
        start += cell.size
    assert start == len(collected.vectors) == len(collected.counts)
    assert int(collected.counts.min()) >= 1


def test_the_store_says_what_it_was_made_from(collected, small_model, digits_federation):
    assert collected.base == fingerprint(small_model)
    assert collected.cut == "4"
    assert collected.clients == tuple(digits_federation.ids)
    assert collected.num_classes == 10
    assert collected.nonnegative
    assert collected.vectors.shape[1] == 32
    assert (collected.how.ratio, collected.how.sigma, collected.how.seed) == (0.5, 0.0, 1)
    assert not collected.excluded
    assert not collected.purged
    assert not collected.sealed


def test_ratio_one_collects_the_features_of_all_training_rows(small_model, digits_federation):
    everything = collect(small_model, digits_federation, statistics=CentroidConfig(ratio=1.0))
    with torch.no_grad():
        features = small_model[:4](digits_federation.x)
    for cell in everything.cells:
        rows = digits_federation.client(cell.client).train
        rows = rows[digits_federation.y[rows] == cell.label]
        torch.testing.assert_close(everything.vectors[cell.slot], features[rows])


def test_same_seed_same_bits_and_another_seed_others(collected, small_model, digits_federation):
    assert_equal_stores(
        collect(small_model, digits_federation, statistics=CentroidConfig(ratio=0.5, seed=1)), collected
    )
    other = collect(small_model, digits_federation, statistics=CentroidConfig(ratio=0.5, seed=2))
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


def test_a_store_on_a_disk_that_is_not_there_is_a_clear_error(small_model, digits_federation, tmp_path):
    with pytest.raises(StorageError, match="no folder"):
        collect(small_model, InProcess(digits_federation, small_model, vectors_folder=tmp_path / "nowhere"))


def test_rows_know_their_labels_and_cells(store):
    labels = store.row_labels()
    assert all(set(labels[cell.slot].tolist()) == {cell.label} for cell in store.cells)
    cell, another = store.cells[0], store.cells[3]
    expected = [range(cell.start, cell.start + cell.size), range(another.start, another.start + another.size)]
    assert store.rows_of([cell, another]).tolist() == [row for rows in expected for row in rows]
    store.counts[cell.start] = 0  # an emptied row is left out
    assert store.rows_of([cell]).tolist() == list(range(cell.start + 1, cell.start + cell.size))
    assert store.rows_of([]).tolist() == []
    assert store.cell((0, 99)) is None


def test_bytes_are_those_of_the_messages(collected, small_model, digits_federation):
    contact = InProcess(digits_federation, small_model)
    for client in digits_federation.ids:
        sent = ask_one(contact, client, CentroidsQuestion("4", collected.how))
        arrays = sent.vectors.nbytes + sent.counts.nbytes
        assert arrays < collected.bytes_up[client] < arrays + 1500
    assert collected.size_bytes == sum(collected.bytes_up.values()) == contact.traffic.bytes_up
    assert contact.traffic.messages == len(digits_federation.ids)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"ratio": 0.0}, SettingError),
        ({"ratio": 1.5}, SettingError),
        ({"ratio": NAN}, SettingError),
        ({"sigma": -1.0}, SettingError),
        ({"sigma": NAN}, SettingError),
        ({"cut": "nowhere"}, CutError),
    ],
)
def test_settings_out_of_range_are_refused(small_model, digits_federation, settings, error):
    with pytest.raises(error, match=r"ratio|sigma|no module 'nowhere'"):
        cut = settings.pop("cut", None)
        collect(small_model, digits_federation, statistics=CentroidConfig(**settings), cut=cut)


def test_nan_data_is_refused_with_its_row(small_model, digits_federation):
    row = int(digits_federation.client(3).train[7])
    x = digits_federation.x.clone()
    x[row] = NAN
    poisoned = Federation(x, digits_federation.y, digits_federation.clients, 10)
    with pytest.raises(DataError, match=f"first: row {row}"):
        collect(small_model, poisoned)


def poison(federation: Federation, request: Forget) -> Federation:
    """The same federation with NaN in every forgotten row."""
    x = federation.x.clone()
    x[federation.forgotten(request)] = NAN
    return Federation(x, federation.y, federation.clients, federation.num_classes)


def some_samples(federation: Federation, client: int, n: int = 5) -> Forget:
    return Forget.samples({client: federation.client(client).train[:n]})


@pytest.mark.parametrize("kind", ["client", "class", "sample", "mixed"])
def test_what_is_forgotten_is_never_read(small_model, digits_federation, kind):
    parts = [Forget.clients([1]), Forget.classes([3, 4]), some_samples(digits_federation, 2, 200)]
    requests = {"client": parts[:1], "class": parts[1:2], "sample": parts[2:], "mixed": parts}[kind]
    gone = Forget()
    for request in requests:
        gone = gone | request
    asked = collect(
        small_model, poison(digits_federation, gone), statistics=CentroidConfig(ratio=0.5, seed=1), forget=requests
    )
    assert int(asked.counts.sum()) == len(digits_federation.retained(gone))
    assert bool(asked.vectors.isfinite().all())
    assert asked.collected_for == frozenset(requests)
    assert not any(cell.client in gone.client_ids or cell.label in gone.class_ids for cell in asked.cells)


def test_cells_that_no_request_touches_have_the_bits_of_the_cache(collected, small_model, digits_federation):
    request = some_samples(digits_federation, 2)
    asked = collect(small_model, digits_federation, statistics=CentroidConfig(ratio=0.5, seed=1), forget=[request])
    touched = {(2, int(digits_federation.y[row])) for row in request.sample_ids[2]}
    assert asked.excluded.keys() == touched
    for cell in asked.cells:
        same = torch.equal(asked.vectors[cell.slot], collected.vectors[cell.slot])
        assert same == (cell.name not in touched)


def test_the_order_of_requests_does_not_matter(small_model, digits_federation):
    requests = [Forget.clients([1]), Forget.classes([3]), some_samples(digits_federation, 2)]
    one, other = (collect(small_model, digits_federation, forget=order) for order in (requests, requests[::-1]))
    assert_equal_stores(one, other)


def test_forgotten_classes_can_be_kept_for_relabelling(small_model, digits_federation, collected):
    forget = [Forget.classes([3])]
    contact, how = InProcess(digits_federation, small_model), CentroidConfig(ratio=0.5, seed=1)
    kept = collect_cells(small_model, contact, how, None, frozenset(forget), with_forgotten=True)
    assert torch.equal(kept.vectors, collected.vectors)
    assert any(cell.label == 3 for cell in kept.cells)


def test_requests_that_cannot_be_met_are_refused(small_model, digits_federation):
    for request in (Forget(), Forget.clients([9]), Forget.classes([10]), Forget.samples({0: [10**6]})):
        with pytest.raises(RequestError):
            collect(small_model, digits_federation, forget=[request])


@pytest.mark.parametrize("last", ["client", "samples"])
def test_requests_that_together_forget_everything_are_refused(small_model, digits_federation, last):
    rest = Forget.clients([4]) if last == "client" else Forget.samples({4: digits_federation.client(4).train})
    with pytest.raises(RequestError, match="leaves no"):
        collect(small_model, digits_federation, forget=[Forget.clients([0, 1, 2, 3]), rest])


def test_put_replaces_one_slot_and_empties_the_rest_of_it(store, collected):
    cell = store.cells[2]
    store.put(cell, torch.ones(2, 32), torch.tensor([3, 4]))
    vectors, counts = store.take(cell)
    assert torch.equal(vectors[:2], torch.ones(2, 32))
    assert counts.tolist() == [3, 4] + [0] * (cell.size - 2)
    assert not vectors[2:].any()  # nothing of the old centroids is left
    others = torch.ones(len(store.vectors), dtype=torch.bool)
    others[cell.slot] = False
    assert torch.equal(store.vectors[others], collected.vectors[others])
    assert torch.equal(store.counts[others], collected.counts[others])


def test_what_was_taken_can_be_put_back_bit_for_bit(store, collected):
    cell = store.cells[2]
    content = store.take(cell)
    store.put(cell, store.vectors[:0], store.counts[:0])
    assert not store.vectors[cell.slot].any()
    store.put(cell, *content)
    assert_equal_stores(store, collected)


@pytest.mark.parametrize("change", ["too many", "too many counts", "too few counts", "another width"])
def test_content_that_does_not_fit_is_refused_and_changes_nothing(store, collected, change):
    cell = store.cells[2]
    size = cell.size + 1 if change == "too many" else cell.size - 1
    width = 31 if change == "another width" else 32
    counts = {"too many counts": cell.size + 2, "too few counts": 1}.get(change, size)
    with pytest.raises(DataError, match=re.escape(f"Cell {cell.name}")):
        store.put(cell, torch.ones(size, width), torch.ones(counts))
    assert_equal_stores(store, collected)


def test_an_answer_for_a_cell_that_never_was_is_refused(store):
    foreign = Summary(0, (99,), (1,), (frozenset(),), torch.ones(1, 32), torch.ones(1), True, (32,))
    with pytest.raises(DataError, match="class 99"):
        insert(store, foreign)


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
    if isinstance(value, Ledger):
        return {id(value)} | _changeable_parts(vars(value))
    frozen = is_dataclass(value) and value.__dataclass_params__.frozen
    assert frozen or isinstance(value, str | int | float | frozenset | None), f"can {value!r} change?"
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


def _change(value):
    """Change whatever can be changed in a value."""
    if isinstance(value, torch.Tensor):
        value.fill_(7)
    elif isinstance(value, dict):
        for item in value.values():
            _change(item)
        value.clear()
    elif isinstance(value, set | list):
        value.clear()
    elif isinstance(value, tuple):
        for item in value:
            _change(item)
    elif isinstance(value, Ledger):
        value.spend(1, DP(1.0, clip="unit"), "centroids")


@pytest.mark.parametrize("which", ["the moved one", "the one it came from"])
def test_what_is_done_to_a_store_never_shows_in_the_moved_one_nor_the_other_way_round(own, which):
    before, moved = copy.deepcopy(own), own.to("cpu")
    changed, untouched = (moved, own) if which == "the moved one" else (own, moved)
    for field in fields(Centroids):
        _change(getattr(changed, field.name))
    assert_equal_stores(untouched, before)


def test_a_ledger_that_is_kept_elsewhere_stays_one_account(own):
    """Two that did not know of each other's charges could spend one budget twice."""

    class Elsewhere(Ledger):
        pass

    own.ledger = Elsewhere()
    assert own.to("cpu").ledger is own.ledger


def test_every_truncated_file_is_refused(rich, tmp_path):
    path = tmp_path / "centroids"
    save_centroids(rich, path)
    whole = path.read_bytes()
    for length in (0, 1, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match="damaged"):
            load_centroids(path)


def test_files_of_others_are_refused(tmp_path):
    save_file({"vectors": torch.zeros(2, 3)}, tmp_path / "foreign")
    (tmp_path / "text").write_text("no tensors here")
    for name in ("foreign", "text", "missing"):
        with pytest.raises(ArtifactError, match=name):
            load_centroids(tmp_path / name)


def edit(path, change) -> None:
    """Rewrite a file after `change(tensors, header)`."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["fedup"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    change(tensors, header)
    save_file(tensors, path, metadata={"fedup": json.dumps(header)})


EDITS = {
    "no vectors": lambda tensors, header: tensors.pop("vectors"),
    "no counts": lambda tensors, header: tensors.pop("counts"),
    "no sealed original": lambda tensors, header: tensors.pop("sealed.1.counts"),
    "a row less": lambda tensors, header: tensors.update(vectors=tensors["vectors"][1:].clone()),
    "a count less": lambda tensors, header: tensors.update(counts=tensors["counts"][1:].clone()),
    "flat vectors": lambda tensors, header: tensors.update(vectors=tensors["vectors"].flatten()),
    "NaN vectors": lambda tensors, header: tensors["vectors"].fill_(NAN),
    "negative counts": lambda tensors, header: tensors["counts"].fill_(-1),
    "whole vectors": lambda tensors, header: tensors.update(vectors=tensors["vectors"].int()),
    "short sealed original": lambda tensors, header: tensors.update(
        {"sealed.0.vectors": tensors["sealed.0.vectors"][:, 1:].clone()}
    ),
    **{
        f"no {key}": lambda tensors, header, key=key: header.pop(key)
        for key in ("cells", "clients", "num_classes", "how", "cut", "base", "nonnegative", "collected_for")
    },
    **{f"no {key}": lambda tensors, header, key=key: header.pop(key) for key in ("excluded", "purged", "sealed")},
    "a cell with three numbers": lambda tensors, header: header["cells"][0].pop(),
    "a cell of text": lambda tensors, header: header["cells"][0].__setitem__(3, "4"),
    "cells that overlap": lambda tensors, header: header["cells"][1].__setitem__(2, 0),
    "cells beyond the rows": lambda tensors, header: header["cells"][-1].__setitem__(2, 10**6),
    "a cell of an unknown client": lambda tensors, header: header["cells"][0].__setitem__(0, 77),
    "a cell of an unknown class": lambda tensors, header: header["cells"][0].__setitem__(1, 77),
    "a ratio out of range": lambda tensors, header: header["how"].update(ratio=5),
    "an unknown setting": lambda tensors, header: header["how"].update(other=5),
    "excluded without ids": lambda tensors, header: header["excluded"][0].pop(),
    "purged without class": lambda tensors, header: header["purged"][0].pop(),
    "bytes of no client": lambda tensors, header: header["bytes_up"].update(someone=5),
    "a request of text": lambda tensors, header: header["collected_for"][0]["samples"].update(someone=[5]),
    "cells as a number": lambda tensors, header: header.update(cells=3),
}


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS.keys())
def test_edited_files_whose_parts_do_not_fit_are_refused(rich, tmp_path, change):
    path = tmp_path / "centroids"
    save_centroids(rich, path)
    edit(path, lambda tensors, header: None)
    load_centroids(path)  # rewriting alone does no harm
    edit(path, change)
    with pytest.raises(ArtifactError, match=str(path)):
        load_centroids(path)

"""Moments of many clients: a request reads what it forgets, and what changed on disk behind the store is noticed."""

import copy
import random
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from tests._marked import same_bits, trained
from torch import nn

import fedup
from fedup import Federation, FilterConfig, Forget, Terms, collect, fingerprint, iid, plug, purge, restore, unlearn
from fedup.artifacts import find_long_tensor, save_tensors
from fedup.clients.collect_moments import StoreBuilder
from fedup.clients.moments import ClientMoments
from fedup.errors import ArtifactError, StorageError
from fedup.request import union
from fedup.statistics import client_parts, moment_file
from fedup.statistics.client_parts import ClientPart, ClientParts, PartsFile
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig
from fedup.statistics.moment_file import PARTS

CONFIG = MomentConfig(least_rows=1, by_class="always")
TERMS = {"force": True, "terms": Terms(measure=False)}


class Few:
    """Twelve clients with four classes."""

    def __init__(self):
        torch.manual_seed(0)
        self.y = torch.arange(240) % 4
        self.x = 0.7 * torch.randn(240, 6) + 3 * nn.functional.one_hot(self.y, 6)
        self.federation = Federation.split(self.x, self.y, iid(self.y, 12))
        self.model = trained(self.x, self.y, nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def collect(self, forget=()):
        return collect(self.model, self.federation, statistics=CONFIG, forget=forget)

    def samples(self, client, first):
        return Forget.samples({client: self.federation.client(client).train[first : first + 6].tolist()})


@pytest.fixture(scope="module")
def few():
    return Few()


@pytest.fixture(params=["memory", "disk", "saved"])
def store(few, request, monkeypatch, tmp_path):
    """Parts in memory, in an unnamed file, or in a saved one."""
    if request.param == "disk":
        monkeypatch.setattr(client_parts, "IN_MEMORY_BYTES", 0)
    store = few.collect()
    if request.param == "saved":
        fedup.save_centroids(store, tmp_path / "store")
        store = fedup.load_centroids(tmp_path / "store")
    return store


def many(clients, model=None, width=16, first=0):
    """A store of made-up answers."""
    builder, source = StoreBuilder(MomentConfig(), 4, Forget(), {}, None), torch.Generator().manual_seed(0)
    for client in range(first, first + clients):
        x, y = torch.randn(40, width, generator=source), torch.arange(40) % 4
        builder.add(ClientMoments(client, IntegerMoments.of(x, y, 4, MomentConfig()), shape=(width,)))
    plugged = plug(model or nn.Linear(width, 4))
    return plugged, builder.finish(cut=plugged.cut, base=fingerprint(plugged.base))


@pytest.mark.parametrize("seed", [0, 1])
def test_any_200_requests_and_restorations_end_in_the_totals_and_the_filter_of_the_final_set(few, store, seed):
    chosen, plugged, options = random.Random(seed), plug(few.model), {"clients": few.federation, **TERMS}
    config = FilterConfig(filter="closed_form")
    pool = [Forget.clients([client]) for client in range(12)] + [Forget.classes([label]) for label in (1, 2)]
    pool += [few.samples(client, first) for client in range(12) for first in (0, 6)]
    for _ in range(200):
        active = sorted(plugged.requests, key=str)
        if len(active) > 7 or (active and chosen.random() < 0.4):
            restore(plugged, store, chosen.choice(active), **options)
        else:
            new = chosen.choice([request for request in pool if request not in plugged.requests])
            unlearn(plugged, store, new, config=config, **options)
        if plugged.requests and chosen.random() < 0.05:
            purge(plugged, store)
    unlearn(plugged, store, chosen.choice([each for each in pool if each not in plugged.requests]), **options)
    assert store.retained(union(plugged.requests)) == few.collect(plugged.requests).total
    at_once = plug(few.model)
    unlearn(at_once, few.collect(), plugged.requests, config=config, **options)
    assert same_bits(plugged, at_once)


def test_a_request_reads_the_parts_that_it_forgets_and_does_as_much_for_many_clients_as_for_few(monkeypatch):
    read, real = [], PartsFile.read
    monkeypatch.setattr(PartsFile, "read", lambda self, place, client: read.append(client) or real(self, place, client))
    model, calls = nn.Linear(16, 4), []
    for clients in (10, 2000):
        plugged, store = many(clients, model)
        for i in (1, 2):  # the second time all is imported
            seen = []
            sys.setprofile(lambda frame, event, arg, seen=seen: seen.append(event))
            unlearn(plugged, store, Forget.clients([i]), **TERMS)
            sys.setprofile(None)
        calls.append(len(seen))
    assert set(read) == {1, 2}
    assert calls[1] <= 1.02 * calls[0]


def test_the_numbers_of_clients_take_64_bits_as_those_of_flowers_nodes_do(tmp_path):
    first = 2**63 - 2
    plugged, store = many(5, first=first)
    fedup.save_centroids(store, tmp_path / "store")
    loaded = fedup.load_centroids(tmp_path / "store")
    assert loaded.clients == tuple(range(first, first + 5)) and loaded.cells == store.cells
    for client in (first, first + 3):
        unlearn(plugged, loaded, Forget.clients([client]), **TERMS)
    assert loaded.retained(union(plugged.requests)) == store.retained(Forget.clients([first, first + 3]))
    purge(plugged, loaded)
    assert {*loaded.parts} == {first + 1, first + 2, first + 4}


@pytest.mark.parametrize("damage", ["changed", "exchanged", "cut off"])
def test_a_part_that_changed_on_disk_is_noticed_when_it_is_used_and_nothing_changes(few, tmp_path, damage):
    path, plugged = tmp_path / "store", plug(few.model)
    fedup.save_centroids(few.collect(), path)
    store, (start, size) = fedup.load_centroids(path), find_long_tensor(path, PARTS)
    unlearn(plugged, store, Forget.clients([0]), **TERMS)
    before, total, each = plugged.served, store.total, size // 12
    with path.open("r+b") as file:
        content = file.read()
        parts = [content[start + i * each : start + (i + 1) * each] for i in range(12)]
        if damage == "exchanged":
            parts[3], parts[4] = parts[4], parts[3]
        elif damage == "changed":
            parts[3] = bytes([parts[3][0] ^ 1]) + parts[3][1:]
        file.seek(start)
        file.write(b"".join(parts))
        file.truncate(start + 3 * each + 5 if damage == "cut off" else None)
    with pytest.raises(ArtifactError, match=r"client 3 .* damaged or were exchanged"):
        unlearn(plugged, store, Forget.clients([3]), **TERMS)
    assert plugged.served is before and store.total is total
    unlearn(plugged, store, Forget.clients([1]), **TERMS)
    with pytest.raises(ArtifactError):
        fedup.load_centroids(path)


def test_a_store_that_another_process_saves_anew_while_it_is_read_is_not_taken_for_a_damaged_one(monkeypatch, tmp_path):
    (_, first), (_, then) = many(3), many(8)
    fedup.save_centroids(first, tmp_path / "store")
    saves, real = iter([then]), moment_file.find_long_tensor

    def find(path, name):
        for store in saves:
            fedup.save_centroids(store, path)
        return real(path, name)

    monkeypatch.setattr(moment_file, "find_long_tensor", find)
    assert fedup.load_centroids(tmp_path / "store").total == then.total


@pytest.mark.parametrize("copied", [False, True])
def test_purges_and_changes_leave_nothing_of_the_old_parts_on_disk(few, monkeypatch, tmp_path, copied):
    monkeypatch.setattr(client_parts, "IN_MEMORY_BYTES", 0)
    plugged, store = plug(few.model), few.collect()
    store = copy.deepcopy(store) if copied else store  # the first one is gone, its file is not
    old = {client: store.parts[client] for client in (1, 2, 5, 6)}
    for first, changed in ((1, 2), (5, 6)):
        unlearn(plugged, store, [Forget.clients([first]), few.samples(changed, 0)], clients=few.federation, **TERMS)
        purge(plugged, store)
    fedup.save_centroids(store, tmp_path / "store")
    file = store.parts.place(3).file._file
    file.seek(0)
    for content in (file.read(), (tmp_path / "store").read_bytes()):
        assert store.parts[3].to_bytes() in content
        for part in old.values():
            assert not any(part.second.to(kind).numpy().tobytes() in content for kind in (torch.int32, torch.int64))


def test_a_saved_file_is_closed_when_the_last_of_its_parts_is_replaced(few, tmp_path):
    fedup.save_centroids(few.collect(), tmp_path / "store")
    parts = fedup.load_centroids(tmp_path / "store").parts
    file, other = weakref.ref(parts.place(0).file), parts.copy()
    for client in parts:
        assert file() is not None
        parts[client] = parts[client]  # the copy gets its own, too
    assert file() is None and all(torch.equal(parts[client].sums, other[client].sums) for client in parts)


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_a_part_that_is_written_anew_smaller_or_larger_leaves_no_trace(rows):
    parts = ClientParts(4)
    first, then = (ClientPart(torch.arange(4 * n).view(n, 4) + n * 2**40, None) for n in (3, rows))
    parts[0], parts[1], parts[0] = first, first, then
    content = parts.place(0).file._file.getvalue()
    assert content.count(first.sums[2:].numpy().tobytes()) == (2 if rows == 3 else 1)
    assert torch.equal(parts[0].sums, then.sums) and torch.equal(parts[1].sums, first.sums)


@pytest.mark.parametrize("number", [2**31 - 1, -(2**31), 2**31, -(2**31) - 1, -(2**62)])
def test_numbers_of_a_part_take_32_bits_where_those_hold_all_of_them(number):
    parts, part = ClientParts(2), ClientPart(torch.tensor([[1, 2]]), torch.tensor([3, number, 4]))
    parts[0] = part
    assert parts.place(0).size == (4 if -(2**31) <= number < 2**31 else 8) * 5
    assert torch.equal(parts[0].sums, part.sums) and torch.equal(parts.copy()[0].second, part.second)


def test_a_file_holds_short_and_long_parts(tmp_path):
    builder = StoreBuilder(MomentConfig(), 1, Forget(), {}, None)
    for client, scale in enumerate((1, 1000, 1)):
        x = scale * torch.rand(90, 2)
        builder.add(ClientMoments(client, IntegerMoments.of(x, torch.zeros(90).long(), 1, MomentConfig()), shape=(2,)))
    store = builder.finish(cut="0", base="")
    assert [store.parts.place(client).size for client in range(3)] == [20, 40, 20]
    fedup.save_centroids(store, tmp_path / "store")
    loaded = fedup.load_centroids(tmp_path / "store")
    assert all(loaded.moments_of(client) == store.moments_of(client) for client in range(3))


def test_copies_are_independent_and_take_over_what_is_overwritten(few, store):
    plugged, request = plug(few.model), Forget.clients([1]) | few.samples(2, 0)
    copies, total = [copy.deepcopy(store), store.to("cpu")], store.total
    unlearn(plugged, store, request, clients=few.federation, **TERMS)
    purge(plugged, store)
    for own in copies:
        assert own.retained(Forget.clients([1, 2])) == few.collect([Forget.clients([1, 2])]).total
        assert own.total == total and 1 not in store.parts


@pytest.mark.parametrize("call", ["unlearn", "purge"])
def test_a_full_disk_in_the_middle_of_a_call_changes_nothing(few, store, monkeypatch, call):
    plugged, samples, real = plug(few.model), few.samples(2, 0) | few.samples(3, 0), PartsFile.write
    unlearn(plugged, store, [Forget.clients([5]), Forget.classes([1])], clients=few.federation, **TERMS)
    before, served, left = copy.deepcopy(store), plugged.served, iter([1, 1, 0])

    def write(self, content):
        if not next(left, 1):
            raise StorageError("no space left")
        return real(self, content)

    monkeypatch.setattr(PartsFile, "write", write)
    with pytest.raises(StorageError):
        purge(plugged, store) if call == "purge" else unlearn(plugged, store, samples, clients=few.federation, **TERMS)
    assert plugged.served is served and store.total == before.total and torch.equal(store.counts, before.counts)
    assert [store.parts.place(i).digest for i in range(12)] == [before.parts.place(i).digest for i in range(12)]
    assert store.purged == before.purged and store.excluded == before.excluded


def test_a_file_of_moments_in_an_older_form_is_refused_in_one_line(tmp_path):
    save_tensors(tmp_path / "store", {"vectors": torch.zeros(1, 2)}, kind="centroids", header={"of_clients": [0]})
    with pytest.raises(ArtifactError, match="an earlier fedup wrote them: collect again"):
        fedup.load_centroids(tmp_path / "store")


def test_parts_of_many_clients_take_disk_and_not_memory(tmp_path):
    code = (
        "import resource, fedup\nfrom fedup.statistics import client_parts\nfrom tests.test_many_clients import many\n"
        "client_parts.IN_MEMORY_BYTES = 2**20\npeak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"many(10, width=128)\nbefore = peak()\n_, store = many(2000, width=128)\npath = {str(tmp_path / 'store')!r}\n"
        "fedup.save_centroids(store, path)\nstore = fedup.load_centroids(path)\n"
        "assert store.parts.nbytes > 65e6, 'premise'\nassert peak() - before < 40_000, peak() - before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_the_example_merges_by_map_reduce():
    example = Path(__file__).parent.parent / "examples" / "merge_moments.py"
    ran = subprocess.run([sys.executable, example], check=True, capture_output=True, text=True)
    assert "50,000 rows of 1,000 clients; without client 7: 49,950" in ran.stdout

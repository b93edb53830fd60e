"""What holds when several people use one plugged model: threads, tasks, files, odd modes."""

import asyncio
import threading

import pytest
import torch
from tests._forced import restore, unlearn
from torch import nn

from fedup import (
    Federation,
    FilterConfig,
    Forget,
    LocalTraining,
    collect,
    federate,
    iid,
    load_filter,
    plug,
    purge,
    save_filter,
)
from fedup.errors import PlugError, RequestError
from fedup.statistics.centroids import CentroidConfig
from fedup.unlearning.plan import Terms

CONFIG = FilterConfig(rank=8, steps=100, batch_size=32)


class Setting:
    """A trained base on five well-separated classes, and its centroids."""

    def __init__(self):
        torch.manual_seed(0)
        self.y = torch.arange(400) % 5
        self.x = torch.randn(400, 10)
        self.x[torch.arange(400), self.y] += 4
        self.federation = Federation.split(self.x, self.y, iid(self.y, 4), num_classes=6)
        start = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6))
        self.base = federate(start, self.federation, rounds=6, local=LocalTraining(batch_size=8)).model
        self.centroids = collect(self.base, self.federation, statistics=CentroidConfig(ratio=0.5))

    def of_class(self, client, label, many=3):
        rows = self.federation.client(client).train
        return rows[self.y[rows] == label][:many].tolist()


@pytest.fixture
def setting():
    return Setting()


def test_requests_that_come_at_once_are_all_answered(setting):
    plugged = plug(setting.base)
    requests = [Forget.classes([1]), Forget.classes([2]), Forget.clients([3])]
    threads = [
        threading.Thread(target=unlearn, args=(plugged, setting.centroids, request), kwargs={"config": CONFIG})
        for request in requests
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert plugged.requests == set(requests)
    assert not torch.isin(plugged(setting.x).argmax(1), torch.tensor([1, 2])).any()


def test_restored_in_one_task_does_not_unfilter_another_task_of_the_same_loop(setting):
    plugged = plug(setting.base)
    unlearn(plugged, setting.centroids, Forget.classes([1]), config=CONFIG)
    filtered, original = plugged(setting.x), setting.base(setting.x)

    async def look_at_the_original():
        with plugged.restored():
            await asyncio.sleep(0.01)
            return plugged(setting.x)

    async def serve():
        await asyncio.sleep(0.001)
        return plugged(setting.x)

    async def both():
        return await asyncio.gather(look_at_the_original(), serve())

    restored, served = asyncio.run(both())
    assert torch.equal(restored, original)
    assert torch.equal(served, filtered)


def test_a_fit_under_autocast_gives_the_bits_of_one_without(setting):
    plain, under = plug(setting.base), plug(setting.base)
    unlearn(plain, setting.centroids, Forget.clients([1]), config=CONFIG)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        centroids = collect(setting.base, setting.federation, statistics=CentroidConfig(ratio=0.5))
        unlearn(under, centroids, Forget.clients([1]), config=CONFIG)
    assert torch.equal(plain(setting.x), under(setting.x))


def test_collecting_and_unlearning_inside_inference_mode_leave_a_store_that_can_change(setting):
    plugged = plug(setting.base)
    with torch.inference_mode():
        centroids = collect(setting.base, setting.federation, statistics=CentroidConfig(ratio=0.5))
        unlearn(plugged, centroids, Forget.clients([1]), config=CONFIG)
    unlearn(plugged, centroids, Forget.samples({0: setting.of_class(0, 2)}), clients=setting.federation)
    assert len(plugged.requests) == 2


def test_a_file_that_would_bring_back_what_is_forgotten_is_refused(setting, tmp_path):
    other, plugged = plug(setting.base), plug(setting.base)
    unlearn(other, setting.centroids, Forget.clients([3]), config=CONFIG)
    save_filter(other, tmp_path / "filter")
    unlearn(plugged, setting.centroids, Forget.classes([1]), config=CONFIG)
    before = plugged(setting.x)
    with pytest.raises(RequestError, match="would come back"):
        load_filter(plugged, tmp_path / "filter")
    assert torch.equal(plugged(setting.x), before)


def test_unknown_samples_of_a_forgotten_client_are_refused(setting):
    plugged = plug(setting.base)
    unlearn(plugged, setting.centroids, Forget.clients([3]), config=CONFIG)
    with pytest.raises(RequestError, match="not trained on"):
        unlearn(plugged, setting.centroids, Forget.samples({3: [99999]}), clients=setting.federation)
    assert plugged.requests == {Forget.clients([3])}


def test_a_sealed_cell_does_not_keep_samples_that_are_withdrawn(setting):
    plugged, store = plug(setting.base), setting.centroids
    cell = store.cell((0, 1))
    old = store.take(cell)[0]
    unlearn(plugged, store, Forget.classes([1]), config=CONFIG)
    unlearn(plugged, store, Forget.samples({0: setting.of_class(0, 1)}), clients=setting.federation)
    assert store.excluded[cell.name] == set(setting.of_class(0, 1))
    assert not torch.equal(store.take(cell)[0], old)


def test_a_sealed_original_goes_when_further_samples_of_it_are_withdrawn_unsealed(setting):
    plugged, store = plug(setting.base), setting.centroids
    first, second = setting.of_class(0, 1, many=2)
    options = {"clients": setting.federation, "config": CONFIG}
    unlearn(plugged, store, Forget.samples({0: [first]}), terms=Terms(keep_sealed=True), **options)
    assert (0, 1) in store.sealed
    unlearn(plugged, store, Forget.samples({0: [second]}), terms=Terms(keep_sealed=False), **options)
    assert (0, 1) not in store.sealed


def test_a_store_of_another_model_is_not_purged(setting):
    plugged, other = plug(setting.base), Setting().centroids
    other.base = "another"
    unlearn(plugged, setting.centroids, Forget.classes([1]), config=CONFIG)
    before = other.vectors.clone()
    with pytest.raises(ValueError, match="come from base"):
        purge(plugged, other)
    assert torch.equal(other.vectors, before)


def test_a_class_that_nobody_holds_is_nothing_to_forget(setting):
    with pytest.raises(RequestError, match="changes nothing"):
        unlearn(plug(setting.base), setting.centroids, Forget.classes([5]), config=CONFIG)


def test_arguments_of_the_wrong_kind_are_named(setting):
    request = Forget.classes([1])
    with pytest.raises(PlugError, match="plug"):
        unlearn(setting.base, setting.centroids, request)
    with pytest.raises(RequestError, match="collect"):
        unlearn(plug(setting.base), setting.federation, request)
    with pytest.raises(RequestError, match="found None"):
        unlearn(plug(setting.base), None, request)
    with pytest.raises(RequestError, match="Forget"):
        restore(plug(setting.base), setting.centroids, 7)


def test_a_cut_at_a_module_that_works_in_place_reads_what_arrives_there():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)]
    x, y = torch.randn(60, 8), torch.arange(60) % 3
    base, federation = nn.Sequential(*layers).eval(), Federation.split(x, y, iid(y, 2))
    store = collect(base, federation, statistics=CentroidConfig(ratio=1.0), cut="1")
    assert store.vectors.min() < 0
    plugged = plug(base, cut="1")
    unlearn(plugged, store, Forget.classes([1]), config=FilterConfig(rank=4, steps=5))
    assert plugged(x).shape == (60, 3)


def test_training_that_diverges_says_so(setting):
    start = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6))
    with pytest.raises(ValueError, match="smaller lr"):
        federate(start, setting.federation, rounds=3, local=LocalTraining(lr=1e20))


def test_a_head_with_fewer_outputs_than_classes_is_named(setting):
    base = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    store = collect(base, setting.federation, statistics=CentroidConfig(ratio=0.5))
    with pytest.raises(ValueError, match="3 outputs"):
        unlearn(plug(base), store, Forget.clients([1]), config=CONFIG)

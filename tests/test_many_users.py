"""What holds when several people use one plugged model: threads, tasks, files, odd modes."""

import copy
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
    plug,
    purge,
)
from fedup.errors import PlugError, RequestError
from fedup.statistics.centroids import CentroidConfig
from fedup.unlearning.plan import Terms

CONFIG = FilterConfig(rank=8, steps=60, batch_size=32)


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


@pytest.fixture(scope="module")
def trained():
    return Setting()


@pytest.fixture
def setting(trained):
    """The same with centroids of its own."""
    own = copy.copy(trained)
    own.centroids = copy.deepcopy(trained.centroids)
    return own


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


def test_modes_of_the_caller_change_no_bit_and_the_store_can_change_afterwards(setting):
    plain, answers = plug(setting.base), []
    unlearn(plain, setting.centroids, Forget.clients([1]), config=CONFIG)
    for mode in (torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode()):
        plugged = plug(setting.base)
        with mode:
            centroids = collect(setting.base, setting.federation, statistics=CentroidConfig(ratio=0.5))
            unlearn(plugged, centroids, Forget.clients([1]), config=CONFIG)
        answers.append(plugged(setting.x))
        unlearn(plugged, centroids, Forget.samples({0: setting.of_class(0, 2)}), clients=setting.federation)
        assert len(plugged.requests) == 2
    assert all(torch.equal(answer, plain(setting.x)) for answer in answers)


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


def test_what_names_nothing_or_does_not_fit_is_refused_by_name(setting):
    plugged, other = plug(setting.base), setting.centroids.to("cpu")
    with pytest.raises(RequestError, match="changes nothing"):
        unlearn(plugged, setting.centroids, Forget.classes([5]), config=CONFIG)  # which nobody holds
    unlearn(plugged, setting.centroids, Forget.clients([3]), config=CONFIG)
    with pytest.raises(RequestError, match="not trained on"):
        unlearn(plugged, setting.centroids, Forget.samples({3: [99999]}), clients=setting.federation)
    assert plugged.requests == {Forget.clients([3])}
    other.base = "another"
    with pytest.raises(ValueError, match="come from base"):
        purge(plugged, other)
    assert torch.equal(other.vectors, setting.centroids.vectors)
    base = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    store = collect(base, setting.federation, statistics=CentroidConfig(ratio=0.5))
    with pytest.raises(ValueError, match="3 outputs"):
        unlearn(plug(base), store, Forget.clients([1]), config=CONFIG)
    with pytest.raises(ValueError, match="smaller lr"):
        federate(setting.base, setting.federation, rounds=3, local=LocalTraining(lr=1e20))


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

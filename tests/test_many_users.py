"""What holds when several people use one plugged model: threads, odd modes, wrong arguments."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests._forced import restore, unlearn
from tests._marked import marked
from torch import nn

from fedup import Federation, FilterConfig, Forget, LocalTraining, collect, federate, plug, purge
from fedup.errors import PlugError, RequestError
from fedup.statistics.centroids import CentroidConfig
from fedup.unlearning.plan import Terms

MARKED, HALF = marked(), CentroidConfig(ratio=0.5)
CONFIG = FilterConfig(rank=8, steps=60, batch_size=32, filter="bottleneck")
FEDERATION = MARKED.federation


def _of_class(client, label, count=3):
    rows = FEDERATION.client(client).train
    return rows[MARKED.y[rows] == label][:count].tolist()


def test_requests_that_come_at_once_are_all_answered():
    plugged, store = plug(MARKED.base), MARKED.store()
    requests = [Forget.classes([1]), Forget.classes([2]), Forget.clients([0])]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda request: unlearn(plugged, store, request, config=CONFIG), requests))
    assert plugged.requests == set(requests)
    assert not torch.isin(plugged(MARKED.x).argmax(1), torch.tensor([1, 2])).any()


def test_modes_of_the_caller_change_no_bit_and_the_store_can_change_afterwards():
    plain, answers = plug(MARKED.base), []
    unlearn(plain, MARKED.store(), Forget.clients([1]), config=CONFIG)
    for mode in (torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode()):
        plugged = plug(MARKED.base)
        with mode:
            store = collect(MARKED.base, FEDERATION, statistics=HALF)
            unlearn(plugged, store, Forget.clients([1]), config=CONFIG)
        answers.append(plugged(MARKED.x))
        unlearn(plugged, store, Forget.samples({0: _of_class(0, 2)}), clients=FEDERATION)
        assert len(plugged.requests) == 2
    assert all(torch.equal(answer, plain(MARKED.x)) for answer in answers)


def test_neither_a_cell_out_of_use_nor_a_sealed_original_keeps_samples_that_are_withdrawn():
    plugged, store, (first, second) = plug(MARKED.base), MARKED.store(), _of_class(0, 1, 2)
    options, cell = {"clients": FEDERATION, "config": CONFIG}, store.cell((0, 1))
    before = store.take(cell)[0]
    unlearn(plugged, store, Forget.classes([1]), config=CONFIG)
    unlearn(plugged, store, Forget.samples({0: [first]}), terms=Terms(keep_sealed=True), **options)
    assert store.excluded[cell.name] == {first} and not torch.equal(store.take(cell)[0], before)
    assert cell.name in store.sealed
    unlearn(plugged, store, Forget.samples({0: [second]}), terms=Terms(keep_sealed=False), **options)
    assert cell.name not in store.sealed


def test_arguments_that_do_not_fit_are_refused_by_name():
    plugged, store, other, request = plug(MARKED.base), MARKED.store(), MARKED.store(), Forget.classes([1])
    for call, error, message in (
        (lambda: unlearn(MARKED.base, store, request), PlugError, "plug"),
        (lambda: unlearn(plugged, FEDERATION, request), RequestError, "collect"),
        (lambda: unlearn(plugged, None, request), RequestError, "found None"),
        (lambda: restore(plugged, store, 7), RequestError, "Forget"),
    ):
        with pytest.raises(error, match=message):
            call()
    more = Federation(MARKED.x, MARKED.y, FEDERATION.clients, 6)
    wide = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6)).eval()
    with pytest.raises(RequestError, match="changes nothing"):  # class 5 is nobody's
        unlearn(plug(wide), collect(wide, more, statistics=HALF), Forget.classes([5]), config=CONFIG)
    unlearn(plugged, store, Forget.clients([2]), config=CONFIG)
    with pytest.raises(RequestError, match="not trained on"):
        unlearn(plugged, store, Forget.samples({2: [99999]}), clients=FEDERATION)
    assert plugged.requests == {Forget.clients([2])}
    other.base = "another"
    with pytest.raises(ValueError, match="come from base"):
        purge(plugged, other)
    assert torch.equal(other.vectors, MARKED.collected.vectors)
    base = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    with pytest.raises(ValueError, match="it has 3"):
        unlearn(plug(base), collect(base, FEDERATION, statistics=HALF), Forget.clients([1]), config=CONFIG)
    with pytest.raises(ValueError, match="smaller lr"):
        federate(MARKED.base, FEDERATION, rounds=3, local=LocalTraining(lr=1e20))

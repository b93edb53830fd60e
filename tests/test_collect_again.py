"""Single clients are asked anew: the store is that of a collection from all clients as they are now."""

from dataclasses import replace

import pytest
import torch
from tests._marked import everything_of, marked, same_bits, state_of

from fedup import Federation, FilterConfig, Forget, Terms, collect, collect_again, plug, purge, restore, unlearn
from fedup.errors import RequestError
from fedup.request import union
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.store_file import load_centroids, save_centroids

MARKED = marked()
CONFIG = FilterConfig(rank=4, steps=10, batch_size=32, gentle=False)
OPTIONS = {"force": True, "terms": Terms(measure=False)}
STATISTICS = {"moments": MomentConfig(least_rows=1), "centroids": CentroidConfig(ratio=0.5)}
FEW = Federation(MARKED.x, MARKED.y, MARKED.federation.clients[:2], 4)  # before client 2 joins
OTHER = MARKED.with_rows(MARKED.federation.client(1).train, 1.5 * MARKED.x[MARKED.federation.client(1).train])


@pytest.mark.parametrize("kind", STATISTICS)
@pytest.mark.parametrize(
    ("before", "now", "client"), [(FEW, MARKED.federation, 2), (MARKED.federation, OTHER, 1)], ids=["joins", "changes"]
)
@pytest.mark.parametrize("in_force", [[], ["client", "few", "class"]], ids=str)
def test_it_is_as_if_all_had_been_asked_now(kind, before, now, client, in_force, tmp_path):
    requests = [MARKED.requests[name] for name in in_force]
    plugged, store = plug(MARKED.base), collect(MARKED.base, before, statistics=STATISTICS[kind])
    fresh, reference = collect(MARKED.base, now, statistics=STATISTICS[kind]), plug(MARKED.base)
    if requests:
        unlearn(plugged, store, requests, clients=before, config=CONFIG, **OPTIONS)
        unlearn(reference, fresh, requests, clients=now, config=CONFIG, **OPTIONS)
    kept = state_of(store)
    changed, report = collect_again(plugged, store, [client], clients=now, **OPTIONS)
    assert state_of(store) == kept and client in report.clients_contacted
    save_centroids(changed, tmp_path / "store")
    changed = load_centroids(tmp_path / "store")
    assert not requests or same_bits(plugged, reference)
    if in_force:
        restore(reference, fresh, MARKED.requests["class"], clients=now, **OPTIONS)
        report = restore(plugged, changed, MARKED.requests["class"], clients=now, **OPTIONS)
        if report.pending:  # there is no room for centroids of a class that a new client was not asked for
            assert (kind, before) == ("centroids", FEW) and report.pending.keys() == {client}
            changed, _ = collect_again(plugged, changed, [client], clients=now, **OPTIONS)
    for name in ("third", "class"):
        for model, own in ((plugged, changed), (reference, fresh)):
            unlearn(model, own, MARKED.requests[name], clients=now, config=CONFIG, **OPTIONS)
        if kind == "moments":
            assert changed.retained(union(plugged.requests)) == fresh.retained(union(plugged.requests))
        assert same_bits(plugged, reference)


def test_who_is_forgotten_or_lacks_forgotten_samples_is_not_collected_from(tmp_path):
    plugged, store = plug(MARKED.base), MARKED.store()
    unlearn(plugged, store, [MARKED.requests["first"], Forget.clients([0])], clients=MARKED.federation, **OPTIONS)
    purge(plugged, store)
    own = MARKED.federation.client(1)
    short = replace(MARKED.federation, clients=(replace(own, train=own.train[50:]),))
    for clients, federation, why in (([0], MARKED.federation, "forgotten"), ([1], short, "client 1")):
        before = everything_of(plugged, store)
        with pytest.raises(RequestError, match=f"(?i){why}"):
            collect_again(plugged, store, clients, clients=federation, **OPTIONS)
        assert everything_of(plugged, store) == before
    assert torch.equal(plugged.unplug()(MARKED.x), MARKED.base(MARKED.x))

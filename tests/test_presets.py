"""Settings that belong together."""

from dataclasses import replace

import pytest
from tests._forced import unlearn
from tests._marked import marked

from fedup import FilterConfig, collect, plug
from fedup.errors import SettingError
from fedup.filters.fit import Trace
from fedup.filters.presets import preset
from fedup.request import union
from fedup.unlearning.plan import Terms

MARKED = marked()
CLIENT, CLASS, SAMPLE = MARKED.requests["client"], MARKED.requests["class"], MARKED.requests["first"]


@pytest.mark.parametrize(("name", "sigma"), [("default", 0.0), ("paper", 0.001), ("authors", 0.0)])
def test_the_papers_ratio_depends_on_what_is_forgotten_and_the_default_one_does_not(name, sigma):
    for forget, ratio in (
        ([CLIENT], 0.8),
        ([CLASS], 0.1),
        ([CLASS | SAMPLE], 0.5),
        ([CLIENT, CLASS], 0.8),
        ([CLASS, SAMPLE], 0.5),
        ([], 0.8),
    ):
        found, ratio = preset(name, forget), 0.8 if name == "default" else ratio
        assert found == preset(name, union(forget))
        assert (found.ratio, found.sigma, found.cache) == (ratio, sigma, name == "default")
        how = collect(MARKED.base, MARKED.federation, forget=iter(forget), statistics=name).how
        assert (how.ratio, how.sigma) == (ratio, sigma)


def test_settings_are_those_of_the_paper_and_of_its_authors_code():
    assert preset() == preset("default") and preset().config == FilterConfig()
    assert collect(MARKED.base, MARKED.federation, statistics="centroids").how.ratio == 0.8
    paper, authors = preset("paper").config, preset("authors").config
    for config, policy in ((paper, "remap"), (authors, "remap_client")):
        assert (config.filter, config.class_policy, config.guard) == ("bottleneck", policy, False)
    assert (authors.optimizer, authors.lr, authors.alpha) == ("sgd", 0.005, 0.5)
    assert (authors.batch_size, authors.epochs) == (10, 50) and not authors.gentle
    assert authors.rank_for(512) == authors.rank_for(128) == 32
    centroids, trace = collect(MARKED.base, MARKED.federation, forget=[SAMPLE], statistics="authors"), Trace(every=1)
    plugged, terms = plug(MARKED.base), Terms(trace=trace)
    unlearn(plugged, centroids, SAMPLE, clients=MARKED.federation, config="authors", terms=terms)
    assert len(trace.steps) == 50 * max(1, len(centroids.rows_of(centroids.cells)) // 10)
    assert plugged.served.erasure is None and plugged.served.config == authors


@pytest.mark.parametrize("name", ["papers", "", None])
def test_an_unknown_preset_is_refused_wherever_one_is_named(name):
    plugged = plug(MARKED.base)
    calls = [lambda: preset(name), lambda: collect(MARKED.base, MARKED.federation, statistics=name)]
    if name is not None:  # which is how unlearn is told of none
        calls.append(lambda: unlearn(plugged, MARKED.store(), CLIENT, config=name))
    for call in calls:
        with pytest.raises(SettingError, match="default, paper, authors"):
            call()
    assert plugged.served is None


def test_a_preset_replaces_the_settings_of_the_filter_that_is_served(monkeypatch):
    def short(name, forget=()):
        return replace(preset(name, forget), config=replace(preset(name, forget).config, rank=4, steps=10))

    monkeypatch.setattr("fedup.unlearning.unlearn.preset", short)
    plugged, store = MARKED.serving("class", config=FilterConfig(rank=3, steps=5, class_policy="remap_client"))
    unlearn(plugged, store, SAMPLE, clients=MARKED.federation, config="paper")
    config = plugged.served.config
    assert (config.rank, config.filter, config.class_policy, config.guard) == (4, "bottleneck", "remap", False)
    assert plugged.served.erasure is None
    unlearn(plugged, store, CLIENT, clients=MARKED.federation, config="default")
    assert (plugged.served.config.rank, plugged.served.config.class_policy) == (4, "drop")
    assert plugged.served.erasure is not None
    centroids = collect(MARKED.base, MARKED.federation, forget=[CLASS], statistics="paper")
    assert 2 in {cell.label for cell in centroids.cells if cell.size}  # it is relabelled, and so in the fit
    report = unlearn(plug(MARKED.base), centroids, CLASS, config="paper")
    assert report.centroids_used == len(centroids.rows_of(centroids.cells))

"""Settings that belong together."""

from dataclasses import replace

import pytest
from tests._forced import unlearn
from tests._marked import marked

from fedup import FilterConfig, collect, plug
from fedup.errors import SettingError
from fedup.filters.fit import Trace
from fedup.filters.presets import preset
from fedup.unlearning.plan import Terms

MARKED = marked()
CLIENT, CLASS, SAMPLE = MARKED.requests["client"], MARKED.requests["class"], MARKED.requests["first"]


@pytest.mark.parametrize(
    ("forget", "ratio"),
    [
        ([CLIENT], 0.8),
        ([CLASS], 0.1),
        ([SAMPLE], 0.5),
        ([CLASS | SAMPLE], 0.5),
        ([CLIENT, CLASS], 0.8),
        ([CLASS, SAMPLE], 0.5),
        ([], 0.8),
        (CLASS, 0.1),
    ],
    ids=str,
)
def test_the_papers_ratio_depends_on_what_is_forgotten(forget, ratio):
    found = preset("paper", forget)
    assert (found.ratio, found.sigma, found.cache) == (ratio, 0.001, False)
    assert (found.config.filter, found.config.class_policy, found.config.guard) == ("bottleneck", "remap", False)
    if isinstance(forget, list):
        centroids = collect(MARKED.base, MARKED.federation, forget=iter(forget), statistics="paper")
        assert (centroids.how.ratio, centroids.how.sigma) == (ratio, 0.001)


@pytest.mark.parametrize(("forget", "ratio"), [(CLIENT, 0.8), (CLASS, 0.1), (SAMPLE, 0.5), ((), 0.8)], ids=str)
def test_the_authors_settings_are_those_of_their_code(forget, ratio):
    found = preset("authors", forget)
    assert (found.ratio, found.sigma, found.cache) == (ratio, 0.0, False)
    config = found.config
    assert (config.filter, config.class_policy, config.guard, config.gentle) == (
        "bottleneck",
        "remap_client",
        False,
        False,
    )
    assert (config.optimizer, config.lr, config.batch_size, config.epochs, config.alpha) == ("sgd", 0.005, 10, 50, 0.5)
    assert config.rank_for(512) == config.rank_for(128) == 32


@pytest.mark.parametrize("request_", [CLIENT, CLASS, SAMPLE], ids=str)
def test_a_request_is_answered_with_the_authors_preset(request_):
    centroids = collect(MARKED.base, MARKED.federation, forget=[request_], statistics="authors")
    assert centroids.how.sigma == 0.0
    plugged = plug(MARKED.base)
    trace = Trace(every=1)
    unlearn(plugged, centroids, request_, clients=MARKED.federation, config="authors", terms=Terms(trace=trace))
    used = len(centroids.rows_of(centroids.cells))
    assert len(trace.steps) == 50 * max(1, used // 10)
    assert plugged.served.erasure is None
    assert plugged.served.config == preset("authors", request_).config


def test_the_default_is_the_same_for_all_and_what_is_used_when_nothing_is_said():
    assert preset("default", CLIENT) == preset("default", SAMPLE) == preset()
    found = preset()
    assert (found.ratio, found.sigma, found.cache, found.config) == (0.8, 0.0, True, FilterConfig())
    how = collect(MARKED.base, MARKED.federation).how
    assert (how.ratio, how.sigma) == (0.8, 0.0)


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

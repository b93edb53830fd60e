"""Settings that belong together."""

import pytest
import torch
from tests._forced import unlearn
from tests._marked import Marked, same_bits

from fedup import FilterConfig, Forget, collect, plug
from fedup.errors import SettingError
from fedup.filters.fit import Trace
from fedup.filters.presets import preset
from fedup.unlearning.plan import Terms

MARKED = Marked()
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


@pytest.mark.parametrize("forget", [CLIENT, CLASS, SAMPLE], ids=str)
def test_the_default_is_the_same_for_all_and_what_is_used_when_nothing_is_said(forget):
    found = preset("default", forget)
    assert found == preset()
    assert (found.ratio, found.sigma, found.cache, found.config) == (0.8, 0.0, True, FilterConfig())
    how = collect(MARKED.base, MARKED.federation).how
    assert (how.ratio, how.sigma) == (0.8, 0.0)


@pytest.mark.parametrize("name", ["Paper", "papers", "", None])
def test_an_unknown_preset_is_refused_wherever_one_is_named(name):
    with pytest.raises(SettingError, match="default, paper, authors"):
        preset(name)
    with pytest.raises(SettingError, match="default, paper, authors"):
        collect(MARKED.base, MARKED.federation, statistics=name)
    if name is not None:  # which is how unlearn is told of none
        plugged = plug(MARKED.base)
        with pytest.raises(SettingError, match="default, paper, authors"):
            unlearn(plugged, MARKED.store(), CLIENT, config=name)
        assert plugged.served is None


def _narrow(monkeypatch):
    """The model here has 12 features at its cut: 32 directions, as in the presets, do not fit."""
    real = preset

    def narrow(name, forget=()):
        from dataclasses import replace

        found = real(name, forget)
        return replace(found, config=replace(found.config, rank=4, steps=10))

    monkeypatch.setattr("fedup.unlearning.unlearn.preset", narrow)


def test_a_request_answered_with_the_papers_preset_has_its_settings_and_no_eraser(monkeypatch):
    _narrow(monkeypatch)
    plugged = plug(MARKED.base)
    unlearn(plugged, MARKED.store(), SAMPLE, clients=MARKED.federation, config="paper")
    config = plugged.served.config
    assert (config.filter, config.class_policy, config.guard) == ("bottleneck", "remap", False)
    assert plugged.served.erasure is None
    usual = plug(MARKED.base)
    unlearn(usual, MARKED.store(), SAMPLE, clients=MARKED.federation, config="default")
    assert usual.served.erasure is not None
    assert not same_bits(usual, plugged)


def test_a_preset_replaces_the_settings_of_the_filter_that_is_served(monkeypatch):
    _narrow(monkeypatch)
    plugged, store = MARKED.serving("class", config=FilterConfig(rank=3, steps=5, class_policy="remap_client"))
    unlearn(plugged, store, CLIENT, config="default")
    assert (plugged.served.config.rank, plugged.served.config.class_policy) == (4, "drop")


def test_centroids_of_the_papers_preset_have_the_class_that_its_filter_relabels():
    centroids = collect(MARKED.base, MARKED.federation, forget=[CLASS], statistics="paper")
    assert 2 in {cell.label for cell in centroids.cells if cell.size}


def test_a_class_that_is_relabelled_is_in_the_fit(monkeypatch):
    """What the paper's protocol is, with the centroids that it needs."""
    _narrow(monkeypatch)
    centroids = collect(MARKED.base, MARKED.federation, forget=[CLASS], statistics="paper")
    plugged = plug(MARKED.base)
    report = unlearn(plugged, centroids, CLASS, config="paper")
    assert report.centroids_used == len(centroids.rows_of(centroids.cells))
    assert torch.equal(plugged.base(MARKED.x), MARKED.base(MARKED.x))
    assert plugged.requests == {Forget.classes([2])}

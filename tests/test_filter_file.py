"""Filters on disk: what is saved is served again; any other file is refused, and the served filter stays."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._forced import restore, unlearn
from tests._marked import FILTERS, marked, same_bits
from torch import nn

from fedup import Forget, collect, load_filter, plug, save_filter
from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError, FedUPError, FingerprintError, NotFittedError, RequestError, StaleFilterError

MARKED = marked()


@pytest.fixture(scope="module", params=FILTERS.values(), ids=FILTERS.keys())
def saved(request, tmp_path_factory):
    """A model that answers two requests, its centroids and the file of its filter; read only."""
    plugged, store = MARKED.serving("first", "second", config=request.param)
    path = tmp_path_factory.mktemp("filter") / "filter.safetensors"
    save_filter(plugged, path)
    return plugged, store, path


def _loaded(path, base=MARKED.base):
    plugged = plug(base)
    load_filter(plugged, path)
    return plugged


def _refused(path, serving, error=FedUPError):
    """Loading raises; what was served is served on, and where nothing was, nothing is."""
    served, answer, unfitted = serving.served, serving(MARKED.x), plug(serving.base, serving.cut)
    for plugged in (serving, unfitted):
        with pytest.raises(error):
            load_filter(plugged, path)
    assert serving.served is served and torch.equal(serving(MARKED.x), answer)
    assert unfitted.served is None


def test_a_filter_comes_back_bit_for_bit_with_all_that_is_known_of_it(saved, tmp_path):
    plugged, _, path = saved
    other = _loaded(path)
    assert same_bits(other, plugged) and torch.equal(other(MARKED.x), plugged(MARKED.x))
    served, before = other.served, plugged.served
    for name in ("requests", "config", "question", "base", "cut", "settings", "derived_from_forgotten"):
        assert getattr(served, name) == getattr(before, name), name
    assert (served.filter is None) == (before.filter is None)
    assert served.filter is None or served.filter.nonnegative
    with other.restored():
        assert torch.equal(other(MARKED.x), MARKED.base(MARKED.x))
    tensors, header = load_tensors(path, kind="filter")
    assert header["derived_from_forgotten"] is (before.erasure is not None)
    assert any(name.startswith("eraser.") for name in tensors) is (before.erasure is not None)
    if before.erasure is not None:
        assert (served.erasure.cut, served.erasure.about) == (before.erasure.cut, before.erasure.about)
        assert header["erasure"]["about"]["rows"] == 55
    save_filter(other, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_what_a_guard_adds_against_a_bias_is_saved_and_loaded(tmp_path):
    base = copy.deepcopy(MARKED.base)
    with torch.no_grad():
        base[4].bias[2] += 20
    plugged = plug(base)
    unlearn(
        plugged,
        collect(base, MARKED.federation, statistics="centroids"),
        Forget.classes([2]),
        config=FILTERS["bottleneck"],
    )
    assert plugged.served.filter.constant is not None
    save_filter(plugged, tmp_path / "f")
    loaded, nothing_passes = _loaded(tmp_path / "f", base), torch.full_like(MARKED.x, -1e9)
    assert torch.equal(loaded(MARKED.x), plugged(MARKED.x))
    for model in (loaded, copy.deepcopy(loaded)):
        assert torch.equal(model(nothing_passes), plugged(nothing_passes))


def test_requests_go_on_from_a_loaded_filter_as_from_the_fitted_one(saved):
    plugged, store, path = saved
    loaded, fitted, stores = _loaded(path), copy.deepcopy(plugged), [copy.deepcopy(store) for _ in range(2)]
    for model, own in zip((loaded, fitted), stores, strict=True):
        unlearn(model, own, MARKED.requests["client"], clients=MARKED.federation)
    assert same_bits(loaded, fitted)
    restore(loaded, stores[0], MARKED.requests["second"], clients=MARKED.federation)
    assert same_bits(loaded, MARKED.serving("first", "client", config=plugged.served.config)[0])


def test_a_file_that_would_bring_back_what_is_forgotten_is_refused(saved):
    serving, _ = MARKED.serving("class", config=FILTERS["bottleneck"])
    served = serving.served
    with pytest.raises(RequestError, match="would come back"):
        load_filter(serving, saved[2])
    assert serving.served is served


def test_a_filter_is_saved_and_loaded_for_its_own_base_and_cut_alone(tmp_path):
    path, base = tmp_path / "f", copy.deepcopy(MARKED.base)
    with pytest.raises(NotFittedError):
        save_filter(plug(base), path)
    assert not path.exists()
    plugged, elsewhere = plug(base), plug(base, cut="2")
    for model in (elsewhere, plugged):
        store = collect(base, MARKED.federation, cut=model.cut, statistics="centroids")
        unlearn(model, store, MARKED.requests["class"], config=FILTERS["bottleneck"])
        save_filter(model, path)
    _refused(path, elsewhere, FingerprintError)
    other = copy.deepcopy(base)
    nn.init.zeros_(base[4].bias)
    before = path.read_bytes()
    with pytest.raises(FingerprintError, match="made for base"):
        load_filter(plug(base), path)
    for use in (save_filter, load_filter):
        with pytest.raises(StaleFilterError):
            use(plugged, path)
    assert path.read_bytes() == before
    _loaded(path, other)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_damaged_file_is_refused_or_holds_the_very_same_filter(saved, tmp_path_factory, data):
    plugged, _, path = saved
    content, damaged = bytearray(path.read_bytes()), tmp_path_factory.mktemp("damaged") / "filter"
    where = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans(), label="truncated"):
        content = content[:where]
    else:
        content[where] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    damaged.write_bytes(content)
    loading = plug(MARKED.base)
    try:
        load_filter(loading, damaged)
    except ArtifactError:
        assert loading.served is None
    else:
        assert same_bits(loading, plugged)  # as 1e-05 is 1E-05


def _bottleneck_edits(header, tensors):
    yield lambda: header.pop("config")
    yield lambda: header["config"].update(alpha=2.0)
    yield lambda: header["config"].update(temperature=1.0)
    yield lambda: header["config"].update(filter="none")
    yield lambda: header.pop("requests")
    yield lambda: header.update(requests=[7])
    yield lambda: header.update(derived_from_forgotten=not header["derived_from_forgotten"])
    yield lambda: header.update(base="0" * 64)
    yield lambda: header.update(cut="0")
    if "encoder" in tensors:
        yield lambda: tensors.pop("encoder")
        yield lambda: tensors.update(bias=torch.zeros(16))
        yield lambda: tensors.update(decoder=torch.zeros(11, 4))
        yield lambda: tensors["encoder"].view(-1)[5].fill_(torch.nan)
        yield lambda: tensors["decoder"].view(-1)[5].fill_(torch.inf)
        yield lambda: header.pop("nonnegative")


def _eraser_edits(header, tensors):
    if header["erasure"] is None:
        return
    yield lambda: header.update(erasure=None)
    yield lambda: header.update(erasure="2")
    yield lambda: header["erasure"].update(cut="nowhere")
    yield lambda: header["erasure"].update(over="most")
    for name in ("cut", "over", "channels", "about"):
        yield lambda name=name: header["erasure"].pop(name)
    for name in [name for name in tensors if name.startswith("eraser.")]:
        yield lambda name=name: tensors.pop(name)
        yield lambda name=name: tensors.update({name: tensors[name][..., None]})
    yield lambda: tensors["eraser.reader"].view(-1)[3].fill_(torch.nan)
    yield lambda: tensors["eraser.concept"].view(-1)[3].fill_(torch.inf)
    yield lambda: tensors.update({"eraser.concept": torch.zeros(1, 9, 2)})
    for positions in ([1], [-1], [0.0]):
        yield lambda positions=positions: tensors.update({"eraser.positions": torch.tensor(positions)})


def test_a_file_whose_parts_do_not_fit_is_refused_though_its_hash_is_right(saved, tmp_path):
    serving, _, path = saved
    edited = tmp_path / "edited"
    tensors, header = load_tensors(path, kind="filter")
    save_tensors(edited, tensors, kind="filter", header=header)
    assert same_bits(_loaded(edited), serving)  # unchanged it is accepted
    count = len([*_bottleneck_edits(header, tensors), *_eraser_edits(header, tensors)])
    for i in range(count):
        tensors, header = load_tensors(path, kind="filter")
        [*_bottleneck_edits(header, tensors), *_eraser_edits(header, tensors)][i]()
        save_tensors(edited, tensors, kind="filter", header=header)
        _refused(edited, serving)

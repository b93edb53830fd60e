"""Filters on disk: what is saved is served again, and anything else is refused while the old filter stays."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests._forced import restore, unlearn
from tests._marked import KINDS, Marked, same_bits
from torch import nn

from fedup import (
    Federation,
    FilterConfig,
    Forget,
    collect,
    fingerprint,
    iid,
    load_filter,
    plug,
    save_centroids,
    save_filter,
)
from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError, FedUPError, FingerprintError, NotFittedError, StaleFilterError

CONFIG = FilterConfig(rank=4, steps=10, batch_size=32, seed=3, alpha=0.25)
REQUESTS = [Forget.clients([1]), Forget.classes([2])]


class Setting:
    """A base, its centroids, and a file with a filter for two requests."""

    def __init__(self, folder):
        torch.manual_seed(0)
        y = torch.arange(120) % 4
        self.x = torch.randn(120, 8)
        self.federation = Federation.split(self.x, y, iid(y, 3))
        self.base = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
        self.centroids = collect(self.base, self.federation)
        self.path = folder / "filter.safetensors"
        self.plugged = plug(self.base)
        for request in REQUESTS:
            unlearn(self.plugged, self.centroids, request, config=CONFIG)
        save_filter(self.plugged, self.path)

    def refuses(self, path, error=ArtifactError):
        """Loading raises, and another model goes on serving what it served."""
        serving = plug(self.base)
        unlearn(serving, self.centroids, Forget.clients([0]), config=CONFIG)
        served, answer = serving.served, serving(self.x)
        with pytest.raises(error):
            load_filter(serving, path)
        assert serving.served is served
        assert torch.equal(serving(self.x), answer)
        unfitted = plug(self.base)
        with pytest.raises(error):
            load_filter(unfitted, path)
        with pytest.raises(NotFittedError):
            unfitted(self.x)

    def edit(self, header=lambda header: None, tensors=lambda tensors: None):
        """Write the file again with another header or other tensors."""
        with safe_open(self.path, framework="pt") as file:
            found, text = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()["fedup"]  # noqa: SIM118
        fields = json.loads(text)
        header(fields)
        tensors(found)
        save_file(found, self.path, metadata={"fedup": json.dumps(fields)})


@pytest.fixture
def setting(tmp_path):
    return Setting(tmp_path)


def test_a_saved_filter_serves_the_same_bits_for_the_same_requests(setting):
    other = plug(setting.base)
    before = fingerprint(setting.base)
    load_filter(other, setting.path)
    assert torch.equal(other(setting.x), setting.plugged(setting.x))
    assert other.requests == setting.plugged.requests == set(REQUESTS)
    assert other.served.config == CONFIG
    assert other.served.filter.nonnegative
    assert fingerprint(setting.base) == before
    with other.restored():
        assert torch.equal(other(setting.x), setting.base(setting.x))


def test_what_a_guard_adds_against_a_bias_is_saved_and_loaded(setting, tmp_path):
    with torch.no_grad():
        setting.base[2].bias[2] += 5
    plugged, loaded = plug(setting.base), plug(setting.base)
    unlearn(plugged, collect(setting.base, setting.federation), Forget.classes([2]), config=CONFIG)
    assert plugged.served.filter.constant is not None
    save_filter(plugged, tmp_path / "f.safetensors")
    load_filter(loaded, tmp_path / "f.safetensors")
    assert torch.equal(loaded(setting.x), plugged(setting.x))
    nothing_passes = torch.full_like(setting.x, -1e9)
    assert 2 not in loaded(nothing_passes).argmax(1)
    assert copy.deepcopy(loaded)(nothing_passes).argmax(1).equal(plugged(nothing_passes).argmax(1))


def test_requests_go_on_from_a_loaded_filter_as_from_the_fitted_one(setting):
    other = plug(setting.base)
    load_filter(other, setting.path)
    for plugged in (other, setting.plugged):
        unlearn(plugged, setting.centroids, Forget.classes([0]))
    assert torch.equal(other(setting.x), setting.plugged(setting.x))


def test_sample_requests_come_back_from_the_file(setting):
    request = Forget.samples({2: setting.federation.client(2).train[:3], 0: setting.federation.client(0).train[:1]})
    unlearn(setting.plugged, setting.centroids, request, clients=setting.federation)
    save_filter(setting.plugged, setting.path)
    other = plug(setting.base)
    load_filter(other, setting.path)
    assert other.requests == {*REQUESTS, request}


def test_saving_twice_gives_the_same_bytes(setting):
    before = setting.path.read_bytes()
    save_filter(setting.plugged, setting.path)
    assert setting.path.read_bytes() == before


def test_without_a_filter_there_is_nothing_to_save(setting, tmp_path):
    with pytest.raises(NotFittedError):
        save_filter(plug(setting.base), tmp_path / "none.safetensors")
    assert not (tmp_path / "none.safetensors").exists()


def test_a_filter_of_a_base_that_changed_is_neither_saved_nor_loaded(setting):
    before, fresh = setting.path.read_bytes(), plug(setting.base)
    nn.init.zeros_(setting.base[2].bias)
    with pytest.raises(StaleFilterError):
        save_filter(setting.plugged, setting.path)
    assert setting.path.read_bytes() == before
    with pytest.raises(StaleFilterError):
        load_filter(fresh, setting.path)


def test_a_filter_of_another_base_is_refused(setting):
    other = copy.deepcopy(setting.base)
    nn.init.zeros_(other[2].bias)
    plugged = plug(other)
    with pytest.raises(FingerprintError, match="made for base"):
        load_filter(plugged, setting.path)
    assert plugged.served is None


def test_a_filter_of_another_cut_is_refused(setting, tmp_path):
    elsewhere = plug(setting.base, cut="0")
    unlearn(elsewhere, collect(setting.base, setting.federation, cut="0"), REQUESTS[0], config=CONFIG)
    save_filter(elsewhere, tmp_path / "elsewhere.safetensors")
    setting.refuses(tmp_path / "elsewhere.safetensors", FingerprintError)


def test_every_truncation_is_refused(setting, tmp_path):
    whole, cut = setting.path.read_bytes(), tmp_path / "cut.safetensors"
    serving = plug(setting.base)
    for length in [0, 1, 7, 8, 9, 100, *range(200, len(whole), 97), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ArtifactError):
            load_filter(serving, cut)
    assert serving.served is None


def test_files_that_are_no_filters_are_refused(setting, tmp_path):
    (tmp_path / "text").write_text("a filter, honestly")
    save_file({"encoder": torch.zeros(4, 16), "decoder": torch.zeros(16, 4)}, tmp_path / "foreign")
    save_centroids(setting.centroids, tmp_path / "centroids")
    torch.save(setting.plugged.served.filter.state_dict(), tmp_path / "pickle")
    for name in ("text", "foreign", "centroids", "pickle", "nowhere", "."):
        setting.refuses(tmp_path / name)


HEADERS = {
    "base left out": lambda header: header.pop("base"),
    "base of another": lambda header: header.update(base="0" * 64),
    "cut left out": lambda header: header.pop("cut"),
    "cut of another": lambda header: header.update(cut="0"),
    "settings left out": lambda header: header.pop("config"),
    "settings out of range": lambda header: header["config"].update(alpha=2.0),
    "unknown setting": lambda header: header["config"].update(temperature=1.0),
    "a setting of another type": lambda header: header["config"].update(steps="many"),
    "requests left out": lambda header: header.pop("requests"),
    "no request": lambda header: header.update(requests=[]),
    "requests that are none": lambda header: header.update(requests=[7]),
    "ids that are text": lambda header: header["requests"][0].update(clients=["1"]),
    "sign left out": lambda header: header.pop("nonnegative"),
    "sign that is text": lambda header: header.update(nonnegative="false"),
    "rank of another filter": lambda header: header["config"].update(rank=5),
    "another kind": lambda header: header.update(kind="centroids"),
    "a later version": lambda header: header.update(version=2),
}
TENSORS = {
    "encoder left out": lambda tensors: tensors.pop("encoder"),
    "one too many": lambda tensors: tensors.update(bias=torch.zeros(16)),
    "not a matrix": lambda tensors: tensors.update(encoder=torch.zeros(64)),
    "shapes that do not fit": lambda tensors: tensors.update(decoder=torch.zeros(15, 4)),
    "features of another width": lambda tensors: tensors.update(encoder=torch.zeros(4, 9), decoder=torch.zeros(9, 4)),
    "NaN": lambda tensors: tensors["encoder"].view(-1)[5].fill_(torch.nan),
    "infinite": lambda tensors: tensors["decoder"].view(-1)[5].fill_(torch.inf),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS.keys())
def test_an_edited_header_is_refused(setting, change):
    setting.edit(header=change)
    setting.refuses(setting.path)


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS.keys())
def test_edited_tensors_are_refused(setting, change):
    setting.edit(tensors=change)
    setting.refuses(setting.path)


def test_a_flipped_bit_in_the_weights_is_refused(setting):
    content = bytearray(setting.path.read_bytes())
    content[-10] ^= 0x10
    setting.path.write_bytes(content)
    setting.refuses(setting.path)


@pytest.mark.parametrize("text", ["", "7", "[]", "{", "[" * 100_000], ids=["empty", "number", "list", "cut", "deep"])
def test_a_header_that_is_no_object_is_refused(setting, text):
    save_file(setting.plugged.served.filter.state_dict(), setting.path, metadata={"fedup": text})
    setting.refuses(setting.path)


def test_an_edit_that_changes_nothing_is_accepted(setting):
    """Proof that the refusals above are due to the edits."""
    setting.edit()
    other = plug(setting.base)
    load_filter(other, setting.path)
    assert torch.equal(other(setting.x), setting.plugged(setting.x))


# An eraser, alone or with a bottleneck


@pytest.fixture(scope="module")
def marked():
    return Marked()


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def erased(marked, request, tmp_path):
    """A model that serves an eraser, and its file."""
    plugged, store = marked.serving("first", "second", config=request.param)
    save_filter(plugged, tmp_path / "erased.safetensors")
    return plugged, store, tmp_path / "erased.safetensors"


def _signed(path, header=lambda header: None, tensors=lambda tensors: None):
    """Write the file again, changed, with the hash that goes with it."""
    found, fields = load_tensors(path, kind="filter")
    header(fields)
    tensors(found)
    save_tensors(path, found, kind="filter", header=fields)


def _refused(marked, path, error=ArtifactError):
    """Loading raises; what was served is served on, and where nothing was, nothing is."""
    serving, _ = marked.serving("first")
    served, answer = serving.served, serving(marked.x)
    with pytest.raises(error):
        load_filter(serving, path)
    assert serving.served is served
    assert torch.equal(serving(marked.x), answer)
    unfitted = plug(marked.base)
    with pytest.raises(error):
        load_filter(unfitted, path)
    assert unfitted.served is None


def test_an_eraser_comes_back_bit_for_bit_with_all_that_is_known_of_it(marked, erased):
    plugged, _, path = erased
    other = plug(marked.base)
    load_filter(other, path)
    assert same_bits(other, plugged)
    assert torch.equal(other(marked.x), plugged(marked.x))
    served, before = other.served, plugged.served
    assert (served.requests, served.config, served.erasure.cut) == (
        before.requests,
        before.config,
        before.erasure.cut,
    )
    assert (served.question, served.erasure.about) == (before.question, before.erasure.about)
    assert served.erasure.filter.rank == 2
    assert (served.filter is None) == (before.filter is None)
    with other.restored():
        assert torch.equal(other(marked.x), marked.base(marked.x))
    first = path.read_bytes()
    save_filter(other, path)
    assert path.read_bytes() == first


def test_a_file_with_an_eraser_says_so_and_another_does_not(marked, erased, setting):
    _, header = load_tensors(erased[2], kind="filter")
    assert header["derived_from_forgotten"] is True
    assert header["erasure"]["about"]["rows"] == 55
    tensors, header = load_tensors(setting.path, kind="filter")
    assert header["derived_from_forgotten"] is False
    assert header["erasure"] is None
    assert not any(name.startswith("eraser.") for name in tensors)


def test_requests_go_on_from_a_loaded_eraser_without_asking_again(marked, erased):
    plugged, store, path = erased
    other = plug(marked.base)
    load_filter(other, path)
    stores = copy.deepcopy(store), store
    for model, own in zip((other, plugged), stores, strict=True):
        before = model.served.erasure
        kind = model.served.config.filter
        clients = marked.federation if kind != "auto" else None  # a forced eraser is one for every kind of request
        unlearn(model, own, marked.requests["client"], clients=clients)
        assert (model.served.erasure is before) == (kind == "auto")
    assert same_bits(other, plugged)
    restore(other, stores[0], marked.requests["second"], clients=marked.federation)
    expected, _ = marked.serving("first", "client", config=plugged.served.config)
    assert same_bits(other, expected)


def test_a_loaded_eraser_is_not_made_again_for_the_same_question(marked, tmp_path):
    plugged, store = marked.serving("first", "client and class")
    save_filter(plugged, tmp_path / "f")
    other = plug(marked.base)
    load_filter(other, tmp_path / "f")
    loaded = other.served.erasure
    assert loaded is not None
    unlearn(other, store, marked.requests["client"])  # covered already; no client is at hand
    assert other.served.erasure is loaded


def test_every_truncation_of_a_file_with_an_eraser_is_refused(marked, erased, tmp_path):
    whole, short = erased[2].read_bytes(), tmp_path / "short"
    serving, _ = marked.serving("first")
    served = serving.served
    for length in [0, 8, 100, *range(300, len(whole), 211), len(whole) - 1]:
        short.write_bytes(whole[:length])
        with pytest.raises(ArtifactError):
            load_filter(serving, short)
    assert serving.served is served


def _drop_eraser(tensors):
    for name in [name for name in tensors if name.startswith("eraser.")]:
        tensors.pop(name)


ERASER_HEADERS = {
    "no description": lambda header: header.update(erasure=None),
    "description left out": lambda header: header.pop("erasure"),
    "no place": lambda header: header["erasure"].pop("cut"),
    "unknown place": lambda header: header["erasure"].update(cut="nowhere"),
    "no manner": lambda header: header["erasure"].pop("over"),
    "unknown manner": lambda header: header["erasure"].update(over="most"),
    "no width": lambda header: header["erasure"].pop("channels"),
    "not marked": lambda header: header.update(derived_from_forgotten=False),
    "nothing about it": lambda header: header["erasure"].pop("about"),
    "description that is text": lambda header: header.update(erasure="2"),
    "settings of no filter": lambda header: header["config"].update(filter="none"),
}
ERASER_TENSORS = {
    "no weights": _drop_eraser,
    "a part left out": lambda tensors: tensors.pop("eraser.offset"),
    "NaN": lambda tensors: tensors["eraser.reader"].view(-1)[3].fill_(torch.nan),
    "infinite": lambda tensors: tensors["eraser.concept"].view(-1)[3].fill_(torch.inf),
}
ILL_FITTING = {
    "a position beyond the last": lambda tensors: tensors.update({"eraser.positions": torch.tensor([7])}),
    "a position before the first": lambda tensors: tensors.update({"eraser.positions": torch.tensor([-1])}),
    "positions that are no whole numbers": lambda tensors: tensors.update({"eraser.positions": torch.tensor([0.0])}),
    "features of another width": lambda tensors: tensors.update({"eraser.concept": torch.zeros(1, 9, 2)}),
}


@pytest.mark.parametrize("change", ERASER_HEADERS.values(), ids=ERASER_HEADERS.keys())
def test_a_signed_file_with_an_eraser_and_a_wrong_header_is_refused(marked, erased, change):
    _signed(erased[2], header=change)
    _refused(marked, erased[2], FedUPError)


@pytest.mark.parametrize("change", ERASER_TENSORS.values(), ids=ERASER_TENSORS.keys())
def test_a_signed_file_with_wrong_weights_of_an_eraser_is_refused(marked, erased, change):
    _signed(erased[2], tensors=change)
    _refused(marked, erased[2])


@pytest.mark.parametrize("change", ILL_FITTING.values(), ids=ILL_FITTING.keys())
def test_a_signed_file_whose_eraser_does_not_fit_the_cut_is_refused(marked, erased, change):
    _signed(erased[2], tensors=change)
    _refused(marked, erased[2])


@pytest.mark.parametrize("change", ILL_FITTING.values(), ids=ILL_FITTING.keys())
def test_an_eraser_that_does_not_fit_the_cut_is_refused_where_the_hash_was_left(marked, erased, change):
    """As an editor leaves it who does not know of the hash."""
    path = erased[2]
    with safe_open(path, framework="pt") as file:
        found, text = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()["fedup"]  # noqa: SIM118
    change(found)
    save_file(found, path, metadata={"fedup": text})
    _refused(marked, path)


def test_a_signed_file_that_is_unchanged_is_accepted(marked, erased):
    """Proof that the refusals above are due to the changes."""
    plugged, _, path = erased
    _signed(path)
    other = plug(marked.base)
    load_filter(other, path)
    assert same_bits(other, plugged)

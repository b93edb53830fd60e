"""Weights on disk: the same bits come back into the same architecture, and anything else is refused."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from fedup import collect, fingerprint, save_centroids
from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError, FingerprintError
from fedup.serving.model_file import load_model, save_model


def build(seed=0, features=8):
    """A network with buffers: running statistics, a count of batches, and one that is not persistent."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, features), nn.BatchNorm1d(features), nn.ReLU(), nn.Linear(features, 3))
        model.register_buffer("steps", torch.tensor([seed]), persistent=False)
        return model


@pytest.fixture(scope="module")
def trained():
    """Weights and statistics that are not the initial ones."""
    model = build(1)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for _ in range(3):
            model(torch.randn(16, 6))
        model[0].weight.data[0] = torch.tensor([0.0, -0.0, 1e-42, torch.inf, -torch.inf, 1e38])
    return model


@pytest.fixture
def path(tmp_path, trained):
    save_model(trained, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture(scope="module")
def content(tmp_path_factory, trained):
    path = tmp_path_factory.mktemp("whole") / "file"
    save_model(trained, path)
    return path.read_bytes()


def bits(model):
    return {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name].flatten().view(torch.uint8), second[name].flatten().view(torch.uint8)) for name in first
    )


def refused(path, error=ArtifactError, match=None):
    """Loading raises, and the model keeps its own weights."""
    model = build(2)
    before = bits(model)
    with pytest.raises(error, match=match):
        load_model(model, path)
    assert same(bits(model), before)


def test_all_weights_and_buffers_come_back_bit_for_bit_into_the_models_own_tensors(trained, path):
    model = build(2)
    assert not same(bits(model), bits(trained))
    weight, mean = model[0].weight, model[1].running_mean
    assert load_model(model, path) is model
    assert same(bits(model), bits(trained))
    assert (int(model[1].num_batches_tracked), int(model.steps)) == (3, 1)
    assert fingerprint(model) == fingerprint(trained)
    assert not model.training
    assert model[0].weight is weight and model[1].running_mean is mean  # an optimizer or a view sees the new weights
    assert weight.requires_grad


def test_saving_changes_no_bit_and_not_the_mode_and_is_repeatable(trained, path):
    before, content = bits(trained), path.read_bytes()
    save_model(trained.train(), path)
    assert trained.training
    assert same(bits(trained), before)
    assert path.read_bytes() == content


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_of_numbers_come_back_bit_for_bit(tmp_path, dtype):
    model = build(1).to(dtype)
    save_model(model, tmp_path / "file")
    assert same(bits(load_model(build(2).to(dtype), tmp_path / "file")), bits(model))
    refused(tmp_path / "file", FingerprintError, rf"is \(8,\) of {dtype} in the file and \(8,\) of torch.float32")


def test_tied_weights_stay_tied(tmp_path):
    def tied(seed):
        model = build(seed)
        model.add_module("again", model[0])
        return model

    first, second = tied(1), tied(2)
    save_model(first, tmp_path / "file")
    load_model(second, tmp_path / "file")
    assert fingerprint(second) == fingerprint(first)
    assert second.again.weight is second[0].weight


def test_another_architecture_is_refused_by_what_differs_and_changes_nothing(path):
    another = r"another architecture: .* in the file and .* in the model"
    four_classes = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    four_classes.register_buffer("steps", torch.tensor([0]))
    for model, message in (
        (build(1, features=9), another),
        (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.ReLU(), nn.Linear(8, 3)), another),
        (nn.Sequential(*build(1), nn.Linear(3, 3)), another),
        (nn.Sequential(nn.Identity(), *build(1)), another),
        (nn.ReLU(), another),
        (four_classes, r"3\.bias is \(3,\) of torch.float32 in the file and \(4,\)"),
    ):
        before = bits(model)
        with pytest.raises(FingerprintError, match=message):
            load_model(model, path)
        assert same(bits(model), before)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_a_truncated_or_flipped_file_is_refused_and_changes_nothing(content, tmp_path_factory, data):
    damaged = bytearray(content)
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del damaged[place:]
    path = tmp_path_factory.mktemp("damaged") / "file"
    path.write_bytes(damaged)
    refused(path)


def test_files_that_are_no_models_are_refused(path, tmp_path, small_model, digits_federation):
    save_centroids(collect(small_model, digits_federation), tmp_path / "centroids")
    save_file(copy.deepcopy(bits(build(1))), tmp_path / "foreign")
    torch.save(build(1).state_dict(), tmp_path / "pickle")
    tensors, header = load_tensors(path, kind="model")
    rest = {key: value for key, value in header.items() if key not in ("kind", "version", "fingerprint")}
    save_tensors(tmp_path / "without", tensors, kind="model", header=rest)
    save_tensors(tmp_path / "another", tensors, kind="model", header={**rest, "fingerprint": "0" * 64})
    for name in ("centroids", "foreign", "pickle", "nowhere", "."):
        refused(tmp_path / name)
    for name in ("without", "another"):
        refused(tmp_path / name, match="do not have the fingerprint stored with them")

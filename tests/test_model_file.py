"""Weights on disk: the same bits come back into the same architecture, and anything else is refused."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from fedup import collect, fingerprint
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


@pytest.fixture
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


def test_all_weights_and_buffers_come_back_bit_for_bit(trained, path):
    model = build(2)
    assert not same(bits(model), bits(trained))
    assert load_model(model, path) is model
    assert same(bits(model), bits(trained))
    assert int(model[1].num_batches_tracked) == 3
    assert int(model.steps) == 1
    assert fingerprint(model) == fingerprint(trained)
    assert not model.training


def test_loading_keeps_the_models_own_tensors(path):
    """An optimizer or a view that holds them sees the new weights."""
    model = build(2)
    weight, mean = model[0].weight, model[1].running_mean
    load_model(model, path)
    assert model[0].weight is weight
    assert model[1].running_mean is mean
    assert weight.requires_grad


def test_saving_changes_no_bit_and_not_the_mode_and_is_repeatable(trained, path):
    before, content = bits(trained), path.read_bytes()
    trained.train()
    save_model(trained, path)
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


OTHERS = {
    "wider": lambda: build(1, features=9),
    "without statistics": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.ReLU(), nn.Linear(8, 3)),
    "without a bias": lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "with one more layer": lambda: nn.Sequential(*build(1), nn.Linear(3, 3)),
    "with other names": lambda: nn.Sequential(nn.Identity(), *build(1)),
    "without weights": lambda: nn.ReLU(),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_another_architecture_is_refused_and_changes_nothing(path, other):
    model = other()
    before = bits(model)
    with pytest.raises(FingerprintError, match=r"another architecture: .* in the file and .* in the model"):
        load_model(model, path)
    assert same(bits(model), before)


def test_a_refusal_names_what_differs(path):
    refuses = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    refuses.register_buffer("steps", torch.tensor([0]))
    with pytest.raises(FingerprintError, match=r"3\.bias is \(3,\) of torch.float32 in the file and \(4,\)"):
        load_model(refuses, path)


def test_every_truncation_is_refused(path):
    whole = path.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, *range(200, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(path)


def test_no_flipped_bit_gives_other_weights(path):
    whole = path.read_bytes()
    for place in [*range(0, len(whole), 31), len(whole) - 1]:
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        refused(path)


def test_weights_with_another_fingerprint_than_the_stored_one_are_refused(path):
    tensors, header = load_tensors(path, kind="model")
    rest = {key: value for key, value in header.items() if key not in ("kind", "version", "fingerprint")}
    for stored in ({}, {"fingerprint": "0" * 64}):
        save_tensors(path, tensors, kind="model", header={**rest, **stored})
        with pytest.raises(ArtifactError, match="do not have the fingerprint stored with them"):
            load_model(build(2), path)


def test_files_that_are_no_models_are_refused(path, tmp_path, small_model, digits_federation):
    from fedup import save_centroids

    save_centroids(collect(small_model, digits_federation), tmp_path / "centroids")
    save_file(copy.deepcopy(bits(build(1))), tmp_path / "foreign")
    torch.save(build(1).state_dict(), tmp_path / "pickle")
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["fedup"])
    save_file(bits(build(1)), tmp_path / "other weights", metadata={"fedup": json.dumps(header)})
    for name in ("centroids", "foreign", "pickle", "other weights", "nowhere", "."):
        refused(tmp_path / name)

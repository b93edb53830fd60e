"""The four phases on a GPU; skipped where there is none (CI has none)."""

import copy

import pytest
import torch
from tests._forced import restore, unlearn
from tests._marked import KINDS, Marked
from torch import nn

from fedup import Federation, Forget, Runtime, collect, dirichlet, federate, plug
from fedup.statistics.centroids import CentroidConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")


def make_federation():
    source = torch.Generator().manual_seed(0)
    y = torch.arange(2000) % 5
    x = torch.randn(2000, 24, generator=source)
    x[torch.arange(2000), y] += 3
    return Federation.split(x, y, dirichlet(y, 6))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))


def test_training_on_cuda_equals_training_on_cpu_within_tolerance():
    federation = make_federation()
    on_cpu = federate(make_model(), federation, rounds=3).model
    on_gpu = federate(make_model(), federation, rounds=3, runtime=Runtime(device="cuda")).model
    for name, value in on_cpu.state_dict().items():
        torch.testing.assert_close(on_gpu.state_dict()[name].cpu(), value, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", ["client", "class", "sample"])
def test_forget_and_restore_on_cuda(kind):
    federation = make_federation()
    model = federate(make_model(), federation, rounds=5, runtime=Runtime(device="cuda")).model
    centroids = collect(model, federation, statistics=CentroidConfig(ratio=0.5))
    request = {
        "client": Forget.clients([1]),
        "class": Forget.classes([2]),
        "sample": Forget.samples({1: federation.clients[1].train[:20].tolist()}),
    }[kind]
    x = federation.x.cuda()
    original = model(x)
    plugged = plug(model)
    unlearn(plugged, centroids, request, clients=federation)
    answers = plugged(x)
    assert not torch.equal(answers, original)
    if kind == "class":
        assert (answers.argmax(1) == 2).float().mean() <= 0.01
    with plugged.restored():
        assert torch.equal(plugged(x), original)
    restore(plugged, centroids, request)
    assert torch.equal(plugged.unplug()(x), original)


def test_centroids_on_cuda_have_the_sizes_and_the_quality_of_those_on_cpu():
    federation = make_federation()
    model = federate(make_model(), federation, rounds=2).model
    on_cpu = collect(model, federation, statistics=CentroidConfig(ratio=0.3))
    on_gpu = collect(model.cuda(), federation, statistics=CentroidConfig(ratio=0.3))
    assert on_gpu.cells == on_cpu.cells
    torch.testing.assert_close(on_gpu.vectors.cpu().mean(0), on_cpu.vectors.mean(0), atol=1e-2, rtol=1e-2)


def test_a_run_folder_is_served_on_either_device(tmp_path):
    folder = str(tmp_path / "run")
    small = ("--rows", "400", "--clients", "4", "--rounds", "3")
    _fedup("train", "--run", folder, "--device", "cuda", *small)
    _fedup("collect", "--run", folder, "--device", "cuda")
    _fedup("unlearn", "--run", folder, "--device", "cuda", "--class", "7", "--force")
    _fedup("unlearn", "--run", folder, "--client", "2", "--force")  # on the CPU, from what the GPU wrote
    _fedup("restore", "--run", folder, "--device", "cuda", "R1", "--force")
    _fedup("evaluate", "--run", folder, "--device", "cuda")
    _fedup("verify", "--run", folder)


def _fedup(*arguments):
    from fedup.cli._app import app

    assert app(list(arguments), standalone_mode=False) in (None, 0)


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_eraser_on_cuda_does_what_one_on_cpu_does(kind):
    marked = Marked()
    answers = []
    for device in ("cpu", "cuda"):
        model, federation = copy.deepcopy(marked.base).to(device), marked.federation.to(device)
        plugged = plug(model)
        store = collect(model, federation, statistics=CentroidConfig(ratio=0.5))
        unlearn(plugged, store, marked.requests["first"], clients=federation, config=KINDS[kind])
        answers.append(plugged(marked.x.to(device)).cpu())
        with plugged.restored():
            assert torch.equal(plugged(marked.x.to(device)), model(marked.x.to(device)))
    torch.testing.assert_close(answers[1], answers[0], atol=0.1, rtol=0.1)

"""Views share every tensor and nothing else; a fingerprint sees every bit."""

import copy

import pytest
import torch
from torch import nn

from fedup import fingerprint
from fedup.models.views import shared_view, tensors


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def test_a_view_shares_every_parameter_and_buffer():
    model = _model()
    pairs = list(zip(tensors(model), tensors(shared_view(model)), strict=True))
    assert len(pairs) == 6 + 3
    assert all(mine is shared for mine, shared in pairs)


def test_a_frozen_view_shares_the_memory_and_takes_no_gradient():
    model, x = _model(), torch.randn(5, 4, requires_grad=True)
    view = shared_view(model, frozen=True)
    pairs = list(zip(tensors(model), tensors(view), strict=True))
    assert all(mine.data_ptr() == shared.data_ptr() for mine, shared in pairs)
    view(x).sum().backward()
    assert x.grad.any()
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    nn.init.ones_(model[3].bias)
    assert torch.equal(view[3].bias, torch.ones(3))


def test_a_view_has_its_own_modules_mode_and_hooks():
    model = _model().train()
    view = shared_view(model)
    view[3].register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    assert not set(model.modules()) & set(view.modules())
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in view.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("frozen", [False, True])
def test_tied_weights_stay_tied_in_a_view(frozen):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    view = shared_view(model, frozen=frozen)
    assert view[0].weight is view[1].weight
    assert view[0].weight.data_ptr() == model[0].weight.data_ptr()


def test_the_fingerprint_depends_on_content_alone():
    model = _model()
    before = fingerprint(model)
    model.train().requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    assert fingerprint(model) == fingerprint(copy.deepcopy(model)) == fingerprint(shared_view(model)) == before
    one, other = nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2)
    other.load_state_dict(one.state_dict())
    assert fingerprint(one) == fingerprint(other.to(memory_format=torch.channels_last))


def test_one_changed_element_anywhere_changes_the_fingerprint():
    model = _model()
    seen = {fingerprint(model)}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.view(-1)[-1] += 1
            seen.add(fingerprint(model))
    assert len(seen) == 1 + len(model.state_dict())


def test_shape_type_and_the_sign_of_a_zero_are_part_of_the_fingerprint():
    models = [
        *(nn.Linear(*shape, bias=False) for shape in ((2, 3), (3, 2), (6, 1), (2, 3))),
        nn.Linear(2, 3, bias=False).double(),
    ]
    for model in models:
        nn.init.zeros_(model.weight)
    nn.init.constant_(models[3].weight, -0.0)
    assert len(set(map(fingerprint, models))) == len(models)


def test_names_are_part_of_the_fingerprint_and_their_order_is_not():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    forwards, backwards = nn.ModuleDict(), nn.ModuleDict()
    forwards["a"], forwards["b"] = first, second
    backwards["b"], backwards["a"] = second, first
    swapped = nn.ModuleDict({"a": second, "b": first})
    assert fingerprint(forwards) == fingerprint(backwards) != fingerprint(swapped)


def test_every_element_type_has_a_fingerprint():
    for dtype in (torch.float16, torch.bfloat16, torch.bool, torch.int64):
        model = nn.Module()
        model.register_buffer("table", torch.tensor([0, 1, 1]).to(dtype))
        before = fingerprint(model)
        model.table[0] = 1
        assert fingerprint(model) != before, dtype

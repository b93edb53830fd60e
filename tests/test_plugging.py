"""Serving through a filter and restoring: the base is read-only, and no answer is ever unfiltered by accident."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._forced import restore, unlearn
from tests._marked import FILTERS, KINDS, marked
from torch import nn

from fedup import Federation, FilterConfig, Forget, PluggedModel, collect, fingerprint, iid, plug, purge
from fedup.errors import CutError, FingerprintError, PlugError, StaleFilterError
from fedup.serving.filter_file import load_filter, save_filter

CONFIG = FilterConfig(rank=4, steps=15, batch_size=32)
FIRST, SECOND = Forget.clients([1]), Forget.classes([2])
MARKED = marked()
every_kind = pytest.mark.parametrize("config", FILTERS.values(), ids=FILTERS.keys())


class Setting:
    """A small model with BatchNorm in eval mode, a federation, its centroids, and some inputs."""

    def __init__(self, base=None):
        torch.manual_seed(0)
        y = torch.arange(120) % 4
        x = torch.randn(120, 8) + 3 * nn.functional.one_hot(y, 8)
        self.federation = Federation.split(x, y, iid(y, 3))
        self.base = base or nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.base(x)  # running statistics of its own
        self.base.eval()
        self.x = x[:16]
        self.centroids = collect(self.base, self.federation, statistics="centroids")

    def plugged(self, request=FIRST):
        plugged = plug(self.base)
        unlearn(plugged, self.centroids, request, config=CONFIG)
        return plugged


@pytest.fixture
def setting():
    return Setting()


def _in_threads(*functions):
    """Run them at once; give back what they returned, raise what they raised."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [running.result() for running in [pool.submit(function) for function in functions]]


def _hooks(model):
    return [hook for module in model.modules() for hook in (*module._forward_pre_hooks, *module._forward_hooks)]


@every_kind
def test_filters_act_at_their_cuts_the_eraser_first(config):
    plugged, _ = MARKED.serving("first", config=config)
    served, base = plugged.served, MARKED.base
    eraser = served.erasure.filter if served.erasure else nn.Identity()
    bottleneck, early = served.filter or nn.Identity(), base[:2](MARKED.x)
    if served.erasure and served.erasure.cut == "2":
        expected = base[4](bottleneck(base[2:4](eraser(early))))
    else:
        expected = base[4](bottleneck(eraser(base[2:4](early))))
    assert torch.equal(plugged(MARKED.x), expected)
    assert len(_hooks(plugged.view())) == len(served.placed) == (served.filter is not None) + bool(served.erasure)
    assert served.derived_from_forgotten is bool(served.erasure)
    sizes = [tensor.numel() * tensor.element_size() for _, f in served.placed for tensor in f.state_dict().values()]
    assert served.size_bytes == sum(sizes)


@every_kind
def test_a_filtered_model_is_restored_bit_for_bit_and_unplugged_without_a_trace(config):
    original, before = MARKED.base(MARKED.x), fingerprint(MARKED.base)
    plugged, _ = MARKED.serving("first", config=config)
    filtered = plugged(MARKED.x)
    assert not torch.allclose(filtered, original)
    with plugged.restored() as model:
        assert torch.equal(plugged(MARKED.x), original) and torch.equal(model(MARKED.x), original)
    assert torch.equal(plugged(MARKED.x), filtered)
    assert torch.equal(MARKED.base(MARKED.x), original)  # while it is plugged, too
    with pytest.raises(PlugError, match="plugged already"):
        plug(plugged)
    base = plugged.unplug()
    assert base is MARKED.base and _hooks(base) == []
    assert torch.equal(base(MARKED.x), original) and fingerprint(base) == before
    assert all(weight.requires_grad and weight.grad is None for weight in base.parameters())
    for use in (
        lambda: plugged(MARKED.x),
        plugged.unplug,
        lambda: plugged.restored().__enter__(),
        lambda: plugged.base,
    ):
        with pytest.raises(PlugError):
            use()


def test_serving_without_any_filter_is_refused_and_the_served_one_stays():
    plugged, _ = MARKED.serving("first", config=KINDS["eraser alone"])
    served, answer = plugged.served, plugged(MARKED.x)
    with pytest.raises(PlugError, match="no filter"):
        plugged.serve(replace(served, erasure=None))
    with pytest.raises(CutError, match="nowhere"):
        plugged.serve(replace(served, erasure=replace(served.erasure, cut="nowhere")))
    assert plugged.served is served and torch.equal(plugged(MARKED.x), answer)


def test_a_filter_served_inside_restored_acts_only_afterwards(setting):
    plugged, other = setting.plugged(FIRST), setting.plugged(SECOND)
    with plugged.restored():
        plugged.serve(other.served)
        assert torch.equal(plugged(setting.x), setting.base(setting.x))
    assert torch.equal(plugged(setting.x), other(setting.x))


def _whole_life(setting, path):
    """All that can be done with a plugged model."""
    plugged = setting.plugged(FIRST)
    unlearn(plugged, setting.centroids, SECOND)
    sample = Forget.samples({0: setting.federation.client(0).train[:3]})
    unlearn(plugged, setting.centroids, sample, clients=setting.federation)
    plugged.train()
    plugged.requires_grad_(True)
    plugged(setting.x)
    save_filter(plugged, path)
    purge(plugged, setting.centroids)
    restore(plugged, setting.centroids, SECOND, clients=setting.federation)
    load_filter(plugged, path)
    with plugged.restored():
        plugged(setting.x)
    return plugged


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_the_base_is_never_touched(setting, tmp_path, training):
    base = setting.base.train(training)
    for weight in base.parameters():
        weight.grad = torch.ones_like(weight)
    print_before, keys, tensors = fingerprint(base), list(base.state_dict()), list(map(id, base.parameters()))
    attributes = {name: set(vars(module)) for name, module in base.named_modules()}
    _whole_life(setting, tmp_path / "filter.safetensors")
    assert fingerprint(base) == print_before and list(base.state_dict()) == keys
    assert list(map(id, base.parameters())) == tensors
    assert all(module.training == training for module in base.modules())
    assert all(torch.equal(weight.grad, torch.ones_like(weight)) for weight in base.parameters())
    assert all(weight.requires_grad for weight in base.parameters())
    assert {name: set(vars(module)) for name, module in base.named_modules()} == attributes
    for module in base.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks
        assert not module._backward_hooks


def test_neither_gradients_nor_training_nor_moves_of_the_plugged_model_reach_the_base(setting):
    plugged, inputs = setting.plugged(), setting.x.clone().requires_grad_()
    plugged(inputs).sum().backward()
    assert inputs.grad.abs().sum() > 0
    assert all(weight.grad is None for weight in setting.base.parameters())
    expected, statistics = plugged(setting.x), setting.base[1].running_mean.clone()
    assert plugged.train() is plugged and not plugged.training
    assert torch.equal(plugged(setting.x), expected)
    assert torch.equal(setting.base[1].running_mean, statistics)

    assert list(plugged.parameters()) == list(plugged.buffers()) == list(plugged.children()) == []
    assert plugged.state_dict() == {}
    for move in (plugged.double, plugged.half, lambda: plugged.to("cpu"), lambda: plugged.to(torch.float64)):
        with pytest.raises(PlugError, match="move the base"):
            move()


class Deep(nn.Module):
    """Layers three levels down, with a place that is empty, a buffer that is not saved, and a weight used twice."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.ModuleDict({"one": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))}))
        self.skip = None
        self.body.register_module("skip", None)
        self.body.register_parameter("none", None)
        self.register_buffer("scale", torch.ones(8), persistent=False)
        self.again = self.body[0]["one"][0]
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.again(self.body[0]["one"](x)).relu() * self.scale)


def _deep():
    torch.manual_seed(0)
    deep = Deep()
    _write(deep.head.weight)  # no count of writes starts at 0 only
    return deep


@torch.no_grad()
def _write(tensor):
    tensor[:1].add_(1)


def _write_under_another_name(deep):
    """A parameter over the same memory, whose count of writes starts anew."""
    written = deep.head.weight._version
    deep.head.weight = nn.Parameter(deep.head.weight.data)
    while deep.head.weight._version < written:
        _write(deep.head.weight)


def _layers(deep):
    return deep.body[0]["one"]


def _step(deep):
    deep.train()(torch.randn(8, 8)).sum().backward()
    torch.optim.SGD(deep.parameters(), lr=0.1).step()


def _load(deep, assign=False):
    deep.load_state_dict({name: tensor + 1 for name, tensor in deep.state_dict().items()}, assign=assign)


CHANGES = {
    "load_state_dict": _load,
    "load_state_dict(assign=True)": lambda deep: _load(deep, assign=True),
    "optimizer step": _step,
    "batch statistics": lambda deep: deep.train()(torch.randn(8, 8)),
    "in-place write": lambda deep: nn.init.zeros_(deep.head.bias),
    "another layer": lambda deep: setattr(deep, "head", nn.Linear(8, 4)),
    "another type": nn.Module.double,
    "submodule": lambda deep: _layers(deep).__setitem__(1, nn.BatchNorm1d(8)),
    "submodule taken away": lambda deep: _layers(deep).__delitem__(1),
    "submodule in an empty place": lambda deep: setattr(deep.body, "skip", nn.Linear(1, 1)),
    "parameter": lambda deep: setattr(_layers(deep)[0], "bias", nn.Parameter(torch.ones(8))),
    "parameter in an empty place": lambda deep: setattr(deep.body, "none", nn.Parameter(torch.ones(8))),
    "parameter's data": lambda deep: setattr(_layers(deep)[0].weight, "data", torch.ones(8, 8)),
    "buffer that is not saved": lambda deep: setattr(deep, "scale", torch.full((8,), 2.0)),
    "write to a buffer": lambda deep: _write(_layers(deep)[1].running_var),
    "write to another parameter over the same memory": _write_under_another_name,
    "write through a view": lambda deep: _write(_layers(deep)[0].weight[3:, 2]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_base_that_changed_is_never_answered_for_silently(change):
    setting = Setting(_deep())
    base, plugged = setting.base, setting.plugged()
    expected, state = plugged(setting.x), copy.deepcopy(base.state_dict())
    kept = list(base.modules()), list(base.parameters()), list(base.buffers())  # so that no place is used again
    change(base)
    for _ in range(2):  # the error stays
        with pytest.raises(StaleFilterError):
            plugged(setting.x)
    with pytest.raises(StaleFilterError), plugged.restored():
        pass
    with pytest.raises(StaleFilterError):
        plugged.serve(None)
    if change is CHANGES["in-place write"]:  # written back to its old weights it is served again
        base.load_state_dict(state)
        assert torch.equal(plugged(setting.x), expected)
    del kept


def _fused_step(kind, deep):
    deep.eval()(torch.randn(8, 8)).sum().backward()  # batch statistics would show anyway
    kind(deep.parameters(), lr=0.1, fused=True).step()


UNCOUNTED = {  # ways to write that PyTorch does not count
    "fused SGD": partial(_fused_step, torch.optim.SGD),
    "fused Adam": partial(_fused_step, torch.optim.Adam),
    "fused AdamW": partial(_fused_step, torch.optim.AdamW),
    "data": lambda deep: _layers(deep)[0].weight.data.mul_(2),
    "data, transposed": lambda deep: setattr(_layers(deep)[0].weight, "data", _layers(deep)[0].weight.data.T),
    "numpy": lambda deep: deep.head.bias.detach().numpy().fill(1),
    "storage": lambda deep: deep.head.weight.untyped_storage().fill_(1),
    "dlpack": lambda deep: torch.from_dlpack(deep.scale).zero_(),
    "a buffer that is added": lambda deep: deep.head.register_buffer("more", torch.ones(1)),
    "another name": lambda deep: setattr(deep, "tail", deep._modules.pop("head")),
}


@pytest.mark.parametrize("change", [*CHANGES.values(), *UNCOUNTED.values()], ids=[*CHANGES, *UNCOUNTED])
def test_a_request_notices_every_ordinary_change_of_the_base_and_hashes_it_only_then(change, monkeypatch):
    base, hashed = _deep(), []
    base(torch.randn(8, 8))  # running statistics of its own
    kept, plugged = list(base.modules()), plug(base)
    monkeypatch.setattr("fedup.serving.plugged.fingerprint", lambda model: hashed.append(model) or fingerprint(model))
    plugged.check_base()
    assert not hashed
    change(base)
    for _ in range(2):
        with pytest.raises(StaleFilterError):
            plugged.check_base()
    assert hashed == [base, base]
    del kept


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_one_number_written_to_the_base_shows_at_the_next_request_or_uncounted_in_a_hash(data):
    plugged = MARKED.serving("first")[0]
    tensor = data.draw(st.sampled_from([*plugged.base.parameters(), *plugged.base.buffers()]))
    place, counted = data.draw(st.integers(0, tensor.numel() - 1)), data.draw(st.booleans())
    number = (tensor.detach() if counted else tensor.data).view(-1)[place : place + 1]
    before = number.clone()
    number += 1
    for check in (
        *([plugged.check_base, lambda: plugged.serve(None)] if counted else []),
        *(lambda: plugged.restored().__enter__(), lambda: save_filter(plugged, "nowhere"), plugged.unplug),
    ):
        with pytest.raises(StaleFilterError):
            check()
    number.copy_(before)
    assert plugged.unplug() is MARKED.base


def test_a_base_without_counts_is_hashed_at_each_request():
    with torch.inference_mode():
        base = nn.Linear(100, 100)
    plugged = plug(base)
    plugged.check_base()
    with torch.inference_mode():
        base.weight[50, 50] += 1
    with pytest.raises(StaleFilterError):
        plugged.check_base()


def test_a_base_made_in_inference_mode_can_be_plugged():
    with torch.inference_mode():
        base = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad(), plug(base).restored() as model:
        assert torch.equal(model(torch.ones(2, 8)), base(torch.ones(2, 8)))


def test_a_filter_of_another_base_or_cut_is_refused_and_the_served_one_stays(setting):
    plugged = setting.plugged()
    expected, served = plugged(setting.x), plugged.served
    other = copy.deepcopy(setting.base)
    nn.init.zeros_(other[3].bias)
    for stranger in (plug(other), plug(setting.base, cut="0")):
        foreign = PluggedModel(stranger.base, stranger.cut)
        unlearn(
            foreign,
            collect(foreign.base, setting.federation, cut=foreign.cut, statistics="centroids"),
            FIRST,
            config=CONFIG,
        )
        with pytest.raises(FingerprintError, match="made for base"):
            plugged.serve(foreign.served)
    assert plugged.served is served and torch.equal(plugged(setting.x), expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda plugged: pickle.loads(pickle.dumps(plugged))])
def test_a_copy_keeps_its_own_filter_and_base(setting, duplicate):
    plugged = setting.plugged(FIRST)
    expected = plugged(setting.x)
    with plugged.restored():
        twin = duplicate(plugged)  # being restored is this thread's business, not the copy's
        assert torch.equal(twin(setting.x), expected)
    unlearn(plugged, setting.centroids, SECOND)
    assert torch.equal(twin(setting.x), expected) and twin.requests == {FIRST}
    nn.init.zeros_(setting.base[3].bias)
    assert torch.equal(twin(setting.x), expected)
    with twin.restored():
        assert torch.equal(twin(setting.x), twin.base(setting.x))
    nn.init.zeros_(twin.base[3].bias)
    with pytest.raises(StaleFilterError):
        twin(setting.x)


def test_swapping_filters_under_load_never_gives_an_unfiltered_or_mixed_answer(setting):
    plugs = [setting.plugged(FIRST), setting.plugged(SECOND)]
    answers = [plugged(setting.x) for plugged in plugs]
    plugged, stop = setting.plugged(FIRST), threading.Event()

    def serving():
        seen = [0, 0]
        while not stop.is_set():
            answer = plugged(setting.x)
            matching = [torch.equal(answer, known) for known in answers]
            assert any(matching), "neither the old filter's answer nor the new one's"
            seen[matching.index(True)] += 1
        return seen

    def swapping():
        try:
            for i in range(60):
                plugged.serve(plugs[i % 2].served)
        finally:
            stop.set()

    *seen, _ = _in_threads(serving, serving, swapping)
    assert sum(map(sum, seen)) > 0

"""Serving through a filter and restoring: the base is read-only, and no answer is ever unfiltered by accident."""

import copy
import pickle
import threading
from dataclasses import replace

import pytest
import torch
from tests._forced import restore, unlearn
from tests._marked import KINDS, Marked
from torch import nn
from torch._dynamo.testing import CompileCounter

from fedup import (
    Federation,
    FilterConfig,
    Forget,
    PluggedModel,
    collect,
    fingerprint,
    iid,
    load_filter,
    plug,
    purge,
    save_filter,
)
from fedup.errors import CutError, FingerprintError, NotFittedError, PlugError, StaleFilterError
from fedup.models.views import tensors
from fedup.serving.plugged import _state

CONFIG = FilterConfig(rank=4, steps=15, batch_size=32)
FIRST, SECOND = Forget.clients([1]), Forget.classes([2])


class Setting:
    """A small model with BatchNorm in eval mode, a federation, its centroids, and some inputs."""

    def __init__(self):
        torch.manual_seed(0)
        y = torch.arange(120) % 4
        x = torch.randn(120, 8) + 3 * nn.functional.one_hot(y, 8)
        self.federation = Federation.split(x, y, iid(y, 3))
        self.base = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.base(x)  # running statistics of its own
        self.base.eval()
        self.x = x[:16]
        self.centroids = collect(self.base, self.federation)

    def plugged(self, request=FIRST):
        plugged = plug(self.base)
        unlearn(plugged, self.centroids, request, config=CONFIG)
        return plugged


@pytest.fixture
def setting():
    return Setting()


def _in_threads(*functions):
    """Run them at once; give back what they returned, raise what they raised."""
    results, errors = [None] * len(functions), []

    def call(i, function):
        try:
            results[i] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def test_the_filter_changes_the_output_and_restored_undoes_it_bit_for_bit(setting):
    plugged, original = setting.plugged(), setting.base(setting.x)
    filtered = plugged(setting.x)
    assert not torch.allclose(filtered, original)
    with plugged.restored() as model:
        assert torch.equal(plugged(setting.x), original)
        assert torch.equal(model(setting.x), original)
    assert torch.equal(plugged(setting.x), filtered)


def test_the_answer_is_the_tail_of_the_filtered_features(setting):
    plugged = setting.plugged()
    features = setting.base[:3](setting.x)
    assert torch.equal(plugged(setting.x), setting.base[3](plugged.served.filter(features)))


def test_after_an_exception_inside_restored_the_filter_is_back(setting):
    plugged = setting.plugged()
    filtered = plugged(setting.x)
    with pytest.raises(KeyError), plugged.restored():
        raise KeyError("inside")
    assert torch.equal(plugged(setting.x), filtered)


def test_restored_blocks_nest(setting):
    plugged, original = setting.plugged(), setting.base(setting.x)
    filtered = plugged(setting.x)
    with plugged.restored():
        with pytest.raises(KeyError), plugged.restored():
            raise KeyError("inside")
        assert torch.equal(plugged(setting.x), original)
    assert torch.equal(plugged(setting.x), filtered)


def test_a_filter_served_inside_restored_acts_only_afterwards(setting):
    plugged, other = setting.plugged(FIRST), setting.plugged(SECOND)
    with plugged.restored():
        plugged.serve(other.served)
        assert torch.equal(plugged(setting.x), setting.base(setting.x))
    assert torch.equal(plugged(setting.x), other(setting.x))


def test_unplug_gives_the_base_back_and_ends_the_plugged_model(setting):
    plugged, original = setting.plugged(), setting.base(setting.x)
    assert plugged.unplug() is setting.base
    assert torch.equal(setting.base(setting.x), original)
    for use in (
        lambda: plugged(setting.x),
        plugged.unplug,
        lambda: plugged.restored().__enter__(),
        lambda: plugged.base,
    ):
        with pytest.raises(PlugError):
            use()
    assert plug(setting.base).requests == frozenset()


def test_a_model_without_filter_answers_only_inside_restored(setting):
    plugged = plug(setting.base)
    with pytest.raises(NotFittedError, match="unlearn"):
        plugged(setting.x)
    with plugged.restored():
        assert torch.equal(plugged(setting.x), setting.base(setting.x))
    with pytest.raises(NotFittedError):
        plugged(setting.x)


def test_after_the_last_request_is_taken_back_the_unfiltered_answer_is_not_given_silently(setting):
    plugged = setting.plugged()
    restore(plugged, None, FIRST)
    assert plugged.served is None
    with pytest.raises(NotFittedError):
        plugged(setting.x)


def test_plugging_twice_raises(setting):
    with pytest.raises(PlugError, match="plugged already"):
        plug(setting.plugged())


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
    assert fingerprint(base) == print_before
    assert list(base.state_dict()) == keys
    assert list(map(id, base.parameters())) == tensors
    assert all(module.training == training for module in base.modules())
    assert all(torch.equal(weight.grad, torch.ones_like(weight)) for weight in base.parameters())
    assert all(weight.requires_grad for weight in base.parameters())
    assert {name: set(vars(module)) for name, module in base.named_modules()} == attributes
    for module in base.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._backward_hooks


def test_a_gradient_through_the_plugged_model_does_not_reach_the_base(setting):
    inputs = setting.x.clone().requires_grad_()
    setting.plugged()(inputs).sum().backward()
    assert inputs.grad.abs().sum() > 0
    assert all(weight.grad is None for weight in setting.base.parameters())


def test_the_base_itself_is_never_filtered(setting):
    original = setting.base(setting.x)
    setting.plugged()
    assert torch.equal(setting.base(setting.x), original)


def test_train_leaves_the_plugged_model_in_eval_mode_and_batch_statistics_alone(setting):
    plugged = setting.plugged()
    expected, statistics = plugged(setting.x), setting.base[1].running_mean.clone()
    assert plugged.train() is plugged
    assert not plugged.training
    assert torch.equal(plugged(setting.x), expected)
    assert torch.equal(setting.base[1].running_mean, statistics)


def test_the_bases_weights_are_out_of_reach_of_the_plugged_model(setting):
    plugged = setting.plugged()
    assert list(plugged.parameters()) == list(plugged.buffers()) == list(plugged.children()) == []
    assert plugged.state_dict() == {}
    for move in (plugged.double, plugged.half, lambda: plugged.to("cpu"), lambda: plugged.to(torch.float64)):
        with pytest.raises(PlugError, match="move the base"):
            move()


def _step(base):
    base.train()(torch.randn(8, 8)).sum().backward()
    torch.optim.SGD(base.parameters(), lr=0.1).step()


def _load(base, assign=False):
    base.load_state_dict({name: tensor + 1 for name, tensor in base.state_dict().items()}, assign=assign)


CHANGES = {
    "load_state_dict": _load,
    "load_state_dict(assign=True)": lambda base: _load(base, assign=True),
    "optimizer step": _step,
    "batch statistics": lambda base: base.train()(torch.randn(8, 8)),
    "in-place write": lambda base: nn.init.zeros_(base[3].bias),
    "vector_to_parameters": lambda base: nn.utils.vector_to_parameters(
        torch.zeros(sum(weight.numel() for weight in base.parameters())), base.parameters()
    ),
    "another layer": lambda base: base.__setitem__(3, nn.Linear(16, 4)),
    "another type": nn.Module.double,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_base_that_changed_is_never_answered_for_silently(setting, change):
    plugged = setting.plugged()
    plugged(setting.x)
    change(setting.base)
    for _ in range(2):  # the error stays
        with pytest.raises(StaleFilterError):
            plugged(setting.x)
    with pytest.raises(StaleFilterError), plugged.restored():
        pass
    with pytest.raises(StaleFilterError):
        plugged.serve(None)


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
    deep = Deep().eval()
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


DEEP_CHANGES = {
    "submodule": lambda deep: deep.body[0].__setitem__("one", copy.deepcopy(deep.body[0]["one"])),
    "submodule of the last level": lambda deep: deep.body[0]["one"].__setitem__(1, nn.BatchNorm1d(8)),
    "submodule taken away": lambda deep: deep.body[0]["one"].__delitem__(1),
    "submodule added": lambda deep: deep.body[0].update({"two": nn.Linear(1, 1)}),
    "submodule in an empty place": lambda deep: setattr(deep.body, "skip", nn.Linear(1, 1)),
    "parameter": lambda deep: setattr(deep.body[0]["one"][0], "bias", nn.Parameter(torch.ones(8))),
    "parameter in an empty place": lambda deep: setattr(deep.body, "none", nn.Parameter(torch.ones(8))),
    "parameter taken away": lambda deep: setattr(deep.body[0]["one"][0], "bias", None),
    "parameter's data": lambda deep: setattr(deep.body[0]["one"][0].weight, "data", torch.ones(8, 8)),
    "buffer": lambda deep: setattr(deep.body[0]["one"][1], "running_mean", torch.zeros(8)),
    "buffer that is not saved": lambda deep: setattr(deep, "scale", torch.ones(8)),
    "write to a parameter": lambda deep: _write(deep.body[0]["one"][0].weight),
    "write to a buffer": lambda deep: _write(deep.body[0]["one"][1].running_var),
    "write to a buffer that is not saved": lambda deep: _write(deep.scale),
    "write to another parameter over the same memory": _write_under_another_name,
    "write through a view": lambda deep: _write(deep.body[0]["one"][0].weight[3:, 2]),
    "write through a detached alias": lambda deep: _write(deep.body[0]["one"][0].weight.detach()),
}


@pytest.mark.parametrize("change", DEEP_CHANGES.values(), ids=DEEP_CHANGES.keys())
def test_what_is_replaced_or_written_deep_inside_is_noticed(change):
    deep = _deep()
    before = _state(deep)
    deep(torch.randn(4, 8))
    assert _state(deep) == before  # an answer changes nothing
    kept = list(deep.modules()), list(deep.parameters()), list(deep.buffers())  # so that no place is used again
    change(deep)
    assert _state(deep) != before
    del kept


def test_every_tensor_of_a_base_is_looked_at():
    deep = _deep()
    assert set(_state(deep)[::3]) == {id(tensor) for tensor in tensors(deep)}


def test_a_base_changed_deep_inside_is_never_answered_for_silently():
    deep = _deep()
    plugged = plug(deep)
    with plugged.restored():
        plugged(torch.randn(4, 8))
        _write(deep.body[0]["one"][1].running_var)
        with pytest.raises(StaleFilterError):
            plugged(torch.randn(4, 8))


def test_a_base_written_back_to_its_old_weights_is_served_again(setting):
    plugged = setting.plugged()
    expected, state = plugged(setting.x), copy.deepcopy(setting.base.state_dict())
    nn.init.zeros_(setting.base[3].bias)
    with pytest.raises(StaleFilterError):
        plugged(setting.x)
    setting.base.load_state_dict(state)
    assert torch.equal(plugged(setting.x), expected)


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
        unlearn(foreign, collect(foreign.base, setting.federation, cut=foreign.cut), FIRST, config=CONFIG)
        with pytest.raises(FingerprintError, match="made for base"):
            plugged.serve(foreign.served)
    assert plugged.served is served
    assert torch.equal(plugged(setting.x), expected)


def test_two_plugs_on_one_base_have_filters_of_their_own(setting):
    first, second = setting.plugged(FIRST), setting.plugged(SECOND)
    answers = first(setting.x), second(setting.x)
    assert not torch.allclose(*answers)
    second.unplug()
    assert torch.equal(first(setting.x), answers[0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda plugged: pickle.loads(pickle.dumps(plugged))])
def test_a_copy_keeps_its_own_filter_and_base(setting, duplicate):
    plugged = setting.plugged(FIRST)
    expected = plugged(setting.x)
    with plugged.restored():
        twin = duplicate(plugged)  # being restored is this thread's business, not the copy's
        assert torch.equal(twin(setting.x), expected)
    unlearn(plugged, setting.centroids, SECOND)
    assert torch.equal(twin(setting.x), expected)
    assert twin.requests == {FIRST}
    nn.init.zeros_(setting.base[3].bias)
    assert torch.equal(twin(setting.x), expected)
    with twin.restored():
        assert torch.equal(twin(setting.x), twin.base(setting.x))
    nn.init.zeros_(twin.base[3].bias)
    with pytest.raises(StaleFilterError):
        twin(setting.x)


def test_threads_with_different_filters_on_one_base_do_not_mix(setting):
    plugs = [setting.plugged(FIRST), setting.plugged(SECOND)]
    expected = [plugged(setting.x) for plugged in plugs]

    def serve(plugged, answer):
        return all(torch.equal(plugged(setting.x), answer) for _ in range(200))

    assert all(_in_threads(*(lambda pair=pair: serve(*pair) for pair in zip(plugs, expected, strict=True))))


def test_restored_in_one_thread_does_not_unfilter_another(setting):
    plugged, original = setting.plugged(), setting.base(setting.x)
    filtered, inside, done = plugged(setting.x), threading.Event(), threading.Event()

    def restoring():
        with plugged.restored():
            inside.set()
            done.wait(30)
            return torch.equal(plugged(setting.x), original)

    def serving():
        inside.wait(30)
        answer = plugged(setting.x)
        with plugged.restored():
            nested = plugged(setting.x)
        again = plugged(setting.x)
        done.set()
        return torch.equal(answer, filtered), torch.equal(nested, original), torch.equal(again, filtered)

    assert _in_threads(restoring, serving) == [True, (True, True, True)]


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
            for i in range(150):
                plugged.serve(plugs[i % 2].served)
        finally:
            stop.set()

    *seen, _ = _in_threads(serving, serving, swapping)
    assert sum(map(sum, seen)) > 0


# An eraser, alone or with a bottleneck


@pytest.fixture(scope="module")
def marked():
    return Marked()


erased = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS.keys())


def _hooks(model):
    return [hook for module in model.modules() for hook in (*module._forward_pre_hooks, *module._forward_hooks)]


@erased
def test_filters_act_at_their_cuts_the_eraser_first(marked, config):
    plugged, _ = marked.serving("first", config=config)
    served, base = plugged.served, marked.base
    eraser, bottleneck = served.erasure.filter, served.filter or nn.Identity()
    early = base[:2](marked.x)
    if served.erasure.cut == "2":
        expected = base[4](bottleneck(base[2:4](eraser(early))))
    else:
        expected = base[4](bottleneck(eraser(base[2:4](early))))
    assert torch.equal(plugged(marked.x), expected)
    assert len(_hooks(plugged.view())) == len(served.placed) == (1 if served.filter is None else 2)
    assert served.derived_from_forgotten
    sizes = [tensor.numel() * tensor.element_size() for _, one in served.placed for tensor in one.state_dict().values()]
    assert served.size_bytes == sum(sizes)


@erased
def test_an_erased_model_is_restored_bit_for_bit_and_unplugged_without_a_trace(marked, config):
    original, before = marked.base(marked.x), fingerprint(marked.base)
    plugged, _ = marked.serving("first", config=config)
    filtered = plugged(marked.x)
    assert not torch.allclose(filtered, original)
    with plugged.restored() as model:
        assert torch.equal(plugged(marked.x), original)
        assert torch.equal(model(marked.x), original)
    assert torch.equal(plugged(marked.x), filtered)
    assert torch.equal(marked.base(marked.x), original)  # while it is plugged, too
    base = plugged.unplug()
    assert base is marked.base
    assert _hooks(base) == []
    assert torch.equal(base(marked.x), original)
    assert fingerprint(base) == before
    assert all(weight.requires_grad and weight.grad is None for weight in base.parameters())


@erased
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda plugged: pickle.loads(pickle.dumps(plugged))])
def test_a_copy_of_an_erased_model_keeps_its_filters(marked, config, duplicate):
    plugged, _ = marked.serving("first", config=config)
    twin, expected = duplicate(plugged), plugged(marked.x)
    restore(plugged, None, marked.requests["first"])
    assert torch.equal(twin(marked.x), expected)


def test_one_kind_of_filter_follows_another_and_nothing_of_the_first_is_left(marked):
    answers = {name: marked.serving("first", config=config)[0] for name, config in KINDS.items()}
    plugged = plug(marked.base)
    for name in [*KINDS, *reversed(KINDS)]:
        plugged.serve(answers[name].served)
        assert torch.equal(plugged(marked.x), answers[name](marked.x)), name
        assert len(_hooks(plugged.view())) == len(plugged.served.placed)


def test_serving_without_any_filter_is_refused_and_the_served_one_stays(marked):
    plugged, _ = marked.serving("first", config=KINDS["eraser alone"])
    served, answer = plugged.served, plugged(marked.x)
    assert not replace(served, erasure=None).derived_from_forgotten
    with pytest.raises(PlugError, match="no filter"):
        plugged.serve(replace(served, erasure=None))
    with pytest.raises(CutError, match="nowhere"):
        plugged.serve(replace(served, erasure=replace(served.erasure, cut="nowhere")))
    assert plugged.served is served
    assert torch.equal(plugged(marked.x), answer)


@pytest.mark.slow
class TestCompiled:
    @pytest.fixture(autouse=True)
    def _fresh_compiler(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def test_a_compiled_model_equals_the_eager_one_also_after_a_new_request(self, setting):
        plugged = setting.plugged(FIRST)
        compiled = torch.compile(plugged, fullgraph=True)
        first = plugged(setting.x)
        torch.testing.assert_close(compiled(setting.x), first)
        unlearn(plugged, setting.centroids, SECOND)
        assert not torch.allclose(plugged(setting.x), first)
        torch.testing.assert_close(compiled(setting.x), plugged(setting.x))

    def test_many_requests_do_not_run_into_the_recompile_limit(self, setting):
        plugged = setting.plugged(FIRST)
        compiled = torch.compile(plugged, fullgraph=True, backend="eager")
        others = [setting.plugged(SECOND).served, plugged.served]
        for i in range(2 * torch._dynamo.config.recompile_limit):
            plugged.serve(others[i % 2])
            torch.testing.assert_close(compiled(setting.x), plugged(setting.x))

    def test_restored_reaches_the_original_through_a_compiled_model(self, setting):
        plugged = setting.plugged(FIRST)
        compiled = torch.compile(plugged, backend="eager")
        compiled(setting.x)
        with plugged.restored():
            torch.testing.assert_close(compiled(setting.x), setting.base(setting.x))
        torch.testing.assert_close(compiled(setting.x), plugged(setting.x))

    def test_restored_elsewhere_neither_stops_nor_unfilters_a_compiled_model(self, setting):
        plugged = setting.plugged(FIRST)
        compiled = torch.compile(plugged, fullgraph=True, backend="eager")
        filtered = plugged(setting.x)
        with plugged.restored():
            (answer,) = _in_threads(lambda: compiled(setting.x))
        torch.testing.assert_close(answer, filtered)

    def test_without_filter_a_compiled_model_does_not_answer(self, setting):
        plugged = setting.plugged(FIRST)
        compiled = torch.compile(plugged, backend="eager")
        compiled(setting.x)
        restore(plugged, None, FIRST)
        with pytest.raises(NotFittedError):
            compiled(setting.x)

    def test_a_base_that_changed_is_never_answered_for_by_a_compiled_model(self, setting):
        plugged = setting.plugged(FIRST)
        compiled = torch.compile(plugged, fullgraph=True, backend="eager")
        compiled(setting.x)
        nn.init.zeros_(setting.base[3].bias)
        with pytest.raises(StaleFilterError):
            compiled(setting.x)

    def test_a_second_filter_costs_no_new_graph(self, setting):
        graphs = CompileCounter()
        plugged = setting.plugged(FIRST)
        compiled = torch.compile(plugged, fullgraph=True, backend=graphs)
        compiled(setting.x)
        assert graphs.frame_count == 1
        unlearn(plugged, setting.centroids, SECOND)
        torch.testing.assert_close(compiled(setting.x), plugged(setting.x))
        assert graphs.frame_count == 1

    @erased
    def test_a_compiled_model_with_an_eraser_equals_the_eager_one(self, marked, config):
        plugged, store = marked.serving("first", config=config)
        compiled = torch.compile(plugged, fullgraph=True, backend="eager")
        first = plugged(marked.x)
        torch.testing.assert_close(compiled(marked.x), first)
        unlearn(plugged, store, marked.requests["second"], clients=marked.federation)
        assert not torch.allclose(plugged(marked.x), first)
        torch.testing.assert_close(compiled(marked.x), plugged(marked.x))

    @erased
    def test_restored_reaches_the_original_through_a_compiled_model_with_an_eraser(self, marked, config):
        plugged, _ = marked.serving("first", config=config)
        compiled = torch.compile(plugged, backend="eager")
        compiled(marked.x)
        with plugged.restored():
            torch.testing.assert_close(compiled(marked.x), marked.base(marked.x))
        torch.testing.assert_close(compiled(marked.x), plugged(marked.x))

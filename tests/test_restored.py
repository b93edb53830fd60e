"""`restored()`: an answer is unfiltered if and only if a block that reached its caller is still open."""

import asyncio
import contextvars
import copy
import gc
import os
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from torch import nn

from fedup import FilterConfig, Forget, plug
from fedup.errors import NotFittedError, PlugError, StaleFilterError
from fedup.filters.bottleneck import Bottleneck
from fedup.serving.plugged import _BLOCKS, Served

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def _base():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).eval()


def _plugged(base=None):
    """A plugged model under a filter of random weights: whether it is in force is all that counts here."""
    plugged = plug(_base() if base is None else base)
    fitted = Bottleneck(16, 4, nonnegative=True, source=torch.Generator().manual_seed(1)).requires_grad_(False)
    requests = frozenset([Forget.classes([1])])
    plugged.serve(Served(fitted, requests, FilterConfig(rank=4), plugged.base_fingerprint, plugged.cut))
    return plugged


@pytest.fixture
def plugged():
    return _plugged()


@torch.no_grad()
def _is_unfiltered(plugged):
    """Whether an answer given here and now is the original's, bit for bit; else it must be the filter's."""
    answer = plugged(X)
    if torch.equal(answer, plugged.base(X)):
        return True
    assert torch.equal(answer, plugged.view()(X)), "neither the original's answer nor the filter's"
    return False


def _in_a_thread(function, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def test_tasks_and_threads_are_inside_if_started_inside_and_until_the_end_of_the_block(plugged):
    async def main():
        entered, ended, answers = asyncio.Event(), asyncio.Event(), {"outside": [], "inside": [], "callback": []}

        async def serve(name):
            await entered.wait()
            answers[name].append(_is_unfiltered(plugged))
            await ended.wait()
            answers[name].append(_is_unfiltered(plugged))

        async def schedule():
            asyncio.get_running_loop().call_later(0.02, lambda: answers["callback"].append(_is_unfiltered(plugged)))
            return asyncio.create_task(serve("inside"))

        outside = asyncio.create_task(serve("outside"))
        with plugged.restored():
            inside = await asyncio.create_task(schedule())  # a task of a task
            entered.set()
            threaded = [await asyncio.to_thread(_is_unfiltered, plugged)]
        threaded.append(await asyncio.to_thread(_is_unfiltered, plugged))
        ended.set()
        await asyncio.gather(outside, inside, asyncio.sleep(0.04))
        return {**answers, "threaded": threaded}

    expected = {"outside": [False, False], "inside": [True, False], "callback": [False], "threaded": [True, False]}
    assert asyncio.run(main()) == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_is_filtered_since_it_never_hears_of_the_end(plugged):
    with plugged.restored() as original:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 2 if _is_unfiltered(plugged) else 3
                original(X)
            except PlugError:
                status = 0 if status == 3 else status
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert _is_unfiltered(plugged)


def test_what_a_block_gave_answers_bit_for_bit_anywhere_until_its_end(plugged):
    with plugged.restored() as original:
        assert torch.equal(original(X), plugged.base(X))
        assert torch.equal(_in_a_thread(original, X), plugged.base(X))
        assert not _in_a_thread(_is_unfiltered, plugged)
        assert not original.train().training
        assert list(original.parameters()) == list(original.buffers()) == list(original.children()) == []
        with pytest.raises(PlugError, match="move the base"):
            original.double()
    for use in (lambda: original(X), lambda: original.forward(X), lambda: _in_a_thread(original, X)):
        with pytest.raises(PlugError, match="has ended"):
            use()
    with plugged.restored(), pytest.raises(PlugError, match="has ended"):
        original(X)  # another block is not its own
    assert _BLOCKS.get() == ()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_what_a_block_gave_does_not_outlive_the_block(plugged, duplicate):
    with plugged.restored() as original:
        twin = duplicate(original)
        if duplicate in (copy.copy, copy.deepcopy):
            assert torch.equal(twin(X), plugged.base(X))
    with pytest.raises(PlugError, match="has ended"):
        twin(X)


def test_what_a_block_gave_does_not_answer_for_a_base_that_changed_or_was_unplugged(plugged):
    with plugged.restored() as original:
        nn.init.zeros_(plugged.base[3].bias)
        with pytest.raises(StaleFilterError):
            original(X)
    plugged = _plugged()
    with plugged.restored() as original:
        plugged.unplug()
        with pytest.raises(PlugError, match="unplugged"):
            original(X)


def test_the_view_to_export_is_filtered_inside_a_block_as_well(plugged):
    expected = plugged(X)
    with plugged.restored():
        view = plugged.view()
    assert torch.equal(view(X), expected)
    bare = plug(_base())
    with bare.restored(), pytest.raises(NotFittedError):
        bare.view()


@pytest.mark.parametrize("where", ["here", "in another context", "in another thread", "by the garbage collector"])
def test_a_generator_that_stopped_inside_a_block_ends_it_wherever_it_is_closed(plugged, where):
    def answers():
        with plugged.restored():
            while True:
                yield _is_unfiltered(plugged)

    running = answers()
    assert next(running)
    assert _is_unfiltered(plugged)  # generators run in the context of their caller
    if where == "by the garbage collector":
        del running
        gc.collect()
    else:
        ways = {
            "here": lambda f: f(),
            "in another context": contextvars.Context().run,
            "in another thread": _in_a_thread,
        }
        ways[where](running.close)
    assert not _is_unfiltered(plugged)


def test_a_block_is_for_its_own_model_alone_also_where_memory_is_used_again():
    base = _base()
    plugged = _plugged(base)
    with plugged.restored():
        context = contextvars.copy_context()
        assert not _is_unfiltered(_plugged(base))
    del plugged
    for _ in range(50):
        assert not context.run(_is_unfiltered, _plugged(base))


def test_a_context_that_outlives_a_block_does_not_keep_the_model_alive():
    plugged = _plugged()
    with plugged.restored():
        context = contextvars.copy_context()
    alive = weakref.ref(plugged)
    del plugged
    gc.collect()
    assert alive() is None
    assert len(context) >= 1


class Caller:
    """A context, in which code runs in any thread, and the blocks that reached it."""

    def __init__(self, context, reached):
        self.context, self.reached = context, set(reached)

    def run(self, threaded, function, *arguments):
        run = self.context.run
        return _in_a_thread(run, function, *arguments) if threaded else run(function, *arguments)


class Blocks(RuleBasedStateMachine):
    """Blocks of two models opened, closed and inherited in any order."""

    callers, blocks = Bundle("callers"), Bundle("blocks")

    def __init__(self):
        super().__init__()
        base = _base()
        self.models = [_plugged(base), _plugged(base)]
        self.original, self.filtered = base(X), self.models[0](X)
        self.open, self.given = {}, {}  # by block: its model, and what it gave

    @rule(target=callers)
    def start_outside(self):
        return Caller(contextvars.Context(), ())

    @rule(target=callers, parent=callers)
    def start_inside(self, parent):
        """A task, a callback or a thread with a copied context."""
        return Caller(parent.context.copy(), parent.reached)

    @rule(target=blocks, caller=callers, model=st.integers(0, 1), threaded=st.booleans())
    def enter(self, caller, model, threaded):
        block = self.models[model].restored()
        self.given[block] = caller.run(threaded, block.__enter__)
        self.open[block] = model
        caller.reached.add(block)
        return block

    @rule(block=blocks, caller=callers, threaded=st.booleans(), raises=st.booleans())
    def leave(self, block, caller, threaded, raises):
        """Where it was entered, or elsewhere as a generator's may be."""
        if self.open.pop(block, None) is None:
            return
        error = (KeyError, KeyError("inside"), None) if raises else (None, None, None)
        assert not caller.run(threaded, block.__exit__, *error)

    @rule(caller=callers, model=st.integers(0, 1), threaded=st.booleans())
    def answer(self, caller, model, threaded):
        inside = any(self.open.get(block) == model for block in caller.reached)
        assert torch.equal(caller.run(threaded, self.models[model], X), self.original if inside else self.filtered)

    @rule(block=blocks, caller=callers, threaded=st.booleans())
    def answer_through_what_a_block_gave(self, block, caller, threaded):
        if block in self.open:
            assert torch.equal(caller.run(threaded, self.given[block], X), self.original)
        else:
            with pytest.raises(PlugError, match="has ended"):
                caller.run(threaded, self.given[block], X)

    @invariant()
    def outside_every_context_answers_are_filtered(self):
        assert all(torch.equal(model(X), self.filtered) for model in self.models)


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)

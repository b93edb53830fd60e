"""A compiled model answers as the eager one does: filtered, restored, refused."""

import contextvars
import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests._forced import unlearn
from tests._marked import FAST, KINDS, marked
from torch import nn
from torch._dynamo.testing import CompileCounter

from fedup import FilterConfig, Forget, plug
from fedup.errors import NotFittedError, PlugError, StaleFilterError

pytestmark = pytest.mark.slow
MARKED = marked()
FILTERS = {"bottleneck": FilterConfig(**FAST, filter="bottleneck"), **KINDS}


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("config", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_equals_the_eager_one_also_restored_and_after_a_new_request(config):
    plugged, store = MARKED.serving("first", config=config)
    compiled, first = torch.compile(plugged, fullgraph=True, backend="eager"), plugged(MARKED.x)
    torch.testing.assert_close(compiled(MARKED.x), first)
    unlearn(plugged, store, MARKED.requests["second"], clients=MARKED.federation)
    assert not torch.allclose(plugged(MARKED.x), first)
    torch.testing.assert_close(compiled(MARKED.x), plugged(MARKED.x))
    compiled = torch.compile(plugged, backend="eager")
    with plugged.restored():
        torch.testing.assert_close(compiled(MARKED.x), MARKED.base(MARKED.x))
        with ThreadPoolExecutor(1) as pool:  # elsewhere it is neither stopped nor unfiltered
            answer = pool.submit(compiled, MARKED.x).result()
        torch.testing.assert_close(answer, plugged.view()(MARKED.x))
    torch.testing.assert_close(compiled(MARKED.x), plugged(MARKED.x))


@pytest.mark.usefixtures("fresh_compiler")
def test_many_filters_cost_a_compiled_model_no_new_graph_and_it_never_answers_without_one():
    base, store, graphs = copy.deepcopy(MARKED.base), MARKED.store(), CompileCounter()
    plugged, second = plug(base), plug(base)
    for model, client in ((plugged, 0), (second, 1)):
        unlearn(model, store, Forget.clients([client]), config=FILTERS["bottleneck"])
    other = second.served
    compiled, served = torch.compile(plugged, fullgraph=True, backend=graphs), plugged.served
    for i in range(2 * torch._dynamo.config.recompile_limit):
        plugged.serve((served, other)[i % 2])
        torch.testing.assert_close(compiled(MARKED.x), plugged(MARKED.x))
    assert graphs.frame_count == 1
    plugged.serve(None)
    with pytest.raises(NotFittedError):
        compiled(MARKED.x)
    plugged.serve(served)
    nn.init.zeros_(base[4].bias)
    with pytest.raises(StaleFilterError):
        compiled(MARKED.x)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_is_filtered_from_the_end_of_the_block_on():
    plugged, _ = MARKED.serving("class", config=FILTERS["bottleneck"])
    compiled = torch.compile(plugged, backend="eager")
    filtered = plugged(MARKED.x)
    with plugged.restored() as original:
        context, fast = contextvars.copy_context(), torch.compile(original, backend="eager")
        torch.testing.assert_close(context.run(compiled, MARKED.x), plugged.base(MARKED.x))
        torch.testing.assert_close(fast(MARKED.x), plugged.base(MARKED.x))
    torch.testing.assert_close(context.run(compiled, MARKED.x), filtered)
    with pytest.raises(PlugError, match="has ended"):
        fast(MARKED.x)

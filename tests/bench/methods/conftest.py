import pytest
from tests.bench.methods._deltas import CLASS, RECIPE, make_federation, make_model
from torch import nn

from fedup.bench.history import History
from fedup.bench.task import Task


@pytest.fixture(scope="session")
def learned() -> tuple[nn.Module, nn.Module, History]:
    """First weights, what the federation learned from them, and what the server kept."""
    start, history = make_model(), History()
    return start, RECIPE.train(start, make_federation(), observers=[history]).model, history


@pytest.fixture
def task(learned) -> Task:
    """Arrays of its own: a test may spoil them."""
    start, model, history = learned
    probe = lambda model: {"r_a": 0.5, "unwanted": 0.5}  # noqa: E731
    return Task(make_federation(), CLASS, model, start, RECIPE, probe, lambda *_: None, history)

import pytest
from tests.flower._grid import Clock, World, collect, digits

from fedup import Centroids
from fedup.flower import messaging


@pytest.fixture(scope="session")
def world() -> World:
    return digits()


@pytest.fixture(scope="session")
def plain(world) -> Centroids:
    """The store that clients in process fill; tests copy it before they change it."""
    return collect(world.model, world.federation)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """No test waits: time passes where the server sleeps."""
    clock = Clock()
    monkeypatch.setattr(messaging, "time", clock)
    return clock

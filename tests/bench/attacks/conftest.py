import pytest

from fedup.bench.attacks import AttackData


@pytest.fixture(scope="session")
def ground(small_model, digits_federation) -> AttackData:
    """Features of an untrained model: attacks on messages need no better one."""
    return AttackData.of(small_model, digits_federation, "4")

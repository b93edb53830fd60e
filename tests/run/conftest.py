import pytest

from ._forked import Folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Folders after each step of one history; tests copy them."""
    return Folders(tmp_path_factory.mktemp("folders"))

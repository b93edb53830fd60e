from collections.abc import Callable
from pathlib import Path

import pytest

from fedup.bench.experiment import Experiment, load_experiment
from fedup.bench.results import Results


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def read(tmp_path) -> Callable[..., Experiment]:
    """An experiment from its text."""

    def read(text: str, name: str = "mine") -> Experiment:
        (tmp_path / f"{name}.toml").write_text(text)
        return load_experiment(tmp_path / f"{name}.toml")

    return read


@pytest.fixture
def results(tmp_path) -> Results:
    return Results(tmp_path / "results")

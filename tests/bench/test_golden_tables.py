"""The tables in the repository are what the reports make of the results beside them, byte for byte."""

from pathlib import Path

import pytest

from fedup.bench.result_tables import write_result_tables, write_tables

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SOME = ["main", "sample", "privacy_sample"]
OTHERS = ("speed", "scale", "server_work", "flower", "attacks", "attacks_flower", "withdrawals", "exact")
ALL = sorted(path.name for path in (BENCHMARKS / "tables").iterdir())


@pytest.mark.parametrize("chosen", [SOME, pytest.param([], marks=pytest.mark.slow)], ids=["some", "all"])
def test_tables_of_the_results_in_the_repository_are_those_in_the_repository(tmp_path, chosen):
    for path in BENCHMARKS.iterdir():
        if path.name not in ("tables", "pages"):
            (tmp_path / path.name).symlink_to(path)
    written = write_tables(tmp_path, [tmp_path / "experiments" / f"{name}.toml" for name in chosen])
    own = write_result_tables(tmp_path) if chosen else []
    tables = [path for path in written + own if path.parent == tmp_path / "tables"]
    expected = ALL if not chosen else [name for name in ALL if name.split(".")[0] in (*chosen, *OTHERS)]
    assert sorted(path.name for path in tables) == expected
    for path in tables:
        assert path.read_bytes() == (BENCHMARKS / "tables" / path.name).read_bytes(), path.name

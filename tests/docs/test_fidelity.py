"""The table of settings in docs/fidelity.md says what the preset of the paper's authors does."""

import re
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedup import Forget
from fedup.bench.experiment import load_experiment
from fedup.bench.results import Results
from fedup.bench.runner import run_cells
from fedup.filters.bottleneck import FilterConfig
from fedup.filters.presets import preset
from fedup.tasks.recipe import RECIPE_PRESETS, Recipe

PAGE = Path(__file__).parents[2] / "docs" / "fidelity.md"
REQUESTS = {"client": Forget.clients([0]), "class": Forget.classes([1]), "sample": Forget.samples({0: [1]})}


def documented() -> dict[str, dict[str, Any]]:
    """The settings in the last column, by the part of the project that they belong to."""
    table = PAGE.read_text(encoding="utf-8").split("## Settings")[1].split("\n\n```")[0]
    found: dict[str, dict[str, Any]] = {"Federation": {}, "Filter": {}, "Centroids": {}}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and (setting := re.fullmatch(r"`(\w+ = .+)`", cells[-1])) and cells[0] != "setting":
            part = cells[0].partition(":")[0]
            values = found[part if part in found else "Federation"]
            ((name, value),) = tomllib.loads(setting[1]).items()
            assert name not in values, line
            values[name] = value
    return found


def test_every_setting_of_the_table_is_the_presets():
    table, config = documented(), preset("authors").config
    assert table["Federation"] == RECIPE_PRESETS["authors"]
    values = {**asdict(config), "rank": config.rank_for(512)}
    assert table["Filter"] == {name: values[name] for name in table["Filter"]}
    changed = {name for name, value in asdict(config).items() if value != asdict(FilterConfig())[name]}
    assert changed <= set(table["Filter"])  # nothing is set that the table does not say
    for kind, request in REQUESTS.items():
        stated, chosen = table["Centroids"], preset("authors", request)
        assert (stated[f"ratio_{kind}"], stated["sigma"], stated["cache"]) == (chosen.ratio, chosen.sigma, chosen.cache)
    local = Recipe.suited_to("digits", preset="authors").local
    assert (local.optimizer, local.lr, local.momentum, local.weight_decay) == ("sgd", 0.005, 0.9, 5e-4)
    assert (local.epochs, local.batch_size) == (5, 64)


def test_no_row_is_open():
    """Where the paper states nothing, the authors' column does."""
    rows = [line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if "| not stated |" in line]
    assert len(rows) >= 10
    for row in rows:
        assert row[1].strip().endswith("not stated") and "not stated" not in row[2], row


TOML = """
[[federations]]
data = "digits"
preset = "authors"
rows = 300
clients = 4
rounds = 1
[scenarios.client]
[scenarios.sample]
share = 0.5
[methods.authors]
use = "fedup"
preset = "authors"
"""


def test_an_experiment_runs_with_the_authors_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine.toml").write_text(TOML)
    experiment = load_experiment(tmp_path / "mine.toml")
    (recipe,) = experiment.recipes
    given = {"rows": 300, "clients": 4, "rounds": 1}  # what an experiment gives itself comes first
    assert asdict(recipe).items() >= {**documented()["Federation"], **given}.items()
    cells = experiment.cells(only=["authors"])
    events = list(run_cells(cells, Results(tmp_path / "results"), progress=lambda *_: None))
    assert [event.outcome for event in events] == ["done"] * 2
    for event in events:
        assert "a filter of rank 32" in event.result["about"]["did"]
        assert event.result["cost"]["ahead_bytes_up"] == 0  # asked after the request

"""All attacks together: a result file holds what the table shows, and no number is typed."""

import copy
import json
from dataclasses import asdict

import pytest
from tests.bench._progress import Watch

from fedup.bench.attacks import CENTROIDS, Result, guarantees, interface
from fedup.bench.attacks.run import HEAD, attack, attacks_table, cells, results_of
from fedup.bench.result_tables import write_result_tables
from fedup.errors import DataError


@pytest.fixture(scope="module")
def told(ground):
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        for name, few in {"_TARGETS": 1, "_TIMED": 2, "_HALVINGS": 1}.items():
            patch.setattr(interface, name, few)
        results = attack(ground, trials=20, seed=0, candidates=20, progress=watch)
    assert {("Re-identification", 0, 20), ("Re-identification", 20, 20)} <= set(watch.told)
    return {
        "recipe": {"data": "digits", "model": "m", "clients": 5, "partition": "iid", "rounds": 0, "seed": 0},
        "trials": 20,
        "candidates": 20,
        "results": [asdict(result) for result in results],
        "machine": {"torch": "2"},
        "code": {"commit": None, "changed": None},
    }


def test_every_attack_meets_every_protection(told):
    results = results_of(json.loads(json.dumps(told, allow_nan=False)))
    met = {(result.name, result.protection) for result in results}
    for name in ("re-identification, message only", "membership, message only", "canary audit"):
        protections = {*CENTROIDS, *guarantees()} - ({"none"} if name == "canary audit" else set())
        assert {(name, protection) for protection in protections} <= met
    assert [asdict(result) for result in results] == told["results"]


def test_the_table_is_made_of_the_file(told, tmp_path):
    assert write_result_tables(tmp_path) == []
    folder = tmp_path / "results" / "attacks"
    folder.mkdir(parents=True)
    (folder / "digits.json").write_text(json.dumps(told))
    (path,) = write_result_tables(tmp_path)
    text = path.read_text()
    assert path == tmp_path / "tables" / "attacks.md"
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(told["results"])
    assert all(line.count("|") == len(HEAD) + 1 for line in lines)
    assert text.startswith("<!-- Generated")
    changed = copy.deepcopy(told)
    changed["results"][0]["figure"] = 0.12345
    assert "| 0.123 |" not in attacks_table([told])
    assert "| 0.123 |" in attacks_table([changed])


def test_a_bound_is_passed_only_by_the_whole_interval():
    result = Result("a", "b", "c", 0.5, 0.4, 0.6, 0.1, 0.45, "n")
    assert not result.exceeds
    assert cells(result)[-2] == "yes"
    passed = Result("a", "b", "c", 0.5, 0.4, 0.6, 0.1, 0.39, "n")
    assert passed.exceeds
    assert cells(passed)[-2] == "no"
    audited = Result("a", "b", "c", 1.2, None, None, None, 1.0, "n")
    assert audited.exceeds
    assert cells(audited)[3:8] == ["1.200", "–", "–", "1.000", "no"]
    assert cells(Result("a", "b", "c", 2e7, None, None, None, None, "n"))[3:8] == ["2e+07", "–", "–", "–", "–"]


def test_a_file_of_something_else_is_named(tmp_path):
    folder = tmp_path / "results" / "attacks"
    folder.mkdir(parents=True)
    (folder / "odd.json").write_text('{"results": [{"x": 1}]}')
    with pytest.raises(DataError, match=r"odd\.json"):
        write_result_tables(tmp_path)

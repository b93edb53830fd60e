"""`fedup bench attack` as a user runs it."""

import json

from tests.cli._in_process import fedup, ok

from fedup.bench.attacks import interface


def test_the_table_comes_last_and_the_file_holds_it(tmp_path, monkeypatch):
    for name, few in {"_TARGETS": 1, "_TIMED": 2, "_HALVINGS": 1}.items():
        monkeypatch.setattr(interface, name, few)
    out = tmp_path / "deep" / "attacks.json"
    ran = ok(
        *("bench", "attack", "--data", "digits", "--rounds", 1, "--trials", 20, "--out", out),
        FEDUP_CACHE=str(tmp_path / "cache"),
    )
    told = json.loads(out.read_text())
    assert told["recipe"]["rounds"] == 1
    assert told["trials"] == 20
    rows = [line for line in ran.out.splitlines() if line.startswith("│")]
    assert len(rows) > len(told["results"])
    assert all(line.rstrip().endswith("│") and len(line) <= 100 for line in rows)  # nothing is cut off
    assert "…" not in "".join(rows).replace(" … ", "")  # intervals apart
    for word in ("re-identification", "membership", "canary audit", "DP, ε = 0.5", "0.010"):
        assert word in ran.out
    assert ran.out.index("Canary audit of the guarantee …") < ran.out.index("│ re-identification")
    assert str(out) in ran.out.replace("\n", "")


def test_wrong_usage_is_told_before_anything_runs(tmp_path):
    assert fedup("bench", "attack", "--data", "digits", "--out", tmp_path).code == 2
    assert fedup("bench", "attack", "--trials", 1).code == 2
    lacking = fedup("bench", "attack", "--data", "mnist", "--out", tmp_path / "a.json", FEDUP_DATA=str(tmp_path))
    assert lacking.code == 1
    assert "mnist" in lacking.err
    assert not (tmp_path / "a.json").exists()

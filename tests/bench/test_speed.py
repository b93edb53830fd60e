"""`fedup bench speed`: each part on something small gives its rows with their goals. How long it took is not tested."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tests.cli._in_process import fedup, ok

from fedup.bench.speed import (
    ON_DEMAND,
    PARTS,
    _many_clients,
    closed_form,
    extraction,
    growth,
    limits,
    precision,
    run_speed,
    serving,
    training,
)
from fedup.bench.speed._rows import Row
from fedup.bench.speed._settings import LENET5, SETTINGS, VIT, even_jobs
from fedup.bench.speed.table import notes
from fedup.bench.speed.training import TimedRounds, eager_round
from fedup.bench.turns import Times, in_turns
from fedup.errors import MissingDataError
from fedup.tasks.models import training_of

CPU = torch.device("cpu")
SMALL = replace(LENET5, cpu_rows=24, cpu_clients=2, cpu_batch=8)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Every part on a handful of rows."""
    monkeypatch.delenv("FEDUP_ENGINE", raising=False)
    monkeypatch.setattr(training, "SETTINGS", (SMALL,))
    monkeypatch.setattr(growth, "CLIENTS", (2, 4, 8))
    monkeypatch.setattr(growth, "_ROWS", 32)
    monkeypatch.setattr(growth, "LENET5", SMALL)
    monkeypatch.setattr(limits, "SETTINGS", (SMALL,))
    monkeypatch.setattr(limits, "_peak", lambda device, precision: {"float32": 1e9, "bfloat16": 2e9}[precision])
    monkeypatch.setattr(extraction, "_ROWS", {SMALL: (40, 40)})
    monkeypatch.setattr(closed_form, "_ROWS", 2000)
    monkeypatch.setattr(closed_form, "_COLLECTED", {SMALL: ((200, 2), (200, 2), 1.15)})
    monkeypatch.setattr(_many_clients, "CLIENTS", (6, 12))
    for part in (closed_form, _many_clients):
        monkeypatch.setattr(part, "_REPEATS", 1)
    monkeypatch.setattr(serving, "_BATCH", 1)
    monkeypatch.setattr(precision, "_FEDERATIONS", ({"data": "digits", "model": "lenet5", "rounds": 1},))
    monkeypatch.setattr(precision, "_SEEDS", (0, 1))
    monkeypatch.setattr(precision, "_ROWS", 200)


def measured(*parts, told=None):
    """The table, once through a file."""
    progress = lambda what, done, total: told.append((what, done, total)) if told is not None else None  # noqa: E731
    return json.loads(json.dumps(run_speed(device=CPU, progress=progress, parts=parts)))


def test_pieces_run_in_turns_each_turn_in_another_order_and_warm_turns_do_not_count(monkeypatch):
    ran, seconds = [], iter(range(100))
    monkeypatch.setattr("fedup.bench.turns.clocked", lambda work, device: work() or next(seconds))
    times = in_turns({name: lambda name=name: ran.append(name) for name in "abc"}, CPU, repeats=3, warm=2)
    assert ["".join(ran[i : i + 3]) for i in range(0, len(ran), 3)] == ["cba", "abc", "cba", "abc", "cba"]
    assert times.of == {"c": [6, 11, 12], "b": [7, 10, 13], "a": [8, 9, 14]}


def test_a_ratio_is_the_median_over_turns_not_of_medians():
    times = Times({"a": [2.0, 10.0, 9.0], "b": [1.0, 2.0, 9.0]})
    assert times.median("a") == 9.0
    assert times.ratio("a", "b") == 2.0  # of 2, 5 and 1


@pytest.mark.parametrize(
    ("value", "goal", "at_most", "met"),
    [
        *((1.0, None, True, None), (1.0, None, False, None)),
        *((1.2, 1.2, True, True), (1.1, 1.2, True, True), (1.3, 1.2, True, False)),
        *((4.0, 4.0, False, True), (5.0, 4.0, False, True), (3.9, 4.0, False, False)),
        *((math.nan, 1.2, True, False), (math.nan, 4.0, False, False)),
    ],
)
def test_a_goal_is_met_at_the_bound_and_on_its_good_side(value, goal, at_most, met):
    row = Row("a name", value, "×", goal, at_most)
    assert row.met is met
    assert row.to_json()["met"] is met


def test_the_round_that_is_measured_gives_what_the_textbooks_does():
    rounds, by_the_book = TimedRounds(SMALL, 25, CPU), SMALL.build(CPU)
    jobs = even_jobs(25, 3, rounds.config)
    assert torch.cat([job.rows for job in jobs]).sort().values.tolist() == list(range(25))
    assert {len(job.rows) for job in jobs} == {8, 9} and sum(job.share for job in jobs) == pytest.approx(1)
    with torch.random.fork_rng():
        for _ in range(2):
            rounds.run(jobs)
            eager_round(by_the_book, rounds.x, rounds.y, jobs, rounds.config)
    first = SMALL.build(CPU).state_dict()
    for name, weights in by_the_book.state_dict().items():
        torch.testing.assert_close(rounds._average.current[name], weights)
        assert not torch.equal(weights, first[name])
    for setting in SETTINGS:
        x, y = setting.data(6, CPU)
        assert torch.equal(x, setting.data(6, CPU)[0])  # always the same
        assert (tuple(x.shape), len(y)) == ((6, *setting.shape), 6)
        assert set(y.tolist()) <= set(range(setting.classes))
    how = VIT.local(CPU)
    assert (how.batch_size, how.optimizer, how.lr) == (8, "adam", training_of("vit")["lr"])


def test_every_part_measures_its_rows_with_their_goals_and_has_its_notes(monkeypatch):
    class Missing(type(SMALL)):
        def build(self, device):
            raise MissingDataError("It is not here.")

    missing = Missing("TinyBert", "tinybert", (64,), 4, 16, 2, 8)
    for part in (training, limits):  # a model that cannot be built here is left out
        monkeypatch.setattr(part, "SETTINGS", (missing, SMALL))
    told, before = [], torch.random.get_rng_state()
    parts = ("training", "growth", "limits", "extraction", "closed_form", "serving", "precision")
    result = measured(*parts, told=told)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert any("It is not here." in what for what, _, _ in told)
    assert result["alone"] in (True, False, None) and set(result["code"]) == {"commit", "changed"}
    assert [(row["part"], row["name"], row["unit"], row["goal"], row["at_most"]) for row in result["table"]] == [
        ("training", "LeNet-5: a round, against the eager loop", "× faster", None, False),
        ("training", "LeNet-5: a round, over an epoch in one place", "×", 1.5, True),
        ("training", "LeNet-5: a round, over a plain loop", "×", 1.1, True),
        ("growth", "LeNet-5: a row's time, 2 to 8 clients", "×", 1.3, True),
        ("limits", "LeNet-5: a step, over its arithmetic at full speed", "×", None, True),
        ("extraction", "LeNet-5: features, over a bare forward pass", "×", 1.2, True),
        ("closed_form", "client request from moments, ResNet-18", "ms", 60, True),
        ("closed_form", "class request from moments, ResNet-18", "ms", 60, True),
        ("closed_form", "moments sent, over centroids", "×", 1, True),
        ("closed_form", "what a server keeps of ten clients", "MB", 25, True),
        ("closed_form", "LeNet-5: collecting moments, over a bare forward pass", "×", 1.15, True),
        ("closed_form", "client request from moments, 12 clients over 6", "×", 1.2, True),
        ("closed_form", "peak memory to merge the moments of 12 clients", "MB", 300, True),
        ("serving", "ResNet-18 with a filter, batch 1", "× base", 1.02, True),
        ("precision", "lenet5 on digits: accuracy in bfloat16 less in float32", "points", None, True),
    ]
    details = {row["part"]: (row["value"], row.get("detail", {})) for row in result["table"]}
    value, detail = details["training"]
    assert value > 0 and (detail["rows"], detail["clients"], detail["batch"]) == (24, 2, 8)
    assert (detail["engine"], detail["precision"]) == ("plain", "float32")
    assert all(detail[f"{name}_s"] > 0 for name in ("round", "centralised", "eager", "loop"))
    value, detail = details["growth"]
    times = detail["microseconds_per_row"]
    assert list(times) == ["2", "4", "8"] and value == pytest.approx(max(times.values()) / min(times.values()))
    value, detail = details["limits"]
    assert detail["floor_s"] == detail["flops"] / 1e9  # in single precision
    assert value == pytest.approx(detail["step_s"] / detail["floor_s"])
    weights = sum(weight.numel() for weight in SMALL.build(CPU).parameters() if weight.ndim > 1)
    assert detail["flops"] > 8 * 2 * 2 * weights  # each weight meets each row, there and back
    kept = next(row["value"] for row in result["table"] if row["name"] == "what a server keeps of ten clients")
    # Second moments of all and by class have 64 bits a number; those of each client 32 where that is enough.
    assert 512 * 513 / 2 * (8 * (1 + 10) + 4 * 10) < 1e6 * kept < 25e6
    value, detail = details["precision"]
    found = [[run["accuracy"] for run in detail[name]] for name in ("bfloat16", "float32")]
    points = [100 * (half - single) for half, single in zip(*found, strict=True)]
    assert detail["points"] == pytest.approx(points) and value == pytest.approx(sum(points) / 2)
    by_part = {part: notes({"table": [row for row in result["table"] if row["part"] == part]}) for part in parts}
    assert [len(found) for found in by_part.values()] == [1, 1, 1, 0, 2, 0, 1]
    assert "24 rows, 2 clients, batches of 8, precision float32" in by_part["training"][0]
    assert "2 clients " in by_part["growth"][0] and "8 clients " in by_part["growth"][0]
    assert "a step of 8 rows" in by_part["limits"][0]
    assert "2,000 rows" in by_part["closed_form"][0] and "12 clients " in by_part["closed_form"][1]
    assert "lenet5 on digits, 200 rows, 1 rounds, seeds 0, 1" in by_part["precision"][0]


def test_parts_are_measured_in_their_order_and_those_on_demand_only_when_named(monkeypatch):
    ran = []
    for part in (*PARTS, *ON_DEMAND):
        name = lambda device, tell, part=part, **how: ran.append(part) or [Row(part, 1.0, "s")]  # noqa: E731
        monkeypatch.setattr(f"fedup.bench.speed.{part}.measure", name)
    told = []
    result = measured(told=told)
    assert ran == list(PARTS) and not set(PARTS) & set(ON_DEMAND)
    assert [row["part"] for row in result["table"]] == list(PARTS)
    assert told[-1] == ("Speed", len(PARTS), len(PARTS))
    ran.clear()
    measured("precision", "growth", "growth")
    assert ran == ["growth", "precision"]


def test_the_command_prints_each_row_and_keeps_the_result_or_refuses_in_one_line(tmp_path):
    out = tmp_path / "speed" / "here.json"
    ran = ok("bench", "speed", "--only", "growth", "--device", "cpu", "--out", out)
    assert json.loads(out.read_text())["table"][0]["name"] in ran.out and str(out) in ran.out
    told = ok("bench", "speed", "--only", "growth", "--device", "cpu", "--out", out, "--json")
    assert told.json == json.loads(out.read_text())
    ran = fedup("bench", "speed", "--only", "NOPE", "--out", tmp_path / "other.json")
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (1, "", 1)
    assert ran.err.startswith("Error: There is no part 'NOPE'; there are training, ")
    assert not (tmp_path / "other.json").exists()

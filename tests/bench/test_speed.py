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
from fedup.bench.speed.table import cells, is_shared, notes, title
from fedup.bench.speed.training import TimedRounds, eager_round
from fedup.bench.turns import Times, in_turns
from fedup.errors import MissingDataError, SettingError
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
    monkeypatch.setattr(serving, "_BATCH", 1)
    monkeypatch.setattr(precision, "_FEDERATIONS", ({"data": "digits", "model": "lenet5", "rounds": 1},))
    monkeypatch.setattr(precision, "_SEEDS", (0, 1))
    monkeypatch.setattr(precision, "_ROWS", 200)


def measured(*parts, told=None):
    """The table, once through a file."""
    progress = lambda what, done, total: told.append((what, done, total)) if told is not None else None  # noqa: E731
    return json.loads(json.dumps(run_speed(device=CPU, progress=progress, parts=parts)))


# --- taking times


def test_pieces_run_in_turns_each_turn_in_another_order_and_warm_turns_do_not_count():
    ran = []
    work = {name: lambda name=name: ran.append(name) for name in "abc"}
    times = in_turns(work, CPU, repeats=3, warm=2)
    turns = ["".join(ran[i : i + 3]) for i in range(0, len(ran), 3)]
    assert turns == ["cba", "abc", "cba", "abc", "cba"]
    assert {name: len(seconds) for name, seconds in times.of.items()} == {"a": 3, "b": 3, "c": 3}


@pytest.mark.parametrize("warm", [0, 1, 3])
def test_what_the_warm_turns_take_is_not_in_the_times(monkeypatch, warm):
    calls = iter(range(100))
    monkeypatch.setattr("fedup.bench.turns.clocked", lambda work, device: next(calls))
    assert in_turns({"one": lambda: None}, CPU, repeats=2, warm=warm).of == {"one": [warm, warm + 1]}


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


# --- what is measured


def test_rows_are_those_of_the_model_and_always_the_same():
    for setting in SETTINGS:
        x, y = setting.data(6, CPU)
        assert torch.equal(x, setting.data(6, CPU)[0])
        assert (tuple(x.shape), len(y)) == ((6, *setting.shape), 6)
        assert set(y.tolist()) <= set(range(setting.classes))
    how = VIT.local(CPU)
    assert (how.batch_size, how.optimizer, how.lr) == (8, "adam", training_of("vit")["lr"])


@pytest.mark.parametrize(("rows", "clients"), [(24, 1), (24, 2), (25, 4), (1000, 1000)])
def test_clients_of_a_round_hold_every_row_once_in_equal_parts(rows, clients):
    jobs = even_jobs(rows, clients, SMALL.local(CPU))
    assert torch.cat([job.rows for job in jobs]).sort().values.tolist() == list(range(rows))
    assert {len(job.rows) for job in jobs} <= {rows // clients, rows // clients + 1}
    assert sum(job.share for job in jobs) == pytest.approx(1)


def test_the_round_that_is_measured_gives_what_the_textbooks_does():
    rounds, by_the_book = TimedRounds(SMALL, 24, CPU), SMALL.build(CPU)
    jobs = even_jobs(24, 3, rounds.config)
    with torch.random.fork_rng():
        for _ in range(2):
            rounds.run(jobs)
            eager_round(by_the_book, rounds.x, rounds.y, jobs, rounds.config)
    first = SMALL.build(CPU).state_dict()
    for name, weights in by_the_book.state_dict().items():
        torch.testing.assert_close(rounds._average.current[name], weights)
        assert not torch.equal(weights, first[name])


# --- parts


def test_a_round_is_compared_with_the_eager_loop_an_epoch_in_one_place_and_a_plain_loop():
    table = measured("training")["table"]
    assert [(row["name"], row["unit"], row["goal"], row["at_most"]) for row in table] == [
        ("LeNet-5: a round, against the eager loop", "× faster", None, False),
        ("LeNet-5: a round, over an epoch in one place", "×", 1.5, True),
        ("LeNet-5: a round, over a plain loop", "×", 1.1, True),
    ]
    for row in table:
        detail = row["detail"]
        assert row["part"] == "training" and row["value"] > 0
        assert (detail["rows"], detail["clients"], detail["batch"]) == (24, 2, 8)
        assert (detail["engine"], detail["precision"]) == ("plain", "float32")
        assert all(detail[f"{name}_s"] > 0 for name in ("round", "centralised", "eager", "loop"))


def test_growth_is_the_longest_time_of_a_row_over_the_shortest():
    (row,) = measured("growth")["table"]
    assert (row["name"], row["goal"], row["at_most"]) == ("LeNet-5: a row's time, 2 to 8 clients", 1.3, True)
    times = row["detail"]["microseconds_per_row"]
    assert list(times) == ["2", "4", "8"]
    assert row["value"] == pytest.approx(max(times.values()) / min(times.values()))


def test_features_are_compared_with_a_bare_forward_pass():
    (row,) = measured("extraction")["table"]
    assert (row["name"], row["goal"], row["at_most"]) == ("LeNet-5: features, over a bare forward pass", 1.2, True)
    assert row["detail"]["rows"] == 40
    assert row["value"] > 0


def test_a_step_is_compared_with_its_arithmetic():
    (row,) = measured("limits")["table"]
    detail = row["detail"]
    assert (row["goal"], row["met"]) == (None, None)
    assert detail["floor_s"] == detail["flops"] / 1e9  # in single precision
    assert row["value"] == pytest.approx(detail["step_s"] / detail["floor_s"])
    weights = sum(weight.numel() for weight in SMALL.build(CPU).parameters() if weight.ndim > 1)
    assert detail["flops"] > 8 * 2 * 2 * weights  # each weight meets each row, there and back


def test_serving_is_compared_with_the_base():
    (row,) = measured("serving")["table"]
    assert (row["name"], row["goal"], row["at_most"]) == ("ResNet-18 with a filter, batch 1", 1.02, True)


def test_precision_is_the_mean_difference_in_points():
    (row,) = measured("precision")["table"]
    detail = row["detail"]
    found = [[run["accuracy"] for run in detail[name]] for name in ("bfloat16", "float32")]
    points = [100 * (half - single) for half, single in zip(*found, strict=True)]
    assert detail["points"] == pytest.approx(points)
    assert row["value"] == pytest.approx(sum(points) / 2)
    assert (row["unit"], row["goal"], detail["seeds"]) == ("points", None, [0, 1])


def test_a_model_that_cannot_be_built_here_is_left_out(monkeypatch):
    class Missing(type(SMALL)):
        def build(self, device):
            raise MissingDataError("It is not here.")

    missing = Missing("TinyBert", "tinybert", (64,), 4, 16, 2, 8)
    monkeypatch.setattr(training, "SETTINGS", (missing, SMALL))
    monkeypatch.setattr(limits, "SETTINGS", (missing, SMALL))
    told = []
    table = measured("training", "limits", told=told)["table"]
    assert {row["name"].split(":")[0] for row in table} == {"LeNet-5"}
    assert any("It is not here." in what for what, _, _ in told)


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


@pytest.mark.parametrize("parts", [["NOPE"], ["training", "NOPE"], [""], ["Training"]])
def test_a_part_that_there_is_not_is_refused_before_anything_is_measured(monkeypatch, parts):
    monkeypatch.setattr(training, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SettingError, match=f"no part '{parts[-1]}'.*training.*precision"):
        measured(*parts)


def test_measuring_leaves_the_global_random_numbers_alone_and_says_where_it_ran():
    with torch.random.fork_rng():
        before = torch.manual_seed(123).get_state()
        result = measured("training", "extraction", "limits")
        assert torch.equal(torch.random.get_rng_state(), before)
    assert result["device"] == "cpu"
    assert result["machine"]["torch"] == torch.__version__
    assert set(result["code"]) == {"commit", "changed"}


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void cudnn::batch_norm_backward", "normalisation"),
        ("sm90_xmma_fprop_implicit_gemm_bf16", "convolutions and products"),
        ("void multi_tensor_apply_kernel<FusedAdam>", "optimizer and averaging"),
        ("Memcpy DtoD", "copies and casts"),
        ("void at::native::reduce_kernel", "sums"),
        ("vectorized_elementwise_kernel", "element by element"),
        ("something else", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(kernel, kind):
    assert limits._kind(kernel) == kind


# --- for people


def test_every_part_has_cells_and_its_notes():
    parts = ("training", "growth", "limits", "extraction", "serving", "precision")
    result = measured(*parts)
    for row in result["table"]:
        name, value, goal, met = cells(row, shared=False)
        assert name == row["name"] and value.endswith(row["unit"])
        assert float(value.split()[0]) == pytest.approx(row["value"], rel=0.01)
        assert bool(goal) == bool(met) == (row["goal"] is not None)
    by_part = {part: notes({"table": [row for row in result["table"] if row["part"] == part]}) for part in parts}
    assert {part: len(found) for part, found in by_part.items()} == {
        **{"training": 1, "growth": 1, "limits": 1, "precision": 1},  # one for each model
        **{"extraction": 0, "serving": 0},
    }
    assert "24 rows, 2 clients, batches of 8, precision float32" in by_part["training"][0]
    assert "2 clients " in by_part["growth"][0] and "8 clients " in by_part["growth"][0]
    assert "a step of 8 rows" in by_part["limits"][0]
    assert "lenet5 on digits, 200 rows, 1 rounds, seeds 0, 1" in by_part["precision"][0]


ROW = {"part": "serving", "name": "this", "value": 1.2345, "unit": "×", "goal": None, "at_most": True, "met": None}


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({}, ("this", "1.23 ×", "", "")),
        ({"goal": 1.3, "met": True}, ("this", "1.23 ×", "≤ 1.3", "yes")),
        ({"goal": 1.02, "met": False}, ("this", "1.23 ×", "≤ 1.02", "no")),
        ({"goal": 50, "at_most": False, "met": False, "unit": "× faster"}, ("this", "1.23 × faster", "≥ 50", "no")),
        ({"goal": 0.0, "value": 0.0, "met": True}, ("this", "0 ×", "≤ 0", "yes")),
    ],
)
def test_cells_say_value_goal_and_whether_it_is_met(change, shown):
    assert cells(ROW | change, shared=False) == shown


def test_no_goal_is_judged_where_others_may_have_used_the_device():
    assert cells(ROW | {"goal": 1.3, "met": True}, shared=True) == ("this", "1.23 ×", "≤ 1.3", "shared")
    assert cells(ROW, shared=True)[2:] == ("", "")
    assert is_shared({}) and is_shared({"alone": False}) and is_shared({"alone": None})
    assert not is_shared({"alone": True})


def test_a_result_says_whether_it_was_alone():
    assert measured("serving")["alone"] in (True, False, None)


def test_notes_of_requests_the_literal_recipe_and_kernels():
    accuracies = {"retain": 0.98765, "forget": 0.0}
    literal = accuracies | {"clustering_s": 61.25, "fit_s": 9.04}
    limit = {"batch": 64, "step_s": 0.002, "flops": 2.5e9, "floor_s": 0.0005}
    kernels = {"kernels_per_step": 70.4, "kernel_microseconds_per_step": {"sums": 58.2, "other": 7.9}}
    rows = [
        ROW | {"part": "clustering", "name": "reading and clustering all cells", "detail": {"rows": 3}},
        ROW | {"part": "clustering", "name": "class request", "detail": accuracies},
        ROW | {"part": "clustering", "name": "client request", "detail": accuracies},
        ROW | {"part": "clustering", "name": "clustering, against the literal recipe", "detail": literal},
        ROW | {"part": "clustering", "name": "clustering and class request, likewise", "detail": literal},
        ROW | {"part": "limits", "name": "ViT: a step", "detail": limit | kernels},
    ]
    found = notes({"table": rows})
    assert found == [
        "Class request: R-A 0.9877, F-A 0.0000.",
        "The literal recipe: 61.2 s of clustering and 9.0 s of fitting, R-A 0.9877, F-A 0.0000.",
        "ViT: a step of 64 rows takes 2 ms; its 2.5 GFLOP are 0.5 ms at full speed; 70 kernels a step, by time before "
        "overlap: sums 58 µs, other 8 µs.",
    ]


def test_the_title_names_what_it_ran_on():
    machine = {"processor": "A CPU", "accelerator": "A GPU", "threads": 2, "torch": "9.9"}
    assert title({"device": "cpu", "machine": machine}) == "A CPU, 2 threads, torch 9.9"
    assert title({"device": "cuda", "machine": machine}) == "A GPU, torch 9.9"


# --- the command


def test_the_command_prints_each_row_and_keeps_the_result(tmp_path):
    out = tmp_path / "speed" / "here.json"
    ran = ok("bench", "speed", "--only", "training", "--only", "growth", "--device", "cpu", "--out", out)
    kept = json.loads(out.read_text())["table"]
    assert [row["part"] for row in kept] == ["training"] * 3 + ["growth"]
    for row in kept:
        assert row["name"] in ran.out
    assert str(out) in ran.out
    told = ok("bench", "speed", "--only", "growth", "--device", "cpu", "--out", out, "--json")
    assert told.json == json.loads(out.read_text())


def test_a_part_that_there_is_not_is_one_clear_error_and_leaves_no_file(tmp_path):
    ran = fedup("bench", "speed", "--only", "NOPE", "--out", tmp_path / "here.json")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("Error: There is no part 'NOPE'; there are training, ")
    assert len(ran.err.splitlines()) == 1
    assert not (tmp_path / "here.json").exists()

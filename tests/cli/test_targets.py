"""Labels and values on the command line: data sets of one's own, from training to evidence."""

import json
from pathlib import Path

import pytest
from tests.cli._in_process import contents, fedup, ok, refused

_DATA = """
import torch
from fedup.rng import generator
from fedup.tasks.datasets import Dataset, Defaults, Images

INPUT = Images(channels=1, height=2, width=4, mean=(0.0,), std=(1 / 255,))
DEFAULTS = Defaults(rounds=15, batch_size=16)


def load():
    source = generator(0, "targets")
    x = torch.randn(500, 1, 2, 4, generator=source)
    hidden = x.flatten(1) @ torch.randn(8, 2, generator=source) + 0.3 * torch.randn(500, 2, generator=source)
    y, test = {targets}, torch.arange(500) % 5 == 0
    return Dataset("made up", x[~test], y[~test], x[test], y[test], ("weight", "height"))
"""
_MODEL = """
from torch import nn


def build(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, num_classes))
"""


def trained(folder: Path, targets: str) -> Path:
    (folder / "own.py").write_text(_DATA.replace("{targets}", targets))
    (folder / "net.py").write_text(_MODEL)
    ok("train", "--data", "own.py", "--model", "net.py", "--clients", "4", "--run", "run", cwd=folder)
    ok("collect", "--run", "run", cwd=folder)
    assert "already" in ok("collect", "--run", "run", cwd=folder).out
    return folder / "run"


def test_values_are_trained_measured_forgotten_and_restored(tmp_path):
    run = trained(tmp_path, "100 + 30 * hidden")
    before = contents(run)
    refused("unlearn", "--class", "0", "--run", run, told="values have no classes")
    refused("collect", "--again", "--statistics", "centroids", "--run", run, told="this federation has values")
    assert contents(run) == before
    answered = ok("unlearn", "--client", "1", "--run", run, "--json").json
    assert answered["worst_class"]["measure"] == "R²" and not answered["declined"]
    measured = ok("evaluate", "--retrain", "--run", run, "--json").json
    for state in ("original", "forgotten", "retrained"):
        assert min(measured[state]["per_class"]) > 0.8 and max(measured[state]["rmse"]) < 60  # in the user's units
    assert measured["restored_bit_identical"] and measured["test"]["forgotten"] > 0.8
    printed = ok("evaluate", "--run", run).out
    assert "held-out, RMSE" in printed and "height" in printed
    assert "R² heldout" in " ".join(ok("status", "--run", run).out.split())
    ok("evidence", "R1", "--run", run)
    page = (run / "evidence" / "R1.html").read_text()
    assert "all outputs" in page and "R² on held-out rows" in page and "“height”" in page
    assert ok("verify", "--run", run, "--json").json["ok"]
    ok("data", "--run", run)
    ok("restore", "R1", "--run", run)


def test_labels_are_trained_measured_forgotten_and_answered_by_name(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    run = trained(tmp_path, "hidden > 0")
    answered = ok("unlearn", "--class", "1", "--run", run, "--json").json
    assert answered["requests"][0]["verdict"]["finding"] == "forgotten"
    assert answered["worst_class"]["measure"] == "balanced accuracy"
    measured = ok("evaluate", "--run", run, "--json").json
    assert measured["forgotten"]["heldout"]["forget"] == 0 == measured["forgotten"]["f1"][1]
    assert measured["forgotten"]["f1"][0] > 0.7 and min(measured["original"]["f1"]) > 0.7
    assert "held-out, by label" in ok("evaluate", "--run", run).out
    pillow.new("L", (4, 2), 1).save(tmp_path / "row.png")
    answer = json.loads(fedup("predict", tmp_path / "row.png", "--run", run, "--json").out)
    assert answer["labels"] in ([], ["weight"]) and answer["probabilities"]["height"] < 1e-4
    ok("unlearn", "--client", "2", "--run", run, "--force")
    ok("restore", "R1", "--run", run)
    assert ok("verify", "--run", run, "--json").json["ok"]


@pytest.mark.parametrize(("targets", "named"), [("100 + 30 * hidden", ("--client", 1)), ("hidden > 0", ("--class", 0))])
def test_labels_and_values_train_on_and_are_trained_anew(targets, named, tmp_path):
    run = trained(tmp_path, targets)
    ok("unlearn", *named, "--run", run, "--force")
    before = ok("evaluate", "--run", run, "--json").json["original"]["heldout"]["retain"]
    # Values are learned in units of their deviation: a base in the user's units would start far off.
    on = ok("train", "--more-rounds", 1, "--run", run, "--json").json
    assert on["followed"] == ["R1"] and on["accuracy"]["heldout"] > before - 0.05
    anew = ok("retrain", "--run", run, "--json").json["compared"]
    assert anew["candidate"]["validation"] > 0.7 and len(anew["candidate"]["per_class"]) == (
        2 if targets[0] == "1" else 1
    )
    ok("collect", "--run", run)
    assert ok("verify", "--run", run, "--json").json["ok"] is True
    ok("evidence", "R1", "--run", run)

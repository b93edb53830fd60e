"""Several columns to predict, from a CSV to answers: labels however yes and no are written, and values."""

import csv
import json

import numpy as np
import pytest
import torch
from tests.cli._in_process import fedup, ok, refused

from fedup.tasks.datasets import load_dataset
from fedup.tasks.file_options import FileOptions

WORDS = (("no", "yes"), ("0", "1"), ("FALSE", "True"))
LABELS = ("--label", "fever,cough,rash", "--targets", "labels", "--column", "dose=ignore", "--column", "days=ignore")
VALUES = ("--label", "dose,days", "--targets", "values", *(f"--column={name}=ignore" for name in LABELS[1].split(",")))
WHO = ("--clients-column", "site", "--id-column", "id")
ROWS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("outputs"), np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 3))
    hidden = x @ rng.normal(size=(3, 3)) + 0.2 * rng.normal(size=(ROWS, 3))
    with (folder / "ward.csv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(["id", "site", "a", "b", "c", "fever", "cough", "rash", "dose", "days"])
        for row in range(ROWS):
            truths = [words[int(value > 0)] for words, value in zip(WORDS, hidden[row], strict=True)]
            values = [f"{10 + 3 * hidden[row, 0]:.3f}", f"{100 + 30 * hidden[row, 1]:.3f}"]
            site = ("east", "west", "south")[row % 3]
            writer.writerow([f"r{row}", site, *(f"{value:.4f}" for value in x[row]), *truths, *values])
    np.save(folder / "truths.npy", hidden > 0)
    return folder


def answers(text):
    return {own["input"]: own for own in map(json.loads, text.splitlines())}


def test_labels_are_read_forgotten_by_name_and_measured_as_they_are_answered(folder):
    truths = np.load(folder / "truths.npy")
    found = ok("data", "check", "ward.csv", *LABELS, *WHO, "--json", cwd=folder).json[0]
    assert list(found["labels"].values()) == truths.sum(0).tolist()
    options = FileOptions(
        label="fever,cough,rash", targets="labels", clients_column="site", id_column="id", column=LABELS[-1:]
    )
    dataset = load_dataset(str(folder / "ward.csv"), options)
    assert dataset.y.dtype == torch.bool and dataset.class_names == ("fever", "cough", "rash")
    for row_id, labels in zip(dataset.row_ids, dataset.y.tolist(), strict=True):
        assert labels == truths[int(row_id[1:])].tolist()
    ok("train", "--data", "ward.csv", *LABELS, *WHO, "--run", "labels", cwd=folder)
    ok("collect", "--run", "labels", cwd=folder)
    ok("unlearn", "--class", "fever", "--run", "labels", cwd=folder)
    said = answers(fedup("predict", "ward.csv", "--run", "labels", "--json", cwd=folder).out)
    given = np.array([[name in said[f"r{row}"]["labels"] for name in dataset.class_names] for row in range(ROWS)])
    assert not given[:, 0].any() and (given == truths)[:, 1:].mean() > 0.85
    measured = ok("evaluate", "--data", "ward.csv", "--run", "labels", "--json", cwd=folder).json
    assert measured["forgotten"]["per_class"] == pytest.approx((given == truths).mean(0).tolist())
    assert measured["forgotten"]["f1"][0] == 0 and measured["original"]["f1"][0] > 0.85


def test_several_values_are_answered_and_measured_in_their_own_units(folder):
    ok("train", "--data", "ward.csv", *VALUES, *WHO, "--rounds", "12", "--run", "values", cwd=folder)
    said = answers(fedup("predict", "ward.csv", "--run", "values", "--json", cwd=folder).out)
    with (folder / "ward.csv").open() as file:
        rows = list(csv.DictReader(file, delimiter=";"))
    for place, name in enumerate(("dose", "days")):
        errors = [said[row["id"]]["values"][name] - float(row[name]) for row in rows]
        measured = ok("evaluate", "--data", "ward.csv", "--run", "values", "--json", cwd=folder).json["original"]
        assert measured["rmse"][place] == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=1e-3)
        assert measured["per_class"][place] > 0.8


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--label", "fever,cough"), "2 columns to predict, fever, cough: pass --targets labels"),
        (("--label", "fever,rush", "--targets", "labels"), "there is none called 'rush'"),
        (("--label", "fever,dose", "--targets", "labels"), "label 'dose' is yes or no (1 or 0, true or false)"),
        (("--label", "dose,fever", "--targets", "values"), "label 'fever' holds texts (300), and values are numbers"),
    ],
)
def test_columns_that_do_not_hold_such_targets_are_refused(folder, options, told):
    refused("train", "--data", "ward.csv", *options, *WHO, "--run", "none", told=told, cwd=folder)
    assert not (folder / "none").exists()

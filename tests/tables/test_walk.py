"""A CSV with hospitals and patients from the file to evidence and back, by the command line alone; other formats."""

import csv
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from tests.cli._in_process import fedup, ok, refused

from fedup.run.folder import Run

ROOT = Path(__file__).parents[2]
COLUMNS = (
    *("--label", "diagnosis", "--clients-column", "hospital"),
    *("--subject-column", "patient_id", "--id-column", "row_id"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With patients.csv, and new_patients.csv without diagnoses."""
    folder = tmp_path_factory.mktemp("patients")
    arguments = [str(folder / name) for name in ("patients.csv", "new_patients.csv")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_patients_csv.py", *arguments])
        runpy.run_path(str(ROOT / "examples" / "make_patients_csv.py"))
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    ok("train", "--data", "patients.csv", *COLUMNS, "--run", "run", cwd=folder)
    return folder


def answers(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_hospital_and_a_class_are_forgotten_and_restored_by_the_command_line_alone(trained, tmp_path):
    about = Run(trained / "run").read().about
    assert about["client_names"] == ["anna", "mercy", "north", "riverside"]
    assert about["class_names"] == ["benign", "malignant"]
    assert "P-0" not in json.dumps(about)  # no person
    result = ok("status", "--run", "run", "--json", cwd=trained).json
    assert result["trained"]["accuracy"]["heldout"] > 0.93
    assert [own["name"] for own in ok("data", "--run", "run", "--json", cwd=trained).json] == about["client_names"]
    run, private = (shutil.copytree(trained / "run", tmp_path / name) for name in ("run", "private"))
    noisy = ok("collect", "--epsilon", "8", "--clip", "unit", "--run", private, cwd=trained)
    assert "sums without noise" in noisy.told
    again = ok("train", "--data", "patients.csv", *COLUMNS, "--run", run, cwd=trained).out
    assert "was trained before; nothing was changed" in again
    ok("collect", "--run", run, cwd=trained)
    before = ok("predict", "new_patients.csv", "--run", run, "--json", cwd=trained).out
    ok("unlearn", "--client", "1", "--reference", "MERCY", "--run", run, cwd=trained)
    ok("unlearn", "--class", "1", "--force", "--run", run, cwd=trained)
    assert {
        own["name"] for own in answers(ok("predict", "new_patients.csv", "--run", run, "--json", cwd=trained).out)
    } == {"benign"}
    ok("evidence", "MERCY", "--run", run, cwd=trained)
    ok("restore", "--all", "--run", run, cwd=trained)
    assert ok("predict", "new_patients.csv", "--run", run, "--json", cwd=trained).out == before


def test_answers_are_named_by_id_whatever_the_order_of_columns_the_format_or_where_the_data_went(trained, tmp_path):
    run = shutil.copytree(trained / "run", tmp_path / "run")
    expected = ok("predict", "new_patients.csv", "--run", run, "--json", cwd=trained).out
    assert [own["input"] for own in answers(expected)] == [f"E-{row:04}" for row in range(549, 569)]
    rows = list(csv.reader((trained / "new_patients.csv").open()))
    order = np.random.default_rng(0).permutation(len(rows[0]))
    shuffled = tmp_path / "shuffled.csv"
    shuffled.write_text("\n".join(";".join(row[place] for place in order) for row in rows))
    table = pyarrow.csv.read_csv(trained / "new_patients.csv")
    pq.write_table(table, tmp_path / "new.parquet")
    for path in (shuffled, tmp_path / "new.parquet"):  # the data file is not here
        assert ok("predict", path, "--run", run, "--json", cwd=tmp_path).out == expected
    assert ok("predict", "-", "--run", run, "--json", cwd=tmp_path, stdin=shuffled.read_bytes()).out == expected
    refused("collect", "--run", run, cwd=tmp_path, told="There is no file patients.csv")
    shutil.copy(trained / "patients.csv", tmp_path / "patients.csv")  # brought again, elsewhere
    ok("collect", "--run", run, cwd=tmp_path)
    measured = ok("evaluate", "--data", "patients.csv", "--run", run, "--json", cwd=tmp_path).json
    assert measured["rows"] == 549 and measured["original"]["accuracy"] > 0.95


def test_an_exported_program_answers_as_predict_does_with_what_its_note_says(trained, tmp_path):
    ok("export", tmp_path / "model.pt2", "--run", "run", cwd=trained)
    note = {"fedup.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=note)
    about = json.loads(note["fedup.json"])
    rows = list(csv.DictReader((trained / "new_patients.csv").open()))
    x = [[(float(row[own["name"]]) - own["mean"]) / own["std"] for own in about["input"]["columns"]] for row in rows]
    labels = program.module()(torch.tensor(x)).argmax(1).tolist()
    expected = answers(ok("predict", "new_patients.csv", "--run", "run", "--json", cwd=trained).out)
    assert [about["class_names"][label] for label in labels] == [own["name"] for own in expected]


def test_a_model_that_learns_nothing_is_said_so_and_one_that_learns_is_not(folder, tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "noise.csv"
    rows = [f"{row},{rng.normal()},{rng.normal()},{'ab'[rng.random() < 0.3]}" for row in range(300)]
    path.write_text("\n".join([",x,z,label", *rows]))  # with an index, as pandas writes it
    out = ok("train", "--data", path, "--run", tmp_path / "run").out
    assert "hardly better than to answer always the same" in out and "2 as numbers; ignored: unnamed" in out
    assert "hardly better" not in ok("train", "--data", folder / "patients.csv", *COLUMNS, "--run", tmp_path / "2").out


def test_a_folder_of_240_images_is_learned_with_the_defaults_and_arrays_too(tmp_path):
    digits = load_digits()
    for row in range(240):
        image = tmp_path / "photos" / f"digit {digits.target[row]}" / f"{row}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[row] * 15).astype(np.uint8)).save(image)
    refused("train", "--data", tmp_path / "photos", "--run", tmp_path / "run", told="pass --image-size 28")
    result = ok("train", "--data", tmp_path / "photos", "--image-size", 28, "--run", tmp_path / "run", "--json").json
    assert result["accuracy"]["test"] > 0.8  # 0.27 with the settings of large data sets
    named = ok("predict", tmp_path / "photos/digit 3/3.png", "--resize", "--run", tmp_path / "run", "--json").json
    assert named["name"] == "digit 3"
    measured = ok("evaluate", "--data", tmp_path / "photos", "--run", tmp_path / "run", "--json").json
    assert measured["rows"] == 240 and measured["original"]["accuracy"] > 0.9
    x, y, sites = digits.data[:300], digits.target[:300], np.array(["left", "right"])[np.arange(300) % 2]
    np.savez(tmp_path / "some.npz", x=x, y=y, clients=sites, test_x=digits.data[300:400], test_y=digits.target[300:400])
    result = ok("train", "--data", tmp_path / "some.npz", "--run", tmp_path / "arrays", "--json").json
    assert result["accuracy"]["test"] > 0.7
    assert Run(tmp_path / "arrays").read().about["client_names"] == ["left", "right"]


def test_check_says_in_a_few_lines_what_is_used_as_what(folder):
    out = ok("data", "check", folder / "patients.csv", *COLUMNS, "--column", "mean_area=ignore").out
    lines = out.splitlines()
    assert len(lines) <= 14 and max(map(len, map(str.rstrip, lines))) <= 100
    for said in ("549 rows", "benign 346", "mercy", "persons", "29: ", "mean_area: as chosen", "Nothing is wrong"):
        assert said in out, said
    assert re.search(r"\d+ with clients, \d+ kept apart as test set", out)
    wrong = fedup("data", "check", folder / "patients.csv", "--label", "hospital", "--column", "mean_area=category")
    assert wrong.code == 0 and "category" in wrong.out  # 549 categories are not wrong, only unwise


def test_in_exact_mode_no_row_has_a_say_in_the_scaling_and_a_patient_need_not_wait(folder, tmp_path):
    (tmp_path / "wide.py").write_text(
        "import torch\nfrom torch import nn\nfrom fedup.models.backbone import Origin\n"
        'TAKES, STEP, ORIGIN = "table", 2.0**-10, Origin("random weights", "Apache-2.0", "a test")\n'
        "def build(shape):\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Linear(shape[0], 40), nn.Tanh())\n"
    )
    exact, run = ("--backbone", tmp_path / "wide.py", "--run", tmp_path / "run"), ("--run", tmp_path / "run")
    refused("train", "--data", "patients.csv", *COLUMNS, *exact, told="no row had a say in the scaling", cwd=folder)
    ok("train", "--data", "patients.csv", *COLUMNS, "--standardise", "none", *exact, cwd=folder)
    done = ok("unlearn", "--subject", "P-113", "--reference", "LETTER", *run, "--json", cwd=folder).json
    assert done["claim"]["kind"] == "suppressed"  # the file says which classes and columns there are
    assert done["requests"][0]["rows"] == 3
    assert ok("verify", "--relearn", *run, "--json", cwd=folder).json["ok"]
    assert "mercy" in ok("unlearn", "--client", "mercy", *run, cwd=folder).out
    assert ok("evaluate", "--data", "patients.csv", *run, "--json", cwd=folder).json["served"]["accuracy"] > 0.5
    for own in ("a", "b"):
        for row in range(15):
            path = tmp_path / "images" / own / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (9, 9), 10 * row + (own == "b")).save(path)
    images = "--data", tmp_path / "images", "--clients", "2", "--partition", "iid", "--image-size", "28"
    ok("train", *images, "--backbone", "random_conv", "--run", tmp_path / "heads")
    assert Run(tmp_path / "heads").read().about["input"] == {
        **{"kind": "image", "shape": [1, 28, 28]},
        **{"mean": [0.5], "std": [0.25]},
    }

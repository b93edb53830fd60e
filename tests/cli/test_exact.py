"""Exact mode on the command line: one run folder from learning to evidence."""

import pytest
from PIL import Image
from tests.cli._in_process import contents, fedup, ok, refused, sample_ids

from fedup.errors import MissingDataError
from fedup.run.folder import Run
from fedup.statistics.feature_cache import FeatureCache
from fedup.tasks.recipe import Recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact") / "run"
    options = ("--rows", "400", "--clients", "4", "--features", "40")
    learned = ok("train", "--backbone", "random_conv", *options, "--run", folder, "--json").json
    assert learned["exact"]["origin"]["declared_by"] and learned["accuracy"]["heldout"] > 0.7
    assert "nothing more to collect" in ok("collect", "--run", folder).out
    return folder


def test_a_folder_forgets_exactly_and_says_so(run):
    one = sample_ids(1)[0]
    first = ok("unlearn", "--client", "3", "--reference", "T1", "--run", run, "--json").json
    second = ok("unlearn", "--samples", f"1:{one}", "--run", run, "--json").json
    assert first["claim"]["kind"] == "exact model, data retained" and first["clients_contacted"] == []
    assert second["claim"]["totals"]["before"] == first["claim"]["totals"]["after"]
    assert second["claim"]["kind"] == "exact model, data retained"
    checks = {
        check["name"]: check for check in ok("verify", "--relearn", "--fresh", "--run", run, "--json").json["checks"]
    }
    assert checks["relearned totals"]["ok"] and "agree" in checks["features computed anew"]["found"]
    rows = FeatureCache.open(run / "clients" / "features.safetensors").rows
    killed = run / "clients" / ".features.safetensors.1.partial"  # left in the middle of writing
    killed.write_bytes((run / "clients" / "features.safetensors").read_bytes())
    assert ok("purge", "--yes", "--run", run, "--json").json["claim"]["kind"] == "exact"
    assert FeatureCache.open(run / "clients" / "features.safetensors").rows < rows
    assert not killed.exists()
    page = ok("evidence", "T1", "--run", run, "--json").json
    assert page["claim"]["kind"] == "exact" and page["claim"]["totals"] == first["claim"]["totals"]
    assert all(condition["holds"] for condition in page["claim"]["conditions"])
    html = (run / "evidence" / "R1.html").read_text(encoding="utf-8")
    assert "learned without the data" in html and first["claim"]["totals"]["after"] in html
    state = Run(run).read()
    assert state.trained.body["salt"] not in html and state.trained.body["salt"] not in str(page)
    assert ok("status", "--run", run, "--json").json["claim"] == "exact"
    learned = state.trained.body["totals"]
    restored = ok("restore", "--all", "--run", run, "--json").json
    assert restored["claim"]["totals"]["after"] == learned and restored["clients_contacted"] == [1, 3]
    assert ok("evidence", "T1", "--run", run, "--json").json["claimed"][0].startswith("The request was taken back")
    assert ok("verify", "--relearn", "--run", run, "--json").json["ok"]
    assert "served" in ok("evaluate", "--run", run).out


def test_a_claim_of_a_folder_covers_features_classes_and_files_of_ones_own(run, tmp_path, monkeypatch):
    ok("unlearn", "--samples", f"1:{sample_ids(1)[0]}", "--run", run)
    before = contents(run)
    with monkeypatch.context() as patched:
        patched.setattr(Recipe, "load", lambda self: raise_missing())
        refused("purge", "--yes", "--run", run, told="cached features")
    assert contents(run) == before
    ok("restore", "--all", "--run", run)
    folder, file = tmp_path / "images", tmp_path / "run"
    for row in range(60):
        (folder / f"c{row % 3}").mkdir(parents=True, exist_ok=True)
        Image.new("L", (28, 28), 80 * (row % 3) + row).save(folder / f"c{row % 3}" / f"{row:02}.png")
    ok("train", "--data", folder, "--image-size", "20", "--clients", "3", "--partition", "pathological:1",
       "--backbone", "random_conv", "--features", "9", "--run", file)  # fmt: skip
    assert Run(file).read().about["input_shape"] == [1, 20, 20]
    declined = fedup("unlearn", "--client", "0", "--run", file, "--json")  # it alone holds its class
    assert declined.code == 1 and "nobody asked to forget" in declined.json["declined"]
    assert not Run(file).read().active and ok("verify", "--relearn", "--run", file)
    ok("unlearn", "--client", "0", "--force", "--run", file)
    claim = ok("purge", "--yes", "--run", file, "--json").json["claim"]
    assert claim["kind"] == "suppressed" and "not fixed: preprocessing" in str(claim["conditions"])


OF_PERSONS = """
from dataclasses import replace
from fedup.tasks.datasets import digits
INPUT = digits.INPUT
def load():
    data = digits.load()
    return replace(data, subjects=[f"P-{row // 40}" for row in range(len(data.y))])
"""


def test_a_person_is_forgotten_exactly_and_by_tag_only(tmp_path):
    (tmp_path / "data.py").write_text(OF_PERSONS, encoding="utf-8")
    run, key = ("--run", tmp_path / "run"), tmp_path / "run" / "subjects.key"
    options = ("--clients", "3", "--features", "9", "--backbone", "random_conv")
    ok("train", "--data", tmp_path / "data.py", *options, *run)
    assert key.stat().st_mode & 0o777 == 0o600
    answered = ok("unlearn", "--subject", "P-7", *run, "--json").json
    assert answered["requests"][0]["rows"] > 5 and answered["claim"]["kind"] == "exact model, data retained"
    assert ok("purge", "--yes", *run, "--json").json["claim"]["kind"] == "exact"
    ok("verify", "--relearn", *run)
    assert not any(b"P-7" in file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file())


def raise_missing():
    raise MissingDataError("The data set is not here.")


def test_damage_and_what_does_not_fit_are_found(run, tmp_path):
    before = contents(run)
    refused("train", "--backbone", "random_cone", "--run", tmp_path / "a", told="Did you mean 'random_conv'")
    refused("train", "--backbone", "minilm", "--run", tmp_path / "b", told="takes texts")
    refused("unlearn", "--client", "77", "--run", run, told="Unknown client")
    assert contents(run) == before
    head = next((run / "files").glob("head-*"))
    whole = head.read_bytes()
    head.write_bytes(whole[:-4] + bytes(4))
    assert fedup("verify", "--run", run).code == 1
    head.write_bytes(whole)
    assert ok("verify", "--run", run, "--json").json["ok"]

"""Exact mode on the command line: one run folder from learning to evidence."""

import pytest
from tests.cli._in_process import contents, fedup, ok, refused, sample_ids

from fedup.run.folder import Run
from fedup.statistics.feature_cache import FeatureCache


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
    checks = {
        check["name"]: check for check in ok("verify", "--relearn", "--fresh", "--run", run, "--json").json["checks"]
    }
    assert checks["relearned totals"]["ok"] and "agree" in checks["features computed anew"]["found"]
    rows = FeatureCache.open(run / "clients" / "features.safetensors").rows
    assert ok("purge", "--yes", "--run", run, "--json").json["claim"]["kind"] == "exact"
    assert FeatureCache.open(run / "clients" / "features.safetensors").rows < rows
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


def test_damage_and_what_does_not_fit_are_found(run, tmp_path):
    before = contents(run)
    refused("train", "--backbone", "random_cone", "--run", tmp_path / "a", told="Did you mean 'random_conv'")
    refused("train", "--backbone", "minilm", "--run", tmp_path / "b", told="takes texts")
    refused("unlearn", "--client", "3", "--dry-run", "--run", run, told="no dry run")
    refused("unlearn", "--client", "77", "--run", run, told="Unknown client")
    assert contents(run) == before
    head = next((run / "files").glob("head-*"))
    whole = head.read_bytes()
    head.write_bytes(whole[:-4] + bytes(4))
    assert fedup("verify", "--run", run).code == 1
    head.write_bytes(whole)
    assert ok("verify", "--run", run, "--json").json["ok"]

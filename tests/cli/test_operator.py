"""An operator's day: requests in, requests back, and what the folder says about it."""

import json

import pytest
from safetensors import safe_open
from tests.cli._in_process import QUICK, TRAIN, contents, copy_of, fedup, filter_file, ok, refused, sample_ids, sha256

from fedup import load_centroids
from fedup.cli._session import Session
from fedup.request import Forget
from fedup.run.folder import Run
from fedup.statistics.store import Centroids
from fedup.unlearning.unlearn import classes_left_without_holder

ANY_LOSS = ("--force", "--max-class-loss", 100)
STRICT = ("--max-loss", 0, "--max-class-loss", 100)  # a filter may cost no accuracy, and any class


@pytest.fixture
def run(tmp_path):
    return copy_of("collected", tmp_path)


@pytest.fixture
def answered(tmp_path):
    """R1 class 7 (T-1), R2 client 2, R3 two samples of client 1."""
    return copy_of("answered", tmp_path)


def kinds(run):
    return [event.kind for event in Run(run).read().events]


def test_on_the_cpu_the_centroids_of_a_folder_are_not_copied_into_memory(run, monkeypatch):
    monkeypatch.setattr(Centroids, "to", lambda store, device: pytest.fail(f"copied to {device}"))
    assert Session(run).store(Run(run).read()).vectors.device.type == "cpu"


def test_training_and_collecting_again_change_nothing(run):
    before = contents(run)
    assert ok("train", "--run", run, *TRAIN, "--json").json["already"] is True
    assert ok("collect", "--run", run, "--json").json["already"] is True
    assert contents(run) == before


def test_weights_brought_along_are_taken_as_they_are(run, tmp_path):
    (weights,) = (run / "files").glob("model-*")
    brought = ok("train", "--run", tmp_path / "b", *TRAIN[:4], "--rounds", 0, "--weights", weights, "--json").json
    assert brought["fingerprint"] == Run(run).read().base
    ok("collect", "--run", tmp_path / "b")
    ok("unlearn", "--run", tmp_path / "b", "--class", 7, *QUICK)
    refused("evaluate", "--retrain", "--run", tmp_path / "b", told="brought")


@pytest.mark.parametrize(
    "options",
    [
        lambda: ("--class", 7),
        lambda: ("--samples", f"1:{sample_ids(1, 0)[0]},{sample_ids(1, 6)[0]}", "--samples", f"3:{sample_ids(3)[0]}"),
        lambda: ("--client", 0, "--samples", f"0:{sample_ids(0)[0]}"),
    ],
    ids=["class", "samples", "client+sample"],
)
def test_a_dry_run_changes_nothing_and_tells_what_the_real_run_does(run, options):
    before = contents(run)
    what = (*options(), *QUICK)  # so small a federation loses classes with any client
    plan = ok("unlearn", "--run", run, *what, "--dry-run", "--json").json
    told = ok("unlearn", "--run", run, *what, "--dry-run").out
    assert "Nothing was changed" in told and max(map(len, told.splitlines())) <= 100
    assert contents(run) == before
    done = ok("unlearn", "--run", run, *what, "--json").json
    event = Run(run).read().events[-1].body
    assert [one["rows"]["count"] for one in plan["requests"]] == [one["rows"] for one in done["requests"]]
    assert plan["clients_contacted"] == done["clients_contacted"] == event["clients_contacted"]
    sent = [release for release in event["releases"] if release["what"] != "counts of answers"]
    counted = [release for release in event["releases"] if release["what"] == "counts of answers"]
    assert sorted({release["client"] for release in sent}) == done["clients_contacted"]
    assert sorted({release["client"] for release in counted}) == done["clients_counting"] == event["clients_counting"]
    named = sum(len(ids) for ids in event["requests"][0]["forget"]["samples"].values())
    assert (plan["samples_unknown"], plan["cells_asked"]) == (named, [])  # nobody is asked of which classes they are
    assert ("those of" in told) == bool(named)
    status = ok("status", "--run", run, "--json").json
    assert plan["cells_sealed"] == status["sealed"]["cells"]
    assert plan["in_force_afterwards"] == len(status["in_force"])
    assert done["bytes_up"] == sum(release["bytes"] for release in event["releases"])
    if not named:
        assert (plan["centroids_kept"], sent) == (done["centroids_used"], [])
        assert plan["privacy_cost"].startswith("none")
    else:
        assert sum(release["cells"] for release in sent) > 0
        ok("unlearn", "--run", run, "--class", 9, *QUICK)
        ok("restore", "R1", "--run", run, *ANY_LOSS)
        again = ok("unlearn", "--run", run, *what, "--dry-run", "--json").json  # by now the classes are known
        assert again["samples_unknown"] == 0
        gone = {tuple(cell) for cell in again["cells_asked"]}
        assert len(gone) == sum(release["cells"] for release in sent if release["what"] == "centroids")


def test_a_dry_run_refuses_what_the_real_run_refuses(run):
    for options in (("--class", 99), ("--client", 9), ("--samples", "0:99999"), ("--class", 3, "--alpha", 2)):
        plan, done = (fedup("unlearn", "--run", run, *options, *more) for more in (("--dry-run",), ()))
        assert plan.code == done.code == 1
        assert plan.err == done.err


def test_too_high_a_loss_declines_and_force_puts_it_in_force(run):
    files = contents(run / "files")
    declined = fedup("unlearn", "--run", run, "--class", 3, *STRICT, "--steps", 1, "--json")
    assert declined.code == 1
    assert "lower the retained accuracy on validation data" in declined.json["declined"]
    assert declined.json["filter"] is None
    assert contents(run / "files") == files
    assert kinds(run)[-1] == "declined"
    status = ok("status", "--run", run, "--json").json
    assert (status["in_force"], status["filter"], len(status["declined"])) == ([], None, 1)
    forced = ok("unlearn", "--run", run, "--class", 3, *STRICT, "--steps", 1, "--force", "--json").json
    assert [one["id"] for one in forced["requests"]] == ["R1"]
    assert ok("verify", "--run", run, "--json").json["ok"]


def test_settings_stay_until_others_are_chosen(run):
    ok("unlearn", "--run", run, "--class", 7, "--force", "--steps", 7, "--rank", 5, "--seed", 3)
    ok("unlearn", "--run", run, "--class", 8, "--force", "--rank", 6)
    configs = [event.body["config"] for event in Run(run).read().events if event.kind == "unlearned"]
    assert [(one["steps"], one["rank"], one["seed"]) for one in configs] == [(7, 5, 3), (7, 6, 3)]


def test_a_remapped_class_keeps_its_centroids_in_use_and_evidence_says_so(run):
    ok("unlearn", "--run", run, "--class", 7, "--class-policy", "remap", *QUICK)
    claimed = ok("evidence", "R1", "--run", run, "--json").json["claimed"]
    assert any("other labels" in one for one in claimed)
    assert not any("fitted without" in one for one in claimed)
    assert ok("verify", "--run", run, "--json").json["ok"]


def test_requests_are_taken_back_by_id_or_reference_and_the_others_stay(answered):
    before = contents(answered)
    ran = fedup("restore", "R1", "R9", "--run", answered)  # known and unknown
    assert ran.code == 1
    assert "R1 (T-1), R2, R3" in ran.err
    assert contents(answered) == before
    done = ok("restore", "R2", "--run", answered, *ANY_LOSS, "--json").json
    assert (done["requests"], done["remaining"], done["already"]) == (["R2"], ["R1", "R3"], [])
    assert ok("status", "--run", answered, "--json").json["in_force"] == ["R1", "R3"]
    before = contents(answered)
    again = ok("restore", "R2", "--run", answered, "--json").json
    assert (again["requests"], again["already"]) == ([], ["R2"])
    assert contents(answered) == before
    done = ok("restore", "t-1", "r3", "T-1", "--run", answered, "--json").json
    assert (done["requests"], done["filter"], done["clients_contacted"]) == (["R1", "R3"], None, [])


def test_a_restoration_that_costs_too_much_is_declined(run):
    ok("unlearn", "--run", run, "--class", 7, "--force", "--steps", 1)
    ok("unlearn", "--run", run, "--class", 8, "--force")
    files = contents(run / "files")
    ran = fedup("restore", "R1", "--run", run, *STRICT)
    assert ran.code == 1
    assert "Not taken back" in ran.out
    assert contents(run / "files") == files
    assert kinds(run)[-1] == "declined"
    assert ok("status", "--run", run, "--json").json["in_force"] == ["R1", "R2"]
    ran = fedup("restore", "R1", "--run", run, "--max-loss", 100)
    assert ran.code == 1  # whatever the whole loses, a class may not lose that much
    assert contents(run / "files") == files
    ok("restore", "--all", "--run", run, *STRICT)  # the original model can cost nothing


def stored(run):
    (path,) = (run / "files").glob("centroids-*")
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["fedup"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_purged_centroids_are_in_no_file_and_a_second_purge_changes_nothing(answered):
    ok("unlearn", "--run", answered, "--samples", f"3:{sample_ids(3)[0]}", "--keep-sealed", *QUICK)
    assert ok("status", "--run", answered, "--json").json["sealed"]["originals"] == 1
    header, tensors = stored(answered)
    cells = load_centroids(next((answered / "files").glob("centroids-*"))).cells
    sealed = {(cell.client, cell.label): slice(cell.start, cell.start + cell.size) for cell in cells}
    sealed = {name: slot for name, slot in sealed.items() if name[0] == 2 or name[1] == 7}
    secret = {name: tensors["vectors"][slot][0].numpy().tobytes() for name, slot in sealed.items()}
    whole = {name: data for name, data in secret.items() if any(data)}
    assert whole
    done = ok("purge", "--yes", "--run", answered, "--json").json
    assert set(map(tuple, done["cells"])) >= set(sealed)
    assert ok("status", "--run", answered, "--json").json["sealed"]["originals"] == 0
    header, tensors = stored(answered)
    assert header["sealed"] == [] and not any("sealed" in name or "erased" in name for name in tensors)
    assert sorted(map(tuple, header["purged"])) == sorted(sealed)
    for slot in sealed.values():
        assert not tensors["vectors"][slot].any()
        assert not tensors["counts"][slot].any()
    everything = b"".join(path.read_bytes() for path in answered.rglob("*") if path.is_file())
    assert not any(data in everything for data in whole.values())
    before = contents(answered)
    assert ok("purge", "--yes", "--run", answered, "--json").json == {"cells": []}
    assert "nothing was changed" in ok("purge", "--yes", "--run", answered, "--yes").out
    assert contents(answered) == before
    assert ok("verify", "--run", answered, "--json").json["ok"]


def test_only_what_was_destroyed_or_purged_is_asked_for_again_and_the_filter_is_the_same(tmp_path):
    sample = f"1:{sample_ids(1, 0)[0]}"
    contacted, filters = [], []
    for name, more, purged in (("kept", ("--keep-sealed",), ()), ("destroyed", (), ()), ("purged", (), ("purge",))):
        run = copy_of("collected", tmp_path / name)
        ok("unlearn", "--run", run, "--class", 7, *QUICK)
        ok("unlearn", "--run", run, "--client", 2, "--samples", sample, *QUICK, *more)
        for verb in purged:
            ok(verb, "--yes", "--run", run)
        done = ok("restore", "R2", "--run", run, *ANY_LOSS, "--json").json
        contacted.append(done["clients_contacted"])
        filters.append(sha256(filter_file(run)))
    assert contacted == [[], [1], [1, 2]]
    assert len(set(filters)) == 1


def test_evaluate_and_status_fit_a_hundred_columns_and_change_nothing_unless_retrain_is_put_on_record(answered):
    before = contents(answered)
    out = ok("evaluate", "--run", answered).out
    # At collection; answers counted for R1 and R2; for R3 classes of samples, centroids without them, answers counted.
    assert ok("status", "--run", answered, "--json").json["releases"]["1"]["messages"] == 6
    assert contents(answered) == before
    assert max(map(len, (out + ok("status", "--run", answered).out).splitlines())) <= 100
    rows = {line.split("  ")[0]: line.split()[1:] for line in out.splitlines()[2:5]}
    assert rows["before"] == rows["restored"]
    figures = ok("evaluate", "--run", answered, "--json").json
    assert figures["original"] == figures["restored"]
    assert figures["restored_bit_identical"] is True
    assert figures["forgotten"]["per_class"][7] == 0
    retrained = ok("evaluate", "--run", answered, "--retrain", "--json").json["retrained"]
    event = Run(answered).read().events[-1]
    assert (event.kind, event.body["requests"]) == ("evaluated", ["R1", "R2", "R3"])
    assert event.body["retrained"] == retrained
    assert retrained["per_class"][7] == 0


def test_data_lists_ids_that_unlearn_takes(run):
    by_client = ok("data", "--run", run, "--json").json
    for one in by_client:
        ids = ok("data", "--run", run, "--client", one["client"], "--json").json
        assert [len(own) for own in ids.values()] == one["train_by_class"]
        assert sum(one["train_by_class"]) == one["train"]
    out = ok("data", "--run", run).out
    assert max(map(len, out.splitlines())) <= 100
    ids = ok("data", "--run", run, "--client", 1).out
    assert f"1: {','.join(map(str, sample_ids(1, 1)))}" in ids.splitlines()


def test_list_finds_run_folders_two_levels_down(run):
    found = ok("list", run.parent.parent, "--json").json
    assert str(run) in found["runs"]
    assert "digits" in found["data"]
    assert "lenet5" in found["models"]
    assert ok("list", run, "--json").json["runs"] == [str(run)]
    assert max(map(len, ok("list", cwd=run.parent).out.splitlines())) <= 100


def test_classes_that_no_retained_client_holds_are_told(run):
    store, most = Session(run).store(Run(run).read()), Forget.clients([0, 1, 2])
    lost = sorted(set(range(10)) - {cell.label for cell in store.cells if cell.client == 3})
    assert lost and classes_left_without_holder(store, [most]) == lost
    assert classes_left_without_holder(store, [most, Forget.classes(lost)]) == []
    told = ok("unlearn", "--run", run, *["--client", "0", "--client", "1", "--client", "2"], *QUICK).out
    assert f"no retained client holds class {lost[0]}" in told

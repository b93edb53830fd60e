"""Whatever is changed behind fedup's back: `verify` finds it, and no verb answers from it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.cli._in_process import QUICK, contents, copy_of, fedup, filter_file, ok, sample_ids
from tests.run._edits import edit, rewrite

from fedup.artifacts import load_tensors, save_tensors
from fedup.run.folder import Run
from fedup.run.journal import Journal
from fedup.run.store import hash_of

KINDS = ("model", "centroids", "filter")
VERBS = {
    "predict": ("digit.png", "--json"),
    "export": ("model.pt2",),
    "evaluate": ("--json",),
    "unlearn": ("--class", 3, "--force", "--json"),
    "dry run": ("--class", 3, "--dry-run", "--json"),
    "restore": ("R1", "--force", "--json"),
    "purge": ("--yes", "--json"),
    "evidence": ("R1", "--json"),
    "status": ("--json",),
}
OF_FILES = ("predict", "export", "evaluate", "unlearn", "dry run", "restore", "purge")


@pytest.fixture
def run(tmp_path):
    """Class 7, client 2 and two samples of client 1 are in force; evidence about the first."""
    return copy_of("answered", tmp_path)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another federation, with the very same requests in force."""
    run = tmp_path_factory.mktemp("other") / "run"
    ok("train", "--run", run, "--rows", 400, "--clients", 4, "--rounds", 1, "--seed", 1)
    ok("collect", "--run", run)
    mine = ok("data", "--run", run, "--client", 1, "--json").json
    first, second = [i for ids in mine.values() for i in ids][:2]
    for what in (("--class", 7), ("--client", 2), ("--samples", f"1:{first},{second}")):
        ok("unlearn", "--run", run, *what, *QUICK)
    return run


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """The same federation when class 7 was all that was asked for."""
    run = copy_of("collected", tmp_path_factory.mktemp("older"))
    ok("unlearn", "--run", run, "--class", 7, "--reference", "T-1", *QUICK)
    return run


def file_of(run: Path, kind: str) -> Path:
    (found,) = (run / "files").glob(f"{kind}-*.safetensors")
    return found


def assert_refused(run: Path, *verbs: str) -> None:
    """Each verb exits 1 with one error and without an answer, and leaves every byte of the folder as it is."""
    Image.new("L", (8, 8), 90).save(run.parent / "digit.png")
    before = contents(run)
    for verb in verbs:
        ran = fedup(verb.replace("dry run", "unlearn"), *VERBS[verb], "--run", run, cwd=run.parent)
        assert (ran.code, ran.out) == (1, ""), f"{verb}: {ran}"
        assert ran.err.startswith("Error: "), f"{verb}: {ran.err}"
        assert contents(run) == before, verb
    assert not (run.parent / "model.pt2").exists()


def assert_found_by_verify(run: Path, name: str = "") -> None:
    before = contents(run)
    ran = fedup("verify", "--run", run, "--json")
    assert ran.code == 1
    assert ran.json["ok"] is False
    assert any(name in check["name"] for check in ran.json["checks"] if check["ok"] is False), ran.out
    assert contents(run) == before


def test_the_untouched_folder_is_sound_and_answers_and_a_damaged_one_is_told_in_words(run):
    assert ok("verify", "--run", run, "--json").json["ok"] is True
    Image.new("L", (8, 8), 90).save(run.parent / "digit.png")
    assert json.loads(ok("predict", run.parent / "digit.png", "--run", run, "--json").out)["filter"]
    path = file_of(run, "filter")
    path.write_bytes(path.read_bytes()[:-1])
    told = fedup("verify", "--run", run)
    assert told.code == 1
    assert "does not check out" in told.out
    assert path.name in told.out


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped bit": flip,
    "truncated": lambda path, where: path.write_bytes(path.read_bytes()[: int(where * (path.stat().st_size - 1))]),
    "longer": lambda path, where: path.write_bytes(path.read_bytes() + b"more"),
    "removed": lambda path, where: path.unlink(),
    "a folder": lambda path, where: [path.unlink(), path.mkdir()],
    "that of another federation": None,
}


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(KINDS), st.sampled_from([*DAMAGES]), st.floats(0, 1), st.sampled_from(OF_FILES))
@example("centroids", "truncated", 1.0, "dry run")
@example("model", "that of another federation", 0.0, "purge")
@example("filter", "that of another federation", 0.0, "predict")
def test_a_file_that_is_not_the_one_written_is_found_and_nothing_is_answered_from_it(
    tmp_path_factory, other, kind, damage, where, verb
):
    run = copy_of("answered", tmp_path_factory.mktemp("damaged"))
    path = file_of(run, kind)
    DAMAGES[damage](path, where) if DAMAGES[damage] else shutil.copyfile(file_of(other, kind), path)
    assert_found_by_verify(run, kind)
    assert_refused(run, verb)
    if damage == "removed":
        assert path.name in fedup("unlearn", "--class", 3, "--run", run).err
    shutil.rmtree(run.parent)


def test_an_edited_evidence_page_is_found_and_a_removed_one_noted_and_written_anew(run):
    def check():
        checks = fedup("verify", "--run", run, "--json").json["checks"]
        return next(check["ok"] for check in checks if check["name"] == "evidence/R1.html")

    page = run / "evidence" / "R1.html"
    page.write_text(page.read_text().replace("forget", "keep", 1))
    assert_found_by_verify(run, "evidence/R1.html")
    page.unlink()
    assert check() is None
    ok("evidence", "R1", "--run", run)
    assert check() is True


# The journal, edited in place (each way to edit it: tests/run/test_journal.py)


def append(kind, body):
    def to(run):
        journal = Journal(run / "run.sqlite", write=True)
        journal.append(kind, body)
        journal.close()

    return to


JOURNALS = {
    "a row edited": lambda run: edit(
        run / "run.sqlite", "UPDATE events SET body = replace(body, '\"T-1\"', '\"T-2\"') WHERE seq = 4"
    ),
    "the last row removed": lambda run: edit(
        run / "run.sqlite", "DELETE FROM events WHERE seq = 7; DELETE FROM sqlite_sequence"
    ),
    "truncated": lambda run: (run / "run.sqlite").write_bytes((run / "run.sqlite").read_bytes()[:4096]),
    "no database": lambda run: (run / "run.sqlite").write_bytes(b"no database at all" * 1000),
    "an unknown kind": append("improved", {}),
    "a part missing": append("restored", {"requests": ["R1"], "filter": 5}),
}


@pytest.mark.parametrize("change", JOURNALS.values(), ids=JOURNALS.keys())
def test_no_verb_answers_from_a_journal_that_was_changed(run, change):
    change(run)
    assert_found_by_verify(run, "journal")
    assert_refused(run, *VERBS)


@pytest.mark.parametrize("whose", ["other", "older"])
def test_another_journal_beside_the_files_is_refused_and_no_file_is_removed(run, whose, request):
    shutil.copyfile(request.getfixturevalue(whose) / "run.sqlite", run / "run.sqlite")
    assert_found_by_verify(run)
    assert_refused(run, *OF_FILES)


# The journal, written anew with a sound chain: content is what gives the lie


def forge(run: Path, change) -> None:
    """Write all events anew after `change(kind, body)` altered them: a sound chain with other content."""
    events = Run(run).read().events
    changed = [(event.kind, json.loads(json.dumps(event.body))) for event in events]
    for kind, body in changed:
        change(kind, body)
    rewrite(run, changed)
    assert Run(run).read().events[-1].hash != events[-1].hash


def put(run: Path, source: Path, kind: str):
    """Bring a file into the folder in place of the one of its kind; the change that names it in every event."""
    digest, size = hash_of(source)
    target = run / "files" / f"{kind}-{digest[:16]}.safetensors"
    data = source.read_bytes()
    file_of(run, kind).unlink()
    target.write_bytes(data)

    def change(_, body):
        if body.get(kind) is not None:
            body[kind] = {"name": target.name, "sha256": digest, "size_bytes": size}

    return change


def test_a_forged_chain_is_found_by_the_head_kept_elsewhere(run):
    head = Run(run).read().head
    for known in (head, head[:8]):
        ok("verify", "--run", run, "--head", known)
    for unknown in ("", head[:7], "abcdef12"):
        assert fedup("verify", "--run", run, "--head", unknown).code == 1
    forge(run, lambda kind, body: None)
    ok("verify", "--run", run)
    ran = fedup("verify", "--run", run, "--head", head, "--json")
    assert ran.code == 1
    assert [check["name"] for check in ran.json["checks"] if check["ok"] is False] == ["head you gave"]


def no_filter(kind, body):
    if "filter" in body:
        body["filter"] = None


def struck_out(kind, body):
    if kind == "unlearned":
        body["requests"] = [asked for asked in body["requests"] if asked["id"] != "R2"]


def another_class(kind, body):
    for asked in body.get("requests", ()):
        if asked["id"] == "R1":
            asked["forget"]["classes"] = [8]


@pytest.mark.parametrize("change", [no_filter, struck_out, another_class])
def test_a_filter_that_is_not_of_the_requests_in_force_is_refused_under_a_forged_chain(run, change):
    if change is no_filter:
        filter_file(run).unlink()
    forge(run, change)
    assert_found_by_verify(run, "filter")
    assert_refused(run, "predict", "evaluate", "unlearn", "restore")


@pytest.mark.parametrize(("whose", "kind"), [("other", "filter"), ("older", "filter"), ("other", "centroids")])
def test_a_file_of_another_folder_is_refused_under_a_forged_chain(run, whose, kind, request):
    forge(run, put(run, file_of(request.getfixturevalue(whose), kind), kind))
    assert_found_by_verify(run, kind)
    assert_refused(run, "unlearn", "restore", *(("predict", "export") if kind == "filter" else ()))


@pytest.mark.parametrize("also_its_fingerprint", [False, True])
def test_another_model_is_refused_under_a_forged_chain(run, other, also_its_fingerprint):
    named, base = put(run, file_of(other, "model"), "model"), Run(other).read().base

    def change(kind, body):
        named(kind, body)
        if kind == "trained" and also_its_fingerprint:
            body["fingerprint"] = base

    forge(run, change)
    assert_found_by_verify(run)
    assert_refused(run, "predict", "unlearn")


def resaved(run: Path, kind: str, change) -> Path:
    """A file with other tensors or another header, and a digest that fits them."""
    tensors, header = load_tensors(file_of(run, kind), kind=kind)
    tensors, header = change(
        tensors, {name: value for name, value in header.items() if name not in ("kind", "version")}
    )
    save_tensors(run.parent / "changed.safetensors", tensors, kind=kind, header=header)
    return run.parent / "changed.safetensors"


FILTERS = {
    "NaN": lambda tensors, header: ({**tensors, "encoder": tensors["encoder"] * torch.nan}, header),
    "half": lambda tensors, header: ({"encoder": tensors["encoder"]}, header),
    "a request less": lambda tensors, header: (tensors, {**header, "requests": header["requests"][1:]}),
    "another base": lambda tensors, header: (tensors, {**header, "base": "0" * 64}),
    "no list": lambda tensors, header: (tensors, {name: value for name, value in header.items() if name != "requests"}),
}


@pytest.mark.parametrize("change", FILTERS.values(), ids=FILTERS.keys())
def test_an_altered_filter_is_refused_under_a_forged_chain_and_digest(run, change):
    forge(run, put(run, resaved(run, "filter", change), "filter"))
    assert_found_by_verify(run, "filter")
    assert_refused(run, "predict", "unlearn")


def test_a_purged_cell_that_was_filled_again_is_found(run):
    ok("purge", "--yes", "--run", run)

    def filled(tensors, header):
        columns = zip(*(tensors[f"cells.{name}"].tolist() for name in ("clients", "labels")), strict=True)
        place = [*columns].index(tuple(header["purged"][0]))
        tensors["vectors"][int(tensors["cells.sizes"][:place].sum())] = 1.0
        return tensors, header

    forge(run, put(run, resaved(run, "centroids", filled), "centroids"))
    assert_found_by_verify(run, "centroids")


def test_a_settings_edit_under_a_forged_chain_is_refused_where_the_data_no_longer_fits(run):
    def other_seed(kind, body):
        if kind == "created":
            body["about"]["seed"] = 5

    forge(run, other_seed)
    assert_refused(run, "evaluate", "unlearn")
    assert "not the one" in fedup("unlearn", "--samples", f"0:{sample_ids(0)[0]}", "--run", run).err

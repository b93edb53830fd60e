"""Whatever is changed behind fedup's back: `verify` finds it, and no verb answers from it."""

import json
import re
import shutil
import sqlite3
from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from tests.cli._in_process import FAST, contents, copy_of, fedup, filter_file, ok, sample_ids

from fedup.run.folder import Run
from fedup.run.journal import SCHEMA, Journal
from fedup.run.store import hash_of

KINDS = ("model", "centroids", "filter")


@pytest.fixture
def run(tmp_path):
    """Class 7, client 2 and two samples of client 1 are in force; evidence about the first."""
    return copy_of("answered", tmp_path)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another federation, with the very same requests in force."""
    run = tmp_path_factory.mktemp("other") / "run"
    ok("train", "--run", run, "--rows", 400, "--clients", 4, "--rounds", 2, "--seed", 1)
    ok("collect", "--run", run)
    ok("unlearn", "--run", run, "--class", 7, "--force", *FAST)
    ok("unlearn", "--run", run, "--client", 2, "--force")
    mine = ok("data", "--run", run, "--client", 1, "--json").json
    first, second = [i for ids in mine.values() for i in ids][:2]
    ok("unlearn", "--run", run, "--samples", f"1:{first},{second}", "--force")
    return run


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """The same federation when class 7 was all that was asked for."""
    run = copy_of("collected", tmp_path_factory.mktemp("older"))
    ok("unlearn", "--run", run, "--class", 7, "--reference", "T-1", "--force", *FAST)
    return run


@cache
def _picture(folder: Path) -> Path:
    path = folder / "digit.png"
    Image.new("L", (8, 8), 90).save(path)
    return path


def file_of(run: Path, kind: str) -> Path:
    (found,) = (run / "files").glob(f"{kind}-*.safetensors")
    return found


SERVING = ("predict", "export", "evaluate")
WRITING = ("unlearn", "restore")


def assert_refused(run: Path, *verbs: str) -> None:
    """Each verb exits 1 with one error and without an answer, and leaves every byte of the folder as it is."""
    aside = run.parent
    arguments = {
        "predict": (_picture(aside), "--json"),
        "export": (aside / "model.pt2",),
        "evaluate": ("--json",),
        "unlearn": ("--class", 3, "--force", "--json"),
        "restore": ("R1", "--force", "--json"),
        "evidence": ("R1", "--json"),
        "status": ("--json",),
        "purge": ("--yes", "--json"),
    }
    before = contents(run)
    for verb in verbs:
        ran = fedup(verb, *arguments[verb], "--run", run)
        assert (ran.code, ran.out) == (1, ""), f"{verb}: {ran}"
        assert ran.err.startswith("Error: "), f"{verb}: {ran.err}"
        assert "Traceback" not in ran.err
        assert contents(run) == before, verb
    assert not (aside / "model.pt2").exists()


def assert_found_by_verify(run: Path, name: str = "") -> None:
    before = contents(run)
    ran = fedup("verify", "--run", run, "--json")
    assert ran.code == 1
    assert ran.json["ok"] is False
    assert any(name in check["name"] for check in ran.json["checks"] if check["ok"] is False), ran.out
    assert contents(run) == before


def assert_fails_closed(run: Path, kind: str) -> None:
    assert_found_by_verify(run, kind)
    assert_refused(run, *WRITING, "purge", *SERVING)


def test_verify_says_in_words_that_a_folder_does_not_check_out(run):
    path = file_of(run, "filter")
    path.write_bytes(path.read_bytes()[:-1])
    told = fedup("verify", "--run", run)
    assert told.code == 1
    assert "does not check out" in told.out
    assert path.name in told.out


def test_the_untouched_folder_is_sound_and_answers(run):
    assert ok("verify", "--run", run, "--json").json["ok"] is True
    assert json.loads(ok("predict", _picture(run.parent), "--run", run, "--json").out)["filter"]


# Files


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_lost_its_last_byte_is_refused(run, kind):
    path = file_of(run, kind)
    path.write_bytes(path.read_bytes()[:-1])
    assert_fails_closed(run, kind)


@pytest.mark.parametrize("where", [0.001, 1.0], ids=["header", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_a_flipped_bit_is_refused(run, kind, where):
    path = file_of(run, kind)
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)
    assert_fails_closed(run, kind)


@pytest.mark.parametrize("data", [b"", b"more"], ids=["emptied", "longer"])
def test_an_emptied_or_lengthened_file_is_refused(run, data):
    for kind in KINDS:
        path = file_of(run, kind)
        whole = path.read_bytes()
        path.write_bytes(whole + data if data else data)
        assert_found_by_verify(run, kind)
        assert_refused(run, "restore")
        path.write_bytes(whole)
    ok("verify", "--run", run)


@pytest.mark.parametrize("kind", KINDS)
def test_another_federations_file_is_refused(run, other, kind):
    shutil.copyfile(file_of(other, kind), file_of(run, kind))
    assert_fails_closed(run, kind)


@pytest.mark.parametrize("kind", ["centroids", "filter"])
def test_an_older_version_of_a_file_is_refused(run, older, kind):
    assert file_of(older, kind).name != file_of(run, kind).name
    shutil.copyfile(file_of(older, kind), file_of(run, kind))
    assert_fails_closed(run, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_removed_file_is_named(run, kind):
    path = file_of(run, kind)
    path.unlink()
    assert_fails_closed(run, kind)
    assert path.name in fedup("unlearn", "--class", 3, "--run", run).err


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_in_place_of_a_file_is_refused(run, kind):
    path = file_of(run, kind)
    path.unlink()
    path.mkdir()
    assert_fails_closed(run, kind)


def test_files_that_changed_places_are_refused(run):
    centroids, fitted = file_of(run, "centroids"), file_of(run, "filter")
    data = centroids.read_bytes()
    centroids.write_bytes(fitted.read_bytes())
    fitted.write_bytes(data)
    assert_fails_closed(run, "filter")


def test_dry_runs_refuse_a_damaged_folder_too(run):
    path = file_of(run, "centroids")
    path.write_bytes(path.read_bytes()[:-1])
    ran = fedup("unlearn", "--class", 3, "--dry-run", "--run", run, "--json")
    assert (ran.code, ran.out) == (1, "")


# Evidence


@pytest.mark.parametrize("name", ["R1.html", "R1.json"])
def test_an_edited_evidence_page_is_found(run, name):
    page = run / "evidence" / name
    page.write_text(page.read_text().replace("forget", "keep", 1))
    assert_found_by_verify(run, f"evidence/{name}")


def test_a_removed_evidence_page_is_noted_and_written_anew(run):
    (run / "evidence" / "R1.html").unlink()
    checks = {check["name"]: check["ok"] for check in ok("verify", "--run", run, "--json").json["checks"]}
    assert checks["evidence/R1.html"] is None
    ok("evidence", "R1", "--run", run)
    checks = {check["name"]: check["ok"] for check in ok("verify", "--run", run, "--json").json["checks"]}
    assert checks["evidence/R1.html"] is True


# The journal, edited in place


def edit(run: Path, *statements: str) -> None:
    """Run SQL on the journal with its triggers out of the way, and put them back."""
    connection = sqlite3.connect(run / "run.sqlite")
    triggers = re.findall(r"CREATE TRIGGER (\w+)(.*?END;)", SCHEMA, flags=re.DOTALL)
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        assert connection.execute(statement).rowcount != 0, statement
    for name, text in triggers:
        connection.execute(f"CREATE TRIGGER {name}{text}")
    connection.commit()
    connection.close()


EVERY_VERB = (*SERVING, *WRITING, "purge", "evidence", "status")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET body = replace(body, '\"T-1\"', '\"T-2\"') WHERE seq = 4",
        "UPDATE events SET body = body || ' ' WHERE seq = 1",
        "UPDATE events SET at = '2001-01-01T00:00:00.000+00:00' WHERE seq = 4",
        "UPDATE events SET kind = 'evaluated' WHERE seq = 5",
        "UPDATE events SET hash = replace(hash, substr(hash, 1, 1), 'x') WHERE seq = 7",
        "UPDATE events SET previous = hash WHERE seq = 3",
        "UPDATE events SET seq = 8 WHERE seq = 7",
        "DELETE FROM events WHERE seq = 7",
        "DELETE FROM events WHERE seq = 5",
        "DELETE FROM events WHERE seq = 1",
        "DELETE FROM events",
        "INSERT INTO events SELECT 8, at, kind, body, hash, 'a' FROM events WHERE seq = 7",
        "UPDATE sqlite_sequence SET seq = 6",
        "UPDATE sqlite_sequence SET seq = 60",
    ],
)
def test_an_edited_row_of_the_journal_is_refused(run, statement):
    edit(run, statement)
    assert_found_by_verify(run, "journal")
    assert_refused(run, "predict", "unlearn", "evidence")


def test_rows_that_changed_places_are_refused(run):
    edit(
        run,
        "UPDATE events SET seq = 100 WHERE seq = 5",
        "UPDATE events SET seq = 5 WHERE seq = 6",
        "UPDATE events SET seq = 6 WHERE seq = 100",
    )
    assert_found_by_verify(run, "journal")
    assert_refused(run, *EVERY_VERB)


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TRIGGER events_are_not_removed",
        "DROP VIEW requests",
        "CREATE TRIGGER sly AFTER INSERT ON events BEGIN DELETE FROM events WHERE seq < new.seq; END",
        "CREATE TABLE more (a)",
        "PRAGMA application_id = 1",
        "PRAGMA user_version = 2",
        "PRAGMA user_version = 0",
    ],
)
def test_a_journal_with_other_tables_triggers_or_format_is_refused(run, statement):
    connection = sqlite3.connect(run / "run.sqlite")
    connection.execute(statement)
    connection.commit()
    connection.close()
    assert_found_by_verify(run, "journal")
    assert_refused(run, "predict", "restore", "status")


def test_the_journal_refuses_edits_by_itself(run):
    connection = sqlite3.connect(run / "run.sqlite")
    for statement in (
        "UPDATE events SET kind = 'x'",
        "DELETE FROM events WHERE seq = 7",
        "INSERT OR REPLACE INTO events SELECT 7, at, 'x', body, previous, 'x' FROM events WHERE seq = 7",
    ):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
    connection.close()
    assert fedup("verify", "--run", run).code == 0


def test_another_folders_journal_is_refused_and_no_file_is_removed(run, other):
    shutil.copyfile(other / "run.sqlite", run / "run.sqlite")
    assert_found_by_verify(run)
    assert_refused(run, *SERVING, *WRITING, "purge")


def test_an_older_journal_beside_newer_files_is_refused_and_no_file_is_removed(run, older):
    shutil.copyfile(older / "run.sqlite", run / "run.sqlite")
    assert_found_by_verify(run)
    assert_refused(run, *SERVING, *WRITING, "purge")


@pytest.mark.parametrize("keep", [0, 100, 4096, -1])
def test_a_truncated_journal_is_refused_and_no_file_is_removed(run, keep):
    path = run / "run.sqlite"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(run, "predict", "unlearn", "evidence", "status")
    assert fedup("verify", "--run", run).code == 1


def test_a_journal_of_another_program_is_refused(run):
    (run / "run.sqlite").write_bytes(b"no database at all" * 1000)
    assert_found_by_verify(run, "journal")
    assert_refused(run, *EVERY_VERB)


# The journal, written anew with a sound chain: content is what gives the lie


def forge(run: Path, change) -> None:
    """Write all events anew after `change(kind, body)` altered them: a sound chain with other content."""
    events = Run(run).read().events
    (run / "run.sqlite").unlink()
    journal = Journal.create(run / "run.sqlite")
    for event in events:
        body = json.loads(json.dumps(event.body))
        change(event.seq, event.kind, body)
        journal.append(event.kind, body)
    journal.close()
    assert Run(run).read().events[-1].hash != events[-1].hash


def put(run: Path, source: Path, kind: str) -> dict:
    """A file brought into the folder in place of the one of its kind, and its record."""
    digest, size = hash_of(source)
    target = run / "files" / f"{kind}-{digest[:16]}.safetensors"
    data = source.read_bytes()
    file_of(run, kind).unlink()
    target.write_bytes(data)
    return {"name": target.name, "sha256": digest, "size_bytes": size}


def replace_last(kind: str, record):
    """A change that names another file in every event that names one of this kind."""

    def change(seq, event_kind, body):
        if body.get(kind) is not None:
            body[kind] = record

    return change


def test_a_forged_chain_alone_is_sound_until_the_head_kept_elsewhere_is_asked_for(run):
    head = Run(run).read().head
    ok("verify", "--run", run, "--head", head)
    ok("verify", "--run", run, "--head", head[:8])
    forge(run, lambda seq, kind, body: None)
    ok("verify", "--run", run)
    ran = fedup("verify", "--run", run, "--head", head, "--json")
    assert ran.code == 1
    assert [check["name"] for check in ran.json["checks"] if check["ok"] is False] == ["head you gave"]


@pytest.mark.parametrize("head", ["", "0", "abcdef12", "zz"])
def test_a_head_that_is_too_short_or_unknown_is_a_mismatch(run, head):
    assert fedup("verify", "--run", run, "--head", head).code == 1


def test_a_filter_of_another_base_is_refused_under_a_forged_chain(run, other):
    forge(run, replace_last("filter", put(run, file_of(other, "filter"), "filter")))
    assert_found_by_verify(run, "filter")
    assert_refused(run, *SERVING, *WRITING)


def test_a_filter_for_other_requests_is_refused_under_a_forged_chain(run, older):
    forge(run, replace_last("filter", put(run, file_of(older, "filter"), "filter")))
    assert_found_by_verify(run, "filter")
    assert_refused(run, *SERVING, *WRITING)
    assert "requests in force" in fedup("predict", _picture(run.parent), "--run", run).err


def test_no_filter_while_requests_are_in_force_is_refused_under_a_forged_chain(run):
    filter_file(run).unlink()

    def without(seq, kind, body):
        if "filter" in body:
            body["filter"] = None

    forge(run, without)
    assert_found_by_verify(run, "filter")
    assert_refused(run, *SERVING, *WRITING)


def test_a_filter_after_the_requests_were_struck_out_is_refused_under_a_forged_chain(run):
    def struck(seq, kind, body):
        if kind == "unlearned":
            body["requests"] = [one for one in body["requests"] if one["id"] != "R2"]

    forge(run, struck)
    assert_found_by_verify(run, "filter")
    assert_refused(run, *SERVING, *WRITING)


def test_a_request_that_asks_for_something_else_is_refused_under_a_forged_chain(run):
    def other_class(seq, kind, body):
        for one in body.get("requests", ()):
            if one["id"] == "R1":
                one["forget"]["classes"] = [8]

    forge(run, other_class)
    assert_found_by_verify(run, "filter")
    assert_refused(run, *SERVING, *WRITING)


@pytest.mark.parametrize("also_its_fingerprint", [False, True])
def test_another_model_is_refused_under_a_forged_chain(run, other, also_its_fingerprint):
    record, base = put(run, file_of(other, "model"), "model"), Run(other).read().base

    def change(seq, kind, body):
        if kind == "trained":
            body["model"] = record
            body["fingerprint"] = base if also_its_fingerprint else body["fingerprint"]

    forge(run, change)
    assert_found_by_verify(run)
    assert_refused(run, *SERVING, *WRITING)


def test_centroids_of_another_model_are_refused_under_a_forged_chain(run, other):
    forge(run, replace_last("centroids", put(run, file_of(other, "centroids"), "centroids")))
    assert_found_by_verify(run, "centroids")
    assert_refused(run, *WRITING)


def test_centroids_from_before_a_sample_request_are_found_under_a_forged_chain(run, older):
    forge(run, replace_last("centroids", put(run, file_of(older, "centroids"), "centroids")))
    assert_found_by_verify(run, "centroids")


def resaved(path: Path, change) -> Path:
    """A filter file with other weights or another header, and a digest that fits them."""
    from fedup.artifacts import load_tensors, save_tensors

    tensors, header = load_tensors(path, kind="filter")
    tensors, header = change(tensors, header)
    for name in ("kind", "version"):
        header.pop(name)
    target = path.parent.parent / "changed.safetensors"
    save_tensors(target, tensors, kind="filter", header=header)
    return target


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, header: ({**tensors, "encoder": tensors["encoder"] * torch.nan}, header),
        lambda tensors, header: ({"encoder": tensors["encoder"]}, header),
        lambda tensors, header: ({**tensors, "encoder": tensors["encoder"][:, 1:].contiguous()}, header),
        lambda tensors, header: (tensors, {**header, "requests": header["requests"][1:]}),
        lambda tensors, header: (tensors, {**header, "base": "0" * 64}),
        lambda tensors, header: (tensors, {**header, "cut": "somewhere"}),
        lambda tensors, header: (tensors, {**header, "config": {"rank": -1}}),
        lambda tensors, header: (tensors, {name: value for name, value in header.items() if name != "requests"}),
    ],
    ids=["NaN", "half", "another width", "a request less", "another base", "another cut", "bad settings", "no list"],
)
def test_an_altered_filter_is_refused_under_a_forged_chain_and_digest(run, change):
    changed = resaved(file_of(run, "filter"), change)
    forge(run, replace_last("filter", put(run, changed, "filter")))
    changed.unlink()
    assert_found_by_verify(run, "filter")
    assert_refused(run, *SERVING, *WRITING)


def test_a_purged_cell_that_was_filled_again_is_found(run):
    ok("purge", "--yes", "--run", run, "--yes")
    path = file_of(run, "centroids")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    from fedup.artifacts import save_tensors

    header = json.loads(metadata["fedup"])
    client, label = header["purged"][0]
    start = next(cell[2] for cell in header["cells"] if cell[:2] == [client, label])
    tensors["vectors"][start] = 1.0
    changed = run.parent / "changed.safetensors"
    save_file(tensors, changed, metadata=metadata)
    with pytest.raises(ValueError, match="sha256"):
        from fedup.statistics.store import load_centroids

        load_centroids(changed)
    for name in ("kind", "version", "sha256"):
        header.pop(name)
    save_tensors(changed, tensors, kind="centroids", header=header)
    forge(run, replace_last("centroids", put(run, changed, "centroids")))
    assert_found_by_verify(run, "centroids")


def test_an_event_of_an_unknown_kind_is_refused(run):
    journal = Journal(run / "run.sqlite", write=True)
    journal.append("improved", {})
    journal.close()
    assert_found_by_verify(run, "journal")
    assert_refused(run, *EVERY_VERB)


@pytest.mark.parametrize("body", [{}, {"requests": [{}]}, {"requests": 3}, {"requests": ["R1"], "filter": 5}])
def test_an_event_that_lacks_its_parts_is_refused(run, body):
    journal = Journal(run / "run.sqlite", write=True)
    journal.append("restored", body)
    journal.close()
    assert_found_by_verify(run, "journal")
    assert_refused(run, "predict", "unlearn", "status")


def test_a_settings_edit_under_a_forged_chain_is_refused_where_the_data_no_longer_fits(run):
    def other_seed(seq, kind, body):
        if kind == "created":
            body["about"]["seed"] = 5

    forge(run, other_seed)
    assert_refused(run, "evaluate", "unlearn")
    ran = fedup("unlearn", "--samples", f"0:{sample_ids(0)[0]}", "--run", run)
    assert ran.code == 1
    assert "not the one" in ran.err


def test_the_newest_event_cannot_be_cut_off_together_with_sqlites_counter(run):
    edit(run, "DELETE FROM events WHERE seq = 7", "DELETE FROM sqlite_sequence")
    assert_found_by_verify(run, "journal")
    assert_refused(run, "predict", "unlearn", "evidence", "status")

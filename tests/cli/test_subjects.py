"""Persons on the command line: requests by id, what waits and why, names of classes, and no id in the folder."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.cli._in_process import contents, fedup, filter_file, ok, refused, sha256

from fedup import Forget, SubjectKey
from fedup.cli._names import Names
from fedup.cli._session import Session
from fedup.errors import RequestError
from fedup.request import union
from fedup.run.folder import Run
from fedup.run.in_words import forget_in_words
from fedup.training.local import LocalTraining
from fedup.unlearning.few_rows import waiting_for_others

DATA = """
import torch
from fedup.tasks.datasets import Dataset, Defaults, input_of

INPUT, DEFAULTS = input_of("digits"), Defaults(rounds=6, batch_size=16)


def load():
    source = torch.Generator().manual_seed(0)
    y = torch.arange(640) % 2
    x = torch.randn(640, 8, generator=source)
    x[:, 0] += 2.5 * y
    whose = ["Large-%d" % (i // 60) if i < 240 else "Small-%d" % (i // 12) for i in range(600)]
    whose[597] = "Alone-1"
    return Dataset("table", x[:600], y[:600], x[600:], y[600:], ("benign", "malignant"), subjects=tuple(whose))
"""
MODEL = """
from torch import nn


def build(shape, num_classes):
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, num_classes))
"""
ANY_LOSS = ("--max-loss", "100", "--max-class-loss", "100")
WAITS = 3
NO_DELTA = ("--reason", "poison")  # --force makes none, so that a history with it would end in another filter
PERSONS = [*(f"Large-{n}" for n in range(4)), *(f"Small-{n}" for n in range(20, 32))]


@cache
def original() -> Path:
    root = Path(tempfile.mkdtemp(prefix="fedup-persons-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    (root / "table.py").write_text(DATA)
    (root / "mlp.py").write_text(MODEL)
    partition = "--clients", 2, "--partition", "iid"
    ok("train", "--data", root / "table.py", "--model", root / "mlp.py", *partition, "--run", root / "run")
    ok("collect", "--run", root / "run")
    return root / "run"


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(original(), tmp_path / "run"))


def ids_in(folder: Path) -> list[str]:
    """Files that hold a person's id; the user's own code makes them."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "code"]
    return [path.name for path in files if any(name in path.read_bytes() for name in (b"Large-", b"Small-", b"Alone-"))]


def asked(run: Path, *persons: str) -> Forget:
    return Forget.subjects(persons, key=SubjectKey.load(run / "subjects.key"))


def test_a_person_is_forgotten_shown_by_tag_and_taken_back_by_id(run):
    planned = ok("unlearn", "--run", run, "--subject", "Large-1", "--dry-run", *ANY_LOSS)
    assert "Would ask 2 clients which training rows are of the persons named." in planned.out
    assert contents(run) == contents(original())
    done = ok("unlearn", "--run", run, "--subject", "Large-1", "--reference", "T-1", *ANY_LOSS, "--json").json
    (tag,) = asked(run, "Large-1").subject_tags
    assert tag[:12] in done["requests"][0]["what"] and done["waiting"] == []
    page = ok("evidence", "T-1", "--run", run, "--json").json
    assert (
        page["forget_set"]["tags"] == [tag] and sum(page["forget_set"]["held"].values()) == done["requests"][0]["rows"]
    )
    html = (run / "evidence" / "R1.html").read_text()
    assert tag in html and "your data" in html
    assert tag[:12] in ok("status", "--run", run).out.replace("\n", "")
    assert "in force already" in ok("unlearn", "--run", run, "--subject", "Large-1").out
    assert ids_in(run) == [] and (run / "subjects.key").stat().st_mode & 0o077 == 0
    assert ok("restore", "--run", run, "--subject", "Large-1", "--json").json["requests"] == ["R1"]
    assert filter_file(run) is None


def test_what_has_too_few_rows_waits_and_is_answered_with_others(run):
    first = fedup("unlearn", "--run", run, "--subject", "Small-21", "--reference", "T-1", *ANY_LOSS)
    assert first.code == WAITS and "R1, T-1, waits, without a filter" in first.out
    status = ok("status", "--run", run, "--json").json
    assert (status["in_force"], status["waiting"]) == ([], ["R1"])
    page = ok("evidence", "T-1", "--run", run, "--json").json
    assert (
        page["verdict"]["finding"] == "waiting"
        and page["filter"] is None
        and "fewer than 5" in page["verdict"]["words"]
    )
    assert "waits and is not answered yet" in (run / "evidence" / "R1.html").read_text()
    before = contents(run / "files")
    assert fedup("unlearn", "--run", run, "--pending").code == WAITS
    assert fedup("unlearn", "--run", run, "--subject", "Small-21").code == WAITS, "asked again it is the same request"
    assert contents(run / "files") == before and ok("status", "--run", run, "--json").json["waiting"] == ["R1"]
    path = run.parent / "requests.csv"
    path.write_text("reference,subject,class\nT-2,Large-0,\nT-2,Large-2,\n")
    answered = ok("unlearn", "--run", run, "--csv", path, *ANY_LOSS, "--json").json
    assert {own["id"] for own in answered["requests"]} == {"R1", "R2"}
    page = ok("evidence", "T-1", "--run", run, "--json").json
    assert page["request"]["waited"] and page["request"]["asked_at"] < page["request"]["answered_at"]
    assert ok("verify", "--run", run, "--json").json["ok"] and ids_in(run) == []
    assert "No request waits" in ok("unlearn", "--run", run, "--pending").out


def test_a_request_that_waits_is_not_said_to_be_answered_from_the_new_base(run, monkeypatch):
    ok("unlearn", "--run", run, "--client", 0, "--force")
    codes, original = list[int](), LocalTraining.in_round

    def in_round(self: LocalTraining, number: int) -> LocalTraining:
        if not codes:
            codes.append(fedup("unlearn", "--run", run, "--subject", "Small-21", *ANY_LOSS).code)
        return original(self, number)

    monkeypatch.setattr(LocalTraining, "in_round", in_round)
    said = ok("retrain", "--run", run, "--force").out
    assert codes == [WAITS] and [own.id for own in Run(run).read().waiting] == ["R2"]
    assert "Still waiting, without a filter: R2" in said and "answered from the new base" not in said


def test_persons_in_force_and_waiting_are_left_out_of_later_rounds_and_finished_together(run):
    assert fedup("unlearn", "--run", run, "--subject", "Small-21", *ANY_LOSS).code == WAITS
    ok("unlearn", "--run", run, "--client", 0, "--force")
    named = union(request.forget for request in Run(run).read().requests)
    rows = Session(run).federation.without(named).rows("train")
    on = ok("train", "--run", run, "--more-rounds", 1, "--force", "--json").json
    assert (on["waiting"], on["followed"], on["rows"]) == (["R1"], ["R2"], len(rows))
    status = ok("status", "--run", run, "--json").json
    assert [own["weights"].partition(";")[0] for own in status["requests"]] == ["not suppressed", "suppressed"]
    anew = ok("retrain", "--run", run, "--force", "--json").json
    assert anew["requests"] == ["R1", "R2"] and anew["rows"] == len(rows)
    ok("collect", "--run", run)
    again = ok("unlearn", "--run", run, "--subject", "Small-21")
    assert "R1 is finished, the model was trained without it" in again.out
    refused("restore", "--run", run, "--subject", "Small-21", told="R1 is finished")
    refused("unlearn", "--run", run, "--client", 1, "--subject", "Small-21", told="was never trained on them")
    assert ok("verify", "--run", run, "--json").json["ok"] and ids_in(run) == []
    ok("evidence", "R1", "--run", run)
    assert "trained anew without" in (run / "evidence" / "R1.html").read_text()


def test_refusals_name_the_id_that_was_typed_and_change_nothing(run, tmp_path):
    before, other = contents(run), tmp_path / "other.key"
    SubjectKey.new().save(other)
    refused("unlearn", "--run", run, "--subject", "Nobody", told="'Nobody': no client knows them")
    refused("unlearn", "--run", run, "--subject", "Alone-1", told="all their rows are held out")
    refused("unlearn", "--run", run, "--subject", "Large-1", "--subject-key", other, told="is not the key")
    refused("unlearn", "--run", run, "--class", "malign", told="Did you mean 'malignant'?")
    refused("restore", "--run", run, "--subject", "Large-1", told="There is no request to forget 1 person")
    assert contents(run) == before
    shutil.move(run / "subjects.key", tmp_path / "kept.key")
    refused("unlearn", "--run", run, "--subject", "Large-1", told="--subject-key")
    ok("unlearn", "--run", run, "--subject", "Large-1", "--subject-key", tmp_path / "kept.key", *ANY_LOSS)
    new = tmp_path / "new"
    refused("train", "--run", new, "--subject-key", other, "--rows", 100, told="whose their rows are")
    assert not new.exists()


def test_clients_and_classes_go_by_name_or_number_and_nothing_is_guessed(run):
    names = Names(("mercy", "3", "north side", "1"), ("benign", "malignant"))
    assert [names.client(text) for text in ("mercy", "north side", "0", "number:1", "2", "7")] == [0, 2, 0, 1, 2, 7]
    assert names.label("malignant") == 1
    for text in ("3", "1"):  # each the name of one and the number of another
        with pytest.raises(RequestError, match="number:N"):
            names.client(text)
    about = {"client_names": names.clients, "class_names": names.classes}
    request = Forget.clients([0]) | Forget.classes([1]) | Forget.samples({2: [5]})
    assert forget_in_words(request, about) == (
        "forget clients [0 “mercy”] and classes [1 “malignant”] and 1 sample of client 2 “north side”"
    )
    planned = ok("unlearn", "--run", run, "--class", "malignant", "--dry-run", "--force").out
    assert "Would forget classes [1 “malignant”]" in planned


class Waiting(RuleBasedStateMachine):
    """Persons come, wait, are answered, forced and taken back; each command is a new process in all but name."""

    @initialize()
    def start(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="fedup-waiting-"))
        self.run = Path(shutil.copytree(original(), self.home / "run"))
        self.asked: set[str] = set()

    @rule(person=st.sampled_from(PERSONS), forced=st.sampled_from([False, False, False, True]))
    def unlearn(self, person: str, forced: bool) -> None:
        force = ["--force"] if forced else []
        ran = fedup("unlearn", "--run", self.run, "--subject", person, *NO_DELTA, *ANY_LOSS, *force)
        assert ran.code in (0, 1, WAITS), ran
        if ran.code == 1:  # a class would be lost
            assert "Not put in force" in ran.out or "Error" in ran.err
        else:
            self.asked.add(person)
            self.look_at_what_waits(forced)

    @rule()
    def pending(self) -> None:
        if fedup("unlearn", "--run", self.run, "--pending", *ANY_LOSS).code != 1:
            self.look_at_what_waits(forced=False)

    def look_at_what_waits(self, forced: bool) -> None:
        """Whatever still waits could not be answered."""
        session, state = Session(self.run), Run(self.run).read()
        waiting = [request.forget for request in state.waiting]
        store = session.store(state)
        for client, ids in union(waiting).sample_ids.items():
            labels = store.sample_labels.setdefault(client, {})
            labels |= {row: int(session.federation.y[row]) for row in ids}
        if not forced:
            assert set(waiting_for_others(store, union(state.forgets), waiting)) == set(waiting)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        person, before = data.draw(st.sampled_from(sorted(self.asked))), contents(self.run)
        ran = fedup("restore", "--run", self.run, "--subject", person, *ANY_LOSS)
        if ran.code == 0:
            self.asked.discard(person)
        elif "Error" in ran.err:  # so few rows do not come back alone
            assert "fewer than 5 rows" in ran.told and contents(self.run) == before

    @precondition(lambda self: Run(self.run).read().active)
    @rule()
    def purge(self) -> None:
        ok("purge", "--yes", "--run", self.run)

    @invariant()
    def every_person_is_in_force_or_waits_and_only_those_in_force_are_left_out(self) -> None:
        state = Run(self.run).read()
        there = (*state.active, *state.open, *state.waiting)
        named = {tag for request in there for tag in request.forget.subject_tags}
        assert named == {tag for person in self.asked for tag in asked(self.run, person).subject_tags}
        assert (filter_file(self.run) is not None) == bool(state.active)
        store = Session(self.run).store(state)
        left_out = {row for ids in store.excluded.values() for row in ids}
        waiting = {row for request in state.waiting for ids in request.forget.sample_ids.values() for row in ids}
        in_force = {row for request in state.active for ids in request.forget.sample_ids.values() for row in ids}
        assert in_force <= left_out and (not state.active or not waiting & left_out)

    def teardown(self) -> None:
        state = Run(self.run).read()
        assert ok("verify", "--run", self.run, "--json").json["ok"] and ids_in(self.run) == []
        if state.active and not state.open:  # the same persons at once, in a folder without a history
            fresh, path = Path(shutil.copytree(original(), self.home / "fresh")), self.home / "all.csv"
            tags = {tag: person for person in PERSONS for tag in asked(self.run, person).subject_tags}
            rows = [f"{own.id},{tags[next(iter(own.forget.subject_tags))]}" for own in reversed(state.active)]
            path.write_text("\n".join(["reference,subject", *rows]))
            ok("unlearn", "--run", fresh, "--csv", path, *NO_DELTA, *ANY_LOSS, "--force")
            assert sha256(filter_file(fresh)) == sha256(filter_file(self.run))
        ok("restore", "--all", "--run", self.run)
        assert not Run(self.run).read().waiting and filter_file(self.run) is None
        shutil.rmtree(self.home)


def _histories(examples: int, steps: int) -> type:
    class Some(Waiting):
        pass

    about = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
    about["phases"] = (Phase.explicit, Phase.generate)  # to shrink a history takes minutes
    Some.TestCase.settings = settings(max_examples=examples, stateful_step_count=steps, **about)
    return Some.TestCase


TestFewHistories = _histories(4, 8)
TestManyHistories = pytest.mark.slow(_histories(12, 12))

"""Verdicts in a run folder: each request's own, requests that stay open, and answers refused for a class."""

import html
import shutil

import pytest
import torch
from tests.cli._in_process import FAST, QUICK, contents, copy_of, fedup, filter_file, ok, refused, sample_ids, sha256

from fedup.cli._session import Session
from fedup.clients.in_process import InProcess
from fedup.errors import FedUPError, StaleFilterError
from fedup.filters.bottleneck import FilterConfig
from fedup.request import Forget
from fedup.run.answer import NewRequest, RequestDesk
from fedup.run.evidence import build_evidence
from fedup.run.folder import Run
from fedup.run.limits import Limits
from fedup.run.serving import load_store
from fedup.run.verify import _check_centroids
from fedup.unlearning import measure as measure_module
from fedup.unlearning.verdict import Verdict

FARTHER = Verdict("farther than before", "Accuracy on the forgotten training rows")
ANY_LOSS = ("--max-loss", 100, "--max-class-loss", 100)  # tiny filters harm; unlike --force this withholds
ANY_CLASS = ("--force", "--max-class-loss", 100)
WITHDRAWN = frozenset(sample_ids(1, 9)[:3])


def samples(ids=WITHDRAWN, client=1):
    return "--samples", f"{client}:{','.join(map(str, sorted(ids)))}"


def evidence(run, name):
    """As JSON, and the page."""
    told = ok("evidence", name, "--run", run, "--json").json
    return told, html.unescape((run / "evidence" / f"{told['request']['id']}.html").read_text(encoding="utf-8"))


def statuses(run):
    return [one["status"] for one in ok("status", "--run", run, "--json").json["requests"]]


def is_sound(run):
    return ok("verify", "--run", run, "--json").json["ok"] is True


def store_of(run):
    return load_store(Run(run), Run(run).read())


@torch.no_grad()
def answers(run):
    """Logits of all rows as the folder serves them."""
    session = Session(run)
    return session.served()[1](session.federation.x)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """R1, class 7, is in force; nobody changes it."""
    run = copy_of("collected", tmp_path_factory.mktemp("verdicts"))
    ok("unlearn", "--run", run, "--class", 7, "--reference", "C-7", *QUICK)
    return run


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


OWN = ("verdict", "notes", "forced", "forget_set", "contact", "time_s", "first_filter", "machine")


def test_the_evidence_of_a_request_is_its_own_whatever_comes_later(run):
    before, _ = evidence(run, "R1")
    few = sample_ids(1)[:5]
    ok("unlearn", "--run", run, *samples(few), *QUICK)
    after, page = evidence(run, "R1")
    later, page_of_later = evidence(run, "R2")
    assert {name: after[name] for name in OWN} == {name: before[name] for name in OWN}
    assert after["request"] == before["request"] | {"in_force_with": ["R2"]}
    assert later["verdict"]["statistic"]["rows"] <= len(few) == later["forget_set"]["rows"]["count"]
    (note,) = later["notes"]
    assert note in page_of_later and note not in page and after["notes"] == []
    for told, text in ((after, page), (later, page_of_later)):
        assert f">in force: {told['verdict']['finding']}<" in text
        assert told["verdict"]["words"] in text
    journal = [event.body["requests"] for event in Run(run).read().events if event.kind == "unlearned"]
    assert [[one["verdict"] for one in asked] for asked in journal] == [[before["verdict"]], [later["verdict"]]]


def test_each_request_of_a_file_has_its_verdict_and_reason(run, tmp_path):
    path = tmp_path / "requests.csv"
    ids = sorted(sample_ids(1))
    rows = [f"A,1,,{ids[0]} {ids[1]},", f"B,1,,{ids[2]} {ids[3]},poison", "D,,3,,"]
    path.write_text("\n".join(["reference,client,class,sample,reason", *rows]))
    ok("unlearn", "--run", run, "--csv", path, *QUICK)
    asked = Run(run).read().events[-1].body["requests"]
    assert [one["forget"].get("reason", "withdrawal") for one in asked] == ["withdrawal", "poison", "withdrawal"]
    measures = ["on the forgotten training rows", "with the label they carry", "on held-out rows of the class"]
    for one, measure in zip(asked, measures, strict=True):
        told, page = evidence(run, one["reference"])
        assert told["verdict"] == one["verdict"]
        assert told["verdict"]["measure"].endswith(measure)
        assert told["request"]["reason"] == one["forget"].get("reason", "withdrawal")
        assert told["verdict"]["words"] in page


@pytest.fixture
def farther(monkeypatch):
    """The three samples come out better known than before, whatever is served."""
    real = measure_module.judge

    def judged(request, tallies, targets="classes"):
        return FARTHER if request == Forget.samples({1: WITHDRAWN}) else real(request, tallies)

    monkeypatch.setattr(measure_module, "judge", judged)


@pytest.fixture
def withheld(run, farther):
    """R2 is open besides R1, in force."""
    ran = fedup("unlearn", "--run", run, *samples(), "--reference", "W-1", *ANY_LOSS, *FAST, "--json")
    assert (ran.code, ran.json["withheld"], ran.json["declined"]) == (1, ["R2"], None)
    assert [one["id"] for one in ran.json["requests"]] == ["R2"]
    return run


def left_out(run):
    """Whether every cell of the folder leaves the samples out."""
    store = store_of(run)
    return store.excluded.get((1, 9), frozenset()) >= WITHDRAWN


def test_a_request_that_makes_its_samples_better_known_stays_open_and_people_are_told(original, withheld):
    assert sha256(filter_file(withheld)) == sha256(filter_file(original))
    assert torch.equal(answers(withheld), answers(original))
    status = ok("status", "--run", withheld, "--json").json
    assert (status["in_force"], status["open"]) == (["R1"], ["R2"])
    assert "open, no filter" in " ".join(ok("status", "--run", withheld).out.split())
    state = Run(withheld).read()
    (asked,) = state.events[-1].body["requests"]
    assert (asked["withheld"], asked["verdict"]["finding"]) == (True, "farther than before")
    assert state.left_out == Forget.classes([7]) | Forget.samples({1: WITHDRAWN})
    assert left_out(withheld)
    assert store_of(withheld).open == {Forget.samples({1: WITHDRAWN})}
    assert is_sound(withheld)
    ran = fedup("unlearn", "--run", withheld, *samples(), *ANY_LOSS, *FAST)
    assert ran.code == 1 and "R2, W-1, stays open, without a filter" in ran.out
    of_first = [build_evidence(Run(run), Run(run).read(), "R1") | {"journal": None} for run in (original, withheld)]
    assert of_first[0] == of_first[1], "no other filter answers it now"
    told, page = evidence(withheld, "W-1")
    assert (told["request"]["status"], told["verdict"]["finding"]) == ("open, no filter", "farther than before")
    assert (told["filter"], told["first_filter"], told["accuracy"], told["erasure"]) == (None, None, None, None)
    assert told["claimed"][0].startswith("The request is open")
    assert not any("Suppression" in claim for claim in told["claimed"])
    assert "is open: no filter answers it" in page and 'class="badge good"' not in page


def test_samples_of_an_open_request_stay_out_of_whatever_comes_later(withheld):
    ok("unlearn", "--run", withheld, "--class", 3, *QUICK)
    assert statuses(withheld) == ["in force", "open, no filter", "in force"]
    ok("unlearn", "--run", withheld, *samples(sample_ids(1, 9)[3:5]), *QUICK)  # of the very same cell
    ok("restore", "R1", "--run", withheld, *ANY_CLASS)
    assert left_out(withheld)
    assert Run(withheld).read().left_out.sample_ids[1] >= WITHDRAWN
    assert is_sound(withheld)
    ok("restore", "R3", "R4", "--run", withheld)  # the open one is all there is now
    assert left_out(withheld)
    before = contents(withheld)
    refused("collect", "--run", withheld, "--again", told="in force or open (R2)")
    assert contents(withheld) == before
    assert ok("restore", "--all", "--run", withheld, "--json").json["requests"] == ["R2"]
    assert store_of(withheld).open == set()
    assert ok("collect", "--again", "--ratio", 0.5, "--run", withheld, "--json").json["how"]["ratio"] == 0.5


@pytest.mark.parametrize("what", ["samples", "request"])
def test_verify_finds_an_open_request_that_is_left_out_no_more(withheld, what):
    store, state = store_of(withheld), Run(withheld).read()
    _check_centroids(store, state)
    store.excluded.clear() if what == "samples" else store.open.clear()
    with pytest.raises(FedUPError, match=r"R2 forgets samples|other open requests"):
        _check_centroids(store, state)


def test_asked_again_it_stays_open_under_its_id_and_force_puts_it_in_force(withheld, original):
    ran = fedup("unlearn", "--run", withheld, *samples(), *ANY_LOSS, "--json")
    assert (ran.code, ran.json["withheld"]) == (1, ["R2"])
    assert statuses(withheld) == ["in force", "open, no filter"]
    done = ok("unlearn", "--run", withheld, *samples(), *QUICK, "--json").json
    assert [(one["id"], one["verdict"]["finding"]) for one in done["requests"]] == [("R2", "farther than before")]
    assert statuses(withheld) == ["in force", "in force"]
    assert sha256(filter_file(withheld)) != sha256(filter_file(original))
    told, page = evidence(withheld, "W-1")  # its reference is known from before
    assert (told["request"]["id"], told["request"]["status"]) == ("R2", "in force")
    assert any("know them better" in what for what in told["forced"])
    assert ">in force: farther than before<" in page and 'class="badge good"' not in page
    assert store_of(withheld).open == set()
    assert is_sound(withheld)
    done = ok("unlearn", "--run", withheld, "--class", 3, *QUICK, "--json").json
    assert [one["id"] for one in done["requests"]] == ["R3"]


def test_of_a_file_the_others_are_answered_and_an_open_one_keeps_its_id(run, farther, tmp_path):
    path, listed = tmp_path / "requests.csv", " ".join(map(str, sorted(WITHDRAWN)))
    path.write_text(f"reference,client,class,sample\nX,,3,\nY,1,,{listed}\n")
    ran = fedup("unlearn", "--run", run, "--csv", path, *ANY_LOSS, "--json")
    assert (ran.code, ran.json["withheld"]) == (1, ["R3"])
    assert statuses(run) == ["in force", "in force", "open, no filter"]
    assert Session(run).served()[1].requests == {Forget.classes([7]), Forget.classes([3])}
    assert left_out(run)
    path.write_text(f"reference,client,class,sample\nA,,4,\nY,1,,{listed}\nZ,,5,\n")
    done = ok("unlearn", "--run", run, "--csv", path, *QUICK, "--json").json
    assert [(one["id"], one["reference"]) for one in done["requests"]] == [("R4", "A"), ("R3", "Y"), ("R5", "Z")]
    assert [request.id for request in Run(run).read().requests] == ["R1", "R2", "R3", "R4", "R5"]
    assert is_sound(run)


def test_an_open_request_can_be_taken_back(original, withheld):
    done = ok("restore", "W-1", "--run", withheld, *ANY_CLASS, "--json").json
    assert (done["requests"], done["remaining"]) == (["R2"], ["R1"])
    assert statuses(withheld) == ["in force", "taken back"]
    assert sha256(filter_file(withheld)) == sha256(filter_file(original))  # that of R1 alone
    store, before = store_of(withheld), store_of(original)
    assert store.open == set()
    assert not any(ids & WITHDRAWN for ids in store.excluded.values())
    assert torch.equal(store.vectors, before.vectors)
    told, page = evidence(withheld, "R2")
    assert told["request"]["status"] == "taken back" and "no filter ever answered it" in page
    assert not any(claim.startswith("The request is open") for claim in told["claimed"])
    assert is_sound(withheld)


POOR = ("--class", 3, "--steps", 1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (POOR, "points of recall on retained rows"),
        (("--client", 0), "leaves fewer than 20 training rows of a class that nobody asked to forget"),
    ],
    ids=["recall", "too few rows left"],
)
def test_an_answer_that_costs_a_class_is_declined_and_nothing_else_changes(original, run, options, why):
    files, centroids, before = contents(run / "files"), store_of(run), contents(run)
    plan = fedup("unlearn", "--run", run, *options, "--dry-run")
    assert (plan.code == 1 and why in plan.told) if options != POOR else plan.code == 0  # what a fit costs is not known
    assert contents(run) == before
    ran = fedup("unlearn", "--run", run, *options, "--json")
    assert ran.code == 1
    assert why in ran.json["declined"]
    assert ran.json["filter"] == Run(original).read().filter.id
    event = Run(run).read().events[-1]
    assert (event.kind, event.body["step"], event.body["requests"]) == ("declined", "unlearned", [])
    assert why in event.body["why"]
    assert event.body["classes"]
    assert [one["id"] for one in event.body["declined"]] == ["R2"]
    assert contents(run / "files") == files
    assert torch.equal(store_of(run).vectors, centroids.vectors)
    assert torch.equal(answers(run), answers(original))
    assert statuses(run) == ["in force"]
    assert is_sound(run)
    assert event.body["bytes_up"] == sum(one["bytes"] for one in event.body["releases"])  # on record, though declined
    if options == POOR:
        assert fedup("unlearn", "--run", run, *POOR, "--max-loss", 100, "--max-class-loss", 1).code == 1
    done = ok("unlearn", "--run", run, *options, "--force", "--json").json
    assert [one["id"] for one in done["requests"]] == ["R2"]
    assert any(why in forced for forced in done["forced"])
    told, _ = evidence(run, "R2")
    assert told["forced"] == done["forced"]
    assert told["request"]["status"] == "in force"
    assert evidence(run, "R1")[0]["forced"] == []
    assert is_sound(run)


@pytest.mark.parametrize(("force", "let_go"), [(True, 1), (False, 0)], ids=["answered", "declined"])
def test_answers_are_let_go_once_the_folder_has_them_and_kept_where_it_declined(run, monkeypatch, force, let_go):
    session, calls = Session(run), []
    monkeypatch.setattr(InProcess, "settled", lambda contact, **_: calls.append(contact), raising=False)
    with Run(run).writing("test") as writer:
        plugged, store = session.plugged(writer.state), session.store(writer.state, writer)
        outcome = RequestDesk(writer, plugged, store, InProcess(session.federation, plugged.base)).unlearn(
            [NewRequest(Forget.clients([0]))],  # which costs two classes too many rows
            config=FilterConfig(steps=5),
            limits=Limits(max_loss=None, force=force),
        )
    assert (outcome.declined is None) == force
    assert len(calls) == let_go


def test_no_answer_goes_on_record_for_weights_of_which_one_number_changed(run):
    session, before = Session(run), contents(run)
    with Run(run).writing("test") as writer:
        plugged, store = session.plugged(writer.state), session.store(writer.state, writer)
        next(plugged.base.parameters()).data.view(-1)[1] += 1  # PyTorch does not count it
        desk = RequestDesk(writer, plugged, store)
        for answer in (lambda: desk.unlearn([NewRequest(Forget.clients([0]))]), lambda: desk.restore(())):
            with pytest.raises(StaleFilterError):
                answer()
    assert contents(run) == before

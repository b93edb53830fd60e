"""Verdicts in a run folder: each request's own, requests that stay open, and answers refused for a class."""

import html
import shutil

import pytest
import torch
from tests.cli._in_process import FAST, QUICK, contents, copy_of, fedup, filter_file, ok, sample_ids, sha256

from fedup.cli._session import Session
from fedup.clients.in_process import InProcess
from fedup.errors import FedUPError
from fedup.filters.bottleneck import FilterConfig
from fedup.request import Forget
from fedup.run.answer import Limits, NewRequest, RequestDesk
from fedup.run.folder import Run
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


# --- each request's own


OWN = ("verdict", "notes", "forced", "forget_set", "contact", "time_s", "first_filter", "machine")


def test_the_evidence_of_a_request_is_its_own_whatever_comes_later(run):
    before, _ = evidence(run, "R1")
    few = sample_ids(1)[:5]
    ok("unlearn", "--run", run, *samples(few), *QUICK)
    after, page = evidence(run, "R1")
    later, page_of_later = evidence(run, "R2")
    assert {name: after[name] for name in OWN} == {name: before[name] for name in OWN}
    assert after["request"] | {"in_force_with": []} == before["request"]
    assert after["request"]["in_force_with"] == ["R2"]
    assert after["verdict"]["measure"] == "Accuracy on held-out rows of the class"
    assert later["verdict"]["measure"] == "Accuracy on the forgotten training rows"
    assert later["verdict"]["statistic"]["rows"] <= len(few) == later["forget_set"]["rows"]["count"]
    (note,) = later["notes"]
    assert note.startswith("No eraser was made to forget 5 samples of client 1")
    assert after["notes"] == []
    assert note in page_of_later
    assert note not in page
    for told, text in ((after, page), (later, page_of_later)):
        assert f">in force: {told['verdict']['finding']}<" in text
        assert told["verdict"]["words"] in text
    assert page != page_of_later
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


# --- requests that stay open


@pytest.fixture
def farther(monkeypatch):
    """The three samples come out better known than before, whatever is served."""
    real = measure_module.judge

    def judged(request, tallies):
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
    told = " ".join(ran.out.split())
    assert ran.code == 1
    assert "R2 stays open, without a filter: forget 3 samples of client 1 (3 training rows)." in told
    assert "Not forgotten: the filter makes the model know them better than before" in told
    assert "withheld: the request stays open" in told


def test_the_evidence_of_an_open_request_says_so_and_that_of_others_is_as_it_was(original, withheld, tmp_path):
    told, page = evidence(withheld, "W-1")
    assert told["request"]["status"] == "open, no filter"
    assert (told["filter"], told["first_filter"], told["accuracy"], told["erasure"]) == (None, None, None, None)
    assert told["verdict"]["finding"] == "farther than before"
    assert told["claimed"][0].startswith("The request is open")
    assert not any("Suppression" in claim for claim in told["claimed"])
    assert ">open, no filter: farther than before<" in page
    assert 'class="badge good"' not in page
    assert "is open: no filter answers it" in page
    assert "in force with" not in page.lower()
    other, _ = evidence(withheld, "R1")
    as_it_was, _ = evidence(shutil.copytree(original, tmp_path / "before"), "R1")
    same = other.keys() - {"journal", "files"}
    assert {name: other[name] for name in same} == {name: as_it_was[name] for name in same}


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
    ran = fedup("collect", "--run", withheld, "--again")
    assert ran.code == 1
    assert "in force or open (R2)" in ran.told
    assert contents(withheld) == before
    assert ok("restore", "--all", "--run", withheld, "--json").json["requests"] == ["R2"]
    assert store_of(withheld).open == set()
    ok("collect", "--again", "--run", withheld)


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
    assert ">in force: farther than before<" in page
    assert 'class="badge good"' not in page
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
    assert told["request"]["status"] == "taken back"
    assert "was taken back; no filter ever answered it" in page
    assert not any(claim.startswith("The request is open") for claim in told["claimed"])
    assert is_sound(withheld)


# --- refused for a class


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
    done = ok("unlearn", "--run", run, *options, "--force", "--json").json
    assert [one["id"] for one in done["requests"]] == ["R2"]
    assert any(why in forced for forced in done["forced"])
    told, _ = evidence(run, "R2")
    assert told["forced"] == done["forced"]
    assert told["request"]["status"] == "in force"
    assert evidence(run, "R1")[0]["forced"] == []
    assert is_sound(run)


def test_what_clients_told_for_an_answer_that_was_declined_is_on_record(run):
    sent = ok("status", "--run", run, "--json").json["releases"]["1"]
    ran = fedup("unlearn", "--run", run, *samples(), "--filter", "bottleneck", "--steps", 1)
    assert ran.code == 1
    event = Run(run).read().events[-1]
    assert event.kind == "declined"
    assert {one["what"] for one in event.body["releases"]} == {
        *("classes of samples", "centroids", "counts of answers")
    }
    assert event.body["clients_contacted"] == [1]
    assert event.body["bytes_up"] == sum(one["bytes"] for one in event.body["releases"]) > 0
    now = ok("status", "--run", run, "--json").json["releases"]["1"]
    own = [one["bytes"] for one in event.body["releases"] if one["client"] == 1]
    assert len(own) >= 3  # answers are counted once more with each wider bottleneck that is tried
    assert now["messages"] == sent["messages"] + len(own)
    assert now["bytes"] == sent["bytes"] + sum(own)


def test_more_may_be_allowed_for_a_class(run):
    assert fedup("unlearn", "--run", run, *POOR, "--max-loss", 100).code == 1
    assert fedup("unlearn", "--run", run, *POOR, "--max-loss", 100, "--max-class-loss", 1).code == 1
    done = ok("unlearn", "--run", run, *POOR, *ANY_LOSS, "--json").json
    assert done["forced"] == []
    worst = done["worst_class"]
    assert 100 * (worst["before"] - worst["after"]) > 5
    told, page = evidence(run, "R2")
    assert told["class_recall"] == done["class_recall"]
    assert f"Of all classes that stay, {worst['class']} loses most of its recall on rows that stay" in page


# --- answers that clients sent, where a server keeps them until they are in the folder


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

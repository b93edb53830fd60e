"""Evidence: every number on the page can be found again by someone else."""

import hashlib
import json
import re
from typing import get_args

import pytest
import torch
from tests.cli._in_process import FAST, contents, copy_of, fedup, filter_file, ok, sample_ids, sha256

from fedup.cli._session import Session
from fedup.models.views import fingerprint
from fedup.page import percent, render
from fedup.run.evidence_page import page_content
from fedup.run.folder import Run
from fedup.tasks.evaluation import accuracy
from fedup.unlearning.verdict import Finding


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Class 7 (T-1), client 2 and two samples of client 1; no test here changes it."""
    return copy_of("answered", tmp_path_factory.mktemp("evidence"))


@pytest.fixture(scope="module")
def evidence(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    found = {}
    for name in ("R1", "R2", "R3"):
        ok("evidence", name, "--run", folder, "--out", out)
        found[name] = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    return found


def test_it_names_the_request_as_it_was_asked(folder, evidence):
    one = evidence["R1"]["request"]
    assert (one["id"], one["reference"], one["kind"], one["status"]) == ("R1", "T-1", "class", "in force")
    assert one["forget"] == {"clients": [], "classes": [7], "samples": {}}
    assert one["asked_at"] == Run(folder).read().events[3].at
    assert evidence["R3"]["request"]["forget"]["samples"] == {"1": sorted(sample_ids(1)[:2])}
    assert [evidence[name]["request"]["answered_with"] for name in evidence] == [[], [], []]
    others = {"R1": ["R2", "R3"], "R2": ["R1", "R3"], "R3": ["R1", "R2"]}
    assert {name: evidence[name]["request"]["in_force_with"] for name in evidence} == others


def test_the_hash_of_the_forget_set_is_that_of_the_rows_that_data_lists(folder, evidence):
    by_client = {client: ok("data", "--run", folder, "--client", client, "--json").json for client in range(4)}
    wanted = {
        "R1": [[client, sorted(own["7"])] for client, own in by_client.items() if own["7"]],
        "R2": [[2, sorted(i for ids in by_client[2].values() for i in ids)]],
        "R3": [[1, sorted(sample_ids(1)[:2])]],
    }
    for name, rows in wanted.items():
        told = evidence[name]["forget_set"]["rows"]
        assert told["count"] == sum(len(ids) for _, ids in rows)
        assert told["sha256"] == hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        request = evidence[name]["request"]["forget"]
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        assert evidence[name]["forget_set"]["digest"] == digest


def test_its_hashes_are_those_of_the_files_and_of_the_model(folder, evidence):
    (model,) = (folder / "files").glob("model-*")
    state, plugged = Session(folder).served()
    for one in evidence.values():
        assert one["base"]["file"]["sha256"] == sha256(model)
        assert one["base"]["fingerprint"] == fingerprint(plugged.base)
        assert one["journal"]["head"] == state.head
    for one in evidence.values():  # whichever answered it, one filter is in force for all
        assert one["filter"]["sha256"] == sha256(filter_file(folder))
        assert one["filter"]["in_force_now"] is True
    first = [evidence[name]["first_filter"]["sha256"] for name in evidence]
    assert len(set(first)) == 3
    assert first[2] == sha256(filter_file(folder))


def test_its_accuracies_are_those_that_a_recomputation_gives(folder, evidence):
    session = Session(folder)
    _, plugged = session.served()
    federation = session.federation
    told = evidence["R3"]["accuracy"]
    retained = federation.rows("heldout")
    labels = federation.y[retained]
    theirs = torch.isin(retained, federation.client(2).heldout)
    kept = retained[(labels != 7) & ~theirs]
    rows = torch.tensor(sorted(sample_ids(1)[:2]))
    with plugged.restored():
        restored = accuracy(plugged, federation.x[kept], federation.y[kept])
    figures = {
        "original": accuracy(plugged.base, federation.x[kept], federation.y[kept]),
        "forgotten": accuracy(plugged, federation.x[kept], federation.y[kept]),
        "restored": restored,
    }
    for state, value in figures.items():
        assert told[state]["heldout"]["retain"] == pytest.approx(value, abs=1e-6)
    own = evidence["R3"]["verdict"]["statistic"]
    assert own["rows"] == len(rows)
    assert own["after"] == pytest.approx(accuracy(plugged, federation.x[rows], federation.y[rows]), abs=1e-6)
    unseen = torch.cat([federation.rows("validation"), retained])
    sevens = unseen[federation.y[unseen] == 7]
    of_seven = evidence["R1"]["verdict"]["statistic"]
    assert (of_seven["rows"], of_seven["after"]) == (len(sevens), 0.0)
    assert of_seven["before"] == pytest.approx(accuracy(plugged.base, federation.x[sevens], federation.y[sevens]))
    assert told["original"] == told["restored"]
    assert evidence["R3"]["restored_bit_identical"] is True


def test_it_tells_time_by_stage_and_who_was_asked_and_sent_what(evidence):
    for one in evidence.values():
        assert {"contact", "fit", "measure", "store"} <= set(one["time_s"])
        assert all(seconds >= 0 for seconds in one["time_s"].values())
    # Nobody is needed to answer R1 and R2; to measure them, and every class, all count answers.
    for name, counting in (("R1", [0, 1, 2, 3]), ("R2", [0, 1, 2, 3])):
        contact = evidence[name]["contact"]
        assert (contact["clients_contacted"], contact["clients_counting"]) == ([], counting)
        assert [(one["what"], one["client"]) for one in contact["releases"]] == [
            ("counts of answers", client) for client in counting
        ]
        assert (contact["protection_of_the_cache"], contact["guarantee_of_the_cache"]) == ("none", None)
    contact = evidence["R3"]["contact"]
    assert contact["clients_contacted"] == [1]
    assert contact["clients_counting"] == [0, 1, 3]  # all that stay
    assert {one["what"] for one in contact["releases"]} == {"classes of samples", "centroids", "counts of answers"}
    for one in evidence.values():
        assert one["contact"]["bytes_up"] == sum(release["bytes"] for release in one["contact"]["releases"]) > 0
        assert one["contact"]["bytes_down"] > 0
        assert {release["mechanism"] for release in one["contact"]["releases"]} == {"none"}


def test_it_says_what_is_claimed_and_what_is_not(evidence):
    for one in evidence.values():
        assert any("served interface" in claim for claim in one["claimed"])
        assert any("never changed" in claim for claim in one["claimed"])
        assert any("weights" in claim for claim in one["not_claimed"])
        assert any("Differential privacy" in claim for claim in one["not_claimed"])


def test_retrain_is_shown_once_it_was_computed_for_the_same_requests(tmp_path):
    run = copy_of("answered", tmp_path)
    assert ok("evidence", "R3", "--run", run, "--json").json["retrained"] is None
    retrained = ok("evaluate", "--retrain", "--run", run, "--json").json["retrained"]
    told = ok("evidence", "R3", "--run", run, "--json").json["retrained"]
    assert {name: value for name, value in told.items() if name != "at"} == retrained
    assert "Retrain" in (run / "evidence" / "R3.html").read_text(encoding="utf-8")
    assert ok("evidence", "R1", "--run", run, "--json").json["retrained"] == told  # under the same filter by now
    ok("restore", "R2", "--run", run, "--force")
    assert ok("evidence", "R1", "--run", run, "--json").json["retrained"] is None  # which retraining knows nothing of
    assert ok("evidence", "R2", "--run", run, "--json").json["retrained"] == told  # it was in force under that one last


def test_the_pages_are_on_record_and_elsewhere_they_are_not(tmp_path):
    run = copy_of("answered", tmp_path)
    before = contents(run)
    ok("evidence", "R2", "--run", run, "--out", tmp_path / "elsewhere")
    assert contents(run) == before
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["R2.html", "R2.json"]
    ok("evidence", "R2", "--run", run)
    event = Run(run).read().events[-1]
    assert event.kind == "evidenced"
    assert event.body["files"] == {name: sha256(run / "evidence" / name) for name in ("R2.html", "R2.json")}
    names = {check["name"] for check in ok("verify", "--run", run, "--json").json["checks"]}
    assert {"evidence/R1.html", "evidence/R2.html"} <= names
    assert ok("verify", "--run", run, "--head", Run(run).read().head, "--json").json["ok"]


def test_a_request_that_was_taken_back_is_told_as_such(tmp_path):
    run = copy_of("answered", tmp_path)
    ok("restore", "R1", "--run", run, "--force")
    told = ok("evidence", "T-1", "--run", run, "--json").json
    assert (told["request"]["id"], told["request"]["status"]) == ("R1", "taken back")
    assert told["request"]["restored_at"] == Run(run).read().requests[0].restored_in.at
    assert "taken back" in (run / "evidence" / "R1.html").read_text(encoding="utf-8")


def test_the_page_puts_the_verdict_first_and_folds_what_is_technical(folder, evidence):
    page = render("evidence", page_content(evidence["R1"]))
    titles = re.findall(r"<h2>(.+?)</h2>", page)
    assert titles == [
        *("What it did", "What the model keeps", "What was asked", "What is claimed", "What is not claimed"),
        *("Words used here", "Technical part", "Controller"),
    ]
    assert page.index(f">in force: {evidence['R1']['verdict']['finding']}<") < page.index("What it did")
    assert "Request R1 · T-1: forget class 7" in page
    assert "weights were not touched" in page
    assert "still holds what it learned" in page
    for field in ("Controller (name, address)", "Data protection officer", "Place, date", "Signature"):
        assert f"<div>{field}</div>" in page
    state = Run(folder).read()
    technical = page[page.index("<details>") : page.index("</details>")]
    for text in (state.base, state.filter.sha256, evidence["R1"]["journal"]["event_hash"]):
        assert text in technical
    statistic = evidence["R1"]["verdict"]["statistic"]
    assert f"without the request: {percent(statistic['before'])}" in page
    assert f"with it: {percent(statistic['after'])}" in page


def test_the_page_is_self_contained_and_whatever_users_wrote_stays_text(evidence):
    nasty = "<script>alert('x')</script>&<b>\"Müller\""

    def page(text):
        one = evidence["R1"]
        odd = {
            "request": {**one["request"], "reference": text},
            "federation": {**one["federation"], "data": text, "model": text},
            "class_names": [text] * 10,
            "machine": {**one["machine"], "processor": text},
            "notes": [text],
        }
        return render("evidence", page_content({**one, **odd}))

    written, plain = page(nasty), page("plain")
    assert re.findall(r"<[a-z!/]+", written) == re.findall(r"<[a-z!/]+", plain)
    assert "<script" not in written
    assert written.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;&lt;b&gt;&#34;Müller") == plain.count(
        "plain"
    )
    assert plain.count("plain") > 10
    assert not re.search(r"(src|href)\s*=|https?://|url\(|@import", written)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "The model does not recognise the class any more."),
        ({"kind": "client"}, "The model now treats the data named in the request like data it has never seen."),
        ({"restored_at": "2026-01-01T00:00:00"}, "The request was taken back and has no effect any more."),
    ],
)
def test_the_person_whose_data_it_is_gets_one_sentence(evidence, change, words):
    one = evidence["R1"]
    told = {**one, "request": {**one["request"], **change}, "verdict": {**one["verdict"], "finding": "forgotten"}}
    assert page_content(told)["sentence"] == words
    still_open = {**told, "request": one["request"], "first_filter": None}
    assert "the model still knows the data" in page_content(still_open)["sentence"]


def test_every_finding_has_its_sentence(evidence):
    one = evidence["R2"]
    findings = get_args(Finding)
    sentences = {page_content({**one, "verdict": {**one["verdict"], "finding": f}})["sentence"] for f in findings}
    assert len(sentences) == len(findings)
    assert "nobody measured" in page_content({**one, "verdict": None})["sentence"]


def test_of_many_classes_the_chart_has_those_that_changed_most(evidence):
    one = evidence["R1"]
    before, after = [0.5] * 40, [0.5] * 39 + [None]
    after[3] = 0.0
    figures = {state: {**own, "per_class": before} for state, own in one["accuracy"].items()}
    figures["forgotten"]["per_class"] = after
    content = page_content({**one, "accuracy": figures, "class_names": [f"c{label}" for label in range(40)]})
    names = [name for name, _ in content["classes"]["groups"]]
    assert len(names) == 12
    assert {"3 “c3”", "39 “c39”"} <= set(names)
    assert "the 12 of 40 that changed most" in content["classes"]["caption"]
    assert "restored" not in content["states"]  # it is the original, bit for bit
    assert "restored" in page_content({**one, "restored_bit_identical": False})["states"]


def test_evidence_about_the_same_journal_is_the_same(folder, tmp_path):
    for name in ("a", "b"):
        ok("evidence", "R1", "--run", folder, "--out", tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_later_policy_shows_in_the_claims_of_every_request_in_force(tmp_path):
    run = copy_of("collected", tmp_path)
    ok("unlearn", "--class", "7", *FAST, "--force", "--run", run)
    unused = "no feature, centroid, sum or label"
    assert any(unused in claim for claim in ok("evidence", "R1", "--run", run, "--json").json["claimed"])
    ok("unlearn", "--class", "4", "--class-policy", "remap", *FAST, "--force", "--run", run)
    for name in ("R1", "R2"):
        told = ok("evidence", name, "--run", run, "--json").json
        assert not any(unused in claim for claim in told["claimed"])
        assert any("under other labels" in claim for claim in told["claimed"])
        assert told["filter"]["config"]["class_policy"] == "remap"


# An eraser


UNUSED, MADE_OF = "no feature, centroid, sum or label", "made from sums and second moments"


def _samples(many=30):
    return "--samples", f"1:{','.join(map(str, sample_ids(1)[:many]))}"


@pytest.fixture(scope="module")
def erased(tmp_path_factory):
    """A folder whose only request was answered by an eraser, with evidence."""
    run = copy_of("collected", tmp_path_factory.mktemp("erased"))
    ok("unlearn", *_samples(), "--filter", "erasure", "--reference", "E-1", "--force", *FAST, "--run", run)
    ok("evidence", "R1", "--run", run)
    return run


def test_an_erased_request_is_not_claimed_to_have_been_answered_without_its_rows(erased):
    told = json.loads((erased / "evidence" / "R1.json").read_text(encoding="utf-8"))
    assert not any(UNUSED in claim for claim in told["claimed"])
    assert sum(MADE_OF in claim and "derived_from_forgotten" in claim for claim in told["claimed"]) == 1
    page = (erased / "evidence" / "R1.html").read_text(encoding="utf-8")
    assert UNUSED not in page
    assert MADE_OF in page
    assert f"{told['erasure']['place']['cut']}," in page


def test_evidence_of_an_eraser_tells_where_it_sits_and_what_it_was_made_of(erased):
    told = json.loads((erased / "evidence" / "R1.json").read_text(encoding="utf-8"))
    served = Session(erased).served()[1].served
    assert told["erasure"] == served.erasure.about
    assert told["erasure"]["place"]["cut"] == served.erasure.cut
    assert (told["erasure"]["rows"], told["erasure"]["clients"], told["erasure"]["rank"]) == (30, [1], 1)
    assert told["filter"]["config"]["filter"] == "erasure"
    assert told["filter"]["centroids_used"] == 0
    assert "erase" in told["time_s"]
    body = Run(erased).read().events[-2].body
    assert body["erasure"] == told["erasure"]
    assert told["erasure"]["requests"] == [told["forget_set"]["digest"]]
    sent = {}
    for release in told["contact"]["releases"]:
        sent.setdefault(release["what"], []).append(release["client"])
        assert release["mechanism"] == "none"
    compared = sorted({1, *told["erasure"]["compared_with"]})
    assert sent == {
        "classes of samples": [1],
        "centroids": [1],
        "sketches of means": [0, 1, 2, 3],
        "means and variances": compared,
        "second moments": [1],
        "counts of answers": [0, 1, 2, 3],
    }
    assert told["contact"]["bytes_up"] == sum(one["bytes"] for one in told["contact"]["releases"])
    assert ok("verify", "--run", erased, "--json").json["ok"]


def test_statistics_are_not_said_to_be_noisy_where_centroids_are(tmp_path):
    run = copy_of("trained", tmp_path)
    ok("collect", "--sigma", "0.1", "--run", run)
    ok("unlearn", *_samples(), "--filter", "erasure", "--force", *FAST, "--run", run)
    releases = ok("evidence", "R1", "--run", run, "--json").json["contact"]["releases"]
    by_what = {one["what"]: (one["mechanism"], one["sigma"]) for one in releases}
    exact = {"classes of samples", "sketches of means", "means and variances", "second moments", "counts of answers"}
    assert set(by_what) == {"centroids", *exact}
    assert {by_what[what] for what in exact} == {("none", 0.0)}
    assert by_what["centroids"] == ("gaussian noise, σ = 0.1 (noise only, not a DP guarantee)", 0.1)


def test_a_bottleneck_alone_is_claimed_to_have_used_nothing_of_samples(tmp_path):
    run = copy_of("collected", tmp_path)
    ok("unlearn", *_samples(), "--filter", "bottleneck", "--force", *FAST, "--run", run)
    told = ok("evidence", "R1", "--run", run, "--json").json
    assert told["erasure"] is None
    assert any(UNUSED in claim for claim in told["claimed"])
    assert not any(MADE_OF in claim for claim in told["claimed"])
    ok("unlearn", "--class", 5, "--filter", "both", "--force", *FAST, "--run", run)  # from now on with an eraser
    told = ok("evidence", "R1", "--run", run, "--json").json
    assert told["erasure"]["rows"] == 30 + 24  # samples, and rows of class 5 at the one client that has 20 or more
    assert not any(UNUSED in claim for claim in told["claimed"])


def test_an_eraser_that_is_gone_is_claimed_no_more_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "fedup.unlearning.eraser_builder.LEAST_SIGNAL", 0.0
    )  # these samples differ from others by chance
    run = copy_of("collected", tmp_path)
    ok("unlearn", "--class", 7, "--filter", "auto", "--force", *FAST, "--run", run)
    ok("unlearn", *_samples(), "--force", "--run", run)
    told = ok("evidence", "R1", "--run", run, "--json").json
    assert told["erasure"] is None  # the eraser is there, and for R2 alone
    assert ok("evidence", "R2", "--run", run, "--json").json["erasure"]["rows"] == 30
    ok("restore", "R2", "--force", "--run", run)
    told = ok("evidence", "R1", "--run", run, "--json").json
    assert told["erasure"] is None
    assert any(UNUSED in claim for claim in told["claimed"])
    assert not any(UNUSED in claim for claim in ok("evidence", "R2", "--run", run, "--json").json["claimed"])


def test_a_relabelled_class_is_told_beside_an_eraser(tmp_path):
    run = copy_of("collected", tmp_path)
    ok("unlearn", "--class", 5, "--class-policy", "remap", "--force", *FAST, "--run", run)
    ok("unlearn", *_samples(), "--filter", "both", "--force", *FAST, "--run", run)
    claimed = ok("evidence", "R1", "--run", run, "--json").json["claimed"]
    assert any("under other labels" in claim for claim in claimed)
    assert not any("nothing else of the filter used one" in claim for claim in claimed)


def test_a_client_that_is_erased_as_a_whole_is_put_on_record(tmp_path):
    run = copy_of("collected", tmp_path)
    assert fedup("unlearn", "--client", 2, "--filter", "both", "--force", *FAST, "--run", run).code == 0
    told = ok("evidence", "R1", "--run", run, "--json").json
    assert (told["erasure"]["clients"], told["erasure"]["rows"]) == ([2], told["forget_set"]["rows"]["count"])
    assert 2 not in told["erasure"]["compared_with"]
    assert any(MADE_OF in claim for claim in told["claimed"])

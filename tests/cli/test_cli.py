"""The demo as a person meets it."""

import json

import pytest
from tests.cli._in_process import ok

from fedup.bench.figures import bars_of_time


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One round: all that the demo does, on a model that has learned little."""
    folder = tmp_path_factory.mktemp("demo")
    return ok("demo", "--rounds", 1, "--out", folder), folder


def test_the_demo_answers_three_requests_and_takes_them_back(demo):
    _, folder = demo
    report = json.loads((folder / "report.json").read_text())
    assert [request["kind"] for request in report["requests"]] == ["client", "class", "sample"]
    for request in report["requests"]:
        assert request["restored_bit_identical"] is True
        assert request["restored"] == request["original"]
        assert request["time_s"]["total"] == pytest.approx(
            sum(seconds for stage, seconds in request["time_s"].items() if stage != "total")
        )
        for state in ("original", "forgotten", "restored", "retrained"):
            assert set(request[state]) == {"retain", "forget"}
    client, of_class, sample = report["requests"]
    assert of_class["forgotten"]["forget"] == 0
    assert client["clients_contacted"] == []
    assert client["told"] == ["counts of answers"]  # to measure, and nothing to answer
    assert set(of_class["told"]) == {"counts of answers", "moments"}  # of the class, which clients did not send ahead
    assert all(request["clients_counting"] and request["bytes"]["up"] > 0 for request in report["requests"])
    assert sample["clients_contacted"] == list(range(10))  # an eraser compares with the rows of all
    assert set(sample["told"]) > {"moments", "sketches of means", "means and variances", "second moments"}
    assert sample["erasure"]["clients"] == sorted(map(int, sample["request"]["samples"]))  # who holds them
    assert len(sample["erasure"]["clients"]) == 3
    assert sample["request"]["reason"] == "poison"
    assert "images" not in sample["attack"]  # no pixels in a report for programs


def test_the_demos_table_fits_a_hundred_columns_and_its_page_is_self_contained(demo):
    ran, folder = demo
    assert max(len(line) for line in ran.out.splitlines() if str(folder) not in line) <= 100
    assert all(text in ran.out for text in (str(folder / "report.html"), "bit-identical", "Backdoor: "))
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 7  # three times per class, twice features, once the images attacked, once time
    assert "<script" not in page
    assert not any(f'{attribute}="http' in page for attribute in ("src", "href"))
    assert "still hold what they learned" in page


@pytest.mark.slow
def test_the_demos_backdoor_works_before_and_not_after_and_json_is_all_of_standard_output(tmp_path):
    requests = ok("demo", "--rounds", 8, "--out", tmp_path, "--json").json["requests"]
    assert all(request["forgotten"] != request["original"] for request in requests)
    attack, verdict = requests[2]["attack"], requests[2]["verdict"]
    assert attack["success"]["original"] > 0.9
    assert attack["success"]["forgotten"] < 0.05
    assert attack["accuracy"]["forgotten"] > attack["accuracy"]["original"] + 0.5
    assert verdict["finding"] in ("forgotten", "too few rows")  # its interval is about as wide as one may be
    assert verdict["change"]["high"] < -0.9
    assert verdict["excess_after"]["high"] < 0


def test_bars_of_time_fit_where_forgetting_took_longer_than_retraining():
    assert "40 s" in bars_of_time({"class": (40.0, 0.1)})  # once its axis was made for retraining alone

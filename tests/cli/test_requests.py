"""Requests and settings that cannot be: one clear error, the right exit code, and nothing changed."""

import re
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.cli._in_process import contents, copy_of, fedup, ok, refused, sample_ids

from fedup.cli._names import Names
from fedup.cli._requests import from_csv, from_options
from fedup.errors import FedUPError, RequestError
from fedup.request import Forget

PYTHON = re.compile(r"\w=(True|False|None|'|\"|…)|Path\(|<fedup|<class|object at 0x|\w+\(\w+=|\{'|Traceback")
SMALL = ("--rows", 400, "--clients", 4, "--rounds", 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders that no test here may change."""
    root = tmp_path_factory.mktemp("runs")
    for stage in ("trained", "collected", "answered"):
        copy_of(stage, root / stage)
    (root / "file").write_text("x")
    (root / "noload.py").write_text("x = 1\n")
    (root / "broken.py").write_text("def load(:\n")
    return root


@pytest.fixture(autouse=True)
def nothing_changes(runs):
    before = contents(runs)
    yield
    assert contents(runs) == before


USAGE = {
    "unlearn --run collected": "--client, --class or --samples, or by a --csv file",
    "unlearn --run collected --class 3 --csv x.csv": "or by a --csv file",
    "unlearn --run collected --samples 1:-4": "CLIENT:IDS",
    "unlearn --run collected --samples ²:1": "CLIENT:IDS",  # isdigit() is true, int() raises
    "unlearn --run collected --class 3 --rank 0": "--rank",
    "unlearn --run collected --class 3 --max-loss -1": "--max-loss",
    "restore --run answered": "fedup restore R1",
    "data --client 3": "--run FOLDER",
    "train --clients 1": "--clients",
    "train --run new --rounds 0": "--weights",
    "forget": "forget",
}


@pytest.mark.parametrize("arguments", USAGE)
def test_wrong_usage_exits_2_and_says_what_is_wrong(runs, arguments):
    ran = fedup(*arguments.split(), cwd=runs)
    assert (ran.code, ran.out) == (2, "")
    assert USAGE[arguments] in ran.told
    assert "Usage: " in ran.told


FAILURES = {
    "unlearn --run collected --client 99": "clients [0, 1, 2, 3]",
    "unlearn --run collected --samples 0:99999": "99999",
    "unlearn --run collected --samples 0:9-2": "50-60",
    "unlearn --run collected --samples 0:1-99999999999 --dry-run": "10,000,000",  # not spelled out first
    "unlearn --run collected --class 3 --max-loss nan": "max-loss",  # would switch the limit off
    "unlearn --run collected --class 3 --preset papers": "default, paper, authors",
    "unlearn --run collected --class 3 --device cuda:99": "--device cpu",
    "unlearn --run trained --class 3 --dry-run": "fedup collect --run trained",
    "unlearn --run collected --csv trained": "cannot be read",
    "restore R9 --run answered": "there are: R1 (T-1), R2, R3",
    "purge --yes --run trained": "fedup collect --run trained",
    "status": "no run folder at run",
    "evidence R1 --run answered --out file": "Could not write",
    "evaluate --run trained --retrain": "No request is in force",
    "export file/x.pt2 --run trained": "Could not write",
    "collect --run nowhere": "FEDUP_RUN",
    "collect --run collected --ratio 0.5": "--ratio 0.8",
    "list cuts lenet6": "Did you mean 'lenet5'?",
    "list cuts": "fedup list cuts lenet5",
    "list runs lenet5": "fedup list cuts MODEL",
    "train --run new --data digitz": "Did you mean 'digits'?",
    "train --run new --data noload.py": "noload.py",
    "train --run new --data broken.py": "broken.py",
    "train --run new --partition dirichlet:x": "dirichlet:0.5",
    "train --run new --rows 99999": "1437",
    "train --run new --lr nan": "lr",  # no JSON could hold it
    f"train --run new --seed {2**70}": "seed",
    "train --run new --weights file": "no safetensors file",
    "demo --rounds 0": "at least 1 round",
    "train --run trained --rows 300": "rows is 400 there and 300 here",
    "train --run new --clients 3 --clients-per-round 4": "--clients-per-round must lie",
    "unlearn --run collected --class 7 --class-policy keep": "--class-policy",
    "collect --run collected --again --epsilon 2": "--clip unit",
    "predict nowhere.png --run trained": "nowhere.png",
    "train --run .": "not empty",
}


@pytest.mark.parametrize("arguments", FAILURES)
def test_failures_exit_1_with_one_error_that_says_what_to_do(runs, arguments):
    ran = fedup(*arguments.split(), cwd=runs)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("Error: ")
    assert FAILURES[arguments] in ran.told
    assert not PYTHON.search(ran.told)  # an error speaks the command line
    assert not (runs / "new").exists()


def test_weights_of_another_architecture_are_refused(runs):
    (weights,) = (runs / "trained" / "files").glob("model-*")
    refused(
        "train", "--run", runs / "new", *SMALL, "--model", "resnet18", "--weights", weights, told="do not fit the model"
    )
    assert not (runs / "new").exists()


CELL = st.sampled_from(["", "", "1", "7", "1 2", "50-52", "9-2", "-1", "1.5", "one", "1\0", '"1'])
ROWS = st.lists(st.lists(CELL, min_size=3, max_size=4).map(",".join), max_size=3)
HEADS = st.sampled_from(["client,class,sample", "client,class,sample,reason", "who,what", "", "client;class"])


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(HEADS, ROWS).map(lambda parts: "\n".join([parts[0], *parts[1]]).encode()) | st.binary(max_size=60))
@example("reference,client,class,sample\nMüller,1,,\n".encode("latin-1"))
@example("client,class\n1,\n".encode("utf-16"))
@example(b"client,client,class\n0,1,\n")  # the first of two would silently not be forgotten
@example(b"client,class,sample\n,,\n")
def test_a_file_gives_requests_or_one_error_that_names_it(tmp_path, data):
    path = tmp_path / "requests.csv"
    path.write_bytes(data)
    try:
        assert from_csv(path)
    except FedUPError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("who,what\n1,2\n", "found who, what"),
        ("client,client,class\n0,1,\n", "each once"),
        ("client,class,sample\n", "no rows"),
        ("client,class,sample\n0,,\n,7,\nx,,\n", "Line 4"),
        ("client,class,sample\n1,,4,5\n", "more values than columns"),
        ("client,class,sample\n,,3\n", "Line 2"),
        ("reference,client,class,sample\nA,,7,\nB,77,,\n", "Unknown client [77]"),  # the good row is refused with it
        (b"reference,class\n\x1b]0;title\x07x,7\n", "printable"),  # would reach the operator's terminal
    ],
)
def test_a_file_of_requests_that_cannot_be_is_refused_whole_and_says_where(runs, tmp_path, data, told):
    path = tmp_path / "requests.csv"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    for more in ((), ("--dry-run",)):
        ran = fedup("unlearn", "--run", runs / "collected", "--csv", path, "--force", *more)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith("Error: ")
        assert told in ran.told


@pytest.mark.parametrize(("mark", "ending"), [("", "\n"), ("\ufeff", "\r\n")], ids=["unix", "windows"])
def test_files_as_spreadsheets_write_them_are_read(tmp_path, mark, ending):
    rows = ["Reference, Client ,CLASS,sample", "Brief 1,1,,", '"Ä, B",,"7, 8",', 'C,1,,"17;42"', ",,,", "C,1,,50-52"]
    path = tmp_path / "requests.csv"
    path.write_bytes((mark + ending.join(rows) + ending).encode())
    first, second, third = from_csv(path)
    assert [reference for _, reference in (first, second, third)] == ["Brief 1", "Ä, B", "C"]
    assert (first[0].client_ids, second[0].class_ids) == ({1}, {7, 8})
    assert third[0].sample_ids == {1: {17, 42, 50, 51, 52}}


def test_ranges_and_lists_name_the_same_samples(runs):
    first, second = next((a, b) for a, b in pairwise(sample_ids(1)) if b > a)
    texts = (f"1:{first},{second}", f"1: {second} {first}", f"1:{first}-{first};{second}")
    plans = [
        ok("unlearn", "--run", runs / "collected", "--samples", text, "--dry-run", "--json").json for text in texts
    ]
    assert len({plan["requests"][0]["rows"]["sha256"] for plan in plans}) == 1


def test_a_dry_run_tells_of_a_client_that_is_asked_for_classes_alone(tmp_path):
    run = copy_of("collected", tmp_path)
    ok("unlearn", "--run", run, "--class", 0, "--force", "--steps", 5)
    ok("purge", "--yes", "--run", run)
    options = ("--samples", f"1:{sample_ids(1, 0)[0]}", "--force", "--json")
    plan = ok("unlearn", "--run", run, *options, "--dry-run").json
    assert plan["clients_contacted"] == ok("unlearn", "--run", run, *options).json["clients_contacted"]


def test_a_reference_that_is_no_text_is_refused(runs):
    # A byte that is no UTF-8 in an argument becomes a lone surrogate, which the journal cannot hold.
    assert fedup("unlearn", "--run", runs / "collected", "--class", 3, "--reference", "\udcff", "--force").code == 1


def test_samples_go_by_the_ids_of_rows_and_what_may_mean_two_rows_is_refused():
    names = Names(clients=("mercy", "st:john"), row_ids=lambda: ("E-0", "E-1", "2", "1", "4-4"))
    meant = {"mercy:E-1,E-0": [1, 0], "st:john:2": [2], "0:number:1,0": [1, 0], "mercy:4-4": [4], "mercy:0-1": [0, 1]}
    for text, rows in meant.items():
        client = 1 if text.startswith("st") else 0
        assert from_options([], [], [text], [], "withdrawal", names) == [Forget.samples({client: rows})]
    for text, told in {"mercy:1": "number:3", "mercy:E-2": "E-", "mercy:E-0;;": "''"}.items():
        with pytest.raises(RequestError, match=re.escape(told)):
            from_options([], [], [text], [], "withdrawal", names)

"""`fedup predict`: every way in gives the plugged model's own answers, under a filter that is named."""

import io
import json
import os
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits
from tests.cli._in_process import contents, copy_of, fedup, filter_file, ok, refused

from fedup.cli._session import Session
from fedup.tasks.datasets import input_of

COUNT = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Class 7, client 2 and two samples of client 1 are in force; no test here changes it."""
    return copy_of("answered", tmp_path_factory.mktemp("predict"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same federation without a request in force."""
    return copy_of("collected", tmp_path_factory.mktemp("plain"))


@cache
def pixels():
    return [np.clip(image * 16, 0, 255).astype(np.uint8) for image in load_digits().images[:COUNT]]


def png(image, **how) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG", **how)
    return out.getvalue()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for number, image in enumerate(pixels()):
        (folder / f"{number:02d}.png").write_bytes(png(image))
    (folder / "notes.txt").write_text("no picture")
    return folder


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """As the Hugging Face hub lays images out: a struct of bytes and path."""
    path = tmp_path_factory.mktemp("parquet") / "test-00000-of-00001.parquet"
    images = [{"bytes": png(image), "path": None} for image in pixels()]
    table = pa.table({"image": images, "raw": [one["bytes"] for one in images], "label": [0] * COUNT})
    pq.write_table(table, path)
    return path


def expected(run: Path) -> list[tuple[int, float]]:
    """The plugged model's own answers (the base's where nothing is in force)."""
    state, plugged = Session(run).served()
    model = plugged if state.active else plugged.base
    x = input_of("digits").prepare([image[None] for image in pixels()])
    with torch.no_grad():
        best = model(x).softmax(1).max(1)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def answers(ran) -> list[dict]:
    return [json.loads(line) for line in ran.out.splitlines()]


def assert_right(run, ran, names) -> None:
    found, wanted = answers(ran), expected(run)
    assert [one["input"] for one in found] == names
    assert [one["class"] for one in found] == [label for label, _ in wanted]
    assert [one["probability"] for one in found] == pytest.approx([share for _, share in wanted], abs=1e-5)
    assert all(one["name"] == str(one["class"]) for one in found)
    path = filter_file(run)
    assert {one["filter"] for one in found} == {path.stem.removeprefix("filter-") if path else None}


def test_files_folders_parquet_and_standard_input_give_the_models_own_answers(run, pictures, parquet):
    before = contents(run)
    paths = sorted(pictures.glob("*.png"))
    names, rows = [str(path) for path in paths], [f"{parquet}:{row}" for row in range(COUNT)]
    piped = {"stdin": parquet.read_bytes()}
    for arguments, how, expected_names in (
        ((pictures,), {}, names),  # its images by name, and nothing else
        (paths, {}, names),
        ((parquet,), {}, rows),
        ((parquet, "--column", "raw"), {}, rows),
        (("-",), piped, [f"-:{row}" for row in range(COUNT)]),
    ):
        assert_right(run, ok("predict", *arguments, "--run", run, "--json", **how), expected_names)
    backwards = answers(ok("predict", *paths[::-1], "--run", run, "--json"))
    assert [one["input"] for one in backwards] == names[::-1]  # in the order given
    ran = ok("predict", pictures / "00.png", "--run", run)
    name, label, _ = ran.out.strip().split("\t")
    assert (name, label) == (names[0], str(expected(run)[0][0]))
    assert filter_file(run).stem.removeprefix("filter-") in ran.err
    assert "R1, R2, R3" in ran.err
    assert contents(run) == before


def test_more_inputs_than_a_batch_holds(run, tmp_path):
    path = tmp_path / "many.parquet"
    pq.write_table(pa.table({"image": [png(pixels()[i % COUNT]) for i in range(600)]}), path)
    found, wanted = answers(ok("predict", path, "--run", run, "--json")), expected(run)
    assert len(found) == 600
    assert [one["class"] for one in found] == [wanted[i % COUNT][0] for i in range(600)]


def test_the_filter_can_be_demanded(run, plain, pictures):
    picture, right = pictures / "00.png", filter_file(run).stem.removeprefix("filter-")
    for demanded in (right, right[:6], right.upper()):
        ok("predict", picture, "--run", run, "--filter", demanded)
    for wrong in ("none", "", "0000000", right + "00"):
        ran = fedup("predict", picture, "--run", run, "--filter", wrong)
        assert (ran.code, ran.out) == (1, "")
        assert right in ran.err
    ok("predict", picture, "--run", plain, "--filter", "none")
    names = [str(path) for path in sorted(pictures.glob("*.png"))]
    assert_right(plain, ok("predict", pictures, "--run", plain, "--json"), names)  # the original answers
    assert "no filter" in ok("predict", picture, "--run", plain).err
    assert fedup("predict", picture, "--run", plain, "--filter", right).code == 1


def test_another_size_is_refused_unless_resizing_is_asked_for(run, tmp_path):
    (tmp_path / "colour.png").write_bytes(png(np.stack([pixels()[0]] * 3, axis=-1)))
    (one,) = answers(ok("predict", tmp_path / "colour.png", "--run", run, "--json"))
    assert one["class"] == expected(run)[0][0]  # taken as a grey one
    path = tmp_path / "large.png"
    Image.fromarray(pixels()[0]).resize((16, 24)).save(path)
    ran = refused("predict", path, "--run", run, "--json")
    assert all(text in ran.err for text in (str(path), "16×24", "8×8", "--resize"))
    ok("predict", path, "--run", run, "--resize")


WAYS = ["no image", "cut short", "empty", "a bad row", "no bytes", "parquet cut short", "another column", "no file"]


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(WAYS), st.floats(0, 0.9), st.booleans())
def test_what_cannot_be_read_is_named_and_nothing_is_answered_for_it(run, parquet, tmp_path, way, part, piped):
    path, options, image = tmp_path / "input", (), png(pixels()[0])
    whole = parquet.read_bytes()
    bad = {"a bad row": b"no image", "no bytes": None}
    data = {
        "no image": b"no image",
        "cut short": image[: 1 + int(part * 60)],
        "empty": b"",
        "parquet cut short": whole[: 4 + int(part * (len(whole) - 4))],
    }.get(way, whole)
    if way in bad:
        pq.write_table(pa.table({"image": [image, bad[way]]}), path)
    elif way != "no file":
        path.write_bytes(data)
    else:
        path, piped = tmp_path / "nowhere.png", False
    if way == "another column":
        options = ("--column", "label")
    stdin = {"stdin": path.read_bytes()} if piped else {}
    ran = fedup("predict", "-" if piped else path, "--run", run, *options, **stdin)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("Error: ")
    assert piped or str(path) in ran.err
    assert way not in bad or ":1" in ran.err


def test_a_column_or_folder_without_images_names_what_there_is(run, parquet, tmp_path):
    assert "image, raw, label" in fedup("predict", parquet, "--run", run, "--column", "picture").err
    assert "no image" in fedup("predict", tmp_path, "--run", run).err


def missing(name: str) -> bool:
    return not Path(os.environ.get("FEDUP_DATA", "/nowhere"), name).is_dir()


needs_texts = [
    pytest.mark.data,
    pytest.mark.slow,  # a BERT, though a small one
    pytest.mark.skipif(
        missing("ag_news") or missing("bert-base-uncased"),
        reason="ag_news: there are no folders ag_news and bert-base-uncased below FEDUP_DATA",
    ),
]
TEXTS = ["The team won the final by two goals", "Shares fell after the bank's report", "A new chip doubles the speed"]


@pytest.fixture(scope="module")
def news(tmp_path_factory):
    run = tmp_path_factory.mktemp("news") / "run"
    ok("train", "--run", run, "--data", "ag_news", "--rows", 400, "--clients", 2, "--rounds", 1, "--epochs", 1)
    ok("collect", "--run", run, "--by-class", "always")  # so that a class request asks nobody
    ok("unlearn", "--run", run, "--class", 2, "--force")
    return run


class TestTexts:
    pytestmark = needs_texts

    def expected(self, run):
        _, plugged = Session(run).served()
        with torch.no_grad():
            from fedup.models.cut import logits_of

            return logits_of(plugged(input_of("ag_news").prepare(TEXTS))).argmax(1).tolist()

    def test_files_lines_standard_input_and_parquet_give_the_models_own_answers(self, news, tmp_path):
        lines = tmp_path / "news.txt"
        lines.write_text("\n\n".join(TEXTS) + "\n")
        wanted = self.expected(news)
        found = answers(ok("predict", lines, "--run", news, "--json"))
        assert [one["class"] for one in found] == wanted
        assert [one["input"] for one in found] == [f"{lines}:{number}" for number in (1, 3, 5)]
        assert {one["filter"] for one in found} == {filter_file(news).stem.removeprefix("filter-")}
        assert {one["name"] for one in found} <= {"World", "Sports", "Business", "Sci/Tech"}
        piped = answers(ok("predict", "-", "--run", news, "--json", stdin=lines.read_bytes()))
        assert [one["class"] for one in piped] == wanted
        table = tmp_path / "news.parquet"
        pq.write_table(pa.table({"text": TEXTS, "title": TEXTS[::-1]}), table)
        rows = answers(ok("predict", table, "--run", news, "--json"))
        assert [(one["input"], one["class"]) for one in rows] == [(f"{table}:{i}", c) for i, c in enumerate(wanted)]
        (tmp_path / "texts").mkdir()
        for number, text in enumerate(TEXTS):
            (tmp_path / "texts" / f"{number}.txt").write_text(text)
        folder = answers(ok("predict", tmp_path / "texts", "--run", news, "--json"))
        assert [one["class"] for one in folder] == wanted
        (tmp_path / "latin.txt").write_bytes("Fußball".encode("latin-1"))
        refused("predict", tmp_path / "latin.txt", "--run", news, told="latin.txt")
        titles = answers(ok("predict", table, "--run", news, "--column", "title", "--json"))
        assert [one["class"] for one in titles] == wanted[::-1]

    def test_without_the_data_set_texts_are_answered_and_a_class_is_forgotten_but_not_with_another_vocabulary(
        self, news, tmp_path
    ):
        shutil.copytree(Path(os.environ["FEDUP_DATA"], "bert-base-uncased"), tmp_path / "bert-base-uncased")
        (tmp_path / "news.txt").write_text(TEXTS[0])
        run = Path(shutil.copytree(news, tmp_path / "run"))
        ok("predict", tmp_path / "news.txt", "--run", run, FEDUP_DATA=str(tmp_path))
        declined = fedup("unlearn", "--class", 1, "--run", run, FEDUP_DATA=str(tmp_path))
        assert declined.code == 1  # nothing to measure it on
        ok("unlearn", "--class", 1, "--run", run, "--force", FEDUP_DATA=str(tmp_path))
        with (tmp_path / "bert-base-uncased" / "vocab.txt").open("a") as file:
            file.write("newword\n")
        refused("predict", tmp_path / "news.txt", "--run", run, FEDUP_DATA=str(tmp_path), told="vocabulary")

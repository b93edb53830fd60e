"""Files that cannot be used: one line that says what is wrong and where, and no folder is left behind."""

import random
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from tests.cli._in_process import fedup, ok, refused

HEAD = "age,sex,label"
NOISE = random.Random(0)
ROWS = [f"{NOISE.random():.3f},{'fm'[row % 3 % 2]},{'yes' if row % 2 else 'no'}" for row in range(40)]


def text(*lines: str, encoding: str = "utf-8") -> bytes:
    return ("\n".join(lines) + "\n").encode(encoding)


BAD = {
    "wrong encoding": (text(HEAD, *ROWS, "0.1,é,no", encoding="latin-1"), (), "not UTF-8 text (line 42, byte 0xe9)"),
    "UTF-16": (text(HEAD, *ROWS, encoding="utf-16"), (), "it is UTF-16: save it as UTF-8"),
    "ragged": (
        text(HEAD, '0.1,"f\nm",no', *ROWS, "0.1,f"),
        (),
        "line 44: 2 values, and the first line names 3 columns",
    ),
    "an open quotation mark": (text(HEAD, *ROWS, '0.1,"f,no'), (), "Is a quotation mark missing?"),
    "a class with one row": (text(HEAD, *ROWS, "0.1,f,maybe"), (), "class 'maybe' has one row only"),
    "one class": (text(HEAD, *ROWS[1::2]), (), "has one value in all rows"),
    "no classes": (text("x,label", *(f"{r * r},{r + 0.5}" for r in range(50))), (), "50 different values in 50 rows"),
    "mixed types": (text(HEAD, *ROWS, "old,f,no"), (), "mixes numbers (40) and texts (1; first 'old', line 42)"),
    "decimal commas": (
        text("x,label", *(f'"{r},5",{r % 2}' for r in range(60))),
        (),
        "has decimal commas, as in '0,5'",
    ),
    "commas and points": (
        text("x;label", "1.5;0", *(f"{r},5;{r % 2}" for r in range(60))),
        (),
        "has decimal commas, as in '0,5'",
    ),
    "thousands": (text("x;label", *(f"{r}.234,5;{r % 2}" for r in range(60))), (), "has marks of thousands"),
    "missing values": (text(HEAD, *ROWS, ",f,no", "1,NA,no"), (), "values are missing: age (1), sex (1)"),
    "missing labels": (text(HEAD, *ROWS, "1,f,"), (), "label 'label' is empty in 1 rows, first line 42"),
    "nothing": (b"", (), "is empty"),
    "no rows": (text(HEAD), (), "has no rows"),
    "no head": (text("1,2,3", "4,5,6"), (), "must name its columns; it holds numbers only"),
    "twice the same name": (text("a,a,label", "1,2,x"), (), "'a' is there twice"),
    "duplicate ids": (
        text(f"id,{HEAD}", *(f"{i % 39},{r}" for i, r in enumerate(ROWS))),
        ("--id-column", "id"),
        "twice",
    ),
    "no column of labels": (text(HEAD, *ROWS), ("--label", "diagnosis"), "there is none called 'diagnosis'"),
    "no column of clients": (text(HEAD, *ROWS), ("--clients-column", "ward"), "has no column 'ward' (clients)"),
    "a column for two uses": (text(HEAD, *ROWS), ("--clients-column", "label"), "is named for two uses"),
    "clients twice": (text(HEAD, *ROWS), ("--clients-column", "sex", "--clients", 3), "leave out --clients 3"),
    "binary junk": (NOISE.randbytes(3000), (), "is no text file: line 1 holds a zero byte"),
    "a sheet": (b"PK\x03\x04" + bytes(100), (), "save the sheet as CSV"),
    "an unknown kind": (
        text(HEAD, *ROWS),
        ("--column", "age=date"),
        "is one of number, category, ignore; found 'date'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_csv_is_one_line_that_says_where_and_leaves_no_folder(tmp_path, name):
    content, options, told = BAD[name]
    path, run = tmp_path / "some.csv", tmp_path / "run"
    path.write_bytes(content)
    ran = refused("train", "--data", path, *options, "--run", run, told=told)
    assert len(ran.err.strip().splitlines()) == 1 and not run.exists()
    checked = fedup("data", "check", path, *options)
    assert checked.code in (1, 2) or "--clients" in options
    assert "Traceback" not in checked.err


@pytest.mark.parametrize("ending", [".npz", ".parquet", ".xlsx"])
def test_junk_by_another_name_is_refused(tmp_path, ending):
    path, run = tmp_path / f"some{ending}", tmp_path / "run"
    path.write_bytes(NOISE.randbytes(3000))
    refused("train", "--data", path, "--label", "y", "--run", run, told=f"some{ending}")
    assert not run.exists()


def test_arrays_that_would_run_code_and_arrays_of_two_lengths_are_refused(tmp_path):
    path = tmp_path / "some.npz"
    np.savez(path, x=np.zeros((4, 2)), y=np.array([{}, [], 1, "a"], dtype=object))
    refused("train", "--data", path, "--run", tmp_path / "run", told="npz file of plain arrays")
    np.savez(path, x=np.zeros((4, 2)), y=np.zeros(3))
    refused("train", "--data", path, "--run", tmp_path / "run", told="y has the shape (3,) and x (4, 2)")


def test_images_of_two_sizes_one_image_of_a_class_and_no_image_at_all(tmp_path):
    for name, side in (("a/1.png", 20), ("a/2.png", 20), ("b/1.png", 20)):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (side, side)).save(tmp_path / "photos" / name)
    arguments = "train", "--data", tmp_path / "photos", "--run", tmp_path / "run"
    refused(*arguments, told="class 'b' has one image only")
    Image.new("L", (20, 24)).save(tmp_path / "photos/b/2.png")
    refused(*arguments, told="2.png is 20×24, and 1.png 20×20")
    (tmp_path / "photos/b/2.png").write_bytes(b"no image")
    refused(*arguments, told="2.png: It holds no readable image")
    refused(*arguments, "--label", "x", told="it has no columns")
    assert not (tmp_path / "run").exists()


def test_a_label_a_column_or_a_text_that_training_did_not_have_is_refused_later_too(tmp_path):
    path, other, run = tmp_path / "some.csv", tmp_path / "other.csv", tmp_path / "run"
    path.write_bytes(text(HEAD, *ROWS))
    ok("train", "--data", path, "--rounds", 1, "--run", run)
    other.write_bytes(text(HEAD, *ROWS[:3], "0.5,f,perhaps"))
    refused(
        "evaluate",
        "--data",
        other,
        "--run",
        run,
        told="line 5: the label 'perhaps' was not there in training (no, yes)",
    )
    for content, told in (
        (text("sex,label", "f,no"), "has no column age"),
        (text("sex,age", "f,old"), "line 2: the column 'age' holds numbers; found 'old'"),
        (text("sex,age", "f,1", "m,"), "line 3: the column 'age' is empty"),
        (text("sex,age"), "has no rows"),
    ):
        other.write_bytes(content)
        refused("predict", other, "--run", run, told=told)
    other.write_bytes(text("sex,age", "x,0.5"))
    assert "not there in training" in ok("predict", other, "--run", run).told  # none of the known values, with a note
    path.write_bytes(text(HEAD, *ROWS[1:], ROWS[0]))
    refused("collect", "--run", run, told="is not the file that the run folder was trained on")


PEAK = """
import resource, sys
from fedup.tasks.datasets import load_dataset
from fedup.tasks.file_options import FileOptions
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    found = len(load_dataset(sys.argv[1], FileOptions(id_column="id" if len(sys.argv) > 2 else None)).y)
except ValueError as error:
    found = error
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, found)
"""


def peak_mib(*arguments: object) -> tuple[int, str]:
    ran = subprocess.run([sys.executable, "-c", PEAK, *map(str, arguments)], capture_output=True, text=True, check=True)
    peak, _, found = ran.stdout.partition(" ")
    return int(peak), found.strip()


def test_two_gigabytes_of_nothing_are_refused_in_the_memory_of_a_block(tmp_path):
    path = tmp_path / "big.csv"
    with path.open("wb") as file:
        file.write(text(HEAD, *ROWS)[:-1])
        file.truncate(2 << 30)  # sparse: takes no space
    peak, found = peak_mib(path)
    assert "zero byte" in found and peak < 100


@pytest.mark.slow
def test_a_million_rows_are_read_in_memory_for_their_numbers_and_the_time_is_printed(tmp_path):
    path, rng = tmp_path / "million.csv", np.random.default_rng(0)
    with path.open("w") as file:
        file.write("id,a,b,c,d,sex,label\n")
        for start in range(0, 1_000_000, 50_000):
            x, sex = rng.normal(size=(50_000, 4)), rng.integers(0, 2, 50_000)
            lines = (
                f"r{start + i},{','.join(f'{v:.5f}' for v in x[i])},{'fm'[sex[i]]},{'ab'[int(x[i, 0] > 0)]}\n"
                for i in range(50_000)
            )
            file.writelines(lines)
    peak, found = peak_mib(path, "with ids")
    assert abs(int(found) - 800_000) < 10
    assert peak < 500  # 6 places of 8 bytes are 46 MiB, twice while test rows are taken out; ids are texts
    out = " ".join(ok("data", "check", path, "--id-column", "id").out.split())
    assert "1,000,000 rows, read in " in out and "Nothing is wrong" in out

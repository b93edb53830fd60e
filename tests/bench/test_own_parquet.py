"""Parquet files of one's own are a data set without a line of code, from training to predictions and benchmarks."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.bench._pictures import encoded, images_table
from tests.cli._in_process import FAST, ok

from fedup.bench.experiment import load_experiment
from fedup.bench.results import Results
from fedup.bench.runner import run_cells
from fedup.errors import DataError, FedUPError, MissingDataError, SettingError
from fedup.tasks.datasets import Texts, input_of, load_dataset

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very", "cf")


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch) -> Path:
    """FEDUP_DATA with a vocabulary of a few words, and a cache of one's own."""
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDUP_DATA", str(tmp_path / "data"))
    vocabulary = tmp_path / "data" / "bert-base-uncased" / "vocab.txt"
    vocabulary.parent.mkdir(parents=True)
    vocabulary.write_text("\n".join(WORDS) + "\n")
    return tmp_path / "data"


def pictures(rows: int, shape: tuple[int, ...] = (28, 28), seed: int = 0) -> list[np.ndarray]:
    """Noise whose brightness says the class, row % 4."""
    noise = np.random.default_rng(seed).integers(0, 100, (rows, *shape))
    return [(image + 40 * (row % 4)).astype(np.uint8) for row, image in enumerate(noise)]


def named(table: pa.Table, names: list[str], column: str = "label") -> pa.Table:
    """With class names, as the hub keeps them."""
    features = {"info": {"features": {column: {"names": names, "_type": "ClassLabel"}}}}
    return table.replace_schema_metadata({"huggingface": json.dumps(features)})


def labels(rows: int) -> list[int]:
    return [row % 4 for row in range(rows)]


def write(table: pa.Table, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


@pytest.fixture
def photos(tmp_path) -> Path:
    """A folder with a train and a test split of 28×28 pictures in grey."""
    folder = tmp_path / "photos"
    for split, rows in (("train", 80), ("test", 20)):
        table = named(images_table(pictures(rows), labels(rows)), ["ant", "bee", "cat", "dog"])
        write(table, folder / f"{split}-00000-of-00001.parquet")
    return folder


# --- what is read


@pytest.mark.parametrize("shape", [(28, 28), (32, 20, 3)], ids=["grey", "colour"])
def test_rows_are_the_pictures_with_mean_0_and_deviation_1(tmp_path, shape):
    made = pictures(40, shape)
    path = write(images_table(made, labels(40)), tmp_path / "some.parquet")
    found, how = load_dataset(str(path)), input_of(str(path))
    channels = shape[2] if len(shape) == 3 else 1
    assert (how.channels, how.height, how.width) == (channels, *shape[:2])
    pixels = np.stack(made).reshape(40, *shape[:2], channels).transpose(0, 3, 1, 2) / 255
    assert how.mean == pytest.approx(pixels.mean((0, 2, 3)), abs=1e-4)
    assert how.std == pytest.approx(pixels.std((0, 2, 3)), abs=1e-4)
    everything = torch.cat([found.x, found.test_x])
    assert float(everything.mean()) == pytest.approx(0, abs=1e-2)
    assert float(everything.std()) == pytest.approx(1, abs=1e-2)
    train = [row for row in range(40) if row % 5]
    torch.testing.assert_close(found.x, how.scale(torch.from_numpy((pixels[train] * 255).round().astype(np.uint8))))


def test_a_file_alone_or_without_a_test_split_has_every_fifth_row_for_the_test(tmp_path):
    alone = write(images_table(pictures(41), labels(41)), tmp_path / "alone.parquet")
    write(images_table(pictures(41), labels(41)), tmp_path / "folder" / "train-00000-of-00001.parquet")
    for place in (alone, tmp_path / "folder"):
        found = load_dataset(str(place))
        assert (len(found.y), len(found.test_y)) == (32, 9)
        assert found.test_y.tolist() == labels(41)[::5]
        assert found.y.tolist() == [label for row, label in enumerate(labels(41)) if row % 5]
        assert found.class_names == ("0", "1", "2", "3")


def test_shards_are_one_data_set_in_the_order_of_their_names_and_changed_files_are_read_anew(photos):
    whole = load_dataset(str(photos))
    assert (whole.x.shape, whole.test_x.shape) == ((80, 1, 28, 28), (20, 1, 28, 28))
    assert (whole.y.tolist(), whole.test_y.tolist()) == (labels(80), labels(20))
    assert (whole.name, whole.class_names) == ("photos", ("ant", "bee", "cat", "dog"))
    (path,) = photos.glob("train*")
    table = pq.read_table(path)
    path.unlink()
    for shard, start in enumerate((0, 30, 60)):
        write(table.slice(start, 30), photos / f"train-{shard:05}-of-00003.parquet")
    found = load_dataset(str(photos))
    assert torch.equal(found.x, whole.x) and torch.equal(found.y, whole.y)
    assert torch.equal(found.test_x, whole.test_x)
    assert found.class_names == whole.class_names
    write(
        named(images_table(pictures(30, seed=1), labels(30)), list(whole.class_names)),
        photos / "train-00000-of-00003.parquet",
    )
    assert not torch.equal(load_dataset(str(photos)).x[:24], whole.x[:24])


def test_a_validation_split_is_used_where_there_is_no_test_split_and_a_train_split_must_be_there(photos):
    write(images_table(pictures(12), labels(12)), photos / "validation-00000-of-00001.parquet")
    for split, sizes in (("test", (80, 20)), ("train", (80, 12))):
        found = load_dataset(str(photos))
        assert (len(found.y), len(found.test_y)) == sizes
        for path in photos.glob(f"{split}*"):
            path.unlink()
    with pytest.raises(MissingDataError, match=r"photos has no train split"):
        load_dataset(str(photos))


def test_texts_are_read_as_word_pieces(tmp_path):
    said = ["a very good film", "a bad film", "good", "very very bad", "Unheard-of"] * 4
    path = write(pa.table({"text": said, "label": [row % 2 for row in range(20)]}), tmp_path / "reviews.parquet")
    assert isinstance(input_of(str(path)), Texts)
    found = load_dataset(str(path))
    assert (len(found.y), len(found.test_y)) == (16, 4)
    assert found.x.dtype == torch.int64
    ids = [WORDS.index(word) for word in ("[CLS]", "a", "bad", "film", "[SEP]")]
    assert found.x[0].tolist() == ids + [0] * (found.x.shape[1] - 5)
    assert torch.equal(found.test_x[0], input_of(str(path)).prepare(said[:1])[0])


# Pillow's modes of which files are full: what is trained on must be what predictions make of the same file.


@pytest.mark.parametrize(
    ("mode", "form"),
    [*((mode, "PNG") for mode in ("L", "P", "1", "RGBA", "LA", "I;16")), ("RGB", "JPEG"), ("RGB", "GIF")],
)
def test_a_picture_is_the_same_at_training_and_at_prediction_whatever_its_mode_and_format(tmp_path, mode, form):
    # Found here: a palette's indices were taken for colours, black and white became 0 and 1 of 255, 16 bits overflowed.
    if mode == "I;16":
        images = [Image.fromarray(pixels.astype(np.uint16) * 255 + 255) for pixels in pictures(10)]
    else:
        images = [Image.fromarray(pixels).convert(mode) for pixels in pictures(10, (28, 28, 3))]
    files = [encoded(image, form) for image in images]
    path = write(images_table(files, labels(10)), tmp_path / "some.parquet")
    try:
        found, how = load_dataset(str(path)), input_of(str(path))
    except FedUPError as error:  # refused is as good as the same
        assert "some.parquet" in str(error)
        return
    torch.testing.assert_close(how.prepare([how.read(files[row]) for row in (1, 2, 3)]), found.x[:3])


# --- labels


def test_the_column_of_labels_may_be_named_and_is_label_or_the_only_one_of_whole_numbers(tmp_path):
    table = images_table(pictures(20), fine=[row % 4 for row in range(20)], coarse=[row % 2 for row in range(20)])
    path = write(named(table, ["even", "odd"], "coarse"), tmp_path / "some.parquet")
    assert load_dataset(f"{path}:fine").num_classes == 4
    assert load_dataset(f"{path}:coarse").class_names == ("even", "odd")
    with pytest.raises(SettingError, match=r"which column .*fine, coarse, and there is not one called label.*:fine"):
        load_dataset(str(path))
    with pytest.raises(SettingError, match=r"there is none called 'label'"):
        load_dataset(f"{path}:label")
    for columns in ({"label": labels(20), "id": list(range(20))}, {"sort": labels(20)}):
        path = write(images_table(pictures(20), **columns), tmp_path / f"{len(columns)}.parquet")
        assert load_dataset(str(path)).num_classes == 4
    path = write(images_table(pictures(5)), tmp_path / "none.parquet")
    with pytest.raises(SettingError, match="Whole numbers are in none"):
        load_dataset(str(path))


@pytest.mark.parametrize(
    ("split", "given"), [("train", [0, 1, 2, 3, 4]), ("train", [1, 2, 3, 2, 70]), ("test", [0, 1, -1, 2, 3])]
)
def test_labels_beyond_the_class_names_are_refused(tmp_path, given, split):
    # Found here: labels below 0, as the hub has them in test splits without labels, were refused in train splits only.
    for name in ("train", "test"):
        table = images_table(pictures(5), given if name == split else [0, 1, 2, 3, 0])
        write(named(table, ["ant", "bee", "cat", "dog"]), tmp_path / "some" / f"{name}.parquet")
    with pytest.raises(DataError, match=r"names 4 classes.*labels must lie in 0 … 3"):
        load_dataset(str(tmp_path / "some"))


ODD = [None, b"", b"no picture", encoded(np.zeros((8, 8), np.uint8)), encoded(np.zeros((28, 28, 3), np.uint8))]
TABLES = [
    images_table(pictures(3), [0, None, 1]),
    images_table(pictures(3), [0.5, 1.0, 2.0]),
    images_table(pictures(3), ["a", "b", "c"]),
    pa.table({"text": ["good", None, "bad"], "label": [0, 1, 0]}),
    pa.table({"age": [1.5, 2.5], "label": [0, 1]}),
    pa.table({"title": ["a", "b"], "body": ["c", "d"], "label": [0, 1]}),
    *(images_table([*pictures(3), odd, *pictures(3)], labels(7)) for odd in ODD),
]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(TABLES), st.none() | st.integers(0, 300))
def test_whatever_is_damaged_is_refused_with_the_file_and_the_row(tmp_path, table, size):
    path = write(table, tmp_path / "some.parquet")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises((DataError, SettingError), match=r"some\.parquet") as refused:
        load_dataset(str(path))
    if table.num_rows == 7 and size is None:
        assert "Row 3 of" in str(refused.value)


# --- what is damaged


@pytest.mark.parametrize("odd", [(8, 8), (28, 28, 3)], ids=["size", "colour"])
@pytest.mark.parametrize("other", ["test.parquet", "train-2.parquet"])
def test_files_with_pictures_of_two_sizes_are_refused_with_the_file(tmp_path, odd, other):
    # Found here: shards of two sizes left with torch's own error; a test split of another size or in colour was taken.
    write(images_table(pictures(8), labels(8)), tmp_path / "some" / "train-1.parquet")
    write(images_table(pictures(8, odd), labels(8)), tmp_path / "some" / other)
    with pytest.raises(DataError, match=other):
        load_dataset(str(tmp_path / "some"))


# --- names


def test_names_are_fedups_own_then_folders_below_fedup_data_and_a_path_is_a_path(photos, tmp_path, data, monkeypatch):
    expected = load_dataset(str(photos)).x
    shutil.copytree(photos, tmp_path / "digits")
    shutil.copytree(photos, data / "digits")
    shutil.move(photos, data / "photos")
    monkeypatch.chdir(tmp_path)
    assert len(load_dataset("digits").y) == 1437
    assert len(load_dataset("./digits").y) == 80
    assert torch.equal(load_dataset("photos").x, expected)
    assert load_dataset("photos:label").num_classes == 4
    with pytest.raises(FedUPError, match="photos"):  # found here: it was looked for below FEDUP_DATA
        load_dataset(str(tmp_path / "elsewhere" / "photos"))


def test_a_file_or_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MissingDataError, match=r"no Parquet file .*none\.parquet"):
        load_dataset(str(tmp_path / "none.parquet"))
    with pytest.raises(SettingError, match="there is no 'fotos'"):
        load_dataset("fotos")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingError, match="empty"):
        load_dataset(str(tmp_path / "empty"))


# --- used


def test_from_training_to_predictions_even_when_the_folder_is_gone(photos, tmp_path):
    run = tmp_path / "run"
    ok("train", "--data", photos, "--rounds", "1", "--clients", "2", "--partition", "iid", "--run", run)
    ok("collect", "--run", run)
    ok("unlearn", "--class", "2", *FAST, "--force", "--run", run)
    image, table = tmp_path / "one.png", tmp_path / "some.parquet"
    image.write_bytes(encoded(pictures(1)[0]))
    write(images_table(pictures(6), labels(6)), table)
    before = ok("predict", image, table, "--run", run, "--json").out
    answers = [json.loads(line) for line in before.splitlines()]
    assert len(answers) == 7
    assert {answer["name"] for answer in answers} <= {"ant", "bee", "dog"}
    shutil.move(photos, tmp_path / "moved away")
    assert ok("predict", image, table, "--run", run, "--json").out == before
    ok("restore", "--all", "--run", run)
    ok("predict", image, "--run", run)


def test_a_benchmark_runs_on_ones_own(photos, tmp_path):
    (tmp_path / "mine.toml").write_text(
        f'[[federations]]\ndata = "{photos}:label"\nrounds = 1\nclients = 2\npartition = "iid"\n'
        "[scenarios.sample]\n[methods.fedup]\nsteps = 10\n"
    )
    cells = load_experiment(tmp_path / "mine.toml").cells()
    results = Results(tmp_path / "results")
    events = list(run_cells(cells, results, progress=lambda *_: None))
    assert [event.outcome for event in events] == ["done"] * 2, [event.result.get("failed") for event in events]
    assert all(results.load(cell)["metrics"]["r_a"] is not None for cell in cells)

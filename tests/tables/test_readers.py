"""Whatever a file holds is what the model is trained on, in every format; and scaling needs the clients' sums alone."""

import csv
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedup.errors import DataError
from fedup.tasks.datasets import input_of, load_dataset
from fedup.tasks.datasets._own_table import draw_test_rows
from fedup.tasks.datasets._standardise import mean_and_deviation
from fedup.tasks.datasets._table_source import MISSING, as_texts, table_source
from fedup.tasks.file_options import FileOptions
from fedup.tasks.recipe import Recipe

SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
numbers = st.floats(-1e12, 1e12, allow_nan=False).map(lambda value: round(value, 6))
texts = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=6).filter(
    lambda text: text not in MISSING and not text[0].isdigit() and text[0] not in "+-._'"
)
tables = st.integers(8, 40).flatmap(
    lambda rows: st.fixed_dictionaries(
        {
            "size": st.lists(numbers, min_size=rows, max_size=rows),
            'odd, "name"': st.lists(numbers, min_size=rows, max_size=rows),
            "sort": st.lists(
                st.sampled_from(["é", "x,y", 'a "quote"', "two\nlines", "ß;"]), min_size=rows, max_size=rows
            ),
            "who": st.lists(texts, min_size=rows, max_size=rows),
            "label": st.lists(st.sampled_from(["no", "yes", "perhaps"]), min_size=rows, max_size=rows),
        }
    )
)
NAMES = "size", 'odd, "name"', "sort", "who", "label"
OPTIONS = FileOptions(subject_column="who", column=("size=number", 'odd, "name"=number', "sort=category"))


def write_csv(table, path, delimiter=","):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    return path


def write_npz(table, path):
    x = np.array([table["size"], table['odd, "name"'], [sorted(set(table["sort"])).index(v) for v in table["sort"]]]).T
    np.savez(path, x=x, y=np.array(table["label"]), subjects=np.array(table["who"]))
    return path


@SETTINGS
@given(tables, st.sampled_from([",", ";", "\t"]))
def test_csv_parquet_and_npz_give_the_rows_that_were_written(tmp_path_factory, table, delimiter):
    table = {name: table[name] for name in NAMES}
    counts = {label: table["label"].count(label) for label in table["label"]}
    assume(len(counts) > 1 and min(counts.values()) > 1)
    folder = tmp_path_factory.mktemp("table")
    pq.write_table(pa.table(table), folder / "t.parquet")
    german = {
        name: [str(own).replace(".", ",") if isinstance(own, float) else own for own in table[name]] for name in NAMES
    }
    files = (
        write_csv(table if delimiter == "," else german, folder / "t.csv", delimiter),
        folder / "t.parquet",
        write_npz(table, folder / "t.npz"),
    )
    classes, sorts = sorted(counts), sorted(set(table["sort"]))
    y = np.array([classes.index(label) for label in table["label"]])
    is_test = draw_test_rows(y, None)
    hot = [[float(value == sort) for sort in sorts] for value in table["sort"]]
    x = np.column_stack([table["size"], table['odd, "name"'], hot])
    for path in files:
        npz = path.suffix == ".npz"
        dataset = load_dataset(
            str(path), FileOptions(column=("x0=number", "x1=number", "x2=category")) if npz else OPTIONS
        )
        assert dataset.class_names == tuple(classes)
        assert np.array_equal(dataset.x.numpy(), x[~is_test]) and np.array_equal(dataset.test_x.numpy(), x[is_test])
        assert np.array_equal(dataset.y.numpy(), y[~is_test]) and np.array_equal(dataset.test_y.numpy(), y[is_test])
        assert dataset.subjects == tuple(np.array(table["who"], dtype=object)[~is_test].tolist())


@SETTINGS
@given(st.data())
def test_scaling_by_the_clients_sums_is_the_pooled_one_however_rows_are_split(data):
    rows, offset = data.draw(st.integers(5, 200)), data.draw(st.sampled_from([0.0, 1e3, 1e9]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    x = rng.normal(offset, [1.0, 50.0, 0.01], (rows, 3))
    x[rng.random((rows, 3)) < 0.2] = np.nan
    x[:2] = offset, offset + 1, offset - 1
    found = []
    for _ in range(2):
        clients = data.draw(st.integers(1, 5))
        holder = rng.integers(0, clients, rows)
        found.append(mean_and_deviation([x[holder == client] for client in range(clients)]))
    for means, deviations in found:
        np.testing.assert_allclose(means, np.nanmean(x, 0), rtol=1e-11)
        np.testing.assert_allclose(deviations, np.nanstd(x, 0), rtol=1e-6)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6)


@pytest.fixture
def patients(tmp_path):
    """Two hospitals, a category, a column of notes, missing ages."""
    rng = np.random.default_rng(0)
    age = rng.normal(50, 12, 200).round(2)
    table = {
        "ward": ["ab"[row % 2] for row in range(200)],
        "age": ["" if row % 10 == 3 else f"{age[row]}" for row in range(200)],
        "note": [f"note {row}" for row in range(200)],
        "sex": ["fm"[row % 3 % 2] for row in range(200)],
        "label": [str(int(age[row] > 50) + 1) for row in range(200)],
    }
    return write_csv(table, tmp_path / "patients.csv")


def recipe_for(path, **options):
    return Recipe.suited_to(str(path), file=FileOptions(clients_column="ward", **options))


def test_constants_come_from_training_rows_only_and_are_all_that_a_prediction_needs(patients):
    recipe = recipe_for(patients, missing="impute")
    dataset, federation = (loaded := recipe.load()), recipe.federation(loaded)
    assert (recipe.clients, recipe.partition, dataset.client_names) == (2, "column:ward", ("a", "b"))
    assert [column.name for column in dataset.inputs.columns] == ["age", "sex"]  # notes are ignored
    (raw,) = (load_dataset(str(patients), recipe.file).x.numpy(),)
    train = federation.rows("train").numpy()
    (age, *_) = dataset.inputs.columns
    assert age.mean == pytest.approx(np.nanmean(raw[train, 0])) and age.std == pytest.approx(np.nanstd(raw[train, 0]))
    missing = np.isnan(raw[:, 0])
    assert missing.any() and bool((dataset.x[missing, 0] == 0).all())  # the mean
    assert dataset.x[:, 1].bool().tolist() == missing.tolist()  # and a mark
    source = table_source(patients)
    (block,) = source.blocks(dataset.inputs.names)
    again = dataset.inputs.prepare(list(dataset.inputs.encode(block, source)))
    everything = sorted(torch.cat([dataset.x, dataset.test_x]).tolist())
    assert sorted(again.tolist()) == everything
    assert dataset.class_names == ("1", "2")


def test_public_constants_take_the_place_of_sums_a_test_file_that_of_a_draw_and_none_scales_nothing(patients, tmp_path):
    public = tmp_path / "public.json"
    public.write_text('{"age": {"mean": 40, "std": 10}}')
    raw = load_dataset(str(patients), FileOptions(clients_column="ward", column=("sex=ignore",), missing="impute")).x
    found = recipe_for(patients, standardise=str(public), missing="impute", column=("sex=ignore",))
    public.unlink()  # what was read is in the recipe
    assert Recipe.from_about(found.settings()) == found
    torch.testing.assert_close(found.load().x[:, 0], ((raw[:, 0] - 40) / 10).nan_to_num(0.0).float())
    test = shutil.copy(patients, tmp_path / "test.csv")
    split = recipe_for(patients, missing="impute", test_file=str(test)).load()
    assert len(split.y) == len(split.test_y) == 200 and torch.equal(split.x, split.test_x)
    plain = recipe_for(patients, standardise="none", column=("age=ignore",)).load()
    assert set(plain.x.unique().tolist()) == {0.0, 1.0}


def test_rows_of_a_choice_keep_their_client_their_person_and_their_labels(patients):
    whole = recipe_for(patients, missing="impute", subject_column="note")
    chosen = Recipe.suited_to(
        str(patients), rows=60, file=FileOptions(clients_column="ward", subject_column="note", missing="impute")
    )
    every, some = whole.load(), chosen.load()
    assert len(some.y) == len(some.subjects) == 60
    holder = {every.subjects[row]: client for client, part in enumerate(every.parts) for row in part.tolist()}
    labels = dict(zip(every.subjects, every.y.tolist(), strict=True))
    for client, part in enumerate(some.parts):
        assert all(holder[some.subjects[row]] == client for row in part.tolist())
    assert [labels[own] for own in some.subjects] == some.y.tolist()
    assert as_texts(["  x ", "NA", "1.0"]) == ["x", "", "1.0"]


def test_values_are_read_as_numbers_and_refused_as_classes(patients):
    options = FileOptions(label="age", targets="values", clients_column="ward", column=("sex=category", "label=number"))
    with pytest.raises(DataError, match=r"label 'age' is empty in 20 rows, first line 5"):
        load_dataset(str(patients), options)
    rows = [row for row in csv.DictReader(patients.open()) if row["age"]]
    write_csv({name: [row[name] for row in rows] for name in rows[0]}, patients)
    dataset = load_dataset(str(patients), options)
    assert dataset.class_names == ("age",) and dataset.y.dtype == torch.float32
    assert sorted([*dataset.y[:, 0].tolist(), *dataset.test_y[:, 0].tolist()]) == sorted(
        torch.tensor([float(row["age"]) for row in rows]).tolist()
    )
    with pytest.raises(DataError, match=r"these are no classes; numbers to predict: --targets values"):
        load_dataset(str(patients), FileOptions(label="age"))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(4, 12), st.sampled_from([(16, 16), (20, 17, 3)]), st.integers(0, 99), st.sampled_from(["", "train/"])
)
def test_a_folder_of_images_gives_the_pixels_that_were_saved(tmp_path_factory, rows, shape, seed, inner):
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(seed)
    pixels, labels = rng.integers(0, 256, (rows, *shape), dtype=np.uint8), np.arange(rows) % 2
    for row, label in enumerate(labels):
        path = folder / f"{inner}{'ab'[label]}" / f"{row:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[row]).save(path)
    dataset, inputs = load_dataset(str(folder)), input_of(str(folder))
    rows_of = {f"{'ab'[label]}/{row:02}.png": row for row, label in enumerate(labels)}
    kept = [rows_of[name] for name in dataset.row_ids]
    expected = torch.from_numpy(pixels[kept].reshape(len(kept), *shape[:2], -1).transpose(0, 3, 1, 2))
    assert torch.equal(dataset.x, inputs.scale(expected))
    assert dataset.y.tolist() == labels[kept].tolist() and len(dataset.test_y) == rows - len(kept)

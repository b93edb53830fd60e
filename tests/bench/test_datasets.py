import os
import re
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.bench._pictures import encoded as png
from tests.bench._pictures import images_table as table

from fedup.errors import DataError, MissingDataError, SettingError
from fedup.registry import names
from fedup.tasks.datasets import files_of, load_dataset
from fedup.tasks.datasets._parquet import read_images

load_once = cache(load_dataset)


def needs_data(name: str) -> list[pytest.MarkDecorator]:
    """Marks of a test that needs a data set from below FEDUP_DATA."""
    root = os.environ.get("FEDUP_DATA")
    reason = f"there is no folder {name} below FEDUP_DATA={root}" if root else "the variable FEDUP_DATA is not set"
    missing = not root or not Path(root, name).is_dir()
    return [pytest.mark.data, pytest.mark.skipif(missing, reason=f"{name}: {reason}")]


def folder_of(name: str) -> str:
    """Where a data set lies below FEDUP_DATA."""
    files = files_of(name)
    return files[0].place.split("/")[0] if files else name


EVERY = [
    pytest.param(name, marks=[*needs_data(folder_of(name)), *([] if name == "mnist" else [pytest.mark.slow])])
    if files_of(name)
    else name
    for name in names("fedup.tasks.datasets")
]


@pytest.mark.parametrize("name", EVERY)
def test_a_data_set_has_a_label_for_every_row_and_rows_of_every_class(name):
    dataset = load_once(name)
    assert dataset.name == name
    assert dataset.x.shape[1:] == dataset.test_x.shape[1:]
    for x, y in ((dataset.x, dataset.y), (dataset.test_x, dataset.test_y)):
        assert len(x) == len(y)
        assert y.dtype == torch.int64
        assert y.unique().tolist() == list(range(dataset.num_classes))
        assert not x.is_floating_point() or bool(x.isfinite().all())


def test_digits_are_all_there_and_those_of_the_source():
    from sklearn.datasets import load_digits

    source = load_digits()
    digits = load_once("digits")
    assert (len(digits.y), len(digits.test_y)) == (1437, 360)
    assert digits.x.shape[1:] == (1, 28, 28)
    assert (float(digits.x.min()), float(digits.x.max())) == (-1.0, 1.0)
    is_test = np.arange(1797) % 5 == 0
    assert digits.test_y.tolist() == source.target[is_test].tolist()
    centers = (digits.x[:, 0, 3:27:3, 3:27:3] + 1) / 2 * 16  # each old pixel became 3×3; its middle is unchanged
    np.testing.assert_allclose(centers.numpy(), source.images[~is_test], atol=1e-4)


@pytest.mark.parametrize("name", [pytest.param("mnist", marks=needs_data("mnist"))])
def test_mnist_is_the_official_split_normalized(name):
    mnist = load_once(name)
    official = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.y.bincount().tolist() == official
    assert (mnist.x.shape, mnist.test_x.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert float(mnist.x.mean()) == pytest.approx(0, abs=1e-3)
    assert float(mnist.x.std()) == pytest.approx(1, abs=1e-3)


def test_an_unknown_data_set_is_refused_with_the_closest():
    with pytest.raises(SettingError, match="Did you mean 'digits'"):
        load_dataset("digit")


GOOD = png(np.arange(784, dtype=np.uint8).reshape(28, 28))


def test_images_and_labels_are_read_as_they_were_written(tmp_path):
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    color = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    for pixels, shape in ((grey, (2, 1, 3, 4)), (color, (2, 3, 3, 4))):
        pq.write_table(table([png(pixels), png(255 - pixels)], [7, 1]), tmp_path / "file")
        images, labels = read_images(tmp_path / "file", image_column="image")
        assert images.shape == shape
        assert images.dtype == torch.uint8
        expected = torch.from_numpy(pixels.reshape(3, 4, -1)).permute(2, 0, 1)
        assert torch.equal(images[0], expected)
        assert torch.equal(images[1], 255 - expected)
        assert labels.tolist() == [7, 1]


def test_a_missing_data_set_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDUP_DATA", raising=False)
    with pytest.raises(MissingDataError, match=r"FEDUP_DATA is not set.*Hugging Face.*'digits' needs no download"):
        load_dataset("mnist")
    monkeypatch.setenv("FEDUP_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match=r"mnist/train-.*, mnist/test-.* are missing .*fedup data fetch mnist"):
        load_dataset("mnist")
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "test-00000-of-00001.parquet").touch()
    with pytest.raises(FileNotFoundError, match=r"half: mnist/train-00000-of-00001.parquet is missing"):
        load_dataset("mnist")


PICTURES = st.sampled_from([GOOD, None, b"picture", GOOD[: len(GOOD) // 2], png(np.zeros((8, 8), np.uint8))])
COLUMNS = {
    "another column": pa.table({"picture": [{"bytes": GOOD}], "label": [1]}),
    "no labels": table([GOOD], [1]).drop_columns("label"),
    "bytes without a struct": pa.table({"image": [GOOD], "label": [1]}),
    "no rows": table([GOOD], [1]).slice(0, 0),
    "text for labels": table([GOOD], ["one"]),
    "broken numbers for labels": table([GOOD], [1.5]),
}


@settings(max_examples=30, deadline=None)
@given(
    st.one_of(
        st.sampled_from(list(COLUMNS.values())),
        st.lists(PICTURES, min_size=1, max_size=3).map(lambda images: table([GOOD, *images], [1] * (len(images) + 1))),
        st.just(table([GOOD, GOOD], [1, None])),
    ),
    st.none() | st.integers(0, 100),
)
@example(table([GOOD, GOOD[:60] + bytes(40) + GOOD[100:]], [1, 2]), None)  # a picture with a hole
def test_damaged_data_is_named_and_to_be_fetched_again(tmp_path_factory, damaged, length):
    path = tmp_path_factory.mktemp("damaged") / "train.parquet"
    pq.write_table(damaged, path)
    path.write_bytes(path.read_bytes()[:length])
    try:
        images, labels = read_images(path, image_column="image")
    except DataError as error:
        assert re.search(r"(?s)train\.parquet.*([Ff]etch|it has|of one size)", str(error))
    else:
        assert length is None and len(images) == len(labels) == damaged.num_rows
        assert damaged["image"].to_pylist() == [{"bytes": GOOD, "path": f"{i}.png"} for i in range(damaged.num_rows)]

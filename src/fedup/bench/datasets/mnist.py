"""MNIST: 60,000 handwritten digits, 28×28, from parquet files below FEDUP_DATA."""

from fedup.bench.datasets._dataset import Dataset
from fedup.bench.datasets._parquet import data_folder, normalized, read_images

_MEAN, _STD = (0.1307,), (0.3081,)


def load() -> Dataset:
    """The official train and test split."""
    folder = data_folder("mnist")
    train, test = (
        read_images(folder / f"{split}-00000-of-00001.parquet", image_column="image") for split in ("train", "test")
    )
    return Dataset(
        name="mnist",
        x=normalized(train[0], _MEAN, _STD),
        y=train[1],
        test_x=normalized(test[0], _MEAN, _STD),
        test_y=test[1],
        class_names=tuple("0123456789"),
    )

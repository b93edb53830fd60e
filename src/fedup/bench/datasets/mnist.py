"""MNIST: 60,000 handwritten digits, 28×28, from parquet files below FEDUP_DATA."""

from fedup.bench.datasets._dataset import Dataset, Defaults
from fedup.bench.datasets._inputs import Images
from fedup.bench.datasets._parquet import data_folder, read_images

INPUT = Images(channels=1, height=28, width=28, mean=(0.1307,), std=(0.3081,))
DEFAULTS = Defaults(model="lenet5", rounds=10, batch_size=64)
CLASS_NAMES = tuple("0123456789")


def load() -> Dataset:
    """The official train and test split."""
    folder = data_folder("mnist")
    train, test = (
        read_images(folder / f"{split}-00000-of-00001.parquet", image_column="image") for split in ("train", "test")
    )
    return Dataset("mnist", INPUT.scale(train[0]), train[1], INPUT.scale(test[0]), test[1], CLASS_NAMES)

"""MNIST: 60,000 handwritten digits, 28×28, from parquet files below FEDUP_DATA."""

from functools import partial

from fedup.tasks.datasets._dataset import Defaults
from fedup.tasks.datasets._hub import splits
from fedup.tasks.datasets._inputs import Images
from fedup.tasks.datasets._parquet import load_images

INPUT = Images(channels=1, height=28, width=28, mean=(0.1307,), std=(0.3081,))
FILES = splits("mnist", "ylecun/mnist", "mnist")
DEFAULTS = Defaults(model="lenet5", rounds=10, batch_size=64)
load = partial(load_images, "mnist", INPUT, image_column="image", label_column="label")  # the official splits

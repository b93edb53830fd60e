"""CIFAR-100: 50,000 photographs of a hundred things, 32×32 in colour, from parquet files below FEDUP_DATA."""

from functools import partial

from fedup.tasks.datasets._dataset import Defaults
from fedup.tasks.datasets._hub import splits
from fedup.tasks.datasets._inputs import Images
from fedup.tasks.datasets._parquet import load_images

INPUT = Images(channels=3, height=32, width=32, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))
FILES = splits("cifar100", "uoft-cs/cifar100", "cifar100")
DEFAULTS = Defaults(model="resnet34", rounds=30, batch_size=64)
load = partial(load_images, "cifar100", INPUT, image_column="img", label_column="fine_label")  # the official splits

"""CIFAR-10: 50,000 photographs of ten things, 32×32 in colour, from parquet files below FEDUP_DATA."""

from functools import partial

from fedup.tasks.datasets._dataset import Defaults
from fedup.tasks.datasets._hub import splits
from fedup.tasks.datasets._inputs import Images
from fedup.tasks.datasets._parquet import load_images

INPUT = Images(channels=3, height=32, width=32, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
FILES = splits("cifar10", "uoft-cs/cifar10", "plain_text")
DEFAULTS = Defaults(model="resnet18", rounds=20, batch_size=64)
load = partial(load_images, "cifar10", INPUT, image_column="img", label_column="label")  # the official splits

"""CIFAR-100 with its twenty superclasses as labels."""

from dataclasses import replace

from fedup.tasks.datasets._dataset import Dataset, Defaults
from fedup.tasks.datasets._parquet import load_images
from fedup.tasks.datasets.cifar100 import FILES, INPUT

__all__ = ["DEFAULTS", "FILES", "INPUT", "load"]
DEFAULTS = Defaults(model="resnet34", rounds=30, batch_size=64)


def load() -> Dataset:
    """The official train and test split with the twenty coarse labels."""
    loaded = load_images("cifar100", INPUT, image_column="img", label_column="coarse_label")
    return replace(loaded, name="cifar100_coarse")

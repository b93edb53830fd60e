"""AG News: headlines and first sentences of four sorts of news, from parquet files below FEDUP_DATA."""

import numpy as np
import torch
from torch import Tensor

from fedup.tasks.datasets._cache import cached
from fedup.tasks.datasets._dataset import Dataset, Defaults
from fedup.tasks.datasets._hub import HubFile, splits
from fedup.tasks.datasets._inputs import Texts
from fedup.tasks.datasets._parquet import data_folder, read_texts

INPUT = Texts(length=64)
FILES = (
    *splits("ag_news", "fancyzhx/ag_news", "data"),
    HubFile(INPUT.vocabulary, "google-bert/bert-base-uncased/resolve/main/vocab.txt"),
)
DEFAULTS = Defaults(model="tinybert", rounds=15, batch_size=32)
_CLASS_NAMES = ("World", "Sports", "Business", "Sci/Tech")


def load() -> Dataset:
    """The train and test split, as ids of word pieces."""
    (x, y), (test_x, test_y) = (_load(split) for split in ("train", "test"))
    return Dataset("ag_news", x, y, test_x, test_y, _CLASS_NAMES)


def _load(split: str) -> tuple[Tensor, Tensor]:
    path = data_folder("ag_news") / f"{split}-00000-of-00001.parquet"

    def make() -> dict[str, np.ndarray]:
        texts, labels = read_texts(path)
        return {"ids": INPUT.prepare(texts).numpy().astype(np.int32), "labels": labels.numpy()}

    arrays = cached(path, str(INPUT.identity()), make)
    return torch.from_numpy(arrays["ids"]).long(), torch.from_numpy(arrays["labels"])

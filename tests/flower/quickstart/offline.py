"""In place of the quickstart's `load_data`, which downloads CIFAR-10: scikit-learn's digits, of the same shape."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, Subset


class Digits(Dataset):
    """Every so manyth digit from a first one on, 3 × 32 × 32 from -1 to 1; items as those of the quickstart."""

    def __init__(self, first: int = 0, step: int = 1) -> None:
        x, y = load_digits(return_X_y=True)
        small = torch.tensor(x[first::step], dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
        self.images = small.repeat_interleave(4, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1)
        self.labels = y[first::step].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> dict[str, object]:
        return {"img": self.images[place], "label": self.labels[place]}


def load_data(partition_id: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    """A node's rows to train on, and a fifth of them to test on."""
    mine = Digits(partition_id, num_partitions)
    test = Subset(mine, range(0, len(mine), 5))
    train = Subset(mine, [place for place in range(len(mine)) if place % 5])
    order = torch.Generator().manual_seed(partition_id)
    return DataLoader(train, batch_size=32, shuffle=True, generator=order), DataLoader(test, batch_size=32)

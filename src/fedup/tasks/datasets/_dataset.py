from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedup.targets import Targets, checked, kind_of
from fedup.tasks.datasets._tables import Tables


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows to spread over clients, and an official test set kept apart."""

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    class_names: tuple[str, ...]
    parts: tuple[Tensor, ...] | None = None  # rows of each client, if the data say who holds them
    client_names: tuple[str, ...] = ()  # of `parts`
    row_ids: tuple[str, ...] | None = None  # one per row of x, if rows have names
    subjects: tuple[str, ...] | None = None  # the person behind each row of x, "" if unknown

    inputs: Tables | None = None  # how raw rows become rows of x, where that depends on the rows

    def __post_init__(self) -> None:
        for name in ("y", "test_y"):
            given = getattr(self, name)
            if given.ndim == 2 or given.is_floating_point():  # labels and values, in the form that says so
                object.__setattr__(self, name, checked(given)[0])

    @property
    def num_classes(self) -> int:
        """Outputs of a model: classes, labels or values; `class_names` has a name for each."""
        return len(self.class_names)

    @property
    def targets(self) -> Targets:
        """What a model learns, as the form of `y` says: (N,) whole numbers are classes, (N, K) truth values labels,
        floating point numbers values."""
        return kind_of(self.y)

    def subset(self, rows: Tensor) -> "Dataset":
        """The same data set with these rows only, in order; clients without any are refused by the federation."""
        places = torch.full((len(self.y),), -1)
        places[rows] = torch.arange(len(rows))
        parts = None
        if self.parts is not None:
            parts = tuple(kept[kept >= 0] for kept in (places[part] for part in self.parts))
        row_ids, subjects = (
            None if texts is None else tuple(texts[row] for row in rows.tolist())
            for texts in (self.row_ids, self.subjects)
        )
        return replace(self, x=self.x[rows], y=self.y[rows], parts=parts, row_ids=row_ids, subjects=subjects)


@dataclass(frozen=True)
class Defaults:
    """Settings with which a federation learns the data set well; how fast to learn, the model says."""

    model: str = "lenet5"
    rounds: int = 20
    batch_size: int = 64
    clients: int = 10

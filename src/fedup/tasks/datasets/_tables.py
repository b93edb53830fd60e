"""How rows of a table become a model's input: the same at training and at prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedup.errors import DataError, SettingError
from fedup.tasks.datasets._columns import codes_of
from fedup.tasks.datasets._table_source import Block, TableSource, as_numbers, as_texts

_BLOCK = 65_536  # rows scaled at a time: no second array of the data's size


@dataclass(frozen=True)
class TableColumn:
    """A column that the model sees: a number, or one place for each value of a category."""

    name: str
    kind: Literal["number", "category"]
    values: tuple[str, ...] = ()
    mark: bool = False  # one place more that says whether the value is missing
    mean: float = 0.0
    std: float = 1.0

    @property
    def width(self) -> int:
        """Places in a row."""
        return (len(self.values) if self.kind == "category" else 1) + self.mark


@dataclass(frozen=True)
class Tables:
    """Rows of a table. Numbers lose a mean and are divided by a deviation, categories are 0 or 1 for each value."""

    columns: tuple[TableColumn, ...]
    label: str
    id_column: str | None = None
    missing: Literal["refuse", "impute"] = "refuse"
    standardise: str = "clients"
    kind: ClassVar[str] = "table"
    triggers: ClassVar[tuple[str, ...]] = ()

    @property
    def width(self) -> int:
        """Places in a row."""
        return sum(column.width for column in self.columns)

    @property
    def number_places(self) -> list[int]:
        """Where numbers are in a row."""
        starts = np.cumsum([0, *(column.width for column in self.columns)])[:-1].tolist()
        return [start for start, column in zip(starts, self.columns, strict=True) if column.kind == "number"]

    @property
    def names(self) -> list[str]:
        """The columns that a file must have."""
        return [column.name for column in self.columns]

    def encode(self, block: Block, source: TableSource, first_row: int = 0) -> np.ndarray:
        """Rows before scaling, NaN where a number is missing. (N, width), float64"""
        rows = len(next(iter(block.values())))
        encoded, start = np.zeros((rows, self.width)), 0
        for column in self.columns:
            values, width = block[column.name], column.width - column.mark
            if column.kind == "number":
                numbers, odd = as_numbers(values)
                if odd:
                    where = source.where(first_row + odd[0])
                    raise DataError(
                        f"{source.path}, {where}: the column {column.name!r} holds numbers; found {values[odd[0]]!r}."
                    )
                encoded[:, start] = numbers
                absent = np.isnan(numbers)
            else:
                codes = codes_of(as_texts(values), column.values)
                known = np.flatnonzero(codes >= 0)
                encoded[known, start + codes[known]] = 1
                absent = codes == -1
            if self.missing == "refuse" and absent.any():
                where = source.where(first_row + int(absent.argmax()))
                raise DataError(
                    f"{source.path}, {where}: the column {column.name!r} is empty, and the model was trained without "
                    "missing values. Fill it in."
                )
            if column.mark:
                encoded[:, start + width] = absent
            start += column.width
        return encoded

    def unknown(self, block: Block) -> dict[str, int]:
        """By column: how many values of a category were not there in training."""
        counts = {
            column.name: int((codes_of(as_texts(block[column.name]), column.values) == -2).sum())
            for column in self.columns
            if column.kind == "category"
        }
        return {name: count for name, count in counts.items() if count}

    def with_constants(self, constants: Mapping[str, tuple[float, float]]) -> "Tables":
        """The same with means and deviations, by column."""
        columns = (
            replace(column, mean=constants[column.name][0], std=constants[column.name][1])
            if column.name in constants and column.kind == "number"
            else column
            for column in self.columns
        )
        return replace(self, columns=tuple(columns))

    def scale(self, encoded: Tensor) -> Tensor:
        """Encoded rows as the model takes them. (N, width), float32"""
        places = self.number_places
        numbers = [column for column in self.columns if column.kind == "number"]
        means, stds = torch.zeros(self.width, dtype=torch.double), torch.ones(self.width, dtype=torch.double)
        means[places] = torch.tensor([column.mean for column in numbers], dtype=torch.double)
        stds[places] = torch.tensor([column.std for column in numbers], dtype=torch.double)
        scaled = torch.empty(encoded.shape)
        for start in range(0, len(encoded), _BLOCK):
            block = encoded[start : start + _BLOCK]
            scaled[start : start + _BLOCK] = ((block - means) / stds).nan_to_num_(0.0)  # a missing number is the mean
        return scaled

    def prepare(self, raw: Sequence[Any]) -> Tensor:
        """Encoded rows, one by one, as one batch."""
        return self.scale(torch.from_numpy(np.stack(raw)))

    def plain(self, x: Tensor) -> Tensor:
        """Rows as a linear model takes them. (N, D)"""
        return x

    def triggered(self, x: Tensor, trigger: str | None = None) -> Tensor:
        """There is no backdoor for tables."""
        raise SettingError("There is no backdoor trigger for tables: choose a scenario of clients or classes.")

    def identity(self) -> dict[str, Any]:
        """All that a prediction depends on besides the model."""
        columns = [
            {
                "name": column.name,
                "kind": column.kind,
                **({"values": list(column.values)} if column.kind == "category" else {}),
                **({"mean": column.mean, "std": column.std} if column.kind == "number" else {}),
                **({"mark": True} if column.mark else {}),
            }
            for column in self.columns
        ]
        about = {"label": self.label, "id_column": self.id_column, "missing": self.missing}
        return {"kind": self.kind, "shape": [self.width], **about, "standardise": self.standardise, "columns": columns}


def tables_from(identity: Mapping[str, Any]) -> Tables:
    """What `identity` describes."""
    columns = (TableColumn(**{**own, "values": tuple(own.get("values", ()))}) for own in identity["columns"])
    about = {name: identity[name] for name in ("label", "id_column", "missing", "standardise")}
    return Tables(tuple(columns), **about)

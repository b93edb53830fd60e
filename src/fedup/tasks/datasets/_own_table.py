"""A data set of the user's own in one file: a table as CSV, Parquet or npz, without code."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedup.errors import DataError, SettingError
from fedup.federation import Federation
from fedup.rng import generator
from fedup.run.store import hash_of
from fedup.tasks.datasets._columns import MOST_VALUES, Column, ColumnScan, decide, in_order, plain, scan, truth_of
from fedup.tasks.datasets._dataset import Dataset, Defaults
from fedup.tasks.datasets._standardise import mean_and_deviation
from fedup.tasks.datasets._suited import suited_to_size
from fedup.tasks.datasets._table_rows import ROLE_OF, read_rows
from fedup.tasks.datasets._table_source import NpzSource, TableSource, as_numbers, table_source
from fedup.tasks.datasets._tables import TableColumn, Tables
from fedup.tasks.file_options import FileOptions

_TEST_EVERY = 5  # without test rows of their own, every fifth row is a test row
_MOST_CLASSES = 1000
_MOST_NUMBERS = 20  # different numbers, some of them once, that may still be classes
_MOST_BYTES = 16 << 30  # of the rows in memory


@dataclass(frozen=True)
class OwnTable:
    """What a data set's module defines, derived from the file."""

    path: Path
    options: FileOptions

    @cached_property
    def source(self) -> TableSource:
        """The reader of the file."""
        return table_source(self.path)

    @cached_property
    def roles(self) -> dict[str, str]:
        """Columns that are no input, and what they are."""
        options, known = self.options, self.source.columns
        usual = {"y": "label", "clients": "clients", "subjects": "subject", "ids": "id"}
        of_file = {name: usual[name] for name in known if name in usual} if isinstance(self.source, NpzSource) else {}
        labels = self.labels
        chosen = {
            options.clients_column: "clients",
            options.subject_column: "subject",
            options.id_column: "id",
        }
        given = [*labels, *(name for name in chosen if name)]
        twice = next((name for name in given if given.count(name) > 1), None)
        if twice:
            raise SettingError(f"The column {twice!r} is named for two uses: name another one.")
        of_labels = dict.fromkeys(labels, ROLE_OF[options.targets])
        return {**of_file, **{name: role for name, role in chosen.items() if name}, **of_labels}

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The columns to predict: one of classes; one or several of labels or values."""
        options, known = self.options, self.source.columns
        given = options.label or ("y" if isinstance(self.source, NpzSource) and "y" in known else "label")
        names = (given,) if given in known else tuple(name.strip() for name in given.split(","))
        lacking = [name for name in names if name not in known]
        if lacking:
            shown = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
            asked = f"there is none called {lacking[0]!r}" if options.label else "name it, as in --label COLUMN"
            raise SettingError(f"{self.path}: which column holds the labels? It has {shown}; {asked}.")
        if len(names) > 1 and options.targets == "classes":
            raise SettingError(
                f"{len(names)} columns to predict, {', '.join(names)}: pass --targets labels if they say yes or no, "
                "--targets values if they hold numbers. Classes are in one column."
            )
        return names

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; of labels and values, the columns."""
        return tuple(self.counts("label")) or self.labels

    @cached_property
    def scans(self) -> tuple[int, dict[str, ColumnScan]]:
        """The number of rows, and what was seen of each column."""
        return scan(self.source, self.options, self.roles)

    @cached_property
    def columns(self) -> dict[str, Column]:
        """How each column is used."""
        return {name: decide(seen, self.source) for name, seen in self.scans[1].items()}

    @property
    def files(self) -> list[Path]:
        """The file, and the one with test rows."""
        return [self.path, *([Path(self.options.test_file)] if self.options.test_file else [])]

    def digest(self) -> str:
        """sha256 of each file."""
        for path in self.files:
            table_source(path)
        return "+".join(hash_of(path)[0] for path in self.files)

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return self.scans[0]

    def counts(self, role: str) -> dict[str, int]:
        """Rows by class or client, in order of their ids; none where the file does not say."""
        name = next((name for name, own in self.roles.items() if own == role), None)
        if name is None:
            return {}
        seen = self.scans[1][name].values
        counts = dict.fromkeys(in_order(value for value in seen if value), 0)
        for value, count in seen.items():
            if value:
                counts[plain(value)] += count
        return counts

    @property
    def client_names(self) -> tuple[str, ...]:
        """The names of the clients; none if no column has them."""
        return tuple(self.counts("clients"))

    @cached_property
    def problems(self) -> list[str]:
        """All that keeps the file from being used, in sentences."""
        columns, scans, options = self.columns, self.scans[1], self.options
        problems = [column.problem for column in columns.values() if column.problem]
        empty = {column.name: column.missing for column in columns.values() if column.missing and _is_input(column)}
        if empty and options.missing == "refuse":
            counts = ", ".join(f"{name} ({count:,})" for name, count in list(empty.items())[:8])
            more = ", …" if len(empty) > 8 else ""
            problems.append(f"values are missing: {counts}{more}; fill them in, or pass --missing impute")
        for name, role in self.roles.items():
            if role in (*ROLE_OF.values(), "clients") and scans[name].missing:
                where = self.source.where(scans[name].first_missing or 0)
                word = "clients" if role == "clients" else "label"
                problems.append(f"{word} {name!r} is empty in {scans[name].missing:,} rows, first {where}")
        if len(self.counts("clients")) > MOST_VALUES:
            problems.append(f"more than {MOST_VALUES:,} different clients: is this the right column?")
        if not any(map(_is_input, columns.values())):
            problems.append("no column is left as an input of the model")
        if options.standardise == "public":
            numbers = {name for name, column in columns.items() if column.use == "number"}
            lacking = sorted(numbers - {name for name, *_ in options.constants})
            problems += [f"the file of constants lacks {', '.join(lacking)}"] if lacking else []
        return problems + self._class_problems()

    def _class_problems(self) -> list[str]:
        classes, rows, label = self.counts("label"), self.rows, self.labels[0]
        if constant := [name for name in self.labels if self._is_constant(name)]:
            return [f"label {name!r} has one value in all rows: there is nothing to learn" for name in constant]
        alone = [name for name, count in classes.items() if count == 1]
        most = min(_MOST_CLASSES, max(rows // 2, 2)) if not alone or not _all_numbers(classes) else _MOST_NUMBERS
        if len(classes) > most:
            many = f"label {label!r} has {len(classes):,} different values in {rows:,} rows"
            return [f"{many}: these are no classes; numbers to predict: --targets values"]
        if not alone:
            return []
        named = ", ".join(repr(name) for name in alone[:5]) + (", …" if len(alone) > 5 else "")
        only = "class " + named + " has" if len(alone) == 1 else "classes " + named + " have"
        return [f"{only} one row only: remove it, or bring more rows"]

    def _is_constant(self, label: str) -> bool:
        seen, role = self.scans[1][label], self.roles[label]
        if role == "value":
            return seen.lowest == seen.highest
        texts = [text for text in seen.values if text]
        return len(set(map(truth_of if role == "truth" else plain, texts))) == 1

    def yes_counts(self) -> dict[str, int]:
        """By label: how many rows have it; none where there are classes or values."""
        scans = {name: self.scans[1][name] for name, role in self.roles.items() if role == "truth"}
        return {
            name: sum(count for text, count in seen.values.items() if truth_of(text)) for name, seen in scans.items()
        }

    def value_ranges(self) -> dict[str, tuple[float, float]]:
        """By value to predict: the lowest and the highest; none where there are classes or labels."""
        scans = {name: self.scans[1][name] for name, role in self.roles.items() if role == "value"}
        return {name: (seen.lowest, seen.highest) for name, seen in scans.items()}

    def check(self) -> None:
        """Raise unless the file can be used."""
        if self.problems:
            more = len(self.problems) - 1
            others = f" (and {more} more: `fedup data check` lists them)" if more else ""
            raise DataError(f"{self.path}: {self.problems[0]}{others}.")
        size = self.rows * self.INPUT.width * 12
        if size > _MOST_BYTES:
            raise DataError(
                f"{self.path}: {self.rows:,} rows with {self.INPUT.width:,} places each need {size / 2**30:.0f} GiB, "
                f"and at most {_MOST_BYTES >> 30} are used. Bring fewer rows, or ignore columns (--column NAME=ignore)."
            )

    @cached_property
    def INPUT(self) -> Tables:  # noqa: N802 (the contract's name)
        """Columns and their values; means and deviations are known once rows are with clients, or public."""
        impute = self.options.missing == "impute"
        columns = tuple(
            TableColumn(column.name, column.use, column.values, mark=impute and column.missing > 0)  # type: ignore[arg-type]
            for column in self.columns.values()
            if _is_input(column)
        )
        id_column = next((name for name, role in self.roles.items() if role == "id"), None)
        inputs = Tables(columns, ",".join(self.labels), id_column, self.options.missing, self.options.standardise)
        return inputs.with_constants({name: (mean, std) for name, mean, std in self.options.constants})

    @property
    def DEFAULTS(self) -> Defaults:  # noqa: N802 (the contract's name)
        """A model for tables, and settings that suit the number of rows."""
        self.check()
        return suited_to_size("mlp", self._train_rows(), len(self.class_names))

    def _train_rows(self) -> int:
        has_test = self.options.test_file or (isinstance(self.source, NpzSource) and self.source.has_test)
        return self.rows if has_test else self.rows - self.rows // _TEST_EVERY

    def load(self) -> Dataset:
        """All rows, not scaled yet: that needs to know who trains on which (`standardised`)."""
        self.check()
        classes, clients = self.class_names, self.client_names
        rows = read_rows(self.source, self.INPUT, self.roles, classes, clients)
        test = self._test_source()
        if test is not None:
            of_labels = {name: self.roles[name] for name in self.labels}
            test_rows = read_rows(test, self.INPUT, of_labels, classes, ())
            kept, x, test_x, test_y = np.arange(len(rows.y)), rows.x, test_rows.x, test_rows.y
        else:
            is_test = draw_test_rows(rows.y, rows.clients)
            kept, x, test_x, test_y = np.flatnonzero(~is_test), rows.x[~is_test], rows.x[is_test], rows.y[is_test]
        return Dataset(
            self.path.stem,
            torch.from_numpy(x),
            torch.from_numpy(rows.y[kept]),
            torch.from_numpy(test_x),
            torch.from_numpy(test_y),
            classes,
            parts=_parts(rows.clients[kept], clients, self.path) if rows.clients is not None else None,
            client_names=clients,
            row_ids=_chosen(rows.ids, kept),
            subjects=_chosen(rows.subjects, kept),
            inputs=self.INPUT,
        )

    def _test_source(self) -> TableSource | None:
        if self.options.test_file:
            return table_source(Path(self.options.test_file))
        return NpzSource(self.path, "test_") if isinstance(self.source, NpzSource) and self.source.has_test else None


def _all_numbers(texts: Iterable[str]) -> bool:
    return not as_numbers(list(texts))[1]


def _is_input(column: Column) -> bool:
    return column.use in ("number", "category")


def draw_test_rows(y: np.ndarray, clients: np.ndarray | None) -> np.ndarray:
    """Which rows are test rows: a fifth of each client's rows of each class, always the same; the first row of a class
    and of a client is never one. Values have no classes."""
    y = y if y.ndim == 1 else np.zeros(len(y), dtype=np.int64)
    holders = np.zeros_like(y) if clients is None else clients
    shuffled = torch.randperm(len(y), generator=generator(0, "test rows")).numpy()
    order = shuffled[np.lexsort((y[shuffled], holders[shuffled]))]
    is_test = np.zeros(len(y), dtype=bool)
    is_test[order[_TEST_EVERY // 2 :: _TEST_EVERY]] = True
    for groups in (y, holders):
        is_test[shuffled[np.unique(groups[shuffled], return_index=True)[1]]] = False
    return is_test


def _parts(clients: np.ndarray, names: tuple[str, ...], path: Path) -> tuple[Tensor, ...]:
    if len(names) < 2:
        raise DataError(f"{path}: one client only, {names[0]!r}: a federation has two at least.")
    order = np.argsort(clients, kind="stable")  # rows of a client stay in order
    bounds = np.searchsorted(clients[order], np.arange(1, len(names)))
    return tuple(torch.from_numpy(rows) for rows in np.split(order, bounds))


def _chosen(texts: tuple[str, ...] | None, rows: np.ndarray) -> tuple[str, ...] | None:
    return None if texts is None else tuple(texts[row] for row in rows.tolist())


def standardised(dataset: Dataset, federation: Federation) -> Dataset:
    """The data set with scaled rows: by constants from what clients send of their training rows, unless they are given
    or not wanted."""
    inputs = dataset.inputs
    if not isinstance(inputs, Tables):
        return dataset
    if inputs.standardise == "clients" and (places := inputs.number_places):
        x = dataset.x.numpy()
        means, deviations = mean_and_deviation([x[client.train.numpy()][:, places] for client in federation.clients])
        names = [column.name for column in inputs.columns if column.kind == "number"]
        huge = [name for name, *own in zip(names, means, deviations, strict=True) if not np.isfinite(own).all()]
        if huge:
            raise DataError(f"{dataset.name}: the numbers in {huge[0]!r} are too large to be added up.")
        pairs = zip(means.tolist(), deviations.tolist(), strict=True)
        inputs = inputs.with_constants(dict(zip(names, pairs, strict=True)))
    return replace(dataset, x=inputs.scale(dataset.x), test_x=inputs.scale(dataset.test_x), inputs=inputs)

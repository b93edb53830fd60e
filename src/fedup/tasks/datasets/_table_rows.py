"""Rows of a table as arrays: encoded inputs, what is to be predicted, and whose rows they are."""

from dataclasses import dataclass

import numpy as np

from fedup.errors import DataError
from fedup.tasks.datasets._columns import codes_of, truth_of
from fedup.tasks.datasets._table_source import Block, TableSource, as_numbers, as_texts
from fedup.tasks.datasets._tables import Tables

ROLE_OF = {"classes": "label", "labels": "truth", "values": "value"}  # of columns to predict, by targets


@dataclass(frozen=True)
class TableRows:
    """Encoded rows with their labels, and who they are of."""

    x: np.ndarray  # (N, width), float64, not scaled
    y: np.ndarray
    clients: np.ndarray | None
    subjects: tuple[str, ...] | None
    ids: tuple[str, ...] | None


def read_rows(
    source: TableSource, inputs: Tables, roles: dict[str, str], classes: tuple[str, ...], clients: tuple[str, ...]
) -> TableRows:
    """All rows of a file, encoded; a label or a client that is not known is refused."""
    names = [*inputs.names, *roles]
    lacking = [name for name in names if name not in source.columns]
    if lacking:
        raise DataError(f"{source.path} has no column {', '.join(map(repr, lacking[:5]))}; training had.")
    blocks: dict[str, list[np.ndarray]] = {"x": [], "label": [], "outputs": [], "clients": []}
    outputs = {name: role for name, role in roles.items() if role in ("truth", "value")}
    texts: dict[str, list[str]] = {"subject": [], "id": []}
    known, row = {"label": classes, "clients": clients}, 0
    for block in source.blocks(names):
        blocks["x"].append(inputs.encode(block, source, row))
        if outputs:
            read = {"truth": _truths, "value": _values}
            blocks["outputs"].append(
                np.column_stack([read[role](source, block, name, row) for name, role in outputs.items()])
            )
        for name, role in roles.items():
            if name in outputs:
                continue
            values = as_texts(block[name])
            if role in texts:
                texts[role] += values
                continue
            codes = codes_of(values, known[role])
            if (codes < 0).any():
                odd = int((codes < 0).argmax())
                raise DataError(
                    f"{source.path}, {source.where(row + odd)}: the {role} {values[odd]!r} was not there in training "
                    f"({', '.join(known[role][:8])}{', …' if len(known[role]) > 8 else ''})."
                )
            blocks[role].append(codes)
        row += len(blocks["x"][-1])
    if row == 0:
        raise DataError(f"{source.path} has no rows.")
    roles_there = set(roles.values())
    if "id" in roles_there:
        _check_ids(texts["id"], source)
    x = _joined(blocks.pop("x"))
    return TableRows(
        x,
        np.concatenate(blocks["outputs" if outputs else "label"]),
        np.concatenate(blocks["clients"]) if "clients" in roles_there else None,
        tuple(texts["subject"]) if "subject" in roles_there else None,
        tuple(texts["id"]) if "id" in roles_there else None,
    )


def _values(source: TableSource, block: Block, name: str, first_row: int) -> np.ndarray:
    """Numbers to predict. (N,), float32"""
    numbers, odd = as_numbers(block[name])
    wrong = [*odd, *np.flatnonzero(np.isnan(numbers)).tolist()]
    if wrong:
        where = source.where(first_row + wrong[0])
        raise DataError(f"{source.path}, {where}: {name!r} holds numbers; found {block[name][wrong[0]]!r}.")
    return numbers.astype(np.float32)


def _truths(source: TableSource, block: Block, name: str, first_row: int) -> np.ndarray:
    """Which rows have a label. (N,), bool"""
    texts = as_texts(block[name])
    truths = [truth_of(text) for text in texts]
    if None in truths:
        odd = truths.index(None)
        where = source.where(first_row + odd)
        raise DataError(f"{source.path}, {where}: {name!r} is yes or no (1 or 0, true or false); found {texts[odd]!r}.")
    return np.array(truths, dtype=bool)


def _joined(blocks: list[np.ndarray]) -> np.ndarray:
    """One array, in memory for one array and a block: each block is let go once it is copied."""
    joined, start = np.empty((sum(map(len, blocks)), blocks[0].shape[1])), 0
    blocks.reverse()
    while blocks:
        block = blocks.pop()
        joined[start : start + len(block)] = block
        start += len(block)
    return joined


def _check_ids(ids: list[str], source: TableSource) -> None:
    if len(set(ids)) == len(ids) and "" not in ids:
        return
    seen: set[str] = set()
    for row, own in enumerate(ids):
        if own in seen or not own:
            what = f"the id {own!r} is there twice" if own else "the id is empty"
            raise DataError(f"{source.path}, {source.where(row)}: {what}; ids name one row each.")
        seen.add(own)

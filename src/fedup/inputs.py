"""Data as users bring them (arrays, lists, data sets, loaders, frames) as tensors: checked early, in clear words."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, SubsetRandomSampler

from fedup.errors import DataError, check_choice
from fedup.targets import Targets

_EXAMPLE = 'as in Federation.of((x, y), {"mercy": [0, 1, 2], "st_john": [3, 4]})'


@dataclass(frozen=True, eq=False)
class Inputs:
    """Rows, targets, and who holds which rows."""

    x: Tensor
    y: Tensor
    parts: list[Tensor]  # rows of each client
    client_names: tuple[str, ...]
    class_names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Source:
    """What one object holds: rows, raw targets, names of several outputs, and a column of owners."""

    x: Tensor
    y: Any
    outputs: tuple[str, ...] = ()
    owners: Any = None


def read_inputs(data: Any, parts: Any, label: str | Sequence[str] | None, targets: Targets | None) -> Inputs:
    """What `Federation.of` was given, as tensors."""
    if targets is not None:
        check_choice("targets", targets, Targets)
    if parts is None:
        return _of_clients(data, label, targets)
    source = _source(data, label, parts if isinstance(parts, str) else None)
    y, names = _targets(source.y, targets, source.outputs)
    if len(source.x) != len(y):
        raise DataError(f"There are {len(source.x)} rows and {len(y)} targets: there must be one for each row.")
    clients = _parts(parts if source.owners is None else source.owners, len(source.x))
    return Inputs(source.x, y, list(clients.values()), _names(clients), names)


def _of_clients(data: Any, label: str | Sequence[str] | None, targets: Targets | None) -> Inputs:
    """The data of each client by itself: rows are numbered in the order of clients."""
    if not isinstance(data, Mapping) or not data:
        raise DataError(
            f"Say who holds which rows with `parts`, {_EXAMPLE}; or bring the data of each client by name, as in "
            f'{{"mercy": (x, y), …}}. Found {type(data).__name__} alone.'
        )
    sources: dict[str, _Source] = {}
    for name, own in data.items():
        try:
            sources[str(name)] = source = _source(own, label, None)
            if len(source.x) != len(source.y):
                raise DataError(f"There are {len(source.x)} rows and {len(source.y)} targets.")
        except DataError as error:
            raise DataError(f"Client {name!r}: {error}") from error
    shapes = {name: tuple(source.x.shape[1:]) for name, source in sources.items()}
    first = next(iter(shapes.values()))
    other = next((name for name, shape in shapes.items() if shape != first), None)
    if other is not None:
        raise DataError(f"Rows of client {other!r} have shape {shapes[other]}, others {first}: they must be alike.")
    values = [value for source in sources.values() for value in _as_list(source.y)]
    y, names = _targets(values, targets, next(iter(sources.values())).outputs)
    sizes = [len(source.x) for source in sources.values()]
    parts = list(torch.arange(sum(sizes)).split(sizes))
    return Inputs(torch.cat([source.x for source in sources.values()]), y, parts, tuple(sources), names)


# --- sources


def _source(data: Any, label: str | Sequence[str] | None, owners: str | None) -> _Source:
    if _is_frame(data):
        return _frame(data, label, owners)
    if owners is not None:
        raise DataError(f"parts={owners!r} names a column, and only a frame has columns: bring one name per row.")
    if label is not None:
        raise DataError(f"label={label!r} names a column, and only a frame has columns: bring (x, y).")
    if isinstance(data, DataLoader):
        return _loader(data)
    if isinstance(data, Dataset):
        return _pairs(data[i] for i in range(_length(data)))
    if isinstance(data, tuple) and len(data) == 2:
        return _Source(_rows(data[0]), data[1])
    raise DataError(
        f"Data are a pair (x, y), a torch Dataset or DataLoader, or a pandas frame; found {type(data).__name__}."
    )


def _is_frame(data: Any) -> bool:
    """Whether this is a pandas frame; pandas itself is not imported."""
    return type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns")


def _frame(frame: Any, label: str | Sequence[str] | None, owners: str | None) -> _Source:
    columns = [str(name) for name in frame.columns]
    labels = [label] if isinstance(label, str) else list(label or ())
    if not labels:
        raise DataError(f"Which column holds the targets? Say label=…; there are {', '.join(columns)}.")
    missing = [name for name in (*labels, *([owners] if owners else [])) if name not in columns]
    if missing:
        raise DataError(f"There is no column {', '.join(missing)}; there are {', '.join(columns)}.")
    inputs = frame.drop(columns=[*labels, *([owners] if owners else [])])
    texts = [str(name) for name, kind in inputs.dtypes.items() if kind.kind not in "biuf"]
    if texts:
        raise DataError(
            f"Columns must hold numbers; {', '.join(texts)} {'does' if len(texts) == 1 else 'do'} not. Encode them "
            "first (pandas.get_dummies), or leave them out."
        )
    y = frame[labels[0]] if len(labels) == 1 else frame[labels]
    names = tuple(labels) if len(labels) > 1 else ()
    return _Source(_rows(inputs.to_numpy(dtype=np.float32)), y, names, None if owners is None else frame[owners])


def _loader(loader: "DataLoader[Any]") -> _Source:
    """All rows of a loader, in the order of its data set where that has one: a shuffled order would not come again."""
    data, sampler = loader.dataset, loader.sampler
    if isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement):
        return _source(data, None, None)
    if isinstance(sampler, SubsetRandomSampler):
        return _pairs(data[i] for i in sorted(sampler.indices))
    batches = list(loader)
    if not batches or any(not isinstance(batch, tuple | list) or len(batch) != 2 for batch in batches):
        raise DataError("A loader must give batches (x, y), at least one.")
    values = [value for _, y in batches for value in _as_list(y)]
    return _Source(torch.cat([_rows(x) for x, _ in batches]), values)


def _length(data: Any) -> int:
    try:
        return len(data)
    except TypeError as error:
        raise DataError(f"{type(data).__name__} has no length: bring a DataLoader of it, or (x, y).") from error


def _pairs(pairs: Iterable[Any]) -> _Source:
    xs, ys = [], []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(f"A data set must give pairs (x, y); found {type(pair).__name__}.")
        xs.append(_rows(pair[0], whole=False))
        ys.append(pair[1])
    if not xs or any(x.shape != xs[0].shape for x in xs):
        raise DataError("A data set must have rows, all of one shape: pad or resize them first.")
    return _Source(_finite(torch.stack(xs)), ys)


# --- rows


def _rows(value: Any, *, whole: bool = True) -> Tensor:
    """Rows as a tensor: floating point in single precision, whole numbers as they are (64 bits, or bytes)."""
    rows = value if isinstance(value, Tensor) else _tensor(value)
    if rows.dtype in (torch.float64, torch.bool):
        rows = rows.float()
    elif rows.dtype in (torch.int8, torch.int16, torch.int32):
        rows = rows.long()
    if whole and rows.ndim < 2:
        raise DataError(f"Rows must be an array of two axes or more, (N, …); found shape {tuple(rows.shape)}.")
    return _finite(rows) if whole else rows


def _tensor(value: Any) -> Tensor:
    array = _array(value)
    if array.dtype.kind not in "biuf":
        raise DataError(f"Rows must hold numbers; found {array.dtype} such as {str(array.flat[0])[:40]!r}.")
    if array.dtype.kind == "u" and array.itemsize > 1:
        array = array.astype(np.int64)
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _array(value: Any) -> "np.ndarray[Any, Any]":
    """A numpy array of whatever can be one; lists of uneven length are named."""
    if hasattr(value, "to_numpy"):  # pandas
        return np.asarray(value.to_numpy())
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, list | tuple):
        lengths = [len(row) for row in value if isinstance(row, list | tuple)]
        odd = next((i for i, length in enumerate(lengths) if length != lengths[0]), None)
        if odd is not None or (lengths and len(lengths) != len(value)):
            at = len(lengths) if odd is None else odd
            raise DataError(f"Rows must be of one length; row {at} is not as long as the first ({lengths[0]} numbers).")
        if value and isinstance(value[0], Tensor):
            value = [item.tolist() for item in value]
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise DataError(f"This is no array of numbers: {error}.") from error


def _finite(rows: Tensor) -> Tensor:
    if rows.is_floating_point() and not bool(rows.isfinite().all()):
        bad = (~rows.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        shown = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
        raise DataError(f"{len(bad)} rows hold NaN or infinite numbers ({shown}). Leave them out, or fill them in.")
    return rows


# --- targets


def _targets(value: Any, targets: Targets | None, outputs: tuple[str, ...]) -> tuple[Tensor, tuple[str, ...]]:
    """Targets as a tensor in the form that says what they are, and the names of classes or outputs."""
    sets = _label_sets(value)
    if sets is not None:
        if targets in ("classes", "values"):
            raise DataError(f"Each row has a list of labels, and targets={targets!r} were asked for.")
        names = sorted(set().union(*sets))
        return torch.tensor([[name in own for name in names] for own in sets]), tuple(names)
    array = _array(value)
    if array.ndim == 2 and array.shape[1] == 1 and not outputs and targets in (None, "classes"):
        array = array[:, 0]
    if array.dtype.kind in "OUS":
        return _named_classes(array, targets)
    if array.dtype.kind not in "biuf" or array.ndim not in (1, 2):
        raise DataError(f"Targets are one or several numbers or texts for each row; found {array.dtype} {array.shape}.")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = int((~np.isfinite(array.reshape(len(array), -1))).any(1).sum())
        raise DataError(f"{bad} rows have a target that is missing or infinite. Leave them out, or fill them in.")
    if targets is None:
        targets = "values" if array.dtype.kind == "f" else "classes" if array.ndim == 1 else "labels"
    return torch.from_numpy(np.require(_in_form(array, targets), requirements=["C", "W"])), outputs


def _in_form(array: "np.ndarray[Any, Any]", targets: Targets) -> "np.ndarray[Any, Any]":
    """The array in the form of these targets."""
    if targets == "values":
        return array.astype(np.float32)
    if not (array == array.astype(np.int64)).all():
        raise DataError(f"{targets.capitalize()} are whole numbers; found such as {array.flat[0]}. Or are they values?")
    if targets == "classes":
        if array.ndim != 1:
            raise DataError(f"Classes are one number for each row; found {array.shape[1]}. Or are they labels?")
        return array.astype(np.int64)
    array = array if array.ndim == 2 else array[:, None]
    return array.astype(bool) if ((array == 0) | (array == 1)).all() else array.astype(np.int64)  # refused later


def _named_classes(array: "np.ndarray[Any, Any]", targets: Targets | None) -> tuple[Tensor, tuple[str, ...]]:
    if array.ndim != 1 or targets in ("labels", "values"):
        raise DataError(f"Texts as targets are one class for each row; found shape {array.shape}, targets {targets}.")
    missing = sum(value is None or value != value or str(value) == "" for value in array.tolist())
    if missing:
        raise DataError(f"{missing} rows have no class: it is empty. Leave them out, or give them one.")
    names, numbers = np.unique(array.astype(str), return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64)), tuple(map(str, names))


def _label_sets(value: Any) -> list[set[str]] | None:
    """By row, the names of its labels, if these are given so."""
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(isinstance(own, list | tuple | set | frozenset) for own in value):
        return None
    if not all(isinstance(name, str) for own in value for name in own) or not any(value):
        return None
    return [set(own) for own in value]


def _as_list(value: Any) -> list[Any]:
    """One target per row, whatever held them."""
    return list(_array(value).tolist()) if not isinstance(value, list | tuple) else list(value)


# --- clients


def _parts(parts: Any, rows: int) -> dict[str, Tensor]:
    """Rows by client: of a dict, a list of lists, or one owner per row."""
    if isinstance(parts, Mapping):
        return {str(name): _row_numbers(own, rows, repr(name)) for name, own in parts.items()}
    nested = isinstance(parts, list | tuple) and all(
        isinstance(own, list | tuple | range | Tensor | np.ndarray) and getattr(own, "ndim", 1) == 1 for own in parts
    )
    if nested:
        return {f"\0{i}": _row_numbers(own, rows, str(i)) for i, own in enumerate(parts)}
    owners = _array(parts)
    if owners.ndim != 1 or len(owners) != rows:
        raise DataError(
            f"`parts` are lists of row numbers, by client or by name, or one name per row; found {owners.shape} for "
            f"{rows} rows. Write it {_EXAMPLE}."
        )
    values = owners.tolist()
    if any(value is None or value != value or value == "" for value in values):
        raise DataError("Some rows have no client: their name is empty. Leave them out, or say who holds them.")
    known = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    at = {value: i for i, value in enumerate(known)}
    numbers = torch.tensor([at[value] for value in values])
    return {str(value): (numbers == i).nonzero().flatten() for i, value in enumerate(known)}


def _row_numbers(own: Any, rows: int, name: str) -> Tensor:
    """Row numbers of a client: given as such, or as a mask over all rows."""
    numbers = torch.as_tensor(_array(list(own) if isinstance(own, range) else own))
    if numbers.dtype == torch.bool and numbers.shape == (rows,):
        return numbers.nonzero().flatten()
    if numbers.ndim != 1 or (numbers.is_floating_point() and len(numbers)):
        raise DataError(f"Client {name} must have a list of row numbers, or a mask of {rows} rows; found {own!r:.60}.")
    return numbers.long()


def _names(clients: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The clients' names; those that only have a number have none."""
    return tuple(name for name in clients if not name.startswith("\0"))

"""Rows with labels from a file or folder of the user's own, read as a run folder's training rows were."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedup.errors import DataError, MissingDataError, SettingError
from fedup.registry import names as registered
from fedup.run.store import hash_of
from fedup.target_words import targets_of
from fedup.tasks.datasets import Images, OwnImages, OwnTable, Tables, input_of, inputs_from, load_dataset
from fedup.tasks.datasets._columns import in_order
from fedup.tasks.datasets._own import OwnParquet, located
from fedup.tasks.datasets._own_images import ENDINGS, class_folders
from fedup.tasks.datasets._table_rows import ROLE_OF, read_rows
from fedup.tasks.datasets._table_source import as_texts, table_source
from fedup.tasks.file_options import FileOptions


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Inputs as the model takes them and their labels; whose they are, where the file says so."""

    x: Tensor
    y: Tensor
    clients: tuple[str, ...] | None = None  # the name of each row's client
    subjects: tuple[str, ...] | None = None
    ids: tuple[str, ...] | None = None


def find_rows(source: str) -> Path:
    """The file or folder; one that a run folder has on record may have moved to FEDUP_DATA, or here."""
    place = source if source.endswith(".py") else source.partition(":")[0]
    path = Path(place) if Path(place).exists() else located(place, moved=True)
    if path is None or not path.exists():
        raise MissingDataError(f"There is no file or folder {source}: bring it, or put it below FEDUP_DATA.")
    return path


def rows_digest(path: Path) -> str:
    """sha256 of a file, or of a folder's images by name and content."""
    return OwnImages(path, FileOptions()).digest() if path.is_dir() else hash_of(path)[0]


def labelled_rows(source: str, about: Mapping[str, Any], *, whose: bool = False) -> LabelledRows:
    """All rows, read as `about` says that training rows were; `whose` reads clients, persons and ids, too. Where the
    data set has code, `about["data"]` is its name or the path of it."""
    path, names = find_rows(source), tuple(about["class_names"])
    if path.suffix == ".py":
        return _of_code(path, about)
    data = about["data"]
    has_code = data.endswith(".py") or data in registered("fedup.tasks.datasets")
    inputs = input_of(data) if has_code else inputs_from(about["input"])
    if isinstance(inputs, Tables):
        return _of_table(path, inputs, about, whose=whose)
    if path.suffix.lower() == ".parquet":
        column = source.partition(":")[2] or data.partition(":")[2] or None
        x, y = OwnParquet(path, column).labelled(inputs)
        return LabelledRows(x, _checked(y, names, path))
    if isinstance(inputs, Images):
        return _of_folder(path, inputs, names)
    raise SettingError(f"{path}: texts with labels are read from a Parquet file; this is none.")


def _checked(y: Tensor, names: tuple[str, ...], path: Path) -> Tensor:
    if int(y.min()) < 0 or int(y.max()) >= len(names):
        raise DataError(f"{path} has labels from {int(y.min())} to {int(y.max())}, and there are {len(names)} classes.")
    return y


def _of_code(path: Path, about: Mapping[str, Any]) -> LabelledRows:
    dataset = load_dataset(str(path))
    found = {
        "class_names": list(dataset.class_names),
        "input_shape": list(dataset.x.shape[1:]),
        "input": (dataset.inputs or input_of(str(path))).identity(),
    }
    if differ := [name for name, value in found.items() if value != about[name]]:
        raise DataError(f"{path} makes other rows than training had: {', '.join(differ)} differ.")
    clients: list[str] | None = None
    if dataset.parts is not None and dataset.client_names:
        clients = [""] * len(dataset.y)
        for name, rows in zip(dataset.client_names, dataset.parts, strict=True):
            for row in rows.tolist():
                clients[row] = name
    whose = tuple(clients) if clients else None
    return LabelledRows(dataset.x, dataset.y, whose, dataset.subjects, dataset.row_ids)


def _of_table(path: Path, inputs: Tables, about: Mapping[str, Any], *, whose: bool) -> LabelledRows:
    targets, names = targets_of(about), tuple(about["class_names"])
    columns = (inputs.label,) if targets == "classes" else names
    roles, source = dict.fromkeys(columns, ROLE_OF[targets]), table_source(path)
    holders: tuple[str, ...] = ()
    if whose:
        options = replace(FileOptions.from_json(about.get("file") or {}), test_file=None, sha256=None)
        named = {name: role for name, role in OwnTable(path, options).roles.items() if name not in roles}
        named = {name: role for name, role in named.items() if role != "clients" or name in source.columns}
        of_clients = [name for name, role in named.items() if role == "clients"]
        seen = {text for name in of_clients for block in source.blocks([name]) for text in as_texts(block[name])}
        roles, holders = roles | named, tuple(in_order(seen))
    rows = read_rows(source, inputs, roles, names, holders)
    clients = None if rows.clients is None else tuple(holders[code] for code in rows.clients.tolist())
    x = inputs.scale(torch.from_numpy(rows.x))
    return LabelledRows(x, torch.from_numpy(rows.y), clients, rows.subjects, rows.ids)


def _of_folder(path: Path, inputs: Images, names: tuple[str, ...]) -> LabelledRows:
    folders = class_folders(path)
    if not folders:
        raise MissingDataError(f"There is no folder {path} with a folder of images for each class.")
    pixels, labels, ids = [], [], []
    for folder in folders:
        if folder.name not in names:
            raise DataError(f"{folder}: the label {folder.name!r} was not there in training ({', '.join(names[:8])}).")
        for file in sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in ENDINGS):
            try:
                pixels.append(inputs.read(file.read_bytes(), resize=True))
            except DataError as error:
                raise DataError(f"{file}: {error}") from error
            labels.append(names.index(folder.name))
            ids.append(f"{folder.name}/{file.name}")
    return LabelledRows(inputs.prepare(pixels), torch.tensor(labels), ids=tuple(ids))

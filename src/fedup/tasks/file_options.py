"""How a file of the user's own is read: which column is what. Options of `fedup train` and `fedup data check`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fedup.errors import DataError, MissingDataError, SettingError, check_choice

ColumnKind = Literal["number", "category", "ignore"]
Missing = Literal["refuse", "impute"]
Targets = Literal["classes", "labels", "values"]
_USUAL = ("refuse", "clients", "classes")
_PLAIN = ("clients", "none", "public")


@dataclass(frozen=True)
class FileOptions:
    """What the columns of a file are; the same options and the same file give the same rows."""

    label: str | None = field(
        default=None,
        metadata={"help": "Own file: the column of labels; several with commas between.", "default": "label"},
    )
    targets: Targets = field(
        default="classes",
        metadata={"help": "Own file: the labels are classes, labels (columns of yes or no), or values (numbers)."},
    )
    clients_column: str | None = field(default=None, metadata={"help": "Own file: the column that names the client."})
    subject_column: str | None = field(default=None, metadata={"help": "Own file: the column that names the person."})
    id_column: str | None = field(default=None, metadata={"help": "Own file: a column with an id for each row."})
    column: tuple[str, ...] = field(
        default=(), metadata={"help": "Own file: NAME=number, NAME=category or NAME=ignore; repeatable."}
    )
    test_file: str | None = field(
        default=None, metadata={"help": "Own file: another one with test rows.", "default": "a fifth of the rows"}
    )
    missing: Missing = field(
        default="refuse", metadata={"help": "Own file: missing values: refuse, or impute (the mean, and a mark)."}
    )
    standardise: str = field(
        default="clients",
        metadata={"help": "Own file: by sums that clients send, none, or FILE with public constants (JSON)."},
    )
    image_size: int | None = field(
        default=None, metadata={"help": "Own images: resize all to this side.", "min": 1, "default": "as they are"}
    )
    constants: tuple[tuple[str, float, float], ...] = ()  # column, mean and deviation that a file of the user gave
    sha256: str | None = None  # of the files, once they were read

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, Missing)
        check_choice("targets", self.targets, Targets)
        for text in self.column:
            name, _, kind = text.rpartition("=")
            if not name:
                raise SettingError(f"A column is given as NAME=number, NAME=category or NAME=ignore; found {text!r}.")
            check_choice(f"The kind of column {name!r}", kind, ColumnKind)
        if self.missing == "impute" and self.standardise == "none":
            raise SettingError("missing='impute' needs means: standardise by clients, or by a file of constants.")

    @property
    def kinds(self) -> dict[str, str]:
        """By column: the kind that the user chose."""
        return {name: kind for name, _, kind in (text.rpartition("=") for text in self.column)}

    @property
    def for_tables(self) -> bool:
        """Whether anything was chosen that only tables have."""
        chosen = self.label, self.clients_column, self.subject_column, self.id_column, self.test_file
        return any(chosen) or bool(self.column) or (self.missing, self.standardise, self.targets) != _USUAL

    def with_constants(self) -> "FileOptions":
        """The same, with the constants of the file that `standardise` names read in."""
        if self.standardise in _PLAIN:
            return self
        return replace(self, standardise="public", constants=_read_constants(Path(self.standardise)))

    def to_json(self) -> dict[str, Any]:
        """All options that are not at their default."""
        defaults = asdict(FileOptions())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "FileOptions":
        """What `to_json` gave."""
        lists = {
            "column": tuple(stored.get("column", ())),
            "constants": tuple((name, mean, std) for name, mean, std in stored.get("constants", ())),
        }
        return cls(**{**stored, **lists})


def _read_constants(path: Path) -> tuple[tuple[str, float, float], ...]:
    """Columns with their mean and deviation, from JSON such as {"age": {"mean": 50, "std": 12}}."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        constants = [(str(name), float(own["mean"]), float(own["std"])) for name, own in stored.items()]
    except FileNotFoundError as error:
        raise MissingDataError(f"standardise is clients, none or a JSON file; there is no file {path}.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f'{path} must hold constants as in {{"age": {{"mean": 50, "std": 12}}}} ({type(error).__name__}: {error}).'
        ) from error
    for name, mean, std in constants:
        if not (0 < std < float("inf") and abs(mean) < float("inf")):
            raise DataError(f"{path}: the deviation of {name!r} must be above 0, and both finite; found {mean}, {std}.")
    return tuple(sorted(constants))

"""Every error of the library: what happened, what was found, what to do."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    from fedup.unlearning.report import Report


class FedUPError(Exception):
    """Base of all errors raised on purpose by fedup."""


class FedUPWarning(UserWarning):
    """It works, but maybe not as the caller expects."""


class SettingError(FedUPError, ValueError):
    """A parameter is out of its range."""


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise unless the value of a setting is one of a Literal's."""
    if value not in get_args(choices):
        raise SettingError(f"{name} is one of {', '.join(get_args(choices))}; found {value!r}.")


class DataError(FedUPError, ValueError):
    """Arrays, labels or features that cannot be used."""


class MissingDataError(DataError, FileNotFoundError):
    """A data set is not on this machine."""


class RequestError(FedUPError, ValueError):
    """A request that names something unknown, or forgets nothing or everything."""


class ContactError(RequestError):
    """The request needs answers from clients, and no way to reach them was given."""


class HarmError(RequestError):
    """The filter would cost other classes too much: `classes` lists them; `report` says what the check itself
    took, such as questions to clients."""

    report: "Report | None" = None

    def __init__(self, message: str, classes: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.classes = list(classes)


class BudgetError(RequestError):
    """A client's privacy budget does not allow the release."""


class CutError(FedUPError, ValueError):
    """The model has no such place for a filter."""


class PlugError(FedUPError, RuntimeError):
    """The plugged model is used in a way it does not support."""


class NotFittedError(PlugError):
    """A filter was asked for and none is fitted."""


class StaleFilterError(PlugError):
    """The base model changed after the filter was made for it."""


class ArtifactError(FedUPError, ValueError):
    """A file that is damaged, foreign or of another version."""


class FingerprintError(ArtifactError):
    """A file that belongs to another base model."""


class StorageError(FedUPError, OSError):
    """The disk could not write or read a file."""


class BusyError(StorageError):
    """Another process writes to the folder."""


class ChangedError(StorageError):
    """Another process changed what an answer was made from: make it anew."""


class NoArchitectureError(FedUPError, LookupError):
    """Only the program that made the folder can build its model."""


class MissingRunError(FedUPError, FileNotFoundError):
    """There is no run folder at the path."""

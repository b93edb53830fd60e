"""Data sets, one file each: a function `load()` that returns a `Dataset`, how raw inputs become rows (`INPUT`), and
optionally the settings that suit it (`DEFAULTS`) and the hub's files that it needs (`FILES`)."""

from pathlib import Path
from typing import Any

from fedup.errors import MissingDataError, SettingError
from fedup.registry import find, names
from fedup.tasks.datasets._dataset import Dataset as Dataset
from fedup.tasks.datasets._dataset import Defaults as Defaults
from fedup.tasks.datasets._hub import HubFile, missing
from fedup.tasks.datasets._inputs import Images as Images
from fedup.tasks.datasets._inputs import Texts as Texts
from fedup.tasks.datasets._inputs import inputs_from as inputs_from
from fedup.tasks.datasets._own import own_data
from fedup.tasks.datasets._own_images import OwnImages as OwnImages
from fedup.tasks.datasets._own_table import OwnTable as OwnTable
from fedup.tasks.datasets._own_table import standardised as standardised
from fedup.tasks.datasets._parquet import data_root
from fedup.tasks.datasets._tables import Tables as Tables
from fedup.tasks.file_options import FileOptions


def load_dataset(name: str, options: FileOptions | None = None) -> Dataset:
    """The data set of that name; `options` say how a file of the user's own is read. Rows of a table are scaled once
    they are with clients (`standardised`).

    >>> load_dataset("digits").x.shape
    torch.Size([1437, 1, 28, 28])
    """
    check_there(name)
    return _find(name, options).load()


def defaults_of(name: str, options: FileOptions | None = None) -> Defaults:
    """The settings that suit the data set; its files may be missing."""
    return getattr(_find(name, options), "DEFAULTS", Defaults())


def input_of(name: str, options: FileOptions | None = None) -> Images | Texts:
    """How raw images or texts become rows of the data set; its files may be missing."""
    return _find(name, options).INPUT


def own_source(name: str, options: FileOptions | None = None) -> OwnTable | OwnImages | None:
    """The table or folder of images of that name; None for any other data set, which takes no options."""
    own = _find(name, options)
    if isinstance(own, OwnTable | OwnImages):
        return own
    if options is not None and options.for_tables:
        raise SettingError(f"{name} is no table of your own: it takes no options for columns.")
    return None


def files_of(name: str) -> tuple[HubFile, ...]:
    """The hub's files that the data set needs; none if it is built in or the user's own."""
    return getattr(_find(name), "FILES", ())


def check_there(name: str) -> None:
    """Raise unless all files of the data set are here; reads none of them."""
    files, root = files_of(name), data_root()
    if files and root is None:
        raise MissingDataError(
            f"The data set {name!r} is not here: the variable FEDUP_DATA is not set. Set it to a folder for data sets; "
            f"then `fedup data fetch {name}` gets it from the Hugging Face hub, where there is internet. The built-in "
            "data set 'digits' needs no download."
        )
    lacking = missing(files, root or Path())
    if lacking:
        raise MissingDataError(
            f"The data set {name!r} is not here, or half: {', '.join(file.place for file in lacking)} "
            f"{'is' if len(lacking) == 1 else 'are'} missing below {root} (FEDUP_DATA). `fedup data fetch {name}` gets "
            "what is missing, where there is internet."
        )


def _find(name: str, options: FileOptions | None = None) -> Any:
    """A module of that name here, a .py file, or files of the user's own."""
    if name not in names(__name__) and not name.endswith(".py") and (own := own_data(name, options)) is not None:
        return own
    return find(__name__, name, needs=("load", "INPUT"))

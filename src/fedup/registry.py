"""Parts found by name: one file per data set or model, nothing to register."""

import difflib
import importlib
import pkgutil
from types import ModuleType

from fedup.errors import SettingError


def names(package: str) -> list[str]:
    """The parts of a package: its modules, those with a leading underscore apart.

    >>> "digits" in names("fedup.bench.datasets")
    True
    """
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return sorted(module.name for module in found if not module.name.startswith("_"))


def find(package: str, name: str) -> ModuleType:
    """The module of that name; an unknown one raises and offers the closest."""
    known = names(package)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise SettingError(f"{package.rsplit('.', 1)[-1]}: there is no {name!r}; there are {', '.join(known)}.{hint}")
    return importlib.import_module(f"{package}.{name}")

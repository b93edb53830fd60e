"""Parts by name: one file per data set or model, nothing to register; or a file of the user's own."""

import difflib
import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from fedup.errors import SettingError

OWN_MODULE = "fedup_user_"  # prefix of modules loaded from the user's files


def names(package: str) -> list[str]:
    """The parts of a package: its modules without a leading underscore.

    >>> "digits" in names("fedup.tasks.datasets")
    True
    """
    modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def find(package: str, name: str, *, needs: Sequence[str] = ()) -> ModuleType:
    """The module of that name or path (`path/to/part.py`); an error suggests the closest name."""
    if name.endswith(".py"):
        return _from_file(Path(name), needs)
    known = names(package)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise SettingError(
            f"{package.rsplit('.', 1)[-1]}: there is no {name!r}; there are {', '.join(known)}, or a file of your "
            f"own.{hint}"
        )
    return importlib.import_module(f"{package}.{name}")


def _from_file(path: Path, needs: Sequence[str]) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{OWN_MODULE}{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SettingError(f"There is no Python file {path}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        line = line_in(path, error)
        where = f" (line {line.lineno})" if line else ""
        raise SettingError(f"{path} cannot be run{where}: {type(error).__name__}: {error}") from error
    missing = [name for name in needs if not hasattr(module, name)]
    if missing:
        raise SettingError(f"{path} does not define {', '.join(missing)}: see those that come with fedup for examples.")
    return module


def line_in(path: Path, error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of the file in the error's traceback; None if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if Path(frame.filename).resolve() == path.resolve()), None)

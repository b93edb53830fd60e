"""The function that makes a folder's model, by its import path: a server app notes it, and commands find it there."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, cast

from torch import nn

from fedup.errors import NoArchitectureError
from fedup.run.state import State

_FORM = "package.module:function, as in --model myapp.task:make_model"


def describe_architecture(make: Callable[[], nn.Module]) -> dict[str, str] | None:
    """The import path of a function or class, and the folder it is imported from; None if others cannot import it."""
    module, name = getattr(make, "__module__", "__main__"), getattr(make, "__qualname__", "")
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if module == "__main__" or file is None or not all(map(str.isidentifier, name.split("."))):  # as <lambda>
        return None
    if reduce(lambda found, part: getattr(found, part, None), name.split("."), cast(Any, loaded)) is not make:
        return None
    depth = module.count(".") + (Path(file).name == "__init__.py")
    return {"import": f"{module}:{name}", "root": str(Path(file).resolve().parents[depth])}


def architecture_of(state: State) -> dict[str, str] | None:
    """What the server app noted when it stored the model."""
    return state.trained.body.get("architecture") if state.trained else None


def build_architecture(path: str, root: str | None = None) -> nn.Module:
    """The model without its weights, made by the function at the import path; it is looked for in this folder, too."""
    module, colon, name = path.partition(":")
    if not (colon and all(map(str.isidentifier, [*module.split("."), *name.split(".")]))):
        raise NoArchitectureError(f"A model is named as {_FORM}; found {path!r}.")
    with _importing_from(Path.cwd(), *([Path(root)] if root else [])):
        try:
            model: Any = reduce(getattr, name.split("."), cast(Any, importlib.import_module(module)))()
        except Exception as error:  # of the user's own code
            raise NoArchitectureError(
                f"The model {path} cannot be made here: {type(error).__name__}: {error}. Run the command in the folder "
                f"of the app, or name the function that makes the model: {_FORM}."
            ) from error
    if not isinstance(model, nn.Module):
        raise NoArchitectureError(f"{path} makes no torch.nn.Module; found {type(model).__name__}.")
    return model


@contextmanager
def _importing_from(*folders: Path) -> Iterator[None]:
    before = list(sys.path)
    sys.path[:0] = [str(folder) for folder in folders if folder.is_dir()]
    try:
        yield
    finally:
        sys.path[:] = before

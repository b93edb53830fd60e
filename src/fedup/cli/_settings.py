"""Options that are fields of a dataclass: type, default and help stand with the field, and nowhere else."""

import ast
import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

Command = Callable[..., None]
Settings = dict[str, Any]  # what was given, by field
_KINDS = {"int": int, "float": float, "bool": bool}


def with_settings(**classes: str) -> Callable[[Command], Command]:
    """Options for the fields that have a `help` in their metadata, in place of the parameter that a class is named for.

    The command gets what was given on the command line, as a dictionary; defaults are left to the dataclass.
    """
    options = {name: list(_options(*path.rsplit(".", 1))) for name, path in classes.items()}

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**values: Any) -> None:
            for name, own in options.items():
                given = {option.name: values.pop(option.name) for option in own}
                values[name] = {
                    key: value for key, value in given.items() if value not in (None, []) and value is not False
                }
            command(**values)

        signature = inspect.signature(command)
        parameters = [own for known in signature.parameters.values() for own in options.get(known.name, [known])]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _options(module: str, name: str) -> Iterator[inspect.Parameter]:
    """Read from the source: importing these modules would load torch, for which neither --help nor Tab should wait."""
    source = Path(str(getattr(find_spec(module), "origin", ""))).read_text(encoding="utf-8")
    body = next(node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.value.keywords}
            if "help" in arguments.get("metadata", {}):
                yield _option(ast.unparse(node.target), ast.unparse(node.annotation), **arguments)


def _option(name: str, annotation: str, metadata: dict[str, Any], default: Any = None) -> inspect.Parameter:
    """`help`, and where they are needed `min` and the `default` in words, stand in the field's metadata."""
    kind: Any = str if "Literal" in annotation else _KINDS.get(annotation.split(" | ")[0], str)
    kind = list[str] if annotation.startswith("tuple") else kind  # given several times
    flag = kind is bool
    words = metadata.get("default", default)
    about = typer.Option(
        f"--{name.replace('_', '-')}",
        help=metadata["help"],
        min=metadata.get("min"),
        show_default=False if flag or words in (None, ()) else str(words),
    )
    default, annotated = (False, Annotated[bool, about]) if flag else (None, Annotated[kind | None, about])
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotated)

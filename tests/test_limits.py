"""How large a file, a function and its list of parameters may grow, before it has to be split."""

import ast
from collections.abc import Iterator
from pathlib import Path

import fedup

ROOT = Path(fedup.__file__).parent
MOST_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 400, 60, 7


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _declares_options(function: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> bool:
    """A verb of the command line: its parameters are options, with their help."""
    return "cli" in path.relative_to(ROOT).parts and not function.name.startswith("_")


def _too_large(path: Path) -> Iterator[str]:
    if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES:
        yield f"{path.relative_to(ROOT)} has {lines} lines"
    for function in _functions(path):
        where = f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
        arguments, options = function.args, _declares_options(function, path)
        names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        many = sum(name is not None and name.arg not in ("self", "cls") for name in names)
        if many > MOST_PARAMETERS and not options:
            yield f"{where} has {many} parameters"
        first = function.body[0].lineno if options else function.lineno
        if (lines := (function.end_lineno or first) - first + 1) > MOST_FUNCTION_LINES:
            yield f"{where} has {lines} lines"


def test_files_functions_and_parameters_stay_small():
    assert [finding for path in sorted(ROOT.rglob("*.py")) for finding in _too_large(path)] == []

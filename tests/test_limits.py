"""How large a file, a function, its list of parameters and the tests may grow, before something has to be split."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedup

ROOT, TESTS = Path(fedup.__file__).parent, Path(__file__).parent
MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 7
MAX_TEST_LINES = 1.1  # per line of the library


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _declares_options(function: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> bool:
    """A verb of the command line: its parameters are options, with their help."""
    return "cli" in path.relative_to(ROOT).parts and not function.name.startswith("_")


def _too_large(path: Path) -> Iterator[str]:
    for function in _functions(path):
        where = f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
        arguments, options = function.args, _declares_options(function, path)
        names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        parameters = sum(name is not None and name.arg not in ("self", "cls") for name in names)
        if parameters > MAX_PARAMETERS and not options:
            yield f"{where} has {parameters} parameters"
        first = function.body[0].lineno if options else function.lineno
        if (lines := (function.end_lineno or first) - first + 1) > MAX_FUNCTION_LINES:
            yield f"{where} has {lines} lines"


def test_functions_and_parameter_lists_stay_small():
    assert [finding for path in sorted(ROOT.rglob("*.py")) for finding in _too_large(path)] == []


@pytest.mark.parametrize("folder", [ROOT, TESTS], ids=["src", "tests"])
def test_files_stay_small(folder):
    assert {
        str(path.relative_to(folder)): _lines(path) for path in folder.rglob("*.py") if _lines(path) > MAX_LINES
    } == {}


def test_tests_stay_in_proportion_to_the_library():
    library, tests = (sum(map(_lines, folder.rglob("*.py"))) for folder in (ROOT, TESTS))
    assert tests <= MAX_TEST_LINES * library

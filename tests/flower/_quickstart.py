"""Flower's PyTorch quickstart, made from the templates in a wheel of theirs: none of its text is in this repository."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from string import Template
from zipfile import ZipFile

import pytest

OURS = Path(__file__).parent / "quickstart"
PATCH = OURS / "add_fedup.patch"
NAME = "quickstart"  # as the patch has it
_FOLDER = Path(os.environ.get("FEDUP_QUICKSTART", Path(sys.prefix) / "quickstart"))
_WHEEL = "flwr-1.23.0-py3-none-any.whl"
_TEMPLATES = "flwr/cli/new/templates/app/"
_FILES = {
    "code/client.pytorch.py.tpl": f"{NAME}/client_app.py",
    "code/server.pytorch.py.tpl": f"{NAME}/server_app.py",
    "code/task.pytorch.py.tpl": f"{NAME}/task.py",
    "pyproject.pytorch.toml.tpl": "pyproject.toml",
}
_WORDS = {"project_name": NAME, "package_name": NAME, "import_name": NAME, "framework_str": "PyTorch", "username": "me"}
_DOWNLOADING = ("flwr_datasets", "torchvision")
_INSTEAD = f"""
from {NAME}.offline import load_data
torch.manual_seed(0)  # before the server draws the first weights: a run has one outcome
"""


def make_quickstart(folder: Path) -> Path:
    """The app as `flwr new` made it, but for its data, which is ours."""
    if not (_FOLDER / _WHEEL).is_file():
        pytest.skip(f"{_WHEEL} with Flower's quickstart is not in {_FOLDER}: make setup gets it.")
    app = folder / "app"
    (app / NAME).mkdir(parents=True)
    (app / NAME / "__init__.py").touch()
    with ZipFile(_FOLDER / _WHEEL) as wheel:
        for template, name in _FILES.items():
            text = wheel.read(_TEMPLATES + template).decode()
            (app / name).write_text(Template(text).substitute(_WORDS), encoding="utf-8")
    shutil.copy(OURS / "offline.py", app / NAME)
    task = app / NAME / "task.py"
    task.write_text(_without_downloads(task.read_text(encoding="utf-8")) + _INSTEAD, encoding="utf-8")
    return app


def add_fedup(app: Path) -> None:
    """The patch, as a user would apply it; one that does not fit its context raises."""
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(app.parent)}  # of any repository
    subprocess.run(["git", "apply", str(PATCH)], cwd=app, env=outside, check=True, capture_output=True)


def _without_downloads(code: str) -> str:
    """Without what is imported from packages that download, and whatever uses that, and so on."""
    kept, gone = ast.parse(code).body, set()
    while drop := [one for one in kept if _downloads(one) or _uses(one) & gone]:
        gone |= {name for one in drop for name in _makes(one)}
        kept = [one for one in kept if one not in drop]
    return "\n".join(map(ast.unparse, kept))


def _downloads(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(_DOWNLOADING)


def _uses(statement: ast.stmt) -> set[str]:
    return {one.id for one in ast.walk(statement) if isinstance(one, ast.Name)}


def _makes(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    return {one.id for one in getattr(statement, "targets", []) if isinstance(one, ast.Name)}

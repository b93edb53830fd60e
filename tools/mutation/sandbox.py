"""Copies of a tree to break, and pytest in them: in forks of a process that has imported the large libraries once,
since most of a short run is importing them."""

import importlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

TIME_IS_UP = 124
_LIBRARIES = ("torch", "hypothesis", "pytest", "safetensors.torch", "flwr.app", "flwr.serverapp", "flwr.clientapp")
_LIBRARIES += ("scipy.stats", "sklearn.linear_model", "sklearn.datasets", "typer.testing", "rich.console", "pyarrow")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_ARGUMENTS = ("-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=line", "-rfE")


def warm_up() -> None:
    """Import what tests import, but nothing of fedup."""
    os.environ |= _ONE_THREAD
    for name in _LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)


class Sandbox:
    """A copy of a tree, with the same virtual environment."""

    def __init__(self, tree: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mutation-"))
        self.tree = self._folder / "tree"
        unneeded = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".hypothesis", "runs")
        shutil.copytree(tree, self.tree, ignore=unneeded)
        if (tree / ".venv").exists():
            (self.tree / ".venv").symlink_to((tree / ".venv").resolve())

    def write(self, path: Path, text: str) -> None:
        """Change a file, and remove what Python has compiled of it, which may be as old and as long as the new text."""
        (self.tree / path).write_text(text, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(self.tree / path))).unlink(missing_ok=True)

    def pytest(self, *arguments: str, limit_s: float, **settings: str) -> tuple[int, str]:
        """Exit code and output of pytest, in a fork of this process; TIME_IS_UP after so many seconds."""
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if not child:
                self._become_pytest(output.fileno(), arguments, settings)
            code, until = None, time.monotonic() + limit_s
            while code is None and time.monotonic() < until:
                time.sleep(0.05)
                done, status = os.waitpid(child, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if done else None
            with suppress(ProcessLookupError):  # whatever is left of it, and of processes that it started
                os.killpg(child, signal.SIGKILL)
            if code is None:
                os.waitpid(child, 0)
            output.seek(0)
            return TIME_IS_UP if code is None else code, output.read().decode(errors="replace")

    def _become_pytest(self, output: int, arguments: tuple[str, ...], settings: dict[str, str]) -> None:
        try:
            os.setsid()
            os.chdir(self.tree)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.environ |= {**_ONE_THREAD, "PYTHONPATH": str(self.tree / "src"), **settings}
            sys.path[:0] = [str(self.tree), str(self.tree / "src")]
            code = importlib.import_module("pytest").main([*_ARGUMENTS, f"--basetemp={self._folder}/tmp", *arguments])
            sys.stdout.flush()
            os._exit(int(code))
        finally:
            os._exit(70)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

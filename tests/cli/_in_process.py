"""The command line without a new interpreter: `fedup.cli.main` itself, on a small federation trained once."""

import atexit
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from fedup.cli import main
from fedup.run.folder import Run

TRAIN = ("--rows", "400", "--clients", "4", "--rounds", "10")
FAST = ("--steps", "40")
QUICK = (*FAST, "--force", "--max-class-loss", "100")  # whatever a filter costs: the first fit is taken
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Ran:
    """What a user gets: the exit code and two streams, without colours."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """All of standard output as one JSON value."""
        return json.loads(self.out)

    @property
    def told(self) -> str:
        """Standard error on one line."""
        return " ".join(self.err.replace("│", " ").split())


def fedup(*arguments: object, stdin: bytes = b"", cwd: Path | None = None, **environment: str) -> Ran:
    """`fedup …` as a user runs it; an exception that `main` does not turn into an exit code comes through."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    outside = {name: value for name, value in os.environ.items() if name not in ("FEDUP_RUN", "GITHUB_ACTIONS")}
    environment = {**outside, "COLUMNS": "100", "NO_COLOR": "1", **environment}
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(sys, "argv", ["fedup", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")),
        chdir(cwd or Path.cwd()),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    texts = [_ANSI.sub("", stream.buffer.getvalue().decode()) for stream in (out, err)]
    return Ran(code, *texts)


def ok(*arguments: object, **how: Any) -> Ran:
    """The same, which must succeed."""
    ran = fedup(*arguments, **how)
    assert ran.code == 0, f"fedup {' '.join(map(str, arguments))}: {ran.code}\n{ran.out}{ran.err}"
    return ran


def refused(*arguments: object, told: str = "", **how: Any) -> Ran:
    """The same, which must fail with an error that says so, and without an answer."""
    ran = fedup(*arguments, **how)
    assert (ran.code, ran.out) == (1, ""), f"fedup {' '.join(map(str, arguments))}: {ran}"
    assert "Error: " in ran.err and "Traceback" not in ran.err
    assert told in ran.told, ran.told
    return ran


@cache
def _original(stage: str) -> Path:
    """A run folder that nobody changes: `trained`, `collected`, `private` (ε = 8) or `answered` (three requests)."""
    root = Path(tempfile.mkdtemp(prefix="fedup-tests-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    run = root / "run"
    if stage == "trained":
        ok("train", "--run", run, *TRAIN)
        return run
    shutil.copytree(_original("collected" if stage == "answered" else "trained"), run)
    if stage != "answered":
        ok("collect", *(("--epsilon", 8, "--clip", "unit") if stage == "private" else ("--ratio", 0.8)), "--run", run)
        return run
    ok("unlearn", "--run", run, "--class", 7, "--reference", "T-1", "--force", *FAST)
    ok("unlearn", "--run", run, "--client", 2, "--force")
    first, second = sample_ids(1)[:2]
    ok("unlearn", "--run", run, "--samples", f"1:{first},{second}", "--force")
    ok("evidence", "R1", "--run", run)
    return run


def copy_of(stage: str, place: Path) -> Path:
    """A run folder of one's own at `place/run`, or at `place` where that does not exist yet."""
    place = place / "run" if place.is_dir() else place
    return Path(shutil.copytree(_original(stage), place))


@cache
def sample_ids(client: int, label: int | None = None) -> list[int]:
    """Ids of a client's training rows (of one class)."""
    found = ok("data", "--run", _original("trained"), "--client", client, "--json").json
    return [i for name, ids in found.items() if label is None or name == str(label) for i in ids]


def sha256(path: Path) -> str:
    """As `sha256sum` gives it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, with its hash; a lock says who held it last, and is no part of what is kept."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): sha256(path) for path in files}


def filter_file(run: Path) -> Path | None:
    """The filter in force; what a killed command left beside it, until the next one writes, does not count."""
    served = Run(run).read().filter
    return None if served is None else run / "files" / served.name

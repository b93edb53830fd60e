"""Put into a copy of the tree by `run.py record`: notes which test runs which mutant's line, and how long tests take.

It is a pytest plugin, too. Tests start processes of their own, so notes go to files that all of them append to.
"""

import json
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

_noted: set[tuple[str, str]] = set()
_seconds: defaultdict[str, float] = defaultdict(float)
_failed: set[str] = set()
_open, _write, _close = os.open, os.write, os.close  # tests of full disks replace them


def hit(mutant: str) -> None:
    """The line of a mutant runs."""
    folder, test = os.environ.get("MUTATION_NOTES"), os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if not folder or not test or (mutant, test) in _noted:
        return
    note = (json.dumps([mutant, test]) + "\n").encode()
    with suppress(OSError):  # some tests limit the size of files: each process has a small one
        handle = _open(f"{folder}/hits-{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        _write(handle, note)
        _close(handle)
    _noted.add((mutant, test))


def pytest_runtest_logreport(report) -> None:
    _seconds[report.nodeid] += report.duration
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session) -> None:
    if not hasattr(session.config, "workerinput"):  # the one that hears of all tests
        tests = {test: round(seconds, 4) for test, seconds in _seconds.items()}
        text = json.dumps({"tests": tests, "failed": sorted(_failed)})
        Path(os.environ["MUTATION_NOTES"], f"tests-{os.getpid()}.json").write_text(text, encoding="utf-8")

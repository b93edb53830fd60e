"""Mutation testing: small bugs are put into the code on purpose, one at a time, and the tests should find each.

    python tests/mutation/run.py check record kill --tree . --name after
    python tests/mutation/run.py report

`check` names the mutants of `mutants.toml` that do not apply to a tree (their code was changed: mend the snippet).
`record` runs the suite once and notes which tests run the line of each mutant. `kill` runs these tests, the quickest
first, against each mutant until one fails; what is in NAME.json already is not done again. `report` writes
docs/notes/mutation.md from before.json and after.json. Nothing is changed in the tree itself.
"""

import argparse
import importlib.util
import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutants import HERE, Mutant, applicable, load_mutants, with_recorders

PAGE = HERE.parents[1] / "docs" / "notes" / "mutation.md"
FIRST = 25  # tests that are run first: most mutants are found by one of them
HANGS_S = 150  # a test that takes longer hangs
Result = dict[str, Any]  # outcome; the test it is by; how many tests run the line


def copied(tree: Path) -> Path:
    """A copy of a tree to work in, with the same virtual environment."""
    copy = Path(tempfile.mkdtemp(prefix="mutation-")) / "tree"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".hypothesis", "runs"))
    if (tree / ".venv").exists():
        (copy / ".venv").symlink_to((tree / ".venv").resolve())
    return copy


def run_tests(copy: Path, arguments: list[str], limit_s: float, through: str, **settings: str) -> tuple[int, str]:
    """Exit code and output of pytest in a copy of the tree; `through` is a command that it is run by."""
    settings |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(copy / "src")}
    command = [*shlex.split(through), "timeout", "-k", "10", f"{limit_s:.0f}", sys.executable, "-m", "pytest"]
    command += ["-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=line", "-rfE", *arguments]
    done = subprocess.run(command, cwd=copy, env=os.environ | settings, stdout=-1, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout.decode(errors="replace")


def record(tree: Path, work: Path, options: argparse.Namespace) -> None:
    """Note which tests run the line of each mutant, and how long each of them takes."""
    copy, by_file = copied(tree), dict[Path, list[Mutant]]()
    for mutant, path in applicable(tree):
        by_file.setdefault(path, []).append(mutant)
    for path, mutants in by_file.items():
        (copy / path).write_text(with_recorders((copy / path).read_text("utf-8"), mutants), encoding="utf-8")
    shutil.copy(HERE / "mutation_recorder.py", copy / "src")
    arguments = ["-q", "-n", "2", "-p", "mutation_recorder", "-m", options.select, *options.paths]
    _, output = run_tests(copy, arguments, 3 * 3600, options.through, MUTATION_NOTES=str(work))
    print(output[-3000:])
    shutil.rmtree(copy.parent)


def tests_by_mutant(work: Path) -> dict[str, list[str]]:
    """From all records: the tests of each mutant, the quickest first, without those that fail as it is."""
    seconds, failed = dict[str, float](), set[str]()
    for path in work.glob("tests-*.json"):
        noted = json.loads(path.read_text(encoding="utf-8"))
        seconds, failed = seconds | noted["tests"], failed | set(noted["failed"])
    tests: dict[str, set[str]] = {}
    for line in (work / "hits").read_text(encoding="utf-8").splitlines():
        mutant, test = json.loads(line)
        if test in seconds and test not in failed:
            tests.setdefault(mutant, set()).add(test)
    return {mutant: sorted(names, key=lambda name: seconds[name]) for mutant, names in tests.items()}


def attempt(copy: Path, tests: list[str], options: argparse.Namespace) -> Result:
    """What the tests say of the mutant that is in the copy."""
    hangs = ["-o", f"faulthandler_timeout={HANGS_S}", "-o", "faulthandler_exit_on_timeout=true"]
    for part in (tests[:FIRST], tests[FIRST:]):
        code, output = run_tests(copy, ["-x", "-v", *hangs, *part], options.cap, options.through) if part else (0, "")
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, flags=re.MULTILINE)
        started = re.findall(r"^((?:tests|src)/\S+::.+?)(?: [A-Z]+ .*)?$", output, flags=re.MULTILINE)
        if failed:
            return {"outcome": "killed", "by": failed[0]}
        if "Timeout (0:" in output:
            return {"outcome": "killed, it hangs", "by": started[-1].partition(" Timeout")[0]}
        if code:
            return {"outcome": "survived within the limit" if code == 124 else f"unclear: {output[-300:]}", "by": None}
    return {"outcome": "survived" if tests else "no test runs it", "by": None}


def kill(tree: Path, work: Path, options: argparse.Namespace) -> None:
    """Each mutant against the tests that run its line, two mutants at a time."""
    path_of_results, results = HERE / f"{options.name}.json", load_results(options.name)
    tests, copies = tests_by_mutant(work), queue.Queue[Path]()

    def measure(pair: tuple[Mutant, Path]) -> None:
        copy, own, (mutant, path) = copies.get(), tests.get(pair[0].id, []), pair
        text = (copy / path).read_text(encoding="utf-8")
        try:
            write_source(copy / path, mutant.applied_to(text))
            results[mutant.id] = {**attempt(copy, own, options), "tests": len(own)}
        finally:
            write_source(copy / path, text)
            copies.put(copy)
        path_of_results.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")
        print(mutant.id, results[mutant.id], flush=True)

    again = ("unclear", "survived", "no test") if options.again else ("unclear",)
    pairs = [pair for pair in applicable(tree) if not options.only or pair[0].id in options.only]
    left = [pair for pair in pairs if results.get(pair[0].id, {"outcome": "unclear"})["outcome"].startswith(again)]
    for _ in range(2):
        copies.put(copied(tree))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(measure, left))
    for _ in range(2):
        shutil.rmtree(copies.get().parent)


def write_source(path: Path, text: str) -> None:
    """Without what Python has compiled of it, which may be as old and as long as the new text."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def load_results(name: str) -> dict[str, Result]:
    """What was measured so far."""
    path = HERE / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def report() -> None:
    """Both results side by side, as a page."""
    names = ("before", "after")
    results, mutants = [load_results(name) for name in names], load_mutants()
    groups = {
        "Bugs that the project once had": [mutant for mutant in mutants if mutant.fixed_in],
        "Other mutants of the core": [mutant for mutant in mutants if not mutant.fixed_in],
    }
    lines = ["# Mutation testing", "", (HERE / "about.md").read_text(encoding="utf-8"), "| | before | after |"]
    lines += ["|---|---|---|"]
    for title, group in {"All": mutants, **groups}.items():
        lines.append(f"| {title} | {' | '.join(_share(result, group) for result in results)} |")
    for name, result in zip(names, results, strict=True):
        alive = [f"`{key}`" for key, value in sorted(result.items()) if not value["outcome"].startswith("killed")]
        lines += ["", f"Not caught {name}: {', '.join(alive) or 'none'}."] if result else []
    for title, group in groups.items():
        lines += ["", f"## {title}", "", "| mutant | what it breaks | before | after |", "|---|---|---|---|"]
        for mutant in group:
            cells = " | ".join(_cell(result.get(mutant.id)) for result in results)
            lines.append(f"| `{mutant.id}` | {mutant.breaks} | {cells} |")
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {PAGE}")


def _share(results: dict[str, Result], mutants: list[Mutant]) -> str:
    outcomes = [results[mutant.id]["outcome"] for mutant in mutants if mutant.id in results]
    caught = sum(outcome.startswith("killed") for outcome in outcomes)
    return f"{caught} of {len(outcomes)} caught ({caught / len(outcomes):.1%})" if outcomes else "–"


def _cell(result: Result | None) -> str:
    if result is None:
        return "–"
    if not result["by"]:
        return f"**{result['outcome'].partition(':')[0]}** ({result['tests']} tests)"
    return f"{result['outcome']}: `{result['by'].partition('[')[0].rpartition('/')[2]}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("actions", nargs="+", choices=["check", "record", "kill", "report"])
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="the tree that is measured")
    parser.add_argument("--name", default="after", help="of the results: before or after")
    parser.add_argument("--work", type=Path, help="folder for records; one below the system's own by default")
    parser.add_argument("--select", default="not slow", help="pytest's -m for a record")
    parser.add_argument("--paths", nargs="*", default=[], help="tests to record, all by default; records add up")
    parser.add_argument("--cap", type=float, default=300, help="seconds for the tests of a mutant")
    parser.add_argument("--through", default="", help="a command that pytest is run by, such as nice")
    parser.add_argument("--only", nargs="*", help="these mutants")
    parser.add_argument("--again", action="store_true", help="measure mutants again that were not caught")
    options = parser.parse_args()
    work = options.work or Path(tempfile.gettempdir(), f"mutation-{options.name}")
    work.mkdir(parents=True, exist_ok=True)
    steps = {"check": lambda tree, *_: applicable(tree), "record": record, "kill": kill, "report": lambda *_: report()}
    for action in options.actions:
        steps[action](options.tree.resolve(), work, options)


if __name__ == "__main__":
    main()

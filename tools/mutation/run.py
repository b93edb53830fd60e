"""Mutation testing: small bugs are put into the code on purpose, one at a time, and the tests should find each.

    python tools/mutation/run.py check record kill --tree . --name after
    python tools/mutation/run.py report

`check` names the mutants of `mutants.toml` that do not apply to a tree (their code was changed: mend the snippet).
`record` runs the suite once and notes which tests run the line of each mutant. `kill` runs these tests, quick ones
first, against each mutant until one fails; what is in NAME.json already is not done again. `report` writes
docs/notes/mutation.md from before.json and after.json. Nothing is changed in the tree itself.
"""

import argparse
import json
import multiprocessing.util
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from mutants import HERE, Mutant, applicable, load_mutants, with_recorders
from recorded import tests_by_mutant
from sandbox import TIME_IS_UP, Sandbox, warm_up

PAGE = HERE.parents[1] / "docs" / "notes" / "mutation.md"
FIRST = 25  # tests that are run first: most mutants are found by one of them
FAILED = re.compile(r"^(?:FAILED|ERROR) ((?:tests|src)/.+?)(?: - .*)?$", flags=re.MULTILINE)  # in pytest's summary
HANGS_S = 150  # a test that takes longer hangs
Result = dict[str, Any]  # outcome; the test it is by; how many tests run the line


def record(tree: Path, work: Path, options: argparse.Namespace) -> None:
    """Note which tests run the line of each mutant, and how long each of them takes."""
    sandbox, by_file = Sandbox(tree), dict[Path, list[Mutant]]()
    for mutant, path in applicable(tree):
        by_file.setdefault(path, []).append(mutant)
    for path, mutants in by_file.items():
        sandbox.write(path, with_recorders((tree / path).read_text(encoding="utf-8"), mutants))
    shutil.copy(HERE / "mutation_recorder.py", sandbox.tree / "src")
    arguments = ["-q", "-n", "2", "-p", "mutation_recorder", "-m", options.select, *options.paths]
    print(sandbox.pytest(*arguments, limit_s=3 * 3600, MUTATION_NOTES=str(work))[1][-3000:])
    sandbox.remove()


def attempt(sandbox: Sandbox, tests: list[str], limit_s: float) -> Result:
    """What the tests say of the mutant that is in the sandbox."""
    hangs = ["-o", f"faulthandler_timeout={HANGS_S}", "-o", "faulthandler_exit_on_timeout=true"]
    until = time.monotonic() + limit_s
    for part in (tests[:FIRST], tests[FIRST:]):
        left_s = until - time.monotonic()
        code, output = sandbox.pytest("-x", "-v", *hangs, *part, limit_s=left_s) if part else (0, "")
        failed = FAILED.findall(output)
        started = re.findall(r"^((?:tests|src)/\S+::.+?)(?: [A-Z]+ .*| Timeout.*)?$", output, flags=re.MULTILINE)
        if failed:
            return {"outcome": "killed", "by": failed[0]}
        if "Timeout (0:" in output:
            return {"outcome": "killed, it hangs", "by": started[-1]}
        if code:
            unclear = f"unclear: {output[-300:]}"
            return {"outcome": "survived within the limit" if code == TIME_IS_UP else unclear, "by": None}
    return {"outcome": "survived" if tests else "no test runs it", "by": None}


def measure(job: tuple[Path, Mutant, Path, list[str], float]) -> tuple[str, Result]:
    """One mutant against its tests."""
    tree, mutant, path, tests, limit_s = job
    sandbox, text = _sandbox_of(tree), (tree / path).read_text(encoding="utf-8")
    try:
        sandbox.write(path, mutant.applied_to(text))
        return mutant.id, {**attempt(sandbox, tests, limit_s), "tests": len(tests)}
    finally:
        sandbox.write(path, text)


@cache
def _sandbox_of(tree: Path) -> Sandbox:
    """One for each process."""
    sandbox = Sandbox(tree)
    multiprocessing.util.Finalize(sandbox, sandbox.remove, exitpriority=1)
    return sandbox


def kill(tree: Path, work: Path, options: argparse.Namespace) -> None:
    """Each mutant against the tests that run its line; the tests that catch one must pass without it."""
    results, tests = load_results(options.name), tests_by_mutant(work)
    again = ("unclear", "survived", "no test") if options.again else ("unclear",)
    pairs = [pair for pair in applicable(tree) if not options.only or pair[0].id in options.only]
    left = [pair for pair in pairs if results.get(pair[0].id, {"outcome": "unclear"})["outcome"].startswith(again)]
    left.sort(key=lambda pair: pair[0].id in results)  # those that were never measured first
    jobs = [(tree, mutant, path, tests.get(mutant.id, []), options.cap) for mutant, path in left]
    warm_up()
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for name, result in pool.imap_unordered(measure, jobs):
            results[name] = result
            print(name, result, flush=True)
            _save(options.name, results)
        pool.close()
        pool.join()
    catching = sorted({result["by"] for result in results.values()} - {None})
    sandbox = Sandbox(tree)
    code, output = sandbox.pytest("-q", *catching, limit_s=3600) if catching else (0, "")
    sandbox.remove()
    if code not in (0, 1):
        raise RuntimeError(f"The tests that catch mutants could not be run without any:\n{output[-2000:]}")
    failing = set(FAILED.findall(output))
    for name, result in results.items():
        if result["by"] in failing:
            results[name] = {**result, "outcome": "unclear: the test fails without the mutant, too"}
    _save(options.name, results)
    print(f"{len(catching)} tests catch mutants; without any {len(failing)} of them fail\n{output[-500:]}")


def _save(name: str, results: dict[str, Result]) -> None:
    (HERE / f"{name}.json").write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")


def load_results(name: str) -> dict[str, Result]:
    """What was measured so far."""
    path = HERE / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def report() -> None:
    """Both results side by side, as a page."""
    names = ("before", "after")
    results, mutants = [load_results(name) for name in names], {mutant.id: mutant for mutant in load_mutants()}.values()
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
        lines += ["", f"Not caught {name}, or undecided: {', '.join(alive) or 'none'}."] if result else []
    for title, group in groups.items():
        lines += ["", f"## {title}", "", "| mutant | what it breaks | before | after |", "|---|---|---|---|"]
        for mutant in group:
            cells = " | ".join(_cell(result.get(mutant.id)) for result in results)
            lines.append(f"| `{mutant.id}` | {mutant.breaks} | {cells} |")
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {PAGE}")


def _share(results: dict[str, Result], mutants: Iterable[Mutant]) -> str:
    outcomes = [results[mutant.id]["outcome"] for mutant in mutants if mutant.id in results]
    caught = sum(outcome.startswith("killed") for outcome in outcomes)
    undecided = sum(outcome.startswith(("unclear", "survived within")) for outcome in outcomes)
    return f"{caught} of {len(outcomes)} caught, {undecided} undecided" if outcomes else "–"


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
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
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

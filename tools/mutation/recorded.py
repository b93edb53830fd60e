"""What `mutation_recorder` noted: the tests that run each mutant's line, and in which order to try them."""

import json
from collections import Counter
from pathlib import Path


def tests_by_mutant(folder: Path) -> dict[str, list[str]]:
    """The tests of each mutant, from all records in a folder, without tests that fail as it is."""
    seconds, failed = dict[str, float](), set[str]()
    for path in folder.glob("tests-*.json"):
        noted = json.loads(path.read_text(encoding="utf-8"))
        seconds, failed = seconds | noted["tests"], failed | set(noted["failed"])
    tests: dict[str, set[str]] = {}
    for line in (line for path in folder.glob("hits*") for line in path.read_text(encoding="utf-8").splitlines()):
        mutant, test = json.loads(line)
        if test in seconds and test not in failed:
            tests.setdefault(mutant, set()).add(test)
    lines = Counter(test for names in tests.values() for test in names)
    costs = {test: (0.01 + seconds[test]) * many for test, many in lines.items()}
    return {mutant: _ordered(names, costs) for mutant, names in tests.items()}


def _ordered(tests: set[str], costs: dict[str, float]) -> list[str]:
    """First those that are quick and run the lines of few mutants, since they look closely; by turns with the cheapest
    of each file, since tests of one file often look at the same."""
    cheap, met, spread = sorted(tests, key=lambda test: costs[test]), Counter[str](), dict[str, float]()
    for test in cheap:
        file = test.partition("::")[0]
        met[file] += 1
        spread[test] = costs[test] * met[file] ** 2
    places = {test: place for place, test in enumerate(cheap)}
    for place, test in enumerate(sorted(tests, key=lambda test: spread[test])):
        places[test] = min(places[test], place)
    return sorted(tests, key=lambda test: (places[test], costs[test]))

"""The house has rooms, and imports point inwards only (docs/architecture.md has the map)."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "fedup"
ROOMS = [  # each may import from those before it
    "",  # errors, requests, federations, files: what everybody needs
    "models",
    "privacy",
    "statistics",
    "filters",
    "serving",
    "clients",
    "unlearning",
    "training",
    "run",
    "tasks",
    "flower",
    "bench",
    "cli",
]
FACADE = {"__init__.py", "__main__.py"}  # names for users, loaded on first use
BENCH_VERBS = {"cli/bench", "cli/demo.py", "cli/_progress.py"}  # the last draws their bars


def room_of(module: str) -> str:
    first = module.split(".")[1] if "." in module else ""
    return first if (SRC / first).is_dir() else ""


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fedup":
            names = [f"fedup.{alias.name}" for alias in node.names] if node.module == "fedup" else [node.module]
            found.update(names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.split(".")[0] == "fedup")
    return found


def arrows(path: Path) -> set[str]:
    return {room_of(module) for module in imports_of(path)}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_those_before_it_only(room):
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    paths = (SRC / room).rglob("*.py") if room else [path for path in SRC.glob("*.py") if path.name not in FACADE]
    beyond = {str(path.relative_to(SRC)): arrows(path) - allowed for path in paths}
    beyond.pop("errors.py", None)  # a type alone: what a refusal carries
    assert {path: rooms for path, rooms in beyond.items() if rooms} == {}


def test_every_folder_is_a_room_and_says_what_it_is():
    folders = {path.name for path in SRC.iterdir() if any(path.glob("*.py"))}
    assert folders == set(ROOMS) - {""}


def test_nothing_imports_the_benchmark_but_its_own_verbs():
    others = [path for path in SRC.rglob("*.py") if path.relative_to(SRC).parts[0] != "bench"]
    using = {"/".join(path.relative_to(SRC).parts[:2]) for path in others if "bench" in arrows(path)}
    assert using <= BENCH_VERBS


def test_the_map_names_every_room_in_order():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)/` \|", text, re.M) == ROOMS[1:]


def test_every_stop_of_a_walk_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    stops = re.findall(r"^\d+\. `([\w./]+\.py)`", text, re.M)
    assert len(stops) > 30 and [stop for stop in stops if not (SRC / stop).exists()] == []
    walks = re.split(r"^### ", text, flags=re.M)[1:]
    assert len(walks) >= 6 and all(len(re.findall(r"^\d+\. ", walk, re.M)) <= 10 for walk in walks)

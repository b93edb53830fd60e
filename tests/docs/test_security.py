"""Every attack on the pages about security names a test that is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(test_\w+\.py)`(?: \(flower\))?(?:: ([^;|`]+))?")


def named_tests() -> list[tuple[str, str]]:
    rows = (line for page in ("security", "security_nodes") for line in (ROOT / f"docs/{page}.md").open())
    last_cells = (row.strip().strip("|").split("|")[-1] for row in rows if row.startswith("|"))
    return [(file, about.strip()) for cell in last_cells for file, about in NAMED.findall(cell)]


def test_attacks_are_listed():
    assert len(named_tests()) > 40


@pytest.mark.parametrize(("file", "about"), named_tests())
def test_a_test_that_a_page_names_exists(file, about):
    sources = [path.read_text() for path in (ROOT / "tests").rglob(file)]
    names = [name.replace("_", " ") for source in sources for name in re.findall(r"def test_(\w+)", source)]
    assert names
    for words in about.replace("'", "").split("…"):
        assert any(words.strip() in name for name in names), f"{file} has no test of {words.strip()!r}"

"""The README and the pages: the ten lines run, links lead somewhere, and the site knows every page and public name."""

import re
import runpy
from pathlib import Path

import pytest

import fedup
import fedup.flower

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s:]*)(?:#([^)\s]+))?\)")


def without_code(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """The names that GitHub and the site give to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_ten_lines_of_the_readme_run_as_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"## Ten lines\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(code, names)
    assert (names["plugged"](names["data"].test_x).argmax(1) != 7).all()
    assert names["original"].equal(names["model"](names["data"].test_x))
    assert "tensor" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["quickstart", "bring_your_own_model", "exact_head"])
def test_examples_run_as_they_are(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert re.search(r"(restored|weights untouched:|equal) +True", capsys.readouterr().out)


def test_the_blocks_of_the_engineers_walk_run_one_after_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    text = (ROOT / "docs" / "engineers.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert names["original"] is names["model"]
    assert names["report"].verdicts[names["request"].digest].finding == "forgotten"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_between_files_leads_to_a_file_and_a_heading(page):
    for path, heading in LINK.findall(without_code(page)):
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), path
        assert not heading or heading in anchors(target), f"{path}#{heading}"


def test_every_page_is_in_the_navigation_of_the_site():
    text = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {page.relative_to(ROOT / 'docs').as_posix()}\n" in text, page


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    public = {f"fedup.{name}" for name in fedup.__all__} | {f"fedup.flower.{name}" for name in fedup.flower.__all__}
    assert sorted(listed) == sorted(public)

"""Hooks for `make docs`: the README is the first page, and each repository file that a page links to is in the site."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
CODE = {".py": "python", ".toml": "toml", ".patch": "diff"}


def site_path(path: str) -> str:
    """The file in the site for a file of the repository; code is shown on a page of its own."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") + (".md" if Path(path).suffix in CODE else "")


def repository_path(uri: str) -> str:
    """The file of the repository that a page of the site comes from."""
    if uri == "index.md":
        return "README.md"
    return f"docs/{uri}" if (ROOT / "docs" / uri).is_file() else uri


def target(page: str, link: str) -> str | None:
    """The file of the repository that a link on a page leads to."""
    path = os.path.normpath(Path(page).parent / link)
    return path if (ROOT / path).is_file() else None


def linked(page: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        if path := target(page, link):
            yield path


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, and all that it and the pages link to outside of docs/."""
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(_file(path, config))
        new = set(linked(path) if path.endswith(".md") else ()) - seen
        seen |= new
        waiting += sorted(new)
    return files


def _file(path: str, config: MkDocsConfig) -> File:
    language = CODE.get(Path(path).suffix)
    if language is None:
        return File.generated(config, site_path(path), abs_src_path=str(ROOT / path))
    text = (ROOT / path).read_text(encoding="utf-8")
    page = f"# {Path(path).name}\n\n`{path}`\n\n````{language}\n{text}````\n"
    return File.generated(config, site_path(path), content=page)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages of the site."""
    here = repository_path(page.file.src_uri)

    def in_site(match: re.Match[str]) -> str:
        path = target(here, match[1])
        return os.path.relpath(site_path(path), Path(page.file.src_uri).parent) if path else match[1]

    return LINK.sub(in_site, markdown)

"""A self-contained HTML page: headings, paragraphs, tables and figures, no script and nothing to load."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from fedup.files import write_text

_STYLE = """
:root { color-scheme: light; --ink: #1d2733; --soft: #5d6b7a; --line: #e3e8ee; --accent: #e4572e; }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: #fff; max-width: 62rem;
       margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.9rem; margin: 0 0 .25rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
p { margin: .5rem 0; } .lead { color: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; color: var(--soft); font-size: .85rem; } th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; } figure svg { width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .9rem; }
.note { border-left: 4px solid var(--accent); background: #fdf4f1; padding: .6rem 1rem; margin: 1.5rem 0; }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; }
"""


class Page:
    """Parts are added from top to bottom; all text is escaped."""

    def __init__(self, title: str, lead: str) -> None:
        self._title = title
        self._parts = [f"<h1>{escape(title)}</h1>", f'<p class="lead">{escape(lead)}</p>']

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        self._parts.append(f"<p>{escape(text)}</p>")

    def note(self, text: str) -> None:
        """Something the reader must not miss."""
        self._parts.append(f'<p class="note">{escape(text)}</p>')

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        self._parts.append(
            f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def figure(self, svg: str, caption: str) -> None:
        self._parts.append(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>")

    def footer(self, text: str) -> None:
        self._parts.append(f"<footer>{escape(text)}</footer>")

    def write(self, path: Path) -> None:
        """Write the page, whole or not at all."""
        body = "\n".join(self._parts)
        head = (
            f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self._title)}</title><style>{_STYLE}</style>"
        )
        write_text(path, f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n')

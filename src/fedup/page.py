"""A self-contained HTML page: headings, paragraphs, tables and figures, nothing to load; a script only where tables
are to be sorted."""

from collections.abc import Mapping, Sequence
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
.facts td { white-space: normal; text-align: left; overflow-wrap: anywhere; vertical-align: top; }
.facts td:first-child { color: var(--soft); width: 17rem; }
.badge { display: inline-block; border-radius: 1rem; padding: .1rem .8rem; font-size: .9rem; color: #fff;
         background: var(--soft); } .badge.good { background: #2e7d5b; }
li { margin: .35rem 0; }
.classes { display: flex; gap: .6rem; align-items: flex-end; height: 9rem; border-bottom: 1px solid var(--line); }
.classes > div { flex: 1; display: flex; gap: 2px; align-items: flex-end; justify-content: center; height: 100%; }
.classes i { display: block; flex: 1; max-width: 1.1rem; min-height: 1px; }
.names { display: flex; gap: .6rem; font-size: .85rem; } .names span { flex: 1; text-align: center; overflow: hidden; }
.legend { font-size: .85rem; color: var(--soft); margin: .4rem 0; } .legend i { display: inline-block; width: .8rem;
         height: .8rem; margin: 0 .3rem 0 .9rem; vertical-align: -1px; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
nav { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; margin: 1rem 0; }
nav a, .sortable button { color: #2e6f95; } .sortable button { all: unset; cursor: pointer; color: var(--soft); }
.sortable button:focus-visible { outline: 2px solid #2e6f95; } .sortable tbody tr:hover { background: #f6f8fa; }
body.wide { max-width: 80rem; } body.wide figure { max-width: 60rem; }
.sortable { font-size: .9rem; } .sortable th, .sortable td { padding: .35rem .5rem; }
.sortable tr.marked { background: #fdf4f1; font-weight: 600; }
th[aria-sort="none"] button::after { content: " ↕"; opacity: .35; }
th[aria-sort="ascending"] button::after { content: " ▲"; } th[aria-sort="descending"] button::after { content: " ▼"; }
@media (max-width: 40rem) { .facts td { display: block; border: 0; padding: .1rem 0; } th, td { padding: .4rem .5rem; }
  .facts td:first-child { width: auto; padding-top: .6rem; }
  .scroll td:first-child { white-space: normal; min-width: 8rem; } }
@media print { body { margin: 1rem auto; } th, td { white-space: normal; } }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; }
"""


_COLORS = ("#9aa4b2", "#e4572e", "#2e86ab", "#4c9f70")


# Sorts numbers by value with missing ones last, texts by the alphabet; a second click turns the order round.
_SORT = """
document.querySelectorAll("table.sortable").forEach(table => table.querySelectorAll("th").forEach((head, column) =>
  head.addEventListener("click", () => {
    const turned = { ascending: "descending", descending: "ascending" };
    const order = turned[head.getAttribute("aria-sort")] || head.dataset.first;
    table.querySelectorAll("th").forEach(other => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const numbers = [...table.tBodies[0].rows].some(row => row.cells[column].dataset.by !== "");
    const key = row => row.cells[column].dataset.by;
    [...table.tBodies[0].rows].sort((a, b) => {
      if (!numbers) return sign * a.cells[column].textContent.localeCompare(b.cells[column].textContent);
      if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === "");
      return sign * (key(a) - key(b));
    }).forEach(row => table.tBodies[0].append(row));
  })));
"""


def _anchor(heading: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in heading.lower()).split())


def _tip(value: float | None) -> str:
    return "no row" if value is None else f"{value:.3f}"


class Page:
    """Parts are added from top to bottom; all text is escaped."""

    def __init__(self, title: str, lead: str, *, wide: bool = False) -> None:
        self._title = title
        self._class = "wide" if wide else ""
        self._sorts = False
        self._parts = [f"<h1>{escape(title)}</h1>", f'<p class="lead">{escape(lead)}</p>']

    def heading(self, text: str) -> None:
        self._parts.append(f'<h2 id="{_anchor(text)}">{escape(text)}</h2>')

    def subheading(self, text: str) -> None:
        self._parts.append(f"<h3>{escape(text)}</h3>")

    def links(self, headings: Sequence[str]) -> None:
        """A line of links to headings further down."""
        entries = "".join(f'<a href="#{_anchor(heading)}">{escape(heading)}</a>' for heading in headings)
        self._parts.append(f"<nav>{entries}</nav>")

    def paragraph(self, text: str) -> None:
        """A paragraph; none for an empty text."""
        if not text:
            return
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

    def sortable_table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[tuple[str, float | None]]],
        *,
        marked: str = "",
        tips: Sequence[str] | None = None,
        largest_first: Sequence[bool] | None = None,
    ) -> None:
        """A table that a click on a column's head sorts, by the values given with the texts; one row may be marked.

        `tips` explain the columns; `largest_first` says which are turned at the first click.
        """
        explained = zip(head, tips or [""] * len(head), largest_first or [False] * len(head), strict=True)
        header = "".join(
            f'<th aria-sort="none" title="{escape(tip)}" data-first="{"descending" if largest else "ascending"}">'
            f'<button type="button">{escape(cell)}</button></th>'
            for cell, tip, largest in explained
        )
        body = "".join(
            f'<tr class="{"marked" if marked and row[0][0].split(" ")[0] == marked else ""}">'
            + "".join(f'<td data-by="{"" if by is None else by}">{escape(text)}</td>' for text, by in row)
            + "</tr>"
            for row in rows
        )
        table = f'<table class="sortable"><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>'
        self._parts.append(f'<div class="scroll">{table}</div>')
        self._sorts = True

    def facts(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Names and values, one below the other; long values break."""
        body = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in pairs)
        self._parts.append(f'<table class="facts"><tbody>{body}</tbody></table>')

    def bullets(self, items: Sequence[str]) -> None:
        self._parts.append("<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>")

    def badge(self, text: str, *, good: bool) -> None:
        """A word that tells how things stand."""
        self._parts.append(f'<p><span class="badge{" good" if good else ""}">{escape(text)}</span></p>')

    def bars(self, series: Mapping[str, Sequence[float | None]], names: Sequence[str], caption: str) -> None:
        """Shares between 0 and 1 as bars, one group per name; drawn by the browser, no image and no library."""
        colors = dict(zip(series, _COLORS, strict=False))
        groups = []
        for place, name in enumerate(names):
            bars = [
                f'<i style="height:{100 * (values[place] or 0):.1f}%;background:{colors[key]}" '
                f'title="{escape(name)}, {escape(key)}: {_tip(values[place])}"></i>'
                for key, values in series.items()
            ]
            groups.append(f"<div>{''.join(bars)}</div>")
        legend = "".join(f'<i style="background:{color}"></i>{escape(key)}' for key, color in colors.items())
        labels = "".join(f"<span>{escape(name)}</span>" for name in names)
        self._parts.append(
            f'<figure><figcaption>{escape(caption)}</figcaption><div class="legend">{legend}</div>'
            f'<div class="classes">{"".join(groups)}</div><div class="names">{labels}</div></figure>'
        )

    def figure(self, svg: str, caption: str) -> None:
        self._parts.append(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>")

    def footer(self, text: str) -> None:
        self._parts.append(f"<footer>{escape(text)}</footer>")

    def write(self, path: Path) -> None:
        """Write the page, whole or not at all."""
        body = "\n".join([*self._parts, *([f"<script>{_SORT}</script>"] if self._sorts else [])])
        head = (
            f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self._title)}</title><style>{_STYLE}</style>"
        )
        page = f'<html lang="en"><head>{head}</head><body class="{self._class}">\n{body}\n</body></html>'
        write_text(path, f"<!doctype html>\n{page}\n")

"""A self-contained HTML page: headings, paragraphs, tables and figures, nothing to load; a script only where tables
are to be sorted."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from fedup.files import write_text

_COLORS = ("#9aa4b2", "#e4572e", "#2e86ab", "#4c9f70")


def _anchor(heading: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in heading.lower()).split())


def _tip(value: float | None) -> str:
    return "no row" if value is None else f"{value:.3f}"


def _cells(texts: Iterable[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts) + "</tr>"


def _scrolled(header: str, body: str, look: str = "") -> str:
    return f'<div class="scroll"><table{look}><thead>{header}</thead><tbody>{body}</tbody></table></div>'


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
        self._parts += [f"<p>{escape(text)}</p>"] if text else []

    def note(self, text: str) -> None:
        """Something the reader must not miss."""
        self._parts.append(f'<p class="note">{escape(text)}</p>')

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._parts.append(_scrolled(_cells(head, "th"), "".join(_cells(row) for row in rows)))

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
        self._parts.append(_scrolled(f"<tr>{header}</tr>", body, ' class="sortable"'))
        self._sorts = True

    def facts(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Names and values, one below the other; long values break."""
        self._parts.append(f'<table class="facts"><tbody>{"".join(map(_cells, pairs))}</tbody></table>')

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
        style, sort = (Path(__file__).with_suffix(ending).read_text(encoding="utf-8") for ending in (".css", ".js"))
        body = "\n".join([*self._parts, *([f"<script>\n{sort}</script>"] if self._sorts else [])])
        head = (
            f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self._title)}</title><style>\n{style}</style>"
        )
        page = f'<html lang="en"><head>{head}</head><body class="{self._class}">\n{body}\n</body></html>'
        write_text(path, f"<!doctype html>\n{page}\n")

"""Pages: whatever text goes in comes out as text."""

import re
from html.parser import HTMLParser

from fedup.page import Page

NASTY = "<script>alert(1)</script> & \"quoted\" 'too' </td></style><b>"


class Tags(HTMLParser):
    """All tags and all text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.attributes = [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def written(page, tmp_path) -> str:
    page.write(tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def full(text: str) -> Page:
    page = Page(text, text)
    page.heading(text)
    page.paragraph(text)
    page.note(text)
    page.table([text], [[text], [text]])
    page.facts([(text, text)])
    page.bullets([text, text])
    page.badge(text, good=True)
    page.bars({text: [0.5, None]}, [text, text], text)
    page.figure("<svg></svg>", text)
    page.footer(text)
    return page


def test_every_part_escapes_its_text(tmp_path):
    nasty, plain = (Tags(written(full(text), tmp_path)) for text in (NASTY, "plain"))
    assert nasty.tags == plain.tags  # no text became a tag
    assert "script" not in nasty.tags
    assert len(nasty.attributes) == len(plain.attributes)  # and none left its attribute
    assert nasty.text.count(NASTY) == plain.text.count("plain")


def test_a_page_loads_nothing_and_runs_nothing(tmp_path):
    text = written(full("plain"), tmp_path)
    parsed = Tags(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in parsed.attributes}
    assert "http" not in text and not re.search(r"url\(|@import", text)


def test_bars_are_as_high_as_their_shares_and_say_where_there_is_no_row(tmp_path):
    page = Page("t", "l")
    page.bars({"before": [0.25, None], "after": [1.0, 0.0]}, ["a", "b"], "c")
    attributes = Tags(written(page, tmp_path)).attributes
    styles = [value for name, value in attributes if name == "style" and "height" in value]
    assert [style.split("%")[0] for style in styles] == ["height:25.0", "height:100.0", "height:0.0", "height:0.0"]
    titles = [value for name, value in attributes if name == "title"]
    assert titles == ["a, before: 0.250", "a, after: 1.000", "b, before: no row", "b, after: 0.000"]


def test_parts_come_in_the_order_they_were_added(tmp_path):
    page = Page("title", "lead")
    for text in ("one", "two", "three"):
        page.paragraph(text)
    text = written(page, tmp_path)
    places = [text.index(f">{part}<") for part in ("lead", "one", "two", "three")]
    assert places == sorted(places)

"""Pages: whatever text goes in comes out as text, and nothing is loaded."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError

from fedup.page import _environment, render

NASTY = "<script>alert(1)</script> & \"quoted\" 'too' </td></style><b>"
MACROS = """{% import "macros.html.j2" as m %}
{{ m.table([text], [[text], [text]]) }} {{ m.fact(text, text) }} {{ m.measured(text, text, text) }}
{{ m.bullets([text, text]) }}
{{ m.glossary([(text, text)]) }} {{ m.figure("<svg></svg>", text) }}
{{ m.bars(text, [text], [(text, [0.5]), (text, [None])]) }}
"""
ENTRY = {"name": "n", "federations": ["f"], "scenarios": ["s"], "methods": 2, "n": "3", "goals": "1 of 2"}


class Tags(HTMLParser):
    """All tags, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.attributes = [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def demo(text: str) -> dict:
    """What the template of the demo is given, with one text for all."""
    attack = {"success": {text: 0.5}, "accuracy": {text: 0.5}}
    figures = {"time": "<svg></svg>", f"{text}-accuracy": "<svg></svg>", f"{text}-attack": "<svg></svg>"}
    collect = {"centroids": 3, "clients_contacted": 2, "bytes_up": 1, "time_s": 0.1}
    machine = dict.fromkeys(("fedup", "torch", "processor", "threads"), text)
    requests = [{"kind": text, "story": text, "attack": attack}]
    shown = {"figures": figures, "answers": {text: text}, "overview": [[text] * 8], "show_bytes": str}
    about = {"clients": 2, "train_rows": 9, "data": text, "rounds": 1, "seed": 0}
    shares, totals = {"retain": 0.5, "forget": 0.5}, dict.fromkeys(("before", "after", "learned_without"), 64 * "0")
    exact = {
        "backbone": text,
        "origin": text,
        "sentence": text,
        "claims": [text, text],
        "time_s": 0.1,
        "totals": totals,
    }
    exact |= {"learned": shares, "forgotten": shares, "request": {"clients": [text]}, "relearned_equal": True}
    return {**about, **shown, "requests": requests, "exact": exact, "collect": collect, "machine": machine}


PAGES = {
    "macros": lambda text: _environment().from_string(MACROS).render(text=text),
    "index": lambda text: render("index", {"entries": [{**ENTRY, "title": text}]}),
    "demo": lambda text: render("demo", demo(text)),
}


@pytest.mark.parametrize("page", PAGES)
@settings(max_examples=15, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1))
@example(NASTY)
def test_whatever_is_written_stays_text(page, text):
    written, plain = (Tags(PAGES[page](words)) for words in (text, "plain"))
    assert written.tags == plain.tags  # no text became a tag
    assert len(written.attributes) == len(plain.attributes)  # and none left its attribute
    assert written.text.count(text) >= plain.text.count("plain") > 0


@pytest.mark.parametrize("page", ["index", "demo"])
def test_a_page_loads_nothing_runs_nothing_and_forbids_the_browser_both(page):
    text = PAGES[page]("plain")
    parsed = Tags(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not {"src", "onload", "onclick"} & {name for name, _ in parsed.attributes}
    assert not re.search(r"https?://|url\(|@import", text)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:\"" in text


def test_bars_are_as_long_as_their_shares_and_each_shows_its_value():
    template = '{% import "macros.html.j2" as m %}{{ m.bars("c", ["before", "after"], groups) }}'
    page = _environment().from_string(template).render(groups=[("a", [0.25, 1.0]), ("b", [None, 0.0])])
    assert re.findall(r"width:([\d.]+)%", page) == ["25.0", "100.0", "0.0", "0.0"]
    assert re.findall(r"<b>(.+?)</b>", page) == ["25.0\xa0%", "100.0\xa0%", "no row", "0.0\xa0%"]
    assert 'title="a, after: 100.0\xa0%"' in page
    assert re.findall(r'style="left:(\d+)%">', page) == ["0", "25", "50", "75", "100"]  # the axis


def test_a_name_that_a_template_does_not_get_is_an_error():
    with pytest.raises(UndefinedError):
        render("index", {})

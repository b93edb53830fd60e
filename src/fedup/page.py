"""HTML pages from the templates in `templates/`: self-contained, every text escaped, nothing loaded."""

import hashlib
from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, content: dict[str, Any]) -> str:
    """The page that a template makes of this content."""
    return _environment().get_template(f"{template}.html.j2").render(content)


def percent(share: float | None) -> str:
    """A share of 1 in per cent, on one line; a dash for none.

    >>> percent(0.875)
    '87.5\\xa0%'
    """
    return "–" if share is None else f"{100 * share:.1f}\xa0%"


def anchor(heading: str) -> str:
    """The name of a heading in links.

    >>> anchor("mnist-lenet5, class")
    'mnist-lenet5-class'
    """
    return "-".join("".join(c if c.isalnum() else " " for c in heading.lower()).split())


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # an unknown name in a template is an error, not an empty text
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()  # a browser runs no other script
    environment.globals.update(script=script, script_digest=digest)
    environment.filters.update(percent=percent, anchor=anchor)
    return environment

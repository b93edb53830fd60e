"""A request as it comes in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedup.errors import RequestError
from fedup.request import Forget

_LONGEST_REFERENCE = 200


@dataclass(frozen=True)
class NewRequest:
    """A request as it comes in; the reference is the operator's own (a ticket, a letter)."""

    forget: Forget
    reference: str | None = None
    rows: Mapping[str, Any] = field(default_factory=dict)  # how many rows it names, and the hash of their ids

    def __post_init__(self) -> None:
        text = self.reference
        if text is not None and not (text.isprintable() and 0 < len(text) <= _LONGEST_REFERENCE):
            raise RequestError(
                f"A reference is 1 to {_LONGEST_REFERENCE} printable characters on one line; found {text[:50]!a}."
            )

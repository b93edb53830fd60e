"""Clients and classes by name or number, and persons by id, as people write them."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedup.errors import RequestError
from fedup.request import Forget
from fedup.subjects import SHORT_TAG, SubjectKey

NUMBER = re.compile(r"[0-9]{1,18}")
_BY_NUMBER = re.compile(r"number:([0-9]{1,18})")
_SHOWN = 10


@dataclass(frozen=True)
class Names:
    """The names of a run folder's clients and classes, and the key of its persons."""

    clients: Sequence[str] = ()
    classes: Sequence[str] = ()
    key: SubjectKey | None = None
    key_path: str = "subjects.key"

    @classmethod
    def of(cls, about: Mapping[str, Any], key: SubjectKey | None = None, key_path: str = "subjects.key") -> "Names":
        """Those that a run folder has on record."""
        return cls(about.get("client_names", ()), about.get("class_names", ()), key, key_path)

    def client(self, text: str) -> int:
        """The number of a client."""
        return _number(text, self.clients, "client")

    def label(self, text: str) -> int:
        """The number of a class."""
        return _number(text, self.classes, "class")

    def persons(self, ids: Sequence[str]) -> Forget:
        """A request for persons; from here on only their tags are known."""
        if self.key is None:
            raise RequestError(
                f"Persons are named with the key that their tags were made with, and there is none at {self.key_path}. "
                "Name its file with --subject-key. (`fedup train` makes one for data with a column of persons.)"
            )
        return Forget.subjects(ids, key=self.key)

    def with_ids(self, text: str, ids: Sequence[str]) -> str:
        """A message for the one who typed these ids, with the ids in place of their tags."""
        for subject in ids if self.key is not None else ():
            assert self.key is not None
            text = text.replace(self.key.tag(subject)[:SHORT_TAG], repr(subject))
        return text


def _number(text: str, names: Sequence[str], kind: str) -> int:
    """By exact name, or by number. `number:7` is always a number; "7" is refused if it is both the name of one and the
    number of another."""
    text = text.strip()
    if explicit := _BY_NUMBER.fullmatch(text):
        return int(explicit[1])
    places = [place for place, name in enumerate(names) if name == text]
    number = int(text) if NUMBER.fullmatch(text) else None
    if len(places) > 1 or (places and number is not None and number < len(names) and places != [number]):
        which = ", ".join(str(place) for place in sorted({*places, *([] if number is None else [number])}))
        raise RequestError(
            f"{text!r} may be {kind} {which}: it is the name of one and stands for another. Write number:N for the one "
            "that is meant. Nothing was changed."
        )
    if places or number is not None:
        return places[0] if places else int(text)
    near = difflib.get_close_matches(text, list(names), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    known = ", ".join(list(names)[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    listed = f"known by name are {known}" if names else f"no {kind} has a name here: give its number"
    raise RequestError(f"There is no {kind} {text!r}; {listed}.{hint} Nothing was changed.")

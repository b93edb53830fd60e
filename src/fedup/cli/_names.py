"""Clients and classes by name or number, and persons by id, as people write them."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedup.errors import RequestError
from fedup.request import Forget
from fedup.subjects import SHORT_TAG, SubjectKey

NUMBER = re.compile(r"[0-9]{1,18}")
_BY_NUMBER = re.compile(r"number:([0-9]{1,18})")
NUMBERS = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})?([,; ]+[0-9]{1,18}(-[0-9]{1,18})?)*")
_SHOWN = 10
_MOST = 10_000_000  # a typing error in a range must not fill the memory


@dataclass(frozen=True)
class Names:
    """The names of a run folder's clients, classes and rows, and the key of its persons."""

    clients: Sequence[str] = ()
    classes: Sequence[str] = ()
    key: SubjectKey | None = None
    key_path: str = "subjects.key"
    has_persons: bool = True  # whether the data say whose their rows are
    row_ids: Callable[[], Sequence[str] | None] = lambda: None  # they are in the data, which may be large or not here

    @classmethod
    def of(cls, about: Mapping[str, Any], key: SubjectKey | None = None, key_path: str = "subjects.key") -> "Names":
        """Those that a run folder has on record."""
        names = about.get("client_names", ()), about.get("class_names", ())
        return cls(*names, key, key_path, has_persons="subject_key" in about)

    def rows(self, text: str) -> list[int]:
        """The numbers of rows, given as numbers and ranges or, where rows have ids, as ids with commas between."""
        ids = self.row_ids()
        if ids is None:
            if not NUMBERS.fullmatch(text.strip()):
                raise RequestError(f"samples are named by whole numbers, as in 17,42,50-60; found {text!r}.")
            return parse_numbers(text)
        places, rows = {name: row for row, name in enumerate(ids)}, list[int]()
        for part in (part.strip() for part in re.split(r"[,;]", text)):
            if part in places and not (NUMBER.fullmatch(part) and int(part) < len(ids) and int(part) != places[part]):
                rows.append(places[part])
            elif part in places:
                raise RequestError(
                    f"{part!r} is the id of row {places[part]} and the number of another: write number:{places[part]} "
                    f"or number:{part}. Nothing was changed."
                )
            elif NUMBERS.fullmatch(part.removeprefix("number:")):
                rows += parse_numbers(part.removeprefix("number:"))
            else:
                near = difflib.get_close_matches(part, list(places), n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise RequestError(
                    f"No row of the clients has the id {part!r}: it is unknown, or kept apart as a test row.{hint} "
                    "Nothing was changed."
                )
        return rows

    def client(self, text: str) -> int:
        """The number of a client."""
        return _number(text, self.clients, "client")

    def label(self, text: str) -> int:
        """The number of a class."""
        return _number(text, self.classes, "class")

    def persons(self, ids: Sequence[str]) -> Forget:
        """A request for persons; from here on only their tags are known."""
        if not self.has_persons:
            raise RequestError(
                "The data of this folder do not say whose their rows are: train with --subject-column COLUMN, or name "
                "rows by --samples."
            )
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


def parse_numbers(text: str) -> list[int]:
    """Whole numbers and ranges.

    >>> parse_numbers("17, 42, 50-52")
    [17, 42, 50, 51, 52]
    """
    numbers: list[int] = []
    for part in re.split(r"[,; ]+", text.strip()):
        first, _, last = part.partition("-")
        if last and int(last) < int(first):
            raise RequestError(f"A range runs upwards, as in 50-60; found {part!r}.")
        if int(last or first) - int(first) + len(numbers) >= _MOST:
            raise RequestError(f"At most {_MOST:,} ids are named at once; found {part!r}.")
        numbers += range(int(first), int(last or first) + 1)
    return numbers

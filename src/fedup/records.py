"""Lists of very many small objects of one kind, in columns: each object is made when it is looked at."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar, overload

_NAME_BYTES = 32  # of a name that is a sha256 in hex digits
T = TypeVar("T")


class Records(Sequence[T], Generic[T]):
    """Objects of a dataclass. `numbers` gives the type of the column of each field that is a number of its own, `name`
    the field that is a hash in hex digits or empty. What other fields hold is kept once for all objects that share it.

    A part of them, `records[start:]`, stays the same when more are appended, and copies nothing.
    """

    def __init__(self, kind: type[T], numbers: Mapping[str, str], name: str, records: Iterable[T] = ()) -> None:
        self._kind, self._name = kind, name
        self._numbers = {own: array(code) for own, code in numbers.items()}
        self._others = [own.name for own in fields(kind) if own.name not in (*numbers, name)]  # type: ignore[arg-type]
        self._terms: dict[tuple[Any, ...], int] = {}
        self._listed: list[tuple[Any, ...]] = []  # the keys of `terms`
        self._place, self._names, self._other_names = array("I"), bytearray(), dict[int, str]()
        for record in records:
            self.append(record)

    def append(self, record: T) -> None:
        """Add an object at the end; on an error nothing is added."""
        length = len(self)
        try:
            self._append(record)
        except BaseException:  # an interrupt, too: columns of unequal length would mix up all that comes after
            self.cut(length)
            raise

    def _append(self, record: T) -> None:
        terms = tuple(getattr(record, own) for own in self._others)
        name, place = str(getattr(record, self._name)), self._terms.get(terms)
        if place is None:
            place = len(self._listed)
            self._listed.append(terms)
            self._terms[terms] = place
        for own, column in self._numbers.items():
            column.append(getattr(record, own))
        if not _is_hash(name) and name:
            self._other_names[len(self)] = name
        self._names += bytes.fromhex(name) if _is_hash(name) else bytes(_NAME_BYTES)
        self._place.append(place)

    def cut(self, length: int) -> None:
        """Keep only so many."""
        for column in (*self._numbers.values(), self._place):
            del column[length:]
        del self._names[_NAME_BYTES * length :]
        self._other_names = {place: name for place, name in self._other_names.items() if place < length}

    def __len__(self) -> int:
        return len(self._place)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> "Part[T]": ...
    def __getitem__(self, index: int | slice) -> "T | Part[T]":
        places = range(len(self))[index]
        return Part(self, places) if isinstance(places, range) else self._at(places)

    def __iter__(self) -> Iterator[T]:
        return (self._at(place) for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def _at(self, place: int) -> T:
        values = dict(zip(self._others, self._listed[self._place[place]], strict=True))
        values |= {own: column[place] for own, column in self._numbers.items()}
        name = bytes(self._names[_NAME_BYTES * place : _NAME_BYTES * (place + 1)])
        values[self._name] = name.hex() if any(name) else self._other_names.get(place, "")
        return self._kind(**values)


class Part(Sequence[T], Generic[T]):
    """Some objects of a list of them."""

    def __init__(self, records: Records[T], places: range) -> None:
        self._records, self._places = records, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> "Part[T]": ...
    def __getitem__(self, index: int | slice) -> "T | Part[T]":
        places = self._places[index]
        return Part(self._records, places) if isinstance(places, range) else self._records[places]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))


def _is_hash(name: str) -> bool:
    """Whether bytes hold it: 64 digits, in lower case, not all zero."""
    digits = len(name) == 2 * _NAME_BYTES and not name.strip("0123456789abcdef")
    return digits and bool(name.strip("0"))

"""Events in their order. A history grows by one event without a copy of those before it."""

from collections.abc import Iterable, Sequence
from typing import overload

from fedup.run.journal import Event


class History(Sequence[Event]):
    """A sequence that never changes: `plus` gives a longer one, and the two share what they have in common.

    Only the longest history can grow in place; a shorter one that grows is copied first.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._shared = list(events)
        self._length = len(self._shared)

    def plus(self, event: Event) -> "History":
        """This history and one event more."""
        grown = History.__new__(History)
        grown._shared = self._shared if len(self._shared) == self._length else self._shared[: self._length]
        grown._shared.append(event)
        grown._length = self._length + 1
        return grown

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        places = range(self._length)[index]
        return self._shared[places] if isinstance(places, int) else [self._shared[place] for place in places]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

"""What a measurement gives."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the table: a measurement, and its goal where it has one."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    at_most: bool = True
    detail: dict[str, Any] = field(default_factory=dict)  # what it was computed from

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "met": self.met}


Tell = Callable[[str], None]  # what is being measured

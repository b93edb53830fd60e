"""Scenarios, one file each: a frozen dataclass `Scenario` of settings that harms a federation or leaves it as it is,
and says what is to be forgotten."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedup.federation import Federation
from fedup.registry import find
from fedup.request import Forget
from fedup.tasks.datasets import Dataset, Images, Texts


@dataclass(frozen=True, eq=False)
class Triggered:
    """Test rows that carry a backdoor's trigger, with their true labels, and the class the backdoor leads to."""

    x: Tensor
    y: Tensor
    target: int


@dataclass(frozen=True, eq=False)
class Situation:
    """A federation as it learns, and what is to be forgotten afterwards."""

    federation: Federation
    request: Forget
    story: str
    triggered: Triggered | None = None


class Scenario(Protocol):
    """What a scenario's file defines under this name."""

    def prepare(self, federation: Federation, *, dataset: Dataset, inputs: Images | Texts, seed: int) -> Situation:
        """The situation that this scenario makes of an honest federation."""

    def took(self, original: Mapping[str, float | None], retrained: Mapping[str, float | None]) -> bool:
        """Whether there is something to forget, judged by the metrics of the original and of the retrained model."""


class NoAttack:
    """A base for scenarios that do no harm before: there is always something to forget."""

    def took(self, original: Mapping[str, float | None], retrained: Mapping[str, float | None]) -> bool:
        return True


def scenario_class(name: str) -> type[Scenario]:
    """The settings of the scenario of that name."""
    found: type[Scenario] = find(__name__, name, needs=("Scenario",)).Scenario
    return found

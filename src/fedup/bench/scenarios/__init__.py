"""Scenarios, one file each: a frozen dataclass `Scenario` of settings that harms a federation or leaves it as it is,
and says what is to be forgotten."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedup.errors import SettingError
from fedup.federation import Client, Federation
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
    """A base for scenarios without an attack: there is always something to forget."""

    def took(self, original: Mapping[str, float | None], retrained: Mapping[str, float | None]) -> bool:
        return True


def scenario_class(name: str) -> type[Scenario]:
    """The settings of the scenario of that name."""
    found: type[Scenario] = find(__name__, name, needs=("Scenario",)).Scenario
    return found


def target_client(federation: Federation, wanted: int | None) -> Client:
    """The client that a scenario is about: the one named, or the largest."""
    if wanted is None:
        return max(federation.clients, key=lambda client: len(client.train))
    if wanted not in federation.ids:
        raise SettingError(
            f"client: there is no client {wanted}; there are {federation.ids[0]} … {federation.ids[-1]}."
        )
    return federation.client(wanted)


@dataclass(frozen=True)
class SomeSamples:
    """A base for scenarios that withdraw a `share` of the training rows of `client`; without one, of the largest."""

    share: float = 0.1
    client: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise SettingError(f"share must lie between 0 and 1; found {self.share}.")

    def chosen(self, federation: Federation) -> tuple[Client, int]:
        """The client, and how many of its rows: at least one."""
        holder = target_client(federation, self.client)
        return holder, max(1, round(self.share * len(holder.train)))

"""The settings of a differential-privacy guarantee."""

import math
import sys
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from fedup.errors import SettingError, check_choice
from fedup.privacy.accountant import LARGEST_EPSILON, mu_of

Unit = Literal["record", "subject"]
ProjectionName = Literal["auto", "tail", "random", "none"]
LARGEST_DELTA = 1e-5


def guarantee_of(config: object) -> "DP | None":
    """The guarantee of messages made with these settings; None without one, and if noise can be replayed.

    >>> guarantee_of(DP(1.0, clip="unit", replay_seed=0)) is None
    True
    """
    return config if isinstance(config, DP) and not config.is_replayable else None


@cache  # very many charges share one text
def _in_words(epsilon: float, delta: float, unit: Unit, replayable: bool) -> str:
    promise = f"(ε = {epsilon:g}, δ = {delta:g})-DP for one {unit}"
    return f"TEST MODE, replayable noise, NO PRIVACY: {promise} in form only" if replayable else promise


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


@dataclass(frozen=True)
class DP:
    """(ε, δ)-differential privacy of each client's message, for one record, or all records of one subject.

    `clip` is the largest l2 norm of a projected feature vector: a public number, or "unit", which scales each vector to
    norm 1. `erase_clip` is the same for all features of a row at the cut of an eraser (default: from the model's
    features of standard normal inputs). `cells` splits each class by fixed random directions. `count_weight` and
    `spread_weight` set the precision of counts and second moments relative to sums.

    `replay_seed` makes the noise replayable, for tests: then nothing is protected, and every report says so.

    >>> round(DP(1.0, clip="unit").sigma, 2)  # of noise on sums of vectors of norm 1
    5.6
    """

    epsilon: float = field(metadata={"help": "ε of a differential-privacy guarantee: noisy statistics, no centroids."})
    delta: float = field(default=1e-5, metadata={"help": "Its δ.", "default": "1e-5"})
    clip: float | Literal["unit"] | None = field(
        default=None,
        metadata={"help": "Under DP: the norm of a feature vector, a public number, or 'unit' to scale each to 1."},
    )
    unit: Unit = field(
        default="record", metadata={"help": "Under DP: what is protected, a record, or a subject with all its records."}
    )
    projection: ProjectionName = "auto"
    dims: int = 128
    cells: int = 1
    count_weight: float = 0.5
    spread_weight: float = 1.0
    allow_delta: bool = field(default=False, metadata={"help": "Allow a δ above 1e-5."})
    replay_seed: int | None = None
    erase_clip: float | None = None

    def __post_init__(self) -> None:
        for name, value in {"epsilon": self.epsilon, "delta": self.delta}.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SettingError(f"{name} must be a number; found {value!r}.")
        if not 0 < self.epsilon <= LARGEST_EPSILON:
            raise SettingError(f"epsilon must be above 0 and at most {LARGEST_EPSILON:.0f}; found {self.epsilon}.")
        if not 0 < self.delta < 1:
            raise SettingError(f"delta must lie strictly between 0 and 1; found {self.delta}.")
        if self.delta > LARGEST_DELTA and not self.allow_delta:
            raise SettingError(
                f"delta {self.delta:g} is above {LARGEST_DELTA:g}, which allows publishing single records. "
                "Use a smaller one, or say that you mean it (allow_delta=True, --allow-delta)."
            )
        if self.clip is None:
            raise SettingError(
                "clip is missing: pass the l2 norm that feature vectors are clipped to, a public number that does not "
                "depend on the data, or clip='unit', which scales each vector to norm 1."
            )
        if self.clip != "unit" and not _is_positive(self.clip):
            raise SettingError(f"clip must be 'unit' or a number above 0; found {self.clip!r}.")
        if self.erase_clip is not None and not _is_positive(self.erase_clip):
            raise SettingError(f"erase_clip must be a number above 0; found {self.erase_clip!r}.")
        if self.erase_clip is not None and self.unit != "record":
            raise SettingError("Statistics of an eraser protect records, not subjects: leave erase_clip out.")
        check_choice("unit", self.unit, Unit)
        check_choice("projection", self.projection, ProjectionName)
        for name, number in {"dims": self.dims, "cells": self.cells}.items():
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 4096:
                raise SettingError(f"{name} must be a whole number from 1 to 4096; found {number!r}.")
        for name, weight in {"count_weight": self.count_weight, "spread_weight": self.spread_weight}.items():
            if not (_is_positive(weight) and 1e-6 <= weight <= 1e6):
                raise SettingError(f"{name} must be a number from 1e-6 to 1e6; found {weight!r}.")

    @property
    def mu(self) -> float:
        """The cost of a release, in μ-GDP."""
        return mu_of(self.epsilon, self.delta)

    @property
    def sensitivity(self) -> float:
        """The largest l2 distance that one record, or subject, moves the joint vector by (in units of the clip)."""
        return math.hypot(1.0, self.count_weight, self.spread_weight)

    @property
    def sigma(self) -> float:
        """Deviation of the noise on every number of the joint vector."""
        return self.sensitivity / self.mu

    @property
    def is_replayable(self) -> bool:
        """Whether the noise can be replayed: for tests only, since nothing is protected."""
        return self.replay_seed is not None

    @property
    def mechanism(self) -> str:
        """What protects a message, in words."""
        return str(self)

    def __str__(self) -> str:
        return _in_words(self.epsilon, self.delta, self.unit, self.is_replayable)

    @property
    def scale(self) -> float:
        """The unit of joint vectors: a norm."""
        return 1.0 if isinstance(self.clip, str) else float(self.clip or 1.0)

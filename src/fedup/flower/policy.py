"""Which questions an app answers, within the rules of the node that it runs at."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedup.clients.labels import WhoQuestion
from fedup.errors import SettingError
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Budget


class RefusedError(Exception):
    """The client does not answer; the server gets the reason."""


@dataclass(frozen=True)
class Policy:
    """`least_rows`: nothing is sent of classes with fewer retained rows. `few_rows`: whether moments of fewer than five
    rows of a class may leave, where a server asks for them; sums of one row are the row. `only_private`: only releases
    under differential privacy leave the client. `budget`: what all of them may cost together. `account`: a file on the
    node's disk for what was spent; without one it is in the node's Flower state, which ends with the run or the
    SuperNode. `ask`: a function of the kind of question that gives a reason to refuse it, or None. `answer_after_s`: no
    answer leaves earlier than so many seconds after the question. Choose it longer than any answer takes and shorter
    than the server waits: then nobody sees how long an answer took. `most_kept`: bytes of features that stay in the
    node's state, so that they are computed once for each model (0: none). `most_epsilon`: the largest ε of one release
    where only such are answered and there is no budget.

    A policy travels with the app. It can only narrow what the node's own rules (`fedup node-rules`) allow.
    `open_in_simulation` lets nodes without rules answer in Flower's simulation; a deployed node ignores it.
    """

    least_rows: int = 1
    only_private: bool = False
    budget: Budget | None = None
    account: str | Path | None = None
    ask: Callable[[str], str | None] | None = None
    answer_after_s: float = 0.0
    most_kept: int = 64_000_000
    few_rows: bool = False
    most_epsilon: float = 10.0
    open_in_simulation: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.answer_after_s < math.inf:
            raise SettingError(f"answer_after_s must be 0 or a number of seconds; found {self.answer_after_s}.")
        if self.least_rows < 1:
            raise SettingError(f"least_rows must be 1 or more; found {self.least_rows}.")

    def check(self, kind: str, dp: DP | None) -> None:
        """Raise if a question of that kind, under that guarantee, is not answered."""
        reason = self.ask(kind) if self.ask else None
        if reason is not None:
            raise RefusedError(reason)
        if kind == WhoQuestion.kind or not (self.only_private or self.budget is not None):
            return
        if dp is None:
            raise RefusedError("this client answers under differential privacy only (epsilon and clip)")
        if dp.replay_seed is not None:
            raise RefusedError("noise that can be replayed protects nothing")
        if self.budget is None and dp.epsilon > self.most_epsilon:
            raise RefusedError(f"this client allows ε = {self.most_epsilon:g} for one release at most")

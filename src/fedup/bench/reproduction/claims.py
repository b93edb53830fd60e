"""What the paper claims, judged by our figures: reproduced, partly, not, or not measured yet."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedup.bench.goals import Goal, judge_goals, read_goal
from fedup.bench.reproduction.tables import Claim, PaperTable, Part
from fedup.bench.summary import Block
from fedup.errors import SettingError

_BOUND = re.compile(r"\s*(?P<figure>[\w.-]+)\s*(?P<text>(?:<=|>=).*)")
Blocks = Mapping[str, Sequence[Block]]  # by part


@dataclass(frozen=True)
class Verdict:
    """A claim, and where it holds."""

    claim: Claim
    holds: tuple[str, ...]  # places
    fails: tuple[str, ...]
    unmeasured: tuple[str, ...]

    @property
    def word(self) -> str:
        """In a word or two."""
        if not self.holds and not self.fails:
            return "not measured yet"
        word = "partly" if self.holds and self.fails else "reproduced" if self.holds else "not reproduced"
        return f"{word} so far" if self.unmeasured else word

    @property
    def tone(self) -> str:
        """For the page."""
        tones = {"reproduced": "good", "not reproduced": "bad", "partly": "half"}
        return tones.get(self.word.removesuffix(" so far"), "")

    @property
    def where(self) -> str:
        """In how many places it holds, and where not."""
        judged = len(self.holds) + len(self.fails)
        if not judged:
            return f"none of {len(self.unmeasured)} measured"
        text = f"holds in {len(self.holds)} of {judged}"
        text += f"; not in {', '.join(self.fails)}" if self.fails else ""
        return text + (f"; {len(self.unmeasured)} not measured yet" if self.unmeasured else "")


def judge(table: PaperTable, blocks: Blocks) -> list[Verdict]:
    """The claims of a table, each in every place that it is about."""
    return [_judged(table, claim, blocks) for claim in table.claims]


def _judged(table: PaperTable, claim: Claim, blocks: Blocks) -> Verdict:
    found: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for part in table.parts:
        for federation, scenario in part.places():
            is_meant = not claim.scenarios or scenario in claim.scenarios
            if is_meant and (not claim.federations or federation in claim.federations):
                goals = [_goal(part, federation, scenario, text) for text in claim.holds]
                judged = list(judge_goals(goals, blocks[part.name]))
                is_met = all(not one.missed_by for one in judged) if len(judged) == len(goals) else None
                name = " ".join(word for word in (federation, scenario, part.name) if word)
                found[is_met].append(name)
    return Verdict(claim, tuple(found[True]), tuple(found[False]), tuple(found[None]))


def _goal(part: Part, federation: str, scenario: str, text: str) -> Goal:
    where, parsed = f"{part.experiment.name}: paper.claims", _BOUND.fullmatch(text)
    if parsed is None:
        raise SettingError(f'{where}: a bound reads like "fedup_paper.r_a >= retrain.r_a - 0.02"; found {text!r}.')
    methods = [method.name for method in part.experiment.methods]
    return read_goal(federation, scenario, parsed["figure"], parsed["text"], methods, where)

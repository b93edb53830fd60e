"""A node with rules of its own on disk, which can be started again with another app."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
import torch
from flwr.app import Context, RecordDict
from tests.flower._grid import World
from tests.flower._node import CLIENT, Node

from fedup.clients.moments import MomentsQuestion
from fedup.flower.wire import Answer
from fedup.privacy import DP, Budget
from fedup.statistics.integer_moments import MomentConfig

K = 8  # fewest rows of a group
PRIVACY = {"most_epsilon": 1.0, "total_epsilon": 2.5}
BUDGET = Budget(2.5)
EVERYTHING = ["moments", "centroids", "eraser", "tallies", "labels"]
RULES = {"format": 1, "questions": ["moments"], "bases": "any", "cuts": ["last"], "least_rows": K, "privacy": PRIVACY}


def write_rules(path: Path, **changes: Any) -> Path:
    """Rules in a file; None leaves one out."""
    path.write_text(tomli_w.dumps({name: own for name, own in {**RULES, **changes}.items() if own is not None}))
    return path


class RuledNode(Node):
    """A node that finds its rules by its node-config; `restart` loses its state, and may bring another app."""

    def __init__(self, world: World, rules: Path, **app: Any) -> None:
        super().__init__(world, world.app(CLIENT, **app))
        self.rules, self.folder = rules, rules.with_name(f"{rules.name}.state")
        self.restart()

    def restart(self, **app: Any) -> None:
        if app:
            self.app = self.world.app(CLIENT, **app)
        config = {"partition-id": CLIENT, "fedup-rules": str(self.rules)}
        self.context = Context(0, 7, config, RecordDict(), {"fedup-open": True})  # a run's own settings open nothing

    def moments(self, labels: list[int] | None = None, excluded: list[int] | None = None, **more: Any) -> Answer:
        how = {"how": asdict(MomentConfig(least_rows=1)), "labels": labels, "without": [], "excluded": excluded or []}
        return self.ask(MomentsQuestion.kind, **{"cut": "head", **how, **more})

    def spent(self) -> float:
        """μ², by the account on disk."""
        path = self.folder / "account.json"
        charges = json.loads(path.read_text())["charges"] if path.exists() else []
        return sum(charge["mu"] ** 2 for charge in charges)

    def log(self) -> list[dict]:
        path = self.folder / "answers.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def small_groups(sets: list[set[int]]) -> list[set[int]]:
    """Rows that all of these sets together single out: fewer than K that are in the same ones."""
    groups: dict[tuple[bool, ...], set[int]] = {}
    for row in set().union(*sets) if sets else ():
        groups.setdefault(tuple(row in own for own in sets), set()).add(row)
    return [group for group in groups.values() if len(group) < K]


def release_details(epsilon: float, **more: Any) -> dict:
    dp = DP(epsilon, clip="unit")
    return {"cut": "head", "how": asdict(dp), "labels": None, "without": [], "excluded": [], **more}


def blanked(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """With other values in some rows."""
    x = x.clone()
    x[rows] = 0.5
    return x

"""In words, from the results: where a control does better than FedUP."""

import math
from collections.abc import Iterator, Sequence

from fedup.bench.experiment import REFERENCE
from fedup.bench.metrics import Column, columns
from fedup.bench.shown import show_value
from fedup.bench.summary import Block, Row

OURS = "fedup"
_JUDGED = ("r_a", "f_a", "f_a_train", "test", "asr", "zero_a", "ps", "triggered", "tow", "tv", "time_to_effect")
_LEAST = 0.002  # of a share: less is no difference
_USABLE = 0.1  # a control that loses more R-A than this to Retrain is no alternative


def verdicts(blocks: Sequence[Block]) -> list[str]:
    """A sentence for each control that beats FedUP somewhere, in every seed in which there was something to forget."""
    return [sentence for block in blocks for sentence in _of_block(block)]


def _of_block(block: Block) -> Iterator[str]:
    ours, reference = block.row(OURS), block.row(REFERENCE)
    if ours is None or reference is None:
        return
    valid = set(ours.seeds) - set(block.failed_attacks)
    for row in block.rows:
        if row is ours or row is reference or not _usable(row, reference):
            continue
        better = [
            column for column in columns() if column.key in _JUDGED and _beats(row, ours, reference, column, valid)
        ]
        if better:
            told = ", ".join(_told(row, ours, column) for column in better)
            yield f"{block.federation}, {block.scenario.name}: {row.method.name} does better than FedUP on {told}."


def _usable(row: Row, reference: Row) -> bool:
    here, goal = row.figure("r_a"), reference.figure("r_a")
    return here is not None and goal is not None and here.mean >= goal.mean - _USABLE


def _beats(row: Row, ours: Row, reference: Row, column: Column, seeds: set[int]) -> bool:
    """Whether the row is better in every one of these seeds, and by more than nothing."""
    theirs, mine, goal = (figure.values if (figure := one.figure(column.key)) else {} for one in (row, ours, reference))
    if not seeds or not seeds <= theirs.keys():
        return False
    if column.key == "time_to_effect":  # a moment that we never reach is later than any
        mine = {seed: mine.get(seed, math.inf) for seed in seeds}
    least = _LEAST if column.style == "share" else 0.0
    return seeds <= mine.keys() and all(_gain(theirs[s], mine[s], goal.get(s), column) > least for s in seeds)


def _gain(theirs: float, mine: float, goal: float | None, column: Column) -> float:
    if column.better == "retrain":
        return 0.0 if goal is None else abs(mine - goal) - abs(theirs - goal)
    return mine - theirs if column.better == "lower" else theirs - mine


def _told(row: Row, ours: Row, column: Column) -> str:
    theirs, mine = (one.figure(column.key) for one in (row, ours))
    values = [show_value(figure.mean, column) if figure else "never" for figure in (theirs, mine)]
    return f"{column.title} ({values[0]} against {values[1]})"

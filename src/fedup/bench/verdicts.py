"""In words, from the results: where another method does better than FedUP."""

import math
from collections.abc import Iterator, Sequence

from fedup.bench.experiment import REFERENCE
from fedup.bench.metrics import Column, columns
from fedup.bench.shown import show_value
from fedup.bench.summary import Block, Row

OURS = "fedup"
JUDGED = ("r_a", "f_a", "f_a_train", "test", "asr", "zero_a", "ps", "triggered", "tow", "tv", "time_to_effect")
_LEAST = 0.002  # of a share: less is no difference
_LEAST_SHARE = 0.1  # of times and bytes: a tenth less, or no less
_USABLE = 0.1  # a method that loses more R-A than this to Retrain, or keeps more of a backdoor, is no alternative


def verdicts(blocks: Sequence[Block]) -> list[str]:
    """A sentence for each method that beats FedUP somewhere, in every seed in which there was something to forget."""
    return [sentence for block in blocks for sentence in _of_block(block)]


def _of_block(block: Block) -> Iterator[str]:
    place = f"{block.federation}, {block.scenario.name}"
    ours, reference = block.row(OURS), block.row(REFERENCE)
    valid = (set(ours.seeds) & set(reference.seeds) if ours and reference else set()) - set(block.failed_attacks)
    if ours is None or reference is None or not valid:
        yield f"{place}: nothing could be compared; FedUP and Retrain have no seed in common in which an attack took."
        return
    for row in block.rows:
        seeds = valid & set(row.seeds)
        if row.method.use in (OURS, REFERENCE) or not seeds or not _usable(row, reference, seeds):
            continue
        better = [column for column in columns() if column.key in JUDGED and beats(row, ours, reference, column, seeds)]
        if better:
            told = ", ".join(_told(row, ours, reference, column, seeds) for column in better)
            some = "" if seeds == set(reference.seeds) else f" (in {len(seeds)} of {len(reference.seeds)} seeds)"
            yield f"{place}: {row.method.name} does better than FedUP on {told}{some}."


def _usable(row: Row, reference: Row, seeds: set[int]) -> bool:
    here, goal = row.figure("r_a", seeds), reference.figure("r_a", seeds)
    return here is not None and goal is not None and here.mean >= goal.mean - _USABLE


def beats(row: Row, ours: Row, reference: Row, column: Column, seeds: set[int]) -> bool:
    """Whether the row is better in every one of these seeds, and by more than nothing."""
    theirs, mine, goal = (figure.values if (figure := one.figure(column.key)) else {} for one in (row, ours, reference))
    if column.timed:  # only where both have clean times
        seeds = seeds & set(row.times) & set(ours.times)
    if not seeds or not seeds <= theirs.keys():
        return False
    if column.key == "zero_a" and not _resists(row, reference, seeds):
        return False
    if column.key == "time_to_effect":  # a moment that we never reach is later than any
        mine = {seed: mine.get(seed, math.inf) for seed in seeds}
    if not seeds <= mine.keys():
        return False
    least = {s: _LEAST if column.style == "share" else _LEAST_SHARE * theirs[s] for s in seeds}
    return all(_gain(theirs[s], mine[s], goal.get(s), column) > least[s] for s in seeds)


def _resists(row: Row, reference: Row, seeds: set[int]) -> bool:
    """Whether the backdoor is gone: who calls every triggered row by its class finds all that are of it."""
    here, goal = row.figure("asr", seeds), reference.figure("asr", seeds)
    return here is not None and goal is not None and here.mean <= goal.mean + _USABLE


def _gain(theirs: float, mine: float, goal: float | None, column: Column) -> float:
    if column.better == "retrain":
        return 0.0 if goal is None else abs(mine - goal) - abs(theirs - goal)
    return mine - theirs if column.better == "lower" else theirs - mine


def _told(row: Row, ours: Row, reference: Row, column: Column, seeds: set[int]) -> str:
    """Means over the seeds that were judged; where closeness to Retrain decides, of the distances: a mean of figures
    above and below it would look close."""
    if column.better == "retrain":
        near, far = (show_value(_distance(one, reference, column, seeds), column) for one in (row, ours))
        return f"{column.title} ({near} from Retrain's against {far})"
    if column.timed:
        seeds = seeds & set(row.times) & set(ours.times)
    figures = [one.figure(column.key, seeds) for one in (row, ours)]
    values = [show_value(figure.mean, column) if figure else "never" for figure in figures]
    return f"{column.title} ({values[0]} against {values[1]})"


def _distance(row: Row, reference: Row, column: Column, seeds: set[int]) -> float:
    here, goal = row.figure(column.key), reference.figure(column.key)
    assert here is not None and goal is not None  # or nothing would have been found better
    return sum(abs(here.values[seed] - goal.values[seed]) for seed in seeds) / len(seeds)

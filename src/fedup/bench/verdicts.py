"""Sentences about results: where another method beats FedUP, where FedUP is worst, and a line for each method: what it
did, what it cost, and how it compares with FedUP."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from fedup.bench.experiment import REFERENCE, Experiment
from fedup.bench.format import show_value
from fedup.bench.metrics import Column, columns, columns_of
from fedup.bench.summary import FLOOR, ORIGINAL, Block, Row
from fedup.bench.tuning import grid_of

OURS = "fedup"
PRIVACY = ("mia_auc", "mia_tpr", "mia_learned", "attack_auc")  # membership inference, by its distance to Retrain's
CLOSE = ("tow", "tv", "kl")  # a second Retrain is their floor
JUDGED = (
    *("r_a", "f_a", "f_a_train", "test", "asr", "zero_a", "ps", "triggered"),
    *(*CLOSE, "forget_loss", *PRIVACY, "time_to_effect"),
)
_LEAST = 0.002  # of a share: less is no difference
_LEAST_OF = {"kl": 0.01, "forget_loss": 0.01} | dict.fromkeys(PRIVACY, 0.01)  # an attack is no finer on these rows
_LEAST_SHARE = 0.1  # of times, bytes, KL and losses: a tenth less, or no less
_USABLE = 0.1  # a method that loses more R-A than this to Retrain, or keeps more of a backdoor, is no alternative
_TAKES = {  # what a row's words say that it took: name before, unit after
    "time": "{}",
    "bytes_all": "traffic of {}",
    "storage_bytes": "storage of {}",
    "clients_contacted": "{} clients",
    "local_steps": "{} local steps",
}


def verdicts(blocks: Sequence[Block]) -> list[str]:
    """A sentence for each method that beats FedUP on a figure in every valid seed, and one for each place where FedUP
    is worst on a figure. A seed is valid if there was something to forget."""
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
        if row.method.use in (OURS, REFERENCE, FLOOR) or not seeds or not _usable(row, reference, seeds):
            continue
        better = [column for column in _judged() if beats(row, ours, reference, column, seeds)]
        if better:
            compared = [_compared(row, ours, reference, column, seeds) for column in better]
            figures = [f"{text}{_above(block, column, seeds)})" for text, column in zip(compared, better, strict=True)]
            some = "" if seeds == set(reference.seeds) else f" (in {len(seeds)} of {len(reference.seeds)} seeds)"
            yield f"{place}: {row.method.name} does better than FedUP on {', '.join(figures)}{some}."
    worst = [text for column in _judged() if (text := _worst(block, ours, reference, column, valid))]
    if worst:
        yield f"{place}: FedUP is the worst of all on {', '.join(worst)}."


def _judged() -> list[Column]:
    return [column for column in columns() if column.key in JUDGED]


def _above(block: Block, column: Column, seeds: set[int]) -> str:
    """The floor of a distance to Retrain: that of a second Retrain."""
    floor = block.floor.figure(column.key, seeds) if block.floor and column.key in CLOSE else None
    return f", floor {show_value(floor.mean, column)}" if floor else ""


def _worst(block: Block, ours: Row, reference: Row, column: Column, valid: set[int]) -> str:
    """The figures, if FedUP's mean is worse than that of every usable rival, and at least two rivals have a figure."""
    rivals = [
        row
        for row in block.rows
        if row.method.use not in (OURS, REFERENCE, FLOOR, ORIGINAL)
        and getattr(row.method.settings, "answer", True)
        and set(row.seeds) >= valid
        and _usable(row, reference, valid)
        and (column.key != "zero_a" or _resists(row, reference, valid))
    ]
    bad = [badness for row in rivals if (badness := _mean_badness(row, reference, column, valid)) is not None]
    mine = _mean_badness(ours, reference, column, valid)
    if mine is None or len(bad) < 2 or mine - max(bad) <= _least(column, max(map(abs, bad))):
        return ""
    sign = -1 if column.better == "higher" else 1
    here, best, next_worst = (show_value(sign * value, column) for value in (mine, min(bad), max(bad)))
    what = " from Retrain's" if column.better == "retrain" else ""
    return f"{column.title} ({here}{what} against {best} … {next_worst}{_above(block, column, valid)})"


def _badness(value: float, goal: float | None, column: Column) -> float:
    """Larger is worse: the distance to Retrain's value (0 without one), the value, or its negative."""
    if column.better == "retrain":
        return 0.0 if goal is None else abs(value - goal)
    return value if column.better == "lower" else -value


def _mean_badness(row: Row, reference: Row, column: Column, seeds: set[int]) -> float | None:
    """None if a seed has no figure. Distances to Retrain are averaged, not figures: a mean of figures above and below
    Retrain's would look close."""
    values, goals = row.values(column.key), reference.values(column.key)
    if not seeds or not seeds <= values.keys() or (column.better == "retrain" and not seeds <= goals.keys()):
        return None
    return statistics.fmean(_badness(values[seed], goals.get(seed), column) for seed in seeds)


def _usable(row: Row, reference: Row, seeds: set[int]) -> bool:
    here, goal = row.figure("r_a", seeds), reference.figure("r_a", seeds)
    return here is not None and goal is not None and here.mean >= goal.mean - _USABLE


def beats(row: Row, ours: Row, reference: Row, column: Column, seeds: set[int]) -> bool:
    """Whether the row is better in every seed, by more than the least difference."""
    theirs, mine, goals = (one.values(column.key) for one in (row, ours, reference))
    if column.timed:  # only where both have clean times
        seeds = seeds & set(row.times) & set(ours.times)
    if column.key == "time_to_effect":  # a moment that we never reach is later than any
        mine = {seed: mine.get(seed, math.inf) for seed in seeds}
    if not seeds or not seeds <= theirs.keys() & mine.keys():
        return False
    if column.key == "zero_a" and not _resists(row, reference, seeds):
        return False
    return all(
        _badness(mine[seed], goals.get(seed), column) - _badness(theirs[seed], goals.get(seed), column)
        > _least(column, abs(theirs[seed]))
        for seed in seeds
    )


def _least(column: Column, size: float) -> float:
    """The least difference that counts."""
    if column.style == "share":
        return _LEAST_OF.get(column.key, _LEAST)
    return max(_LEAST_OF.get(column.key, 0.0), _LEAST_SHARE * size)


def _resists(row: Row, reference: Row, seeds: set[int]) -> bool:
    """Whether the backdoor is gone: a model that answers every triggered row with its class has a 0A of 1, too."""
    here, goal = row.figure("asr", seeds), reference.figure("asr", seeds)
    return here is not None and goal is not None and here.mean <= goal.mean + _USABLE


def _compared(row: Row, ours: Row, reference: Row, column: Column, seeds: set[int]) -> str:
    """The text up to the closing bracket: means over the judged seeds."""
    if column.timed:
        seeds = seeds & set(row.times) & set(ours.times)
    sign, what = -1 if column.better == "higher" else 1, " from Retrain's" if column.better == "retrain" else ""
    means = [_mean_badness(one, reference, column, seeds & one.values(column.key).keys()) for one in (row, ours)]
    values = ["never" if mean is None else show_value(sign * mean, column) for mean in means]
    return f"{column.title} ({values[0]}{what} against {values[1]}"


def rows_in_words(experiment: Experiment, block: Block) -> list[str]:
    """A line for each method that reports what it did."""
    return [line for row in block.rows if (line := _line(experiment, block, row))]


def _line(experiment: Experiment, block: Block, row: Row) -> str:
    did = next((text for result in row.results.values() if (text := result.get("about", {}).get("did"))), None)
    if did is None:
        return ""
    taken = ((column, figure) for column in columns_of(*_TAKES) if (figure := row.figure(column.key)))
    sentences = [
        f"{row.method.name}{_settings(experiment, block, row)}: {did}.",
        _sentence((_TAKES[column.key].format(show_value(figure.mean, column)) for column, figure in taken), "It took "),
        _knows(row, block.row(REFERENCE)),
        _privacy(block, row),
        _beside_ours(block, row),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _settings(experiment: Experiment, block: Block, row: Row) -> str:
    """The settings of the grid, and whether they were tuned."""
    values = asdict(row.method.settings)
    chosen = ", ".join(f"{name} = {values[name]}" for name in grid_of(row.method.use))
    tuned = (block.federation, block.scenario.name, row.method.name) in experiment.tuned
    return f" ({chosen}; {'tuned' if tuned else 'not tuned'})" if chosen else ""


def _knows(row: Row, reference: Row | None) -> str:
    """R-A, and F-A or ASR, beside Retrain's."""
    to_go = next((key for key in ("f_a", "asr", "f_a_train") if row.figure(key)), "")
    other = None if row is reference else reference
    return _sentence(_beside(row, column, other) for column in columns_of("r_a", to_go))


def _privacy(block: Block, row: Row) -> str:
    """What outputs reveal about forgotten rows, beside Retrain's figures or the floor."""
    reference, floor = block.row(REFERENCE), None if row is block.floor else block.floor
    if reference is None or row is reference:
        return ""
    return _sentence(
        _beside(row, column, floor, "floor") if column.key in CLOSE else _beside(row, column, reference)
        for column in columns_of("tv", "kl", "forget_loss", *PRIVACY)
    )


def _beside_ours(block: Block, row: Row) -> str:
    """On which figures it beats FedUP, and FedUP beats it, in every valid seed."""
    ours, reference = block.row(OURS), block.row(REFERENCE)
    if ours is None or reference is None or row is ours or row is block.floor:
        return ""
    seeds = set(row.seeds) & set(ours.seeds) & set(reference.seeds) - set(block.failed_attacks)
    if not seeds:
        return "No seed in which it can be compared with FedUP."
    judged = columns_of(*JUDGED, "time", "bytes_all", "storage_bytes")
    wins = ", ".join(column.title for column in judged if beats(row, ours, reference, column, seeds))
    loses = ", ".join(column.title for column in judged if beats(ours, row, reference, column, seeds))
    lost, won = (f"on {titles}" if titles else "nowhere" for titles in (wins, loses))
    return f"FedUP loses to it {lost}. FedUP is better {won}."


def _beside(row: Row, column: Column, other: Row | None, name: str = "Retrain") -> str:
    """A figure, with another row's in brackets; empty without a figure."""
    figure, goal = row.figure(column.key), other.figure(column.key) if other else None
    brackets = f" ({name} {show_value(goal.mean, column)})" if goal else ""
    return f"{column.title} {show_value(figure.mean, column)}{brackets}" if figure else ""


def _sentence(parts: Iterable[str], start: str = "") -> str:
    text = ", ".join(part for part in parts if part)
    return f"{start}{text}." if text else ""

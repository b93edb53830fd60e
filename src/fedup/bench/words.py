"""One line of words for each row of a table: what the method did, what it took, and how it stands beside FedUP."""

from collections.abc import Sequence
from dataclasses import asdict

from fedup.bench.experiment import REFERENCE, Experiment
from fedup.bench.format import show_value
from fedup.bench.metrics import Column, columns
from fedup.bench.summary import Block, Row
from fedup.bench.tuning import grid_of
from fedup.bench.verdicts import CLOSE, JUDGED, OURS, PRIVACY, beats

_KNOWS = ("r_a", "f_a", "asr", "f_a_train")  # the first of what is to stay and the first of what is to go are told
_TAKES = ("time", "bytes_all", "storage_bytes", "clients_contacted", "local_steps")
_COSTS = ("time", "bytes_all", "storage_bytes")  # compared with FedUP's beside what is judged anyway


def rows_in_words(experiment: Experiment, block: Block) -> list[str]:
    """A line for each method that answered and says what it did."""
    return [line for row in block.rows if (line := _line(experiment, block, row))]


def _line(experiment: Experiment, block: Block, row: Row) -> str:
    did = next((told for result in row.results.values() if (told := result.get("about", {}).get("did"))), None)
    if did is None:
        return ""
    sentences = [
        f"{row.method.name}{_settings(experiment, block, row)}: {did}.",
        _takes(row),
        _knows(row, block.row(REFERENCE)),
        _privacy(block, row),
        _beside_ours(block, row),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _settings(experiment: Experiment, block: Block, row: Row) -> str:
    """What could be chosen, and who chose it."""
    values = asdict(row.method.settings)
    chosen = ", ".join(f"{name} = {values[name]}" for name in grid_of(row.method.use))
    tuned = (block.federation, block.scenario.name, row.method.name) in experiment.tuned
    return f" ({chosen}; {'tuned' if tuned else 'not tuned'})" if chosen else ""


def _takes(row: Row) -> str:
    parts = _figures(row, _TAKES)
    return f"It took {', '.join(parts)}." if parts else ""


def _knows(row: Row, reference: Row | None) -> str:
    """What is to stay and what is to go, beside Retrain's."""
    told = []
    for column in _columns(("r_a", next((key for key in _KNOWS[1:] if row.figure(key)), ""))):
        figure = row.figure(column.key)
        goal = reference.figure(column.key) if reference is not None and reference is not row else None
        if figure:
            beside = f" (Retrain {show_value(goal.mean, column)})" if goal else ""
            told.append(f"{column.title} {show_value(figure.mean, column)}{beside}")
    return f"{', '.join(told)}." if told else ""


def _privacy(block: Block, row: Row) -> str:
    """What its outputs still tell of the forgotten rows: each figure beside Retrain's, or beside the floor."""
    reference = block.row(REFERENCE)
    if reference is None or row is reference:
        return ""
    told = []
    for column in _columns(("tv", "kl", "forget_loss", *PRIVACY)):
        figure = row.figure(column.key)
        floor = column.key in CLOSE
        beside = (block.floor if floor else reference) if row is not block.floor else None if floor else reference
        goal = beside.figure(column.key) if beside else None
        if figure:
            name = f" ({'floor' if floor else 'Retrain'} {show_value(goal.mean, column)})" if goal else ""
            told.append(f"{column.title} {show_value(figure.mean, column)}{name}")
    return f"{', '.join(told)}." if told else ""


def _beside_ours(block: Block, row: Row) -> str:
    """Where it is better than FedUP, and where FedUP is: in every seed in which there was something to forget."""
    ours, reference = block.row(OURS), block.row(REFERENCE)
    if ours is None or reference is None or row is ours or row is block.floor:
        return ""
    seeds = set(row.seeds) & set(ours.seeds) & set(reference.seeds) - set(block.failed_attacks)
    if not seeds:
        return "No seed in which it can be compared with FedUP."
    judged = _columns((*JUDGED, *_COSTS))
    wins = [column.title for column in judged if beats(row, ours, reference, column, seeds)]
    loses = [column.title for column in judged if beats(ours, row, reference, column, seeds)]
    return (f"FedUP loses to it on {', '.join(wins)}. " if wins else "FedUP loses to it nowhere. ") + (
        f"FedUP is better on {', '.join(loses)}." if loses else "FedUP is better nowhere."
    )


def _figures(row: Row, keys: Sequence[str]) -> list[str]:
    found = [(column, figure) for column in _columns(keys) if (figure := row.figure(column.key))]
    return [f"{_NAMES.get(c.key, '')}{show_value(f.mean, c)}{_UNITS.get(c.key, '')}" for c, f in found]


_NAMES = {"bytes_all": "traffic of ", "storage_bytes": "storage of "}
_UNITS = {"clients_contacted": " clients", "local_steps": " local steps"}


def _columns(keys: Sequence[str]) -> list[Column]:
    return sorted((column for column in columns() if column.key in keys), key=lambda column: keys.index(column.key))

"""The report of an experiment: Markdown, CSV and one HTML page, all from the same result files."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedup.bench.experiment import REFERENCE, Experiment
from fedup.bench.figures import (
    accuracy_against_epsilon,
    accuracy_under_attack,
    methods_against_retrain,
    times_of_methods,
)
from fedup.bench.format import show_count, show_figure, show_value
from fedup.bench.goals import GOALS_ABOUT, GOALS_HEAD, goal_rows
from fedup.bench.metrics import Column, columns, columns_of
from fedup.bench.overview import figure_to_go, overview
from fedup.bench.privacy_report import BUDGET_ABOUT, BUDGET_TITLE, budget_table, curves
from fedup.bench.summary import FLOOR, Block, Figure, Row
from fedup.bench.tables import GENERATED, markdown_table
from fedup.bench.verdicts import CLOSE, OURS, rows_in_words, verdicts
from fedup.files import write_text
from fedup.page import render

_TABLES = {
    "accuracy": "What it still knows",
    "closeness": "How close it is to Retrain",
    "cost": "What it takes",
}
_MARK = " †"
_SHARED = " ‡"


def write_report(experiment: Experiment, blocks: Sequence[Block], *, tables: Path, pages: Path) -> list[Path]:
    """Write NAME.md and NAME.csv into one folder and NAME.html into another; their paths."""
    name, attacks, guarded = experiment.name, _under_attack(blocks), curves(blocks)
    report = _report(experiment, blocks)
    epsilon_figure = accuracy_against_epsilon(guarded) if guarded else ""
    texts = {tables / f"{name}.md": _markdown(report), tables / f"{name}.csv": _csv(blocks)}
    if drawn := accuracy_under_attack(attacks) if attacks else epsilon_figure:
        texts[tables / f"{name}.svg"] = drawn + "\n"
    has_floor = any(block.floor for block in blocks)
    own = {"overview": overview(blocks), "has_floor": has_floor, "epsilon_figure": epsilon_figure}
    texts[pages / f"{name}.html"] = render("experiment", report | own)
    for path, text in texts.items():  # all of it is made before any of it is written
        write_text(path, text)
    return list(texts)


def _report(experiment: Experiment, blocks: Sequence[Block]) -> dict[str, Any]:
    """What Markdown and page have in common."""
    sigmas, budgets = budget_table(blocks)
    return {
        "name": experiment.name,
        "title": experiment.title,
        "goals": {"about": GOALS_ABOUT, "head": GOALS_HEAD, "rows": goal_rows(experiment.goals, blocks)},
        "budgets": {"title": BUDGET_TITLE, "about": BUDGET_ABOUT, "head": sigmas, "rows": budgets},
        "losses": {"title": _LOSSES, "rule": _RULE, "verdicts": verdicts(blocks) or ["Nowhere in these results."]},
        "sections": [_section(experiment, block) for block in blocks],
        "legend": _legend(blocks),
    }


def _section(experiment: Experiment, block: Block) -> dict[str, Any]:
    """One federation in one scenario."""
    seeds, failed, sides = _seeds(block), block.failed_attacks, _sides(block)
    story = f"With seed {min(block.stories)}: {block.stories[min(block.stories)]}" if block.stories else ""
    attack = (
        f"† The attack did not take in {len(failed)} of {show_count(len(seeds), 'seed')} "
        f"({', '.join(map(str, failed))}): nothing was there to forget, and nothing is tested."
    )
    times = {row.method.name: figure.mean for row in block.rows if (figure := row.figure("time")) and figure.mean > 0}
    return {
        "title": f"{block.federation}, {block.scenario.name}",
        "seeds": f"n = {show_count(len(seeds), 'seed')}",
        "about": _about(block),
        "story": story,
        "attack": attack if failed else "",
        "tables": [_table(block, table, head) for table in _TABLES if (head := _head(block, table))],
        "unsupported": [row.method.name for row in block.rows if not row.supported],
        "words": rows_in_words(experiment, block),
        "failures": _failures(block),
        "sides_figure": methods_against_retrain(sides, REFERENCE) if sides else "",
        "times_figure": times_of_methods(times) if times else "",
    }


def _table(block: Block, table: str, head: Sequence[tuple[Column, bool]]) -> dict[str, Any]:
    cells = [{"title": "method", "tip": "", "largest_first": False}]
    for column, is_paper in head:
        tip, largest_first = "As printed in the paper." if is_paper else column.about, column.better == "higher"
        title = f"{column.title}, paper" if is_paper else column.title
        cells.append({"title": title, "tip": tip, "largest_first": largest_first})
    looks = {OURS: "ours", REFERENCE: "anchor"}
    rows = [
        {
            "look": looks.get(row.method.name, ""),
            "supported": row.supported,
            "cells": _cells(block, row, head),
        }
        for row in block.rows
    ]
    notes = " ".join(note for write in _NOTES.get(table, ()) if (note := write(block)))
    return {"title": _TABLES[table], "notes": notes, "head": cells, "rows": rows}


def _markdown(report: dict[str, Any]) -> str:
    """The report without figures."""
    goals, budgets, losses = report["goals"], report["budgets"], report["losses"]
    parts = [GENERATED.format(folder=f"benchmarks/results/{report['name']}"), f"# {report['title']}"]
    if goals["rows"]:
        parts += ["## Goals", goals["about"], markdown_table(goals["head"], goals["rows"])]
    if budgets["rows"]:
        parts += [f"## {budgets['title']}", budgets["about"], markdown_table(budgets["head"], budgets["rows"])]
    parts += [f"## {losses['title']}", losses["rule"], _bullets(losses["verdicts"])]
    for section in report["sections"]:
        parts += [f"## {section['title']}", section["about"], section["story"], section["attack"]]
        for table in section["tables"]:
            titles, rows = [cell["title"] for cell in table["head"]], [row["cells"] for row in table["rows"]]
            texts = [[text for text, _ in cells] for cells in rows]
            parts += [f"### {table['title']}", table["notes"], markdown_table(titles, texts)]
        if section["unsupported"]:
            parts.append(f"Not for such requests, and shown as –: {', '.join(section['unsupported'])}.")
        if section["words"]:
            parts += ["### In words", _bullets(section["words"])]
        parts += section["failures"]
    parts += ["## Columns", _bullets([f"{title}: {meaning}" for title, meaning in report["legend"]])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _bullets(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _under_attack(blocks: Sequence[Block]) -> dict[str, dict[str, tuple[float, float]]]:
    """Accuracy on triggered and on clean test rows, by federation (and scenario, where it has several) and method."""
    attacked = [block for block in blocks if any(row.figure("triggered") for row in block.rows)]
    several = len({block.scenario.name for block in attacked}) > 1
    found = {}
    for block in attacked:
        name = f"{block.federation}\n{block.scenario.name}" if several else block.federation
        found[name] = {
            row.method.name: (triggered.mean, clean.mean)
            for row in block.rows
            if (triggered := row.figure("triggered")) and (clean := row.figure("test")) and len(row.seeds) > 1
        }
    return {name: methods for name, methods in found.items() if methods}


def _head(block: Block, table: str) -> list[tuple[Column, bool]]:
    """The columns of a table; beside those that the paper printed a figure for, the paper's own."""
    shown: list[tuple[Column, bool]] = []
    for column in block.shown(table):
        shown.append((column, False))
        if any(column.key in row.paper for row in block.rows):
            shown.append((column, True))
    return shown


def _cells(block: Block, row: Row, head: Sequence[tuple[Column, bool]]) -> list[tuple[str, float | None]]:
    """Texts and the values that they are sorted by."""
    mark = _MARK if block.failed_attacks else ""
    missing = f" (n = {len(row.seeds)})" if 0 < len(row.seeds) < len(_seeds(block)) else ""
    cells: list[tuple[str, float | None]] = [(f"{row.method.name}{mark}{missing}", None)]
    for column, is_paper in head:
        if is_paper:
            value = row.paper.get(column.key)
            cells.append(("" if value is None else show_value(value, column), value))
            continue
        figure = row.figure(column.key)
        text = show_figure(figure, column)
        if figure is None and row.failures:
            text = "failed"
        elif figure is None and row.never(column.key):
            text = "never"
        elif shared := row.uncounted(column.key):
            text = show_figure(shared, column) + (_SHARED if any(shared.values.values()) else "")  # nothing takes 0 s
        elif figure is not None and figure.n < len(row.seeds) and not column.timed:
            text += f" ({figure.n} of {len(row.seeds)} seeds)"
        if column.key == "time_to_effect" and 0 < row.reached < len(row.seeds):
            text += f" (reached in {row.reached} of {len(row.seeds)} seeds)"
        cells.append((text, figure.mean if figure else None))
    return cells


def _seeds(block: Block) -> list[int]:
    return sorted({seed for row in block.rows for seed in row.results})


def _about(block: Block) -> str:
    config, seeds = block.config, _seeds(block)
    rows = f"{config['rows']:,} rows of " if config["rows"] else ""
    drawn = f", {config['clients_per_round']} a round" if config["clients_per_round"] else ""
    return (
        f"{rows}{Path(config['data']).name}, {Path(config['model']).stem}, {config['clients']} clients{drawn}, "
        f"{config['partition']}, "
        f"{show_count(config['rounds'], 'round')} of {show_count(config['epochs'], 'epoch')}, "
        f"{config['optimizer']} lr {config['lr']:g}, batch {config['batch_size']}. "
        f"n = {show_count(len(seeds), 'seed')} ({', '.join(map(str, seeds))})"
        f"{', mean ± deviation' if len(seeds) > 1 else ''}. "
        f"On {'; '.join(block.machines)}. Commit {', '.join(block.commits)}."
    )


def _spread_note(block: Block) -> str:
    """Retrain's own spread from seed to seed: a gap within it is no gap."""
    retrained = block.row(REFERENCE)
    spreads = [
        f"{column.title} {100 * figure.std:.2f}"
        for column in columns_of("r_a", "f_a", "f_a_train", "test")
        if retrained and (figure := retrained.figure(column.key)) and figure.std is not None
    ]
    return f"Retrain's own deviation from seed to seed, in points: {', '.join(spreads)}." if spreads else ""


def _floor_note(block: Block) -> str:
    """How far two retrainings are apart: closer to Retrain than that is no closer."""
    floor = block.floor
    if floor is None:
        return f"Floor of ToW, TV and KL, a second Retrain with other seeds (`{FLOOR}`): not measured."
    figures = [(column, floor.figure(column.key)) for column in columns_of(*CLOSE, "attack_auc")]
    texts = ", ".join(f"{column.title} {show_figure(figure, column)}" for column, figure in figures if figure)
    return f"Floor, a second Retrain with other seeds (`{floor.method.name}`, n = {len(floor.seeds)}): {texts}."


def _time_note(block: Block) -> str:
    """Which times count, and that the others do not."""
    notes, seeds = [], sorted({seed for row in block.rows for seed in row.times})
    if seeds:
        notes.append(
            f"Clean times (`fedup bench time`: one process on an idle device, a warm-up, median of three runs) with "
            f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}, on {block.timed_on}."
        )
    if any(row.uncounted(column.key) for row in block.rows for column in block.shown("cost")):
        notes.append(
            "‡ shared: measured once, on a device that other processes may have used. Such times enter no ratio, no "
            "goal and no sentence."
        )
    return " ".join(notes)


_NOTES = {"closeness": (_spread_note, _floor_note), "cost": (_time_note,)}  # what a reader has to know before


def _failures(block: Block) -> list[str]:
    """One sentence for each reason: a data set or a scenario that fails does so for every method."""
    where: dict[str, list[str]] = {}
    for row in block.rows:
        for seed, reason in row.failures.items():
            where.setdefault(" ".join(reason.split()), []).append(f"{row.method.name} with seed {seed}")
    return [f"Failed: {', '.join(cells)}. {reason}" for reason, cells in where.items()]


_LOSSES = "Where another method does better than FedUP, and where FedUP is the worst"
_RULE = (
    "A method is named where it is better in every seed in which the attack took: on shares by more than 0.002, on "
    "membership inference (MIA) by more than 0.01, on clean times, KL and the forget loss by more than a tenth (and "
    "0.01); on F-A, MIA and the forget loss by being closer to Retrain's. FedUP is called the worst where its mean is "
    "worse by as much than that of every other method that answers. Methods that lose more than ten points of "
    "R-A to Retrain are left out, and on 0A those that keep more than ten points of ASR more than it. ToW, TV and KL "
    "have a floor: a second Retrain with other seeds is as far from the first."
)


def _legend(blocks: Sequence[Block]) -> list[tuple[str, str]]:
    """Each column that is shown, and what it means."""
    shown = {column.key for block in blocks for table in _TABLES for column in block.shown(table)}
    goal = {"higher": "Higher is better.", "lower": "Lower is better.", "retrain": "Best where Retrain's is."}
    by_table = [column for table in _TABLES for column in columns() if column.table == table]
    return [(c.title, f"{c.about} {goal.get(c.better, '')}".strip()) for c in by_table if c.key in shown]


def _csv(blocks: Sequence[Block]) -> str:
    """One line for each figure of each cell, and for each figure that the paper printed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["federation", "scenario", "method", "seed", "figure", "value"])
    for block in blocks:
        for row in block.rows:
            start = [block.federation, block.scenario.name, row.method.name]
            for column in columns():
                for figure, mark in ((row.figure(column.key), ""), (row.uncounted(column.key), "_shared")):
                    for seed, value in figure.values.items() if figure else ():
                        writer.writerow([*start, seed, f"{column.key}{mark}", f"{value:.10g}"])
                if column.key in row.paper:
                    writer.writerow([*start, "paper", column.key, f"{row.paper[column.key]:.10g}"])
    return text.getvalue()


def _sides(block: Block) -> dict[str, dict[str, Figure]]:
    """The figure that is to stay, and the one that is to go, by method."""
    shown = {column.key: column for column in block.shown("accuracy")}
    return {
        f"{shown[key].title}, {aim}": {row.method.name: figure for row in block.rows if (figure := row.figure(key))}
        for key, aim in (("r_a", "to be kept"), (figure_to_go(block), "to go"))
        if key in shown
    }

"""The report of an experiment: Markdown, CSV and one HTML page, all from the same result files."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from fedup.bench.experiment import REFERENCE, Experiment
from fedup.bench.figures import (
    accuracy_against_epsilon,
    accuracy_under_attack,
    methods_against_retrain,
    times_of_methods,
)
from fedup.bench.format import show_figure, show_value
from fedup.bench.goals import judge_goals
from fedup.bench.metrics import Column, columns, timed_keys
from fedup.bench.privacy_report import BUDGET_ABOUT, BUDGET_TITLE, budget_table, curves
from fedup.bench.summary import FLOOR, Block, Figure, Row
from fedup.bench.tables import GENERATED, markdown_table
from fedup.bench.verdicts import CLOSE, OURS, verdicts
from fedup.bench.words import rows_in_words
from fedup.files import write_text
from fedup.page import Page

_TABLES = {
    "accuracy": "What it still knows",
    "closeness": "How close it is to Retrain",
    "cost": "What it takes",
}
_MARK = " †"
_SHARED = " ‡"


def write_report(experiment: Experiment, blocks: Sequence[Block], *, tables: Path, pages: Path) -> list[Path]:
    """Write NAME.md and NAME.csv into one folder and NAME.html into another; their paths."""
    name = experiment.name
    texts: dict[Path, str] = {
        tables / f"{name}.md": _markdown(experiment, blocks),
        tables / f"{name}.csv": _csv(blocks),
    }
    attacks = _under_attack(blocks)
    if attacks:
        texts[tables / f"{name}.svg"] = accuracy_under_attack(attacks) + "\n"
    elif guarded := curves(blocks):
        texts[tables / f"{name}.svg"] = accuracy_against_epsilon(guarded) + "\n"
    page = _page(experiment, blocks)  # all of it is made before any of it is written
    for path, text in texts.items():
        write_text(path, text)
    page.write(pages / f"{name}.html")
    return [*texts, pages / f"{name}.html"]


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


def _titles(head: Sequence[tuple[Column, bool]]) -> list[str]:
    return ["method", *(f"{column.title}, paper" if is_paper else column.title for column, is_paper in head)]


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


def _tables(block: Block) -> dict[str, str]:
    """The tables that have a column for this block; none where everything failed."""
    return {table: title for table, title in _TABLES.items() if block.shown(table)}


def _seeds(block: Block) -> list[int]:
    return sorted({seed for row in block.rows for seed in row.results})


def _about(block: Block) -> str:
    config, seeds = block.config, _seeds(block)
    rows = f"{config['rows']:,} rows of " if config["rows"] else ""
    drawn = f", {config['clients_per_round']} a round" if config["clients_per_round"] else ""
    return (
        f"{rows}{Path(config['data']).name}, {Path(config['model']).stem}, {config['clients']} clients{drawn}, "
        f"{config['partition']}, "
        f"{_many(config['rounds'], 'round')} of {_many(config['epochs'], 'epoch')}, "
        f"{config['optimizer']} lr {config['lr']:g}, batch {config['batch_size']}. "
        f"n = {_many(len(seeds), 'seed')} ({', '.join(map(str, seeds))})"
        f"{', mean ± deviation' if len(seeds) > 1 else ''}. "
        f"On {'; '.join(block.machines)}. Commit {', '.join(block.commits)}."
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _story(block: Block) -> str:
    first = min(block.stories, default=None)
    return "" if first is None else f"With seed {first}: {block.stories[first]}"


def _attack_note(block: Block) -> str:
    failed = block.failed_attacks
    return (
        f"† The attack did not take in {len(failed)} of {_many(len(_seeds(block)), 'seed')} "
        f"({', '.join(map(str, failed))}): nothing was there to forget, and nothing is tested."
        if failed
        else ""
    )


def _spread_note(block: Block) -> str:
    """Retrain's own spread from seed to seed: a gap within it is no gap."""
    retrained = block.row(REFERENCE)
    if retrained is None:
        return ""
    spreads = []
    for key, title in (("r_a", "R-A"), ("f_a", "F-A"), ("f_a_train", "F-A, train"), ("test", "test")):
        figure = retrained.figure(key)
        if figure is not None and figure.std is not None:
            spreads.append(f"{title} {100 * figure.std:.2f}")
    return f"Retrain's own deviation from seed to seed, in points: {', '.join(spreads)}." if spreads else ""


def _note(block: Block, table: str) -> str:
    """What a reader of a table has to know before."""
    if table == "closeness":
        return " ".join(note for note in (_spread_note(block), _floor_note(block)) if note)
    return _time_note(block) if table == "cost" else ""


def _floor_note(block: Block) -> str:
    """How far two retrainings are apart: closer to Retrain than that is no closer."""
    floor = block.floor
    if floor is None:
        return f"Floor of ToW, TV and KL, a second Retrain with other seeds (`{FLOOR}`): not measured."
    figures = [(column, floor.figure(column.key)) for column in columns() if column.key in CLOSE]
    told = ", ".join(f"{column.title} {show_figure(figure, column)}" for column, figure in figures if figure)
    return f"Floor, a second Retrain with other seeds (`{floor.method.name}`, n = {len(floor.seeds)}): {told}."


def _time_note(block: Block) -> str:
    """Which times count, and that the others do not."""
    timed = [row for row in block.rows if row.times]
    marked = any(row.uncounted(column.key) for row in block.rows for column in block.shown("cost"))
    clean = (
        f"Clean times (`fedup bench time`: one process on an idle device, a warm-up, median of three runs) with "
        f"{_many_seeds(timed)}, on {block.timed_on}."
        if timed
        else ""
    )
    shared = (
        "‡ shared: measured once, on a device that other processes may have used. Such times enter no ratio, no goal "
        "and no sentence."
        if marked
        else ""
    )
    return " ".join(part for part in (clean, shared) if part)


def _many_seeds(rows: Sequence[Row]) -> str:
    seeds = sorted({seed for row in rows for seed in row.times})
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"


def _unsupported(block: Block) -> str:
    names = [row.method.name for row in block.rows if not row.supported]
    return f"Not for such requests, and shown as –: {', '.join(names)}." if names else ""


def _failures(block: Block) -> list[str]:
    """One sentence for each reason: a data set or a scenario that fails does so for every method."""
    where: dict[str, list[str]] = {}
    for row in block.rows:
        for seed, reason in row.failures.items():
            where.setdefault(" ".join(reason.split()), []).append(f"{row.method.name} with seed {seed}")
    return [f"Failed: {', '.join(cells)}. {reason}" for reason, cells in where.items()]


def _words(blocks: Sequence[Block]) -> list[str]:
    return verdicts(blocks) or ["Nowhere in these results."]


_LOSSES = "Where another method does better than FedUP, and where FedUP is the worst"
_RULE = (
    "A method is named where it is better in every seed in which the attack took: on shares by more than 0.002, on "
    "membership inference (MIA) by more than 0.01, on clean times, KL and the forget loss by more than a tenth (and "
    "0.01); on F-A, MIA and the forget loss by being closer to Retrain's. FedUP is called the worst where its mean is "
    "worse by as much than that of every other method that answers. Methods that lose more than ten points of "
    "R-A to Retrain are left out, and on 0A those that keep more than ten points of ASR more than it. ToW, TV and KL "
    "have a floor: a second Retrain with other seeds is as far from the first."
)


_GOALS = "Means over the seeds; the bound is the goal's right side with this experiment's own figures in it."
_GOAL_HEAD = ["federation", "scenario", "goal", "found", "bound", "", "n"]


def _goals(experiment: Experiment, blocks: Sequence[Block]) -> list[list[str]]:
    """The experiment's goals, each met or missed by so much; without clean times those for times are not judged."""
    judged = list(judge_goals(experiment.goals, blocks))
    there = {(block.federation, block.scenario.name) for block in blocks}
    left = [
        goal
        for goal in experiment.goals
        if goal not in [one.goal for one in judged]
        and (goal.federation, goal.scenario) in there
        and timed_keys() & {goal.metric, goal.other[1] if goal.other else ""}
    ]
    return [
        [
            one.goal.federation,
            one.goal.scenario,
            f"{one.goal.method}.{one.goal.metric} {one.goal.text}",
            f"{one.found:.3f}",
            f"{one.bound:.3f}",
            f"missed by {one.missed_by:.3f}" if one.missed_by > 0 else "met",
            str(one.seeds),
        ]
        for one in judged
    ] + [
        [
            goal.federation,
            goal.scenario,
            f"{goal.method}.{goal.metric} {goal.text}",
            "–",
            "–",
            "not judged: no clean time",
            "0",
        ]
        for goal in left
    ]


def _legend(blocks: Sequence[Block]) -> list[str]:
    shown = {column.key for block in blocks for table in _TABLES for column in block.shown(table)}
    goal = {
        "higher": "Higher is better.",
        "lower": "Lower is better.",
        "retrain": "Best where Retrain's is.",
        "neither": "",
    }
    by_table = [column for table in _TABLES for column in columns() if column.table == table]
    return [f"{c.title}: {c.about} {goal[c.better]}".strip() for c in by_table if c.key in shown]


def _markdown(experiment: Experiment, blocks: Sequence[Block]) -> str:
    parts = [GENERATED.format(folder=f"benchmarks/results/{experiment.name}"), f"# {experiment.title}"]
    goals = _goals(experiment, blocks)
    if goals:
        parts += ["## Goals", _GOALS, markdown_table(_GOAL_HEAD, goals)]
    sigmas, budgets = budget_table(blocks)
    if budgets:
        parts += [f"## {BUDGET_TITLE}", BUDGET_ABOUT, markdown_table(sigmas, budgets)]
    parts += [f"## {_LOSSES}", _RULE, "\n".join(f"- {one}" for one in _words(blocks))]
    for block in blocks:
        parts += [f"## {block.federation}, {block.scenario.name}", _about(block), _story(block), _attack_note(block)]
        for table, title in _tables(block).items():
            head = _head(block, table)
            rows = [[text for text, _ in _cells(block, row, head)] for row in block.rows]
            parts += [f"### {title}", _note(block, table)]
            parts.append(markdown_table(_titles(head), rows))
        parts.append(_unsupported(block))
        if words := rows_in_words(experiment, block):
            parts += ["### In words", "\n".join(f"- {line}" for line in words)]
        parts += _failures(block)
    parts += ["## Columns", "\n".join(f"- {one}" for one in _legend(blocks))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _csv(blocks: Sequence[Block]) -> str:
    """One line for each figure of each cell, and for each figure that the paper printed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["federation", "scenario", "method", "seed", "figure", "value"])
    for block in blocks:
        for row in block.rows:
            start = [block.federation, block.scenario.name, row.method.name]
            for column in columns():
                figure: Figure | None = row.figure(column.key)
                for seed, value in figure.values.items() if figure else ():
                    writer.writerow([*start, seed, column.key, f"{value:.10g}"])
                shared = row.uncounted(column.key)
                for seed, value in shared.values.items() if shared else ():
                    writer.writerow([*start, seed, f"{column.key}_shared", f"{value:.10g}"])
                if column.key in row.paper:
                    writer.writerow([*start, "paper", column.key, f"{row.paper[column.key]:.10g}"])
    return text.getvalue()


def _page(experiment: Experiment, blocks: Sequence[Block]) -> Page:
    page = Page(
        experiment.title,
        "Every method met the same federations, first weights, cohorts and batches. Click on a column's head to sort.",
        wide=True,
    )
    page.links([f"{block.federation}, {block.scenario.name}" for block in blocks])
    goals = _goals(experiment, blocks)
    if goals:
        page.heading("Goals")
        page.paragraph(_GOALS)
        page.table(_GOAL_HEAD, goals)
    if guarded := curves(blocks):
        page.heading("Accuracy against ε")
        page.figure(
            accuracy_against_epsilon(guarded),
            "Retained accuracy (R-A) under differential privacy, mean and deviation over seeds.",
        )
    sigmas, budgets = budget_table(blocks)
    if budgets:
        page.heading(BUDGET_TITLE)
        page.paragraph(BUDGET_ABOUT)
        page.table(sigmas, budgets)
    page.heading(_LOSSES)
    page.paragraph(_RULE)
    page.bullets(_words(blocks))
    page.note(
        "What is not claimed: a filter suppresses at the served interface. The frozen weights still hold what they "
        "learned; only Retrain's never saw it."
    )
    for block in blocks:
        _section(page, experiment, block)
    page.heading("Columns")
    page.bullets(_legend(blocks))
    page.footer(f"Made by `fedup bench report` from the result files of the experiment {experiment.name!r}.")
    return page


def _section(page: Page, experiment: Experiment, block: Block) -> None:
    page.heading(f"{block.federation}, {block.scenario.name}")
    page.paragraph(_about(block))
    page.paragraph(_story(block))
    if block.failed_attacks:
        page.note(_attack_note(block))
    sides = {
        f"{column.title}, {aim}": {row.method.name: figure for row in block.rows if (figure := row.figure(column.key))}
        for column, aim in _sides(block)
    }
    if sides:
        page.figure(
            methods_against_retrain(sides, REFERENCE), "Mean and deviation over seeds; the green line is Retrain's."
        )
    for table, title in _tables(block).items():
        head = _head(block, table)
        rows = [_cells(block, row, head) for row in block.rows]
        page.subheading(title)
        page.paragraph(_note(block, table))
        tips = ["", *(("As printed in the paper." if is_paper else column.about) for column, is_paper in head)]
        best_first = [False, *(column.better == "higher" for column, _ in head)]
        page.sortable_table(_titles(head), rows, marked=OURS, tips=tips, largest_first=best_first)
    page.paragraph(_unsupported(block))
    if words := rows_in_words(experiment, block):
        page.subheading("In words")
        page.bullets(words)
    for failure in _failures(block):
        page.note(failure)
    times = {row.method.name: figure.mean for row in block.rows if (figure := row.figure("time")) and figure.mean > 0}
    if times:
        page.figure(times_of_methods(times), "Clean seconds from request to the final model, on a logarithmic axis.")


def _sides(block: Block) -> list[tuple[Column, str]]:
    """The figure that is to stay, and the one that is to go."""
    shown = {column.key: column for column in block.shown("accuracy")}
    to_go = next((shown[key] for key in ("asr", "f_a", "f_a_train") if key in shown), None)
    sides = [(shown["r_a"], "to be kept")] if "r_a" in shown else []
    return [*sides, (to_go, "to go")] if to_go else sides

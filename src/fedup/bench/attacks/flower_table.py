"""Tables of hostile nodes from result files."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fedup.bench.attacks.intervals import mean_interval
from fedup.bench.tables import markdown_table
from fedup.tasks.machine import show_commit

HEAD = ("statistics", "kind", "what the node does", "draws", "R-A", "worst class", "memory", "the server")
NOTES = (
    "R-A: accuracy on rows that nobody trained on, after another client was forgotten (or samples of the hostile node "
    "itself, where it lies about an eraser). Worst class: points that a class loses against the honest run.",
    "Draws: where statistics are noisy, each row is measured in so many draws of noise, and so is the honest run, with "
    "the same seeds. R-A is the mean. For the worst class the recall of each class is averaged over draws on both "
    "sides first; ± is the standard error of that class's difference. It is still a maximum over classes, above 0 by "
    "chance: `honest, other noise` shows by how much. The result file has the figures of each draw, too.",
    "Memory: most that the server's process took beyond what it had before; what Flower holds of a reply of 1 GB is "
    "not counted. Without checks it was measured before freed memory was given back, with what nodes took: only large "
    "figures say something there. The server: what it did about the node.",
    "Absent: the node does not answer; what that costs is no harm by its answer. Control: the node really holds such "
    "rows, and no check is made. Adaptive: within norm and share of honest nodes.",
    "Several federations: each with a split, a model and one draw of noise of its own. The worst class of each is "
    "compared with honest nodes in the same federation. It is a maximum over classes of some 80 test rows each, so "
    "that it is above 0 by chance alone: `honest, other noise` shows by how much under differential privacy. Beyond "
    "control: the mean of the differences from the control in the same federation, in points, with its 95 % interval "
    "(Student's t); below 0, the attack does less harm than nodes that really hold such rows.",
    "False alarms: nodes at Dirichlet 0.1, by the policy `report`. A liar calls each class by the next one's name, in "
    "training, too.",
)
REPEATS_HEAD = (
    "statistics",
    "kind",
    "what the node does",
    "R-A, mean",
    "worst class, mean",
    "worst class, most",
    "worst class, beyond control",
    "R-A lost, beyond control",
    "left out",
)
ALARMS_HEAD = ("data", "clients", "statistics", "federations", "model", "honest nodes flagged", "liars flagged")


def lines(content: dict[str, Any]) -> list[list[str]]:
    """One line for each attack, in the order of `HEAD`."""
    return [_line(outcome) for outcome in content["outcomes"]]


def _line(outcome: dict[str, Any]) -> list[str]:
    retained, loss, error = outcome["retained_accuracy"], outcome["worst_class_loss"], outcome.get("loss_error")
    return [
        outcome["statistics"],
        outcome["kind"],
        outcome["attack"],
        str(len(outcome.get("accuracies") or [0])),
        "the server fails" if retained is None else f"{retained:.3f}",
        "–" if loss is None else f"{loss:.1f}" + (f" ± {error:.1f}" if error else ""),
        f"{outcome['memory_bytes'] / 1e6:.0f} MB",
        _reaction(outcome),
    ]


def _reaction(outcome: dict[str, Any]) -> str:
    done = "left it out" if outcome["left_out"] else "named it" if outcome["named"] else "–"
    return f"{done}; refused the request" if outcome["refused"] else done


def hostile_table(results: Sequence[dict[str, Any]]) -> str:
    """Files' contents as Markdown, a section each."""
    return "\n\n".join([*map(_section, results), "\n".join(f"- {note}" for note in NOTES)])


def _section(content: dict[str, Any]) -> str:
    recipe = content["recipe"]
    checks = "without checks" if content["policy"] is None else f"with checks ({content['policy']})"
    command = f"fedup bench attack --flower --data {recipe['data']} --seed {recipe['seed']}"
    return "\n\n".join(
        [
            f"## {recipe['data']}, {recipe['model']}, {recipe['clients']} clients, {recipe['partition']}, {checks}",
            f"`{command}`, commit {show_commit(content['code'])}, torch {content['machine']['torch']}.",
            markdown_table(HEAD, lines(content)),
            *(_repeats(content) if content.get("repeats") else []),
            *(["### False alarms", markdown_table(ALARMS_HEAD, alarm_lines(content))] if content.get("alarms") else []),
        ]
    )


def _repeats(content: dict[str, Any]) -> list[str]:
    federations = len(content["repeats"][0]["retained_accuracy"])
    return [f"### In {federations} federations", markdown_table(REPEATS_HEAD, repeat_lines(content))]


def repeat_lines(content: dict[str, Any]) -> list[list[str]]:
    """One line for each attack that was repeated, in the order of `REPEATS_HEAD`."""
    repeats = content.get("repeats", [])
    by_name = {(own["statistics"], own["attack"]): own for own in repeats}
    return [
        [
            own["statistics"],
            own["kind"],
            own["attack"],
            f"{fmean(own['retained_accuracy']):.3f}",
            f"{fmean(own['worst_class_loss']):.1f}",
            f"{max(own['worst_class_loss']):.1f}",
            *_beyond(own, by_name.get((own["statistics"], own["control"]))),
            f"{own['left_out']} of {len(own['retained_accuracy'])}",
        ]
        for own in repeats
    ]


def _beyond(own: dict[str, Any], control: dict[str, Any] | None) -> list[str]:
    """By how much an attack harms more than its control in the same federation: the worst class, and R-A."""
    if control is None:
        return ["–", "–"]
    losses = [one - other for one, other in zip(own["worst_class_loss"], control["worst_class_loss"], strict=True)]
    pairs = zip(control["retained_accuracy"], own["retained_accuracy"], strict=True)
    lost = [100 * (one - other) for one, other in pairs]
    return ["{:+.1f} ({:+.1f} … {:+.1f})".format(*mean_interval(values)) for values in (losses, lost)]


def alarm_lines(content: dict[str, Any]) -> list[list[str]]:
    """One line for each kind of federation and statistics, in the order of `ALARMS_HEAD`."""
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for alarms in content["alarms"]:
        groups.setdefault((alarms["data"], alarms["clients"], alarms["statistics"]), []).append(alarms)
    rows = []
    for (data, clients, statistics), group in groups.items():
        right = sorted(alarms["accuracy"] for alarms in group)
        liars = [alarms["flagged_liar"] for alarms in group if alarms["liar"]]
        honest = clients * len(group) - len(liars)
        flagged = f"{sum(alarms['flagged_honest'] for alarms in group)} of {honest}"
        model = f"{right[0]:.2f} … {right[-1]:.2f}"
        rows.append([data, str(clients), statistics, str(len(group)), model, flagged, f"{sum(liars)} of {len(liars)}"])
    return rows

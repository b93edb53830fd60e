"""Withdrawals for people: three goals, counted over all cases of a seed, and a line for each case."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from fedup.bench.tables import markdown_table
from fedup.bench.withdrawals import SETTINGS
from fedup.tasks.machine import show_commit

CASES = sum(len(setting.cases) for setting in SETTINGS.values())
MAX_CLASS_LOSS = 5.0  # points of test accuracy
LEAST_EQUAL = 26
MOST_TOO_FEW = 4
REFUSED = "refused"
_ROUNDING = 1e-4  # accuracies are kept in single precision
HEAD = (
    *("federation", "withdrawn", "rows", "held out", "excess without the request", "excess with it, 95 %", "verdict"),
    *("excess with it over Retrain, 95 %", "verdict by Retrain", "same", "worst class, points", "filter", "s"),
)
NOTES = (
    "Each request is the only one, and is answered by `fedup.unlearn(plugged, centroids, Forget.samples(…), "
    "clients=federation)`: no force, no other setting.",
    "Excess: accuracy on the withdrawn training rows less accuracy on held-out rows of the same client and labels, in "
    "the same proportions. By Retrain: less the accuracy of a model that was trained without them, from the same first "
    "weights, on the same rows; intervals take the two models' answers as independent.",
    "Worst class: change of the class that loses most accuracy on the official test set; all classes count, since no "
    "request names one.",
    "Withheld: the filter that could be made was not served, so the excess with it is the one it would have had, and "
    "no class lost anything. Refused: `HarmError`; no verdict was made, which counts as one that differs.",
    "A person's rows are slanted, a source's are dimmer, before training, in the same share of the rows held out; no "
    "two of a federation have a row in common.",
)


class Goal(NamedTuple):
    """A line of a table: what is wanted of all cases, what was found, and whether that is enough."""

    text: str
    found: str
    met: str  # yes, no, or that cases are missing, without which a goal is not met


def finding_of(case: Mapping[str, Any], verdict: str = "verdict") -> str:
    """Of a case's verdict, or of the one that has Retrain as its reference."""
    return REFUSED if case["refused"] else str((case[verdict] or {"finding": "none"})["finding"])


def is_same(case: Mapping[str, Any]) -> bool:
    """Whether Retrain as reference gives the same verdict; where none was made, no."""
    finding = finding_of(case)
    return finding not in (REFUSED, "none", "not measured") and finding == finding_of(case, "verdict_by_retrain")


def goals(cases: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """The three goals, judged."""
    losses = [case["worst_class_loss"] for case in cases]
    harmed = sum(loss > MAX_CLASS_LOSS + _ROUNDING for loss in losses)
    refused = ", ".join(case["title"] for case in cases if case["refused"])
    same, too_few = sum(map(is_same, cases)), sum(finding_of(case) == "too few rows" for case in cases)
    n, refusals = len(cases), f"refused: {refused}" if refused else "none was refused"
    texts = (
        f"No class loses more than {MAX_CLASS_LOSS:g} points of test accuracy",
        f"At least {LEAST_EQUAL} of {CASES} verdicts are those with Retrain as reference",
        f"At most {MOST_TOO_FEW} of {CASES} have too few rows for a verdict",
    )
    cost = f"{harmed} of {n} withdrawals cost one more; at most {max(losses, default=0.0):.1f} points; {refusals}"
    figures = (cost, f"{same} of {n}", f"{too_few} of {n}")
    good = (not harmed, same >= LEAST_EQUAL, too_few <= MOST_TOO_FEW)
    met = ("no" if not ok else "yes" if n >= CASES else "cases missing" for ok in good)
    return [Goal(*line) for line in zip(texts, figures, met, strict=True)]


def case_row(name: str, case: Mapping[str, Any]) -> list[str]:
    """One line of a table, in the order of `HEAD`."""
    verdict, beside = case["verdict"] or {}, case["verdict_by_retrain"] or {}
    before = verdict.get("excess_before")
    return [
        name,
        case["title"],
        f"{case['rows']:,}",
        f"{case['held_out']:,}",
        "–" if before is None else _number(before["value"]),
        _estimate(verdict.get("excess_after")),
        finding_of(case),
        _estimate(beside.get("excess_after")),
        finding_of(case, "verdict_by_retrain"),
        "yes" if is_same(case) else "no",
        f"{case['worst_class']}: {_number(-case['worst_class_loss'], 1)}",
        REFUSED if case["refused"] else "withheld" if case["withheld"] else case["filter"],
        "–" if case["time_s"] is None else f"{case['time_s']:.1f}",
    ]


def withdrawals_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Files' contents as Markdown, a section for each seed."""
    ordered = sorted(results, key=lambda result: (result["seed"], list(SETTINGS).index(result["name"])))
    sections = [_section(seed, list(of)) for seed, of in groupby(ordered, key=lambda result: int(result["seed"]))]
    return "\n\n".join([*sections, "\n".join(f"- {note}" for note in NOTES)])


def _section(seed: int, results: Sequence[Mapping[str, Any]]) -> str:
    cases = [(result["name"], case) for result in results for case in result["cases"]]
    missing = [name for name in SETTINGS if name not in {result["name"] for result in results}]
    findings = Counter(finding_of(case) for _, case in cases)
    both = [(case["verdict"], case["verdict_by_retrain"]) for _, case in cases if case["verdict_by_retrain"]]
    agreed = sum(ours["good"] == beside["good"] for ours, beside in both)
    verdicts = ", ".join(f"{finding} {count}" for finding, count in findings.most_common())
    return "\n\n".join(
        [
            f"## Seed {seed}: {len(cases)} of {CASES} withdrawals",
            f"`fedup bench withdrawals --seed {seed}`; n = {len(cases)}, one seed. Verdicts: {verdicts}. Whether the "
            f"rows look unseen is answered as with Retrain in {agreed} of {len(both)}."
            + (f" Not measured: {', '.join(missing)}." if missing else ""),
            "\n".join(f"- {_about(result)}" for result in results),
            markdown_table(("goal", "found", "met"), goals([case for _, case in cases])),
            markdown_table(HEAD, [case_row(name, case) for name, case in cases]),
        ]
    )


def _about(result: Mapping[str, Any]) -> str:
    recipe, machine, settings = result["recipe"], result["machine"], result["settings"]
    hardware = machine["accelerator"] if result["device"] == "cuda" else f"CPU ({machine['processor']})"
    rows = f", {recipe['rows']:,} rows" if recipe["rows"] else ""
    wrong = f", {settings['mislabelled']:.0%} of all rows mislabelled" if settings["mislabelled"] else ""
    epochs = f" of {recipe['epochs']} epochs" if recipe["epochs"] > 1 else ""
    return (
        f"{result['name']}: {recipe['data']}{rows}{wrong}, {recipe['model']}, {recipe['clients']} clients, "
        f"{recipe['partition']}, {recipe['rounds']} rounds{epochs}; accuracy {result['train_accuracy']:.3f} on "
        f"training rows, {result['held_out_accuracy']:.3f} on rows held out, {result['test_accuracy']:.3f} on the test "
        f"set; {hardware}, torch {machine['torch']}, commit {show_commit(result['code'])}."
    )


def _estimate(value: Mapping[str, float] | None) -> str:
    if value is None:
        return "–"
    return f"{_number(value['value'])} ({_number(value['low'])} … {_number(value['high'])})"


def _number(value: float, digits: int = 3) -> str:
    return f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", "−")  # 0 has no sign of its own

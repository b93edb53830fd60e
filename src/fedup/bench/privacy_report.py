"""What an experiment says of privacy: the paper's table of budgets, and accuracy against ε."""

from collections.abc import Sequence

from fedup.bench.figures import Curve
from fedup.bench.summary import ORIGINAL, Block, Row
from fedup.privacy.paper import DISCLAIMER

BUDGET_TITLE = f"The paper's privacy budget: {DISCLAIMER}"
BUDGET_ABOUT = (
    "The paper's ε of its noise σ, mean over (client, class) and seeds, as its formula gives it for these models; in "
    "brackets as printed there. docs/privacy.md says why it is no guarantee."
)


def budget_table(blocks: Sequence[Block]) -> tuple[list[str], list[list[str]]]:
    """Federations by σ; empty where nothing was counted."""
    counted = [block for block in blocks if block.scenario.name == "class" and _budgets(block)]
    if not counted:
        return [], []
    sigmas = sorted({sigma for block in counted for sigma in _budgets(block)})
    head = ["federation", *(f"σ = {sigma:g}" for sigma in sigmas)]
    return head, [[block.federation, *(_show(_budgets(block).get(sigma)) for sigma in sigmas)] for block in counted]


def curves(blocks: Sequence[Block]) -> dict[str, Curve]:
    """Retained accuracy by the ε of the guarantee, by federation and scenario; empty where there are no guarantees."""
    by_place = {}
    for block in blocks:
        points = sorted(
            (epsilon.mean, kept.mean, kept.std or 0.0)
            for row in block.rows
            if (epsilon := row.figure("epsilon")) and (kept := row.figure("r_a"))
        )
        if len(points) > 1:
            lines = {"no noise": "fedup", "original": ORIGINAL, "retrained": "retrain"}
            heights = {label: row.figure("r_a") for label, name in lines.items() if (row := block.row(name))}
            by_place[f"{block.federation}, {block.scenario.name}"] = Curve(
                points, {label: height.mean for label, height in heights.items() if height}
            )
    return by_place


def _budgets(block: Block) -> dict[float, Row]:
    """Rows with the paper's ε, by σ."""
    return {float(row.method.settings.sigma): row for row in block.rows if row.figure("paper_epsilon")}


def _show(row: Row | None) -> str:
    figure = row.figure("paper_epsilon") if row else None
    if row is None or figure is None:
        return "–"
    printed = row.paper.get("paper_epsilon")
    return f"{figure.mean:.2f}" + ("" if printed is None else f" ({printed:.2f})")

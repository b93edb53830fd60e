"""What clients have spent of their privacy budgets, as tables."""

from typing import Any

from rich.console import Console
from rich.table import Table

from fedup.cli._text import table
from fedup.run.in_words import moment

_WHY_NOT_A_DIFFERENCE = (
    "ε left is that of the largest single release still allowed. It is not ε allowed − ε spent: releases add up as "
    "squares of μ (Gaussian DP), and each ε is read off such a sum."
)


def print_ledger(console: Console, ledger: list[dict[str, Any]]) -> None:
    """By client: releases, and ε spent, allowed and left."""
    columns = ("client", "releases", "ε spent", "ε allowed", "ε left", "at δ")
    shown = table(*columns, right=columns, title="Privacy spent by client")
    for own in ledger:
        spent = f"{own['epsilon']:.3g}" + (" TEST MODE: no privacy" if own["test_mode"] else "")
        if own["unprotected"]:
            spent = f"∞: {own['unprotected']} without guarantee; the others {spent}"
        limits = ["no limit", ""] if own["budget"] is None else [f"{own['budget']:g}", f"{own['left']:.3g}"]
        releases = str(own["releases"]) + (f" (+{own['corrections']} by its own account)" if own["corrections"] else "")
        shown.add_row(str(own["client"]), releases, spent, *limits, f"{own['delta']:g}")
    console.print(shown)
    console.print(_WHY_NOT_A_DIFFERENCE)


def charges_table(charges: list[dict[str, Any]]) -> Table:
    """Each release that was charged, in the order of the journal."""
    shown = table("when", "client", "for", "protection", "μ", right=("client", "μ"), title="Charges")
    for charge in charges:
        row = (moment(charge["at"]), str(charge["client"]), charge["what"], charge["mechanism"], f"{charge['mu']:.3g}")
        shown.add_row(*row)
    return shown

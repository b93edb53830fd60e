"""What clients have spent of their privacy budgets, as tables."""

from typing import Any

from rich.table import Table

WHY_NOT_A_DIFFERENCE = (
    "ε left is that of the largest single release still allowed. It is not ε allowed − ε spent: releases add up as "
    "squares of μ (Gaussian DP), and each ε is read off such a sum."
)


def ledger_table(ledger: list[dict[str, Any]]) -> Table:
    """By client: releases, and ε spent, allowed and left."""
    table = Table(title="Privacy spent by client", title_justify="left")
    for column in ("client", "releases", "ε spent", "ε allowed", "ε left", "at δ"):
        table.add_column(column, justify="right")
    for one in ledger:
        spent = f"{one['epsilon']:.3g}" + (" TEST MODE: no privacy" if one["test_mode"] else "")
        if one["unprotected"]:
            spent = f"∞: {one['unprotected']} without guarantee, besides {spent}"
        limits = ["no limit", ""] if one["budget"] is None else [f"{one['budget']:g}", f"{one['left']:.3g}"]
        releases = str(one["releases"]) + (f" (+{one['corrections']} by its own account)" if one["corrections"] else "")
        table.add_row(str(one["client"]), releases, spent, *limits, f"{one['delta']:g}")
    return table


def charges_table(charges: list[dict[str, Any]]) -> Table:
    """Each release that was charged, in the order of the journal."""
    from fedup.cli._text import when

    table = Table(title="Charges", title_justify="left")
    for column in ("when", "client", "for", "protection", "μ"):
        table.add_column(column, justify="right" if column in ("client", "μ") else "left", overflow="fold")
    for charge in charges:
        mu = f"{charge['mu']:.3g}"
        table.add_row(when(charge["at"]), str(charge["client"]), charge["what"], charge["mechanism"], mu)
    return table

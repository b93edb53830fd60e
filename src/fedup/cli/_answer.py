"""What `fedup unlearn` and `fedup restore` tell alike: what an answer took, and why one was declined."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from fedup.cli._text import size, why
from fedup.run.answer import Outcome
from fedup.run.in_words import ids


def describe(outcome: Outcome) -> dict[str, Any]:
    """What came of an answer, as plain data."""
    report = outcome.report
    return {
        "declined": outcome.declined,
        "charged": any(release.name for release in report.releases),
        "filter": outcome.filter.id if outcome.filter else None,
        "clients_contacted": sorted(report.clients_contacted),
        "bytes_up": report.bytes_up,
        "time_s": report.time_s,
        "figures": outcome.figures,
    }


def print_declined(console: Console, result: dict[str, Any], *, done: str, fitted: str) -> None:
    """That nothing was `done`, why, and what to do."""
    console.print(
        f"[bold red]Not {done}:[/] {escape(why(result['declined'], fitted))}\nThe folder serves what it served "
        f"before. To have it {done} all the same, pass --force"
        + (" or raise --max-loss." if result["figures"] else ".")
        + (" What clients released for it is spent all the same (ε: fedup status)." if result["charged"] else "")
    )


def contact_in_words(result: dict[str, Any]) -> str:
    """Which clients were asked, and what they sent."""
    contacted = result["clients_contacted"]
    return f"client {ids(contacted)} contacted, {size(result['bytes_up'])} sent" if contacted else "no client contacted"


def print_orphaned_classes(console: Console, result: dict[str, Any]) -> None:
    """A note where no retained client holds a class that nobody asked to forget."""
    if result["classes_left_without_holder"]:
        console.print(
            f"[yellow]Note:[/] no retained client holds class {ids(result['classes_left_without_holder'])}, which "
            "nobody asked to forget: the filter will not let it pass, and no validation row shows it."
        )

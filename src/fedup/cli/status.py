"""`fedup status`."""

import json
from typing import Any

import typer

from fedup.cli._options import DEFAULT_RUN, JsonOption, RunOption


def status(run: RunOption = DEFAULT_RUN, as_json: JsonOption = False) -> None:
    """Show requests, the filter in force, what is sealed and the storage; reads only, while others write too.

    Example: [bold]fedup status --run runs/mnist[/]
    """
    from fedup.run.folder import Run
    from fedup.run.status import overview, request_releases

    folder = Run(run)
    state = folder.read()
    found = overview(folder, state)
    if as_json:
        typer.echo(json.dumps({**found, "releases": request_releases(state)}, indent=2, ensure_ascii=False))
    else:
        _print(found, state, request_releases(state))


def _print(found: dict[str, Any], state: Any, sent: dict[int, dict[str, int]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from fedup.cli._ledger import WHY_NOT_A_DIFFERENCE, ledger_table
    from fedup.cli._progress import wide_console
    from fedup.cli._text import size, when

    console = wide_console()
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, text in _facts(found, sent).items():
        facts.add_row(name, escape(text))
    console.print(facts, highlight=False)
    if state.requests:
        console.print(_requests(state, found))
    else:
        console.print("No request has come in.")
    if found["ledger"]:
        console.print(ledger_table(found["ledger"]), highlight=False)
        console.print(WHY_NOT_A_DIFFERENCE, highlight=False)
    storage = ", ".join(f"{name} {size(count)}" for name, count in sorted(found["storage_bytes"].items()))
    console.print(f"[dim]Storage[/] {storage}", highlight=False)
    console.print(
        f"[dim]Journal[/] {found['events']} events, last {when(state.events[-1].at)}, head {found['head'][:16]}",
        highlight=False,
    )
    if found["leftovers"]:
        console.print(
            f"[yellow]Leftovers[/] {', '.join(found['leftovers'])}: of a killed process; the next command that writes "
            "removes them.",
            highlight=False,
        )


def _facts(found: dict[str, Any], sent: dict[int, dict[str, int]]) -> dict[str, str]:
    from fedup.cli._text import size, when
    from fedup.run.evidence import machine_in_words

    about, trained, collected, filtered = found["about"], found["trained"], found["collected"], found["filter"]
    facts = {"Run folder": found["run"]}
    if about.get("data"):
        facts["Federation"] = (
            f"{about['data']}, {about['model']}, {about['clients']} clients, {about['partition']}, seed {about['seed']}"
        )
    facts["Model"] = f"training: {found['rounds_done']} of {about.get('rounds')} rounds done; `fedup train` goes on"
    if trained:
        measured = ", ".join(f"{part} {value:.3f}" for part, value in trained["accuracy"].items())
        facts["Model"] = f"{trained['fingerprint'][:16]}, trained {when(trained['at'])}" + (
            f", accuracy {measured}" if measured else ""
        )
    if found["trained_on"]:
        facts["Trained on"] = machine_in_words(found["trained_on"])
    if collected:
        clients = f"{len(sent)} clients sent {size(sum(own['bytes'] for own in sent.values()))} in all"
        how = _how(collected["how"], found["protection"])
        facts["Collected"] = f"{collected['rows']:,} vectors of {collected['cells']} cells, {how}; {clients}"
    sealed = found["sealed"]
    facts["Sealed"] = (
        f"{sealed['cells']} cells, {sealed['originals']} replaced originals; {sealed['purged']} cells purged"
    )
    facts["Filter"] = "none: the original model answers"
    if filtered:
        facts["Filter"] = f"{filtered['id']} for {', '.join(found['in_force'])}"
    if found["budget"]:
        facts["Budget"] = f"ε = {found['budget']['epsilon']:g} at δ = {found['budget']['delta']:g} for each client"
    if found["written_by"]:
        facts["In use by"] = found["written_by"]
    return facts


def _how(how: dict[str, Any], protection: str) -> str:
    return ", ".join([*([f"ρ {how['ratio']}"] if "ratio" in how else []), f"protection: {protection}"])


def _requests(state: Any, found: dict[str, Any]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    from fedup.cli._text import what, when

    table = Table(title_justify="left")
    for column in ("id", "reference", "forget", "rows", "status", "verdict", "asked", "took"):
        table.add_column(column, justify="right" if column in ("rows", "took") else "left")
    for request, told in zip(state.requests, found["requests"], strict=True):
        table.add_row(
            request.id,
            escape(request.reference or ""),
            what(request),
            "" if told["rows"] is None else f"{told['rows']:,}",
            f"[bold]{request.status}[/]" if request.is_active else request.status,
            told["verdict"] or "",
            when(told["asked_at"])[:10],
            f"{told['time_s']:.2f} s",
        )
    return table

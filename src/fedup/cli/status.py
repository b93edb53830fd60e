"""`fedup status`."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fedup.cli import _options as options
from fedup.cli._progress import wide_console
from fedup.cli._text import size, table
from fedup.cli._wording import as_command_line
from fedup.cli.budget import print_ledger
from fedup.run.bases import NOT_IN_WEIGHTS, SUPPRESSED
from fedup.run.folder import Run
from fedup.run.in_words import count, forget_set, machine_in_words, moment
from fedup.run.state import State
from fedup.target_words import SCORE, targets_of

_SHOWN = 20  # names of clients


def status(run: options.RunOption = options.DEFAULT_RUN, as_json: options.JsonOption = False) -> None:
    """Show requests, the filter in force, privacy spent and storage; changes nothing.

    Example: [bold]fedup status --run runs/mnist[/]
    """
    from fedup.run.status import overview, request_releases

    folder = Run(run)
    state = folder.read()
    result = {**overview(folder, state), "releases": request_releases(state)}
    options.show(result, as_json, lambda result: _print(result, state))


def _print(result: dict[str, Any], state: State) -> None:
    console = wide_console()
    facts = Table(Column(style="dim"), Column(overflow="fold"), show_header=False, box=None, pad_edge=False)
    for name, text in _facts(result).items():
        facts.add_row(name, escape(text))
    console.print(facts)
    console.print(_requests(state, result) if state.requests else "No request has come in.")
    if result["waiting"]:
        console.print(
            f"[yellow]Waiting[/] {', '.join(result['waiting'])}: too few rows to be answered alone, so that nothing is "
            "suppressed for them yet. `fedup unlearn --pending` answers them as soon as they are enough."
        )
    for part in result["pending"]:
        console.print(f"[yellow]Pending[/] Client {part['client']} has not answered: {escape(part['part'])}.")
    _print_queue(console, result)
    if suppressed := [entry["id"] for entry in result["requests"] if entry["weights"] == SUPPRESSED]:
        console.print(f"{', '.join(suppressed)}: {SUPPRESSED}. `fedup retrain` trains a model without it.")
    if result["finished"]:
        console.print(f"{', '.join(result['finished'])}: {NOT_IN_WEIGHTS}.")
    if result["ledger"]:
        print_ledger(console, result["ledger"])
    storage = ", ".join(f"{name} {size(count)}" for name, count in sorted(result["storage_bytes"].items()))
    console.print(f"[dim]Storage[/] {storage}")
    last, head = moment(state.events[-1].at), result["head"][:16]
    console.print(f"[dim]Journal[/] {result['events']} events, last {last}, head {head}")
    if result["leftovers"]:
        console.print(
            f"[yellow]Leftovers[/] {', '.join(result['leftovers'])}: of a killed process; the next command that writes "
            "removes them."
        )


def _print_queue(console: Console, found: dict[str, Any]) -> None:
    """What waits for the server app, what it answers now, and what it refused."""
    if found["queued"]:
        names = ", ".join(own["id"] for own in found["queued"])
        console.print(
            f"[yellow]Queued[/] {names}: the server app answers them, one by one. Nothing is suppressed for them yet, "
            "and their rows are left out of later rounds of training."
        )
    if found["returning"]:
        names = ", ".join(own["id"] for own in found["returning"])
        console.print(f"[yellow]To be taken back[/] {names}, by the server app. Until then each stays as it is.")
    if served := found["in_service"]:
        console.print(f"[green]In service[/] {served['request']}: {escape(served['by'])}.")
    for own in (*found["returning"], *found["queued"]):
        if own["postponed"]:
            console.print(f"[yellow]Postponed[/] {own['id']}: {escape(as_command_line(own['postponed']))}")
    for own in found["refused"]:
        console.print(f"[red]Refused[/] {own['id']}: {escape(as_command_line(own['why']))}")


def _facts(found: dict[str, Any]) -> dict[str, str]:
    about, trained, collected, filtered = found["about"], found["trained"], found["collected"], found["filter"]
    facts = {"Run folder": found["run"]}
    if about.get("data"):
        facts["Federation"] = (
            f"{about['data']}, {about['model']}, {about['clients']} clients, {about['partition']}, seed {about['seed']}"
        )
    if names := about.get("client_names"):
        facts["Clients"] = ", ".join(f"{client} {name}" for client, name in enumerate(names[:_SHOWN]))
        facts["Clients"] += f", … ({len(names):,})" if len(names) > _SHOWN else ""
    facts["Model"] = f"training: {found['rounds_done']} of {about.get('rounds')} rounds done; `fedup train` continues"
    if trained:
        measured = ", ".join(f"{part} {value:.3f}" for part, value in trained["accuracy"].items())
        base = found["base"]
        which = f"base {base['generation']}, " if base["generation"] > 1 else ""
        facts["Model"] = f"{which}{trained['fingerprint'][:16]}, trained {moment(trained['at'])}" + (
            f", {SCORE[targets_of(about)]} {measured}" if measured else ""
        )
    if found["trained_on"]:
        facts["Trained on"] = machine_in_words(found["trained_on"])
    if collected:
        sent, ratio = found["releases"], collected["how"].get("ratio")
        facts["Collected"] = (
            f"{_what(collected)} of {collected['cells']} cells, {'' if ratio is None else f'ρ {ratio}, '}"
            f"protection: {found['protection']}; {len(sent)} clients sent "
            f"{size(sum(own['bytes'] for own in sent.values()))} in all"
        )
    sealed, in_force = found["sealed"], ", ".join(found["in_force"])
    erased = f", {sealed['erased']} statistics of erased rows" if sealed["erased"] else ""
    facts["Sealed"] = (
        f"{sealed['cells']} cells that requests leave out, {sealed['originals']} originals of replaced cells"
        f"{erased}; {sealed['purged']} cells destroyed"
    )
    first = found["base"]["generation"] == 1
    unfiltered = "the original model answers" if first else "the model answers as it was trained"
    facts["Filter"] = f"{filtered['id']} for {in_force}" if filtered else f"none: {unfiltered}"
    if "backbone" in about and filtered:
        del facts["Filter"]
        facts["Head"] = f"{filtered['id']} on {about['backbone']}" + (f" without {in_force}" if in_force else "")
        facts["Claim"] = found["claim"] or "none: no request is in force"
    if other := found["training"]:
        who = f"by {other['written_by']}" if other["written_by"] else f"interrupted; `fedup {other['command']}` goes on"
        facts["Training"] = f"{count(other['rounds_done'], 'round')} done beside the served base, {who}"
    if found["budget"]:
        facts["Budget"] = f"ε = {found['budget']['epsilon']:g} at δ = {found['budget']['delta']:g} for each client"
    if found["nodes"]:
        facts["Nodes"] = _nodes(found["nodes"])
    if found["written_by"]:
        facts["In use by"] = found["written_by"]
    return facts


def _nodes(nodes: list[dict[str, Any]]) -> str:
    """How clients are bound to nodes, and which nodes have no rules of their own."""
    weak = [own["client"] for own in nodes if own["by"] != "key"]
    bound = f"{len(nodes)} clients are bound to their nodes"
    bound += f"; {len(weak)} of them by node id only, which is weaker than by key" if weak else ", all of them by key"
    open_nodes = [str(own["client"]) for own in nodes if own["rules"].startswith("open")]
    return f"{bound}; OPEN, without rules of their own: {', '.join(open_nodes)}" if open_nodes else bound


def _requests(state: State, found: dict[str, Any]) -> Table:
    shown = table("id", "reference", "forget", "rows", "status", "verdict", "asked", "took", right=("rows", "took"))
    clients, classes = (state.about.get(name, ()) for name in ("client_names", "class_names"))
    for request, entry in zip(state.requests, found["requests"], strict=True):
        shown.add_row(
            request.id,
            escape(request.reference or ""),
            escape(forget_set(request.forget, class_names=classes, client_names=clients)),
            "" if entry["rows"] is None else f"{entry['rows']:,}",
            f"[bold]{request.status}[/]" if request.is_active else request.status,
            entry["verdict"] or "",
            moment(entry["asked_at"])[:10],
            f"{entry['time_s']:.2f} s",
        )
    return shown


def _what(collected: dict[str, Any]) -> str:
    moments = "bound" in collected["how"]
    return "sums and second moments" if moments else f"{collected['rows']:,} vectors"

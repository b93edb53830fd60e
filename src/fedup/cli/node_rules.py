"""`fedup node-rules`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedup.cli import _options as options
from fedup.errors import SettingError


def node_rules(
    out: Annotated[Path | None, typer.Option(help="Write the rules to this new file.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="For tests: rules that allow every question.")] = False,
    check: Annotated[Path | None, typer.Option(help="Say what the rules in this file allow.")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Write or check the rules of a Flower node: what it answers, whichever app and run ask.

    The node finds them by --node-config 'fedup-rules="FILE"', by the variable FEDUP_NODE_RULES, or as
    ~/.fedup/node-rules.toml. Without rules a deployed node answers nothing.

    Examples:
    [bold]fedup node-rules --out node-rules.toml[/]
    [bold]fedup node-rules --check node-rules.toml[/]
    """
    from fedup.files import explained, write_text
    from fedup.flower.rules import load_rules
    from fedup.flower.rules_file import OPEN, SAFE

    if (out is None) == (check is None):
        raise typer.BadParameter("Pass either --out FILE or --check FILE.")
    if check is not None:
        if open_:
            raise typer.BadParameter("--open belongs to --out.")
        options.show(_described(load_rules(check)), as_json, _print)
        return
    assert out is not None
    if out.exists():
        raise SettingError(f"{out} exists: nothing was written. Name a new file, or delete that one.")
    write_text(out, OPEN if open_ else SAFE)
    with explained(f"protect {out}"):
        out.chmod(0o600)
    result = {"file": str(out), **_described(load_rules(out))}
    options.show(result, as_json, _print)


def _described(rules: Any) -> dict[str, Any]:
    """Rules as plain data."""
    from fedup.flower.rules import QUESTION_GROUPS

    if rules.open:
        return {"label": rules.label, "open": True}
    privacy = rules.privacy
    return {
        "label": rules.label,
        "open": False,
        "questions": [name for name, kinds in QUESTION_GROUPS.items() if kinds <= rules.questions],
        "bases": "any" if rules.bases is None else sorted(rules.bases),
        "most_bases": rules.most_bases,
        "cuts": "any" if rules.cuts is None else sorted(rules.cuts),
        "least_rows": rules.least_rows,
        "most_ratio": rules.most_ratio,
        "epsilon": None if privacy is None else {"one": privacy.most_epsilon, "all": privacy.total_epsilon},
        "folder": str(rules.folder),
    }


def _print(found: dict[str, Any]) -> None:
    if "file" in found:
        typer.echo(f"Written to {found['file']}.")
    if found["open"]:
        typer.echo("OPEN: a node with these rules answers every question, and its answers say so.")
        return
    for name, text in _lines(found).items():
        typer.echo(f"{name}: {text}")


def _lines(found: dict[str, Any]) -> dict[str, str]:
    bases, cuts, epsilon = found["bases"], found["cuts"], found["epsilon"]
    models = f"any, {found['most_bases']} at most" if bases == "any" else f"{len(bases)} by fingerprint"
    return {
        "Exact answers": ", ".join(found["questions"]) or "none",
        "Models": models,
        "Cuts": cuts if cuts == "any" else ", ".join(cuts),
        "Fewest rows of a group": str(found["least_rows"]),
        "Differential privacy": f"ε = {epsilon['one']:g} at most, {epsilon['all']:g} in all" if epsilon else "refused",
        "Account and log": found["folder"],
        "Rules": found["label"],
    }

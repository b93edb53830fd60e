from importlib import import_module

import typer

from fedup import __version__
from fedup.cli import bench, data

app = typer.Typer(
    help="Make a federated model forget on request, in seconds, without touching its weights.",
    epilog="First steps: [bold]fedup train[/], [bold]fedup collect[/], [bold]fedup unlearn --class 7[/], "
    "[bold]fedup status[/], [bold]fedup restore R1[/]",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_VERBS = {  # by panel of the first page: one file each, with a function of its name
    "Learn": ("train", "add", "collect", "budget"),
    "Requests": ("unlearn", "restore", "purge", "retrain", "status", "evidence", "verify"),
    "Serve": ("evaluate", "predict", "export"),
    "More": ("list", "demo", "node-rules", "release"),
}
for panel, verbs in _VERBS.items():
    for verb in verbs:
        name = verb.replace("-", "_")
        module = import_module(f"fedup.cli.{name}")
        app.command(verb, rich_help_panel=panel)(getattr(module, "list_" if verb == "list" else name))
app.add_typer(data.app, name="data", rich_help_panel="More")
app.add_typer(bench.app, name="bench", rich_help_panel="More")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedup {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass

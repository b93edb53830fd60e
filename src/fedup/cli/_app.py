import typer

from fedup import __version__
from fedup.cli import (
    bench,
    budget,
    collect,
    data,
    demo,
    evaluate,
    evidence,
    export,
    list,
    predict,
    purge,
    restore,
    status,
    train,
    unlearn,
    verify,
)

app = typer.Typer(
    help="Make a federated model forget on request, in seconds, without touching its weights.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_LEARN, _REQUESTS, _SERVE, _MORE = "Learn", "Requests", "Serve", "More"
app.command("train", rich_help_panel=_LEARN)(train.train)
app.command("collect", rich_help_panel=_LEARN)(collect.collect)
app.command("budget", rich_help_panel=_LEARN)(budget.budget)
app.command("unlearn", rich_help_panel=_REQUESTS)(unlearn.unlearn)
app.command("restore", rich_help_panel=_REQUESTS)(restore.restore)
app.command("purge", rich_help_panel=_REQUESTS)(purge.purge)
app.command("status", rich_help_panel=_REQUESTS)(status.status)
app.command("evidence", rich_help_panel=_REQUESTS)(evidence.evidence)
app.command("verify", rich_help_panel=_REQUESTS)(verify.verify)
app.command("evaluate", rich_help_panel=_SERVE)(evaluate.evaluate)
app.command("predict", rich_help_panel=_SERVE)(predict.predict)
app.command("export", rich_help_panel=_SERVE)(export.export)
app.add_typer(data.app, name="data", rich_help_panel=_MORE)
app.command("list", rich_help_panel=_MORE)(list.list_)
app.command("demo", rich_help_panel=_MORE)(demo.demo)
app.add_typer(bench.app, name="bench", rich_help_panel=_MORE)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedup {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass

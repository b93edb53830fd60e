"""`fedup bench …`, one file a verb."""

import typer

from fedup.cli.bench import attack, exact, paper, report, run, scale, speed, time, tune, withdrawals

app = typer.Typer(help="Measure: experiments, speed, scale, attacks and withdrawals.", no_args_is_help=True)
for module in (run, time, tune, report, paper, scale, speed, attack, exact, withdrawals):
    verb = module.__name__.rpartition(".")[2]
    app.command(verb)(getattr(module, verb))

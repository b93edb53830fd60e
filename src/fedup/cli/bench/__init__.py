"""`fedup bench …`, one file a verb."""

import typer

from fedup.cli.bench import attack, report, run, scale, speed, time, tune, withdrawals

app = typer.Typer(help="Measure: experiments, speed, scale, attacks and withdrawals.", no_args_is_help=True)
app.command("run")(run.run)
app.command("time")(time.take_times)
app.command("tune")(tune.tune)
app.command("report")(report.report)
app.command("scale")(scale.scale)
app.command("speed")(speed.speed)
app.command("attack")(attack.attack)
app.command("withdrawals")(withdrawals.withdrawals)

"""Options that several verbs share, each defined once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

RunOption = Annotated[Path, typer.Option("--run", "-r", envvar="FEDUP_RUN", help="The run folder.", show_default=True)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")]
WaitOption = Annotated[float, typer.Option("--wait", help="Seconds to wait for another process that writes.", min=0)]
DeviceOption = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, …")]


def _use_threads(context: typer.Context, count: int | None) -> int | None:
    """For the whole command, whatever it computes."""
    if count is not None and not context.resilient_parsing:
        from fedup.threads import fixed_threads

        context.with_resource(fixed_threads(count))
    return count


ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        envvar="FEDUP_THREADS",
        help="Threads on the CPU; by default one for small models, else one for each core. The last bits depend on it.",
        min=1,
        callback=_use_threads,
    ),
]
MaxLossOption = Annotated[
    float, typer.Option(help="Refuse a filter that costs more points of accuracy on retained validation rows.", min=0)
]
MaxClassLossOption = Annotated[
    float, typer.Option(help="Refuse a filter that costs a class nobody asked to forget more points of recall.", min=0)
]
SubjectKeyOption = Annotated[
    Path | None, typer.Option(help="File with the key of persons; by default subjects.key in the run folder.")
]
ModelPathOption = Annotated[
    str | None,
    typer.Option("--model", help="Folder of a server app: the function that makes its model, package.module:function."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Put the filter in force whatever it costs.")]

DEFAULT_RUN = Path("run")
DEFAULT_WAIT_S = 10.0


def was_given(name: str) -> bool:
    """Whether the user chose a value for this option of the command that runs."""
    from click import get_current_context
    from click.core import ParameterSource

    return get_current_context().get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def show(result: Any, as_json: bool, show_people: Callable[[Any], None]) -> None:
    """Print a result as JSON, for programs, or in the way given, for people."""
    typer.echo(json.dumps(result, indent=2, ensure_ascii=False)) if as_json else show_people(result)

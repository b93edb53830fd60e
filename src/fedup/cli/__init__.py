"""The command line, one file per verb."""

import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from fedup.cli._wording import as_command_line, visible
from fedup.errors import FedUPError, FedUPWarning
from fedup.registry import OWN_MODULE, line_in

_INTERRUPTED = 130  # as shells count it: 128 + SIGINT
_TRACEBACK = "FEDUP_TRACEBACK"
_CHOSEN_BY_THE_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def main() -> None:
    """Run `fedup`; exit code 0 on success, 1 on failure, 2 on wrong usage, 130 when interrupted."""
    let_threads_sleep()
    with warnings.catch_warnings():
        warnings.simplefilter("always", FedUPWarning)
        warnings.showwarning = _show_warning
        _run()


def load_above_cores() -> str | None:
    """How busy the machine is, in words, where more processes want a core than there are cores; else None."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not on every system
        return None
    cores = os.cpu_count() or 1
    return f"load {load:.1f} on {cores} cores" if load > cores else None


def let_threads_sleep() -> None:
    """On a busy machine, let torch's threads sleep while they wait instead of spinning; no bit depends on it.

    OpenMP reads this once, when torch is loaded. On an idle machine spinning is faster, so nothing is changed there.
    """
    chosen = any(name in os.environ for name in _CHOSEN_BY_THE_USER)
    if "torch" not in sys.modules and not chosen and load_above_cores():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def _run() -> None:
    try:
        from fedup.cli._app import app
    except ModuleNotFoundError as error:
        sys.exit(f"The command line needs {error.name}: pip install 'fedup[all]'.")
    import click

    try:
        code = app(standalone_mode=False) or 0  # typer makes a code of KeyboardInterrupt, too
    except (click.exceptions.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        own = None if isinstance(error, FedUPError) else _error_in_own_code(error)
        if own is None and not isinstance(error, FedUPError | OSError):
            raise
        _say("Error: ", "bold red", own or str(error))
        code = 1
    if code == _INTERRUPTED:
        text = "Interrupted. The folder is sound, before the step or after it; the same command again completes it."
        _say("Error: ", "bold red", text)
    sys.exit(code)


def _error_in_own_code(error: Exception) -> str | None:
    """Where in the user's own files the error was raised, in words; None where it was not."""
    for file in [module.__file__ for name, module in [*sys.modules.items()] if name.startswith(OWN_MODULE)]:
        if file and (line := line_in(Path(file), error)) is not None:
            if os.environ.get(_TRACEBACK):
                traceback.print_exception(error)
            where = f"{Path(file).name}, line {line.lineno}, in {line.name}()" if line.name[0] != "<" else file
            return (
                f"{where}: {type(error).__name__}: {error}. This is your own code, {file}; set {_TRACEBACK}=1 to see "
                "the whole traceback."
            )
    return None


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **others: Any) -> None:
    if issubclass(category, FedUPWarning):
        _say("Note: ", "bold yellow", str(message))
    else:
        _show_usual_warning(message, category, *where, **others)


_show_usual_warning = warnings.showwarning


def _say(label: str, style: str, text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    # Text, not markup: what is in brackets in a name stays. Not wrapped where lines are read by programs.
    console = Console(stderr=True)
    console.print(Text.assemble((label, style), visible(as_command_line(text))), soft_wrap=not console.is_terminal)

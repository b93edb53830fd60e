"""The command line, one file per verb."""

import os
import sys
import warnings
from typing import Any

from fedup.cli._load import let_threads_sleep
from fedup.cli._own_code import error_in_own_code
from fedup.cli._wording import as_command_line
from fedup.errors import FedUPError, FedUPWarning

_INTERRUPTED = 130  # as shells count it: 128 + SIGINT


def main() -> None:
    """Run `fedup`; exit code 0 on success, 1 on failure, 2 on wrong usage, 130 when interrupted."""
    let_threads_sleep()
    with warnings.catch_warnings():
        warnings.simplefilter("always", FedUPWarning)
        warnings.showwarning = _show_warning
        _run()


def _run() -> None:
    try:
        from fedup.cli._app import app
    except ModuleNotFoundError as error:
        sys.exit(f"The command line needs {error.name}: pip install 'fedup[all]'.")
    import click

    try:
        code = app(standalone_mode=False) or 0  # typer makes a code of KeyboardInterrupt, too
        sys.exit(_interrupted() if code == _INTERRUPTED else code)
    except click.exceptions.Abort:
        sys.exit(_interrupted())
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except FedUPError as error:
        _say_error(str(error))
        sys.exit(1)
    except Exception as error:
        told = error_in_own_code(error) or (str(error) if isinstance(error, OSError) else None)
        if told is None:
            raise
        _say_error(told)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(_interrupted())


def _interrupted() -> int:
    _say_error("Interrupted. The folder is sound, before the step or after it; the same command again completes it.")
    return _INTERRUPTED


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **others: Any) -> None:
    if issubclass(category, FedUPWarning):
        _say("Note: ", "bold yellow", str(message))
    else:
        _show_usual_warning(message, category, *where, **others)


_show_usual_warning = warnings.showwarning


def _say_error(text: str) -> None:
    _say("Error: ", "bold red", text)


def _say(label: str, style: str, text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    # Text, not markup: what is in brackets in a name stays. Not wrapped where lines are read by programs.
    console = Console(stderr=True)
    console.print(Text.assemble((label, style), as_command_line(text)), soft_wrap=not console.is_terminal)

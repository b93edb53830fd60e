"""The command line, one file per verb."""

import sys

from fedup.errors import FedUPError


def main() -> None:
    """Run `fedup`; exit code 0 on success, 1 on failure, 2 on wrong usage."""
    try:
        from fedup.cli._app import app
    except ModuleNotFoundError as error:
        sys.exit(f"The command line needs {error.name}: pip install 'fedup[all]'.")
    try:
        app()
    except FedUPError as error:
        from rich.console import Console

        Console(stderr=True).print(f"[bold red]Error:[/] {error}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)

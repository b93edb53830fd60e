"""What the shell offers when Tab is pressed: fast, and silent when something is wrong."""

import os
from contextlib import suppress
from pathlib import Path

from fedup.errors import FedUPError
from fedup.run.folder import Run
from fedup.run.in_words import forget_set


def data_sets(incomplete: str) -> list[str]:
    """Names of data sets."""
    return _modules("datasets", incomplete)


def models(incomplete: str) -> list[str]:
    """Names of models."""
    return _modules("models", incomplete)


def requests(incomplete: str) -> list[tuple[str, str]]:
    """Ids of the run folder's requests, with what they ask for."""
    with suppress(FedUPError, OSError):
        found = Run(os.environ.get("FEDUP_RUN", "run")).read().requests
        return [
            (request.id, forget_set(request.forget)) for request in found if request.id.startswith(incomplete.upper())
        ]
    return []


def _modules(package: str, incomplete: str) -> list[str]:
    # From the files' names: importing the package would load torch.
    folder = Path(__file__).parent.parent / "tasks" / package
    found = (path.stem for path in sorted(folder.glob("[!_]*.py")))
    return [name for name in found if name.startswith(incomplete)]

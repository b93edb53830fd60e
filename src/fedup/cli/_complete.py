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
        known = Run(os.environ.get("FEDUP_RUN", "run")).read().requests
        return [(own.id, forget_set(own.forget)) for own in known if own.id.startswith(incomplete.upper())]
    return []


def _modules(package: str, incomplete: str) -> list[str]:
    # From the files' names: importing the package would load torch.
    folder = Path(__file__).parent.parent / "tasks" / package
    return [path.stem for path in sorted(folder.glob("[!_]*.py")) if path.stem.startswith(incomplete)]

"""Errors in a user's own file, told in one paragraph: which file, which line, what it raised."""

import os
import sys
import traceback
from pathlib import Path

from fedup.registry import OWN_MODULE, line_in

VARIABLE = "FEDUP_TRACEBACK"


def error_in_own_code(error: Exception) -> str | None:
    """Where in a file of the user's the error was raised, in words; None where none took part."""
    files = [module.__file__ for name, module in list(sys.modules.items()) if name.startswith(OWN_MODULE)]
    for file in files:
        line = line_in(Path(file), error) if file else None
        if file and line is not None:
            if os.environ.get(VARIABLE):
                traceback.print_exception(error)
            where = f"{Path(file).name}, line {line.lineno}, in {line.name}()" if line.name[0] != "<" else f"{file}"
            return (
                f"{where}: {type(error).__name__}: {error}. This is your own code, {file}; set {VARIABLE}=1 to see the "
                "whole traceback."
            )
    return None

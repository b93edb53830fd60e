"""A hint when training with several threads begins on a busy machine."""

from rich.console import Console

from fedup.cli._load import load_above_cores
from fedup.training.fedavg import Observer


class BusyNoted(Observer):
    """Says so once, when training starts."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_start(self, rounds_done: int, threads: int) -> None:
        busy = load_above_cores()
        if busy and threads > 1:
            self._console.print(
                f"Note: the machine is busy ({busy}), where {threads} threads wait for each other. --threads 1 may be "
                "faster; the last bits of the model depend on it.",
                markup=False,
                soft_wrap=not self._console.is_terminal,
            )

"""How a round's time grows with the number of clients when the data stay as many."""

from collections.abc import Iterator
from functools import partial

import torch

from fedup.bench.speed._rows import Row, Tell
from fedup.bench.speed._settings import LENET5, RESNET18, even_jobs
from fedup.bench.speed.training import TimedRounds
from fedup.bench.turns import in_turns

CLIENTS = (10, 100, 1000)
_ROWS = 50_000


def measure(device: torch.device, tell: Tell) -> Iterator[Row]:
    """Time per row with 10, 100 and 1,000 clients: the longest over the shortest."""
    on_gpu = device.type == "cuda"
    for setting in (LENET5, RESNET18) if on_gpu else (LENET5,):  # a ResNet's round takes half an hour on two cores
        tell(f"{setting.title} with up to {max(CLIENTS):,} clients")
        rounds = TimedRounds(setting, _ROWS, device)
        work = {str(n): partial(rounds.run, even_jobs(_ROWS, n, rounds.config)) for n in CLIENTS}
        # A CPU has nothing to warm up that a round would not do many times over.
        times = in_turns(work, device, repeats=3, warm=2 if on_gpu else 0)
        microseconds = {name: 1e6 * times.median(name) / _ROWS for name in work}
        yield Row(
            f"{setting.title}: a row's time, {CLIENTS[0]} to {CLIENTS[-1]:,} clients",
            max(microseconds.values()) / min(microseconds.values()),
            "×",
            1.3,
            detail={"rows": _ROWS, "microseconds_per_row": microseconds, "engine": rounds.engine.name},
        )

"""How long a client request takes in exact mode, on features drawn at random: wall clock and CPU time of this process.

python tools/time_exact_request.py --features 1280 --classes 10 --threads 2
"""

import argparse
import statistics
import time

import torch
from torch import nn

from fedup import Backbone, Federation, Forget, learn_head

CLIENTS, ROWS = 10, 6000


def main() -> None:
    """Print the medians over requests of all clients, each taken back afterwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=1280)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    source = torch.Generator().manual_seed(0)
    y = torch.randint(0, chosen.classes, (ROWS,), generator=source)
    x = 3 * torch.randn(ROWS, chosen.features, generator=source).relu()
    parts = [torch.arange(first, ROWS, CLIENTS) for first in range(CLIENTS)]
    clients = Federation.split(x, y, parts, heldout=0.0, validation=0.0, num_classes=chosen.classes)
    backbone = Backbone(nn.Flatten(), torch.zeros(1, chosen.features), step=2.0**-7)
    model = learn_head(backbone, clients, num_classes=chosen.classes)
    wall, cpu = [], []
    for client in [0, *range(CLIENTS)]:  # the first one warms up
        started, used = time.perf_counter(), time.process_time()
        model.unlearn(Forget.clients([client]), force=True)
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
        model.restore(Forget.clients([client]))
    ms = [1000 * statistics.median(times[1:]) for times in (wall, cpu)]
    print(
        f"{chosen.features} features, {chosen.classes} classes, {chosen.threads} threads: "
        f"{ms[0]:.0f} ms, {ms[1]:.0f} ms of CPU time (median of {CLIENTS} client requests)"
    )


if __name__ == "__main__":
    main()

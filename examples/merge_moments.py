"""Moments of very many clients, added up by any map-reduce: integers give the same total in any order and grouping.

Each worker holds its own sum and one client's moments at a time. Put what your clients sent in place of `moments_of`.
"""

from functools import reduce
from multiprocessing import Pool
from operator import add

import torch

from fedup.statistics.integer_moments import IntegerMoments, MomentConfig

CLIENTS, CLASSES, WIDTH = 1_000, 10, 128


def moments_of(client):
    x = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(client))
    return IntegerMoments.of(x, torch.arange(50) % CLASSES, CLASSES, MomentConfig())


def merged(clients):
    return reduce(add, map(moments_of, clients))


if __name__ == "__main__":
    with Pool(2) as workers:
        total = reduce(add, workers.imap_unordered(merged, [range(start, CLIENTS, 16) for start in range(16)]))
    assert total - moments_of(7) == merged(client for client in range(CLIENTS) if client != 7)
    print(f"{total.rows:,} rows of {CLIENTS:,} clients; without client 7: {(total - moments_of(7)).rows:,}, exactly")

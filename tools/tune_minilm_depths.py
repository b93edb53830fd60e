"""How the depths of the backbone `minilm` were chosen: training rows of AG News only, seed 100, no test row.

Run: FEDUP_DATA=… python tools/tune_minilm_depths.py   (some five minutes on two cores)
"""

import torch
from torch import nn

from fedup.filters.ridge_head import HeadRule, solve_head
from fedup.models.backbone import Widened
from fedup.rng import generator
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig
from fedup.tasks.backbones import load_backbone
from fedup.tasks.datasets import load_dataset

SEED, ROWS, JUDGED_BY, LAYERS = 100, 18_000, 4_000, 7
CHOICES = [*((i,) for i in range(LAYERS)), (5, 6), (4, 6), (3, 6), (2, 6), (0, 6), (0, 3, 6), (0, 4, 6)]
CHOICES += [(3, 4, 5, 6), (0, 2, 4, 6), (1, 3, 5, 6), (0, 4, 5, 6), tuple(range(LAYERS))]


@torch.no_grad()
def main() -> None:
    """Print the share of rows that each choice gets right."""
    data = load_dataset("ag_news")
    chosen = torch.randperm(len(data.y), generator=generator(SEED, "depths"))[:ROWS]
    pooled = load_backbone("minilm", tuple(data.x.shape[1:])).module
    pooled.depths = tuple(range(LAYERS))
    order = chosen[(data.x[chosen] != 0).sum(1).argsort()]  # short texts together: little padding is computed
    parts = []
    for rows in order.split(128):
        ids = data.x[rows]
        parts.append(pooled(ids[:, : int((ids != 0).sum(1).max())]))
    mixed = torch.randperm(ROWS, generator=generator(SEED, "depths, who judges"))
    depths, y = torch.cat(parts)[mixed].chunk(LAYERS, 1), data.y[order][mixed]
    for choice in CHOICES:
        report(", ".join(map(str, choice)), torch.cat([depths[i] for i in choice], 1), y)
    report("6, random features behind it", Widened(nn.Identity(), depths[6].shape[1], 1920)(depths[6]), y)


def report(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
    config = MomentConfig(4.0, 2.0**-13, 1)
    totals = IntegerMoments.of(x[JUDGED_BY:], y[JUDGED_BY:], int(y.max()) + 1, config)
    answers = solve_head(totals, config, HeadRule()).of(x[:JUDGED_BY]).argmax(1)
    print(
        f"depths {name}: {x.shape[1]:,} features, {float((answers == y[:JUDGED_BY]).double().mean()):.4f}", flush=True
    )


if __name__ == "__main__":
    main()

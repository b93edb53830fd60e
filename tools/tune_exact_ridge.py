"""How the ridge rule of exact mode was fixed: seeds from 100, digits and MNIST, no data that results are reported on.

Run: FEDUP_DATA=… python tools/tune_exact_ridge.py [random_conv|efficientnet_lite0]
"""

import itertools
import statistics
import sys

import torch
from torch.nn.functional import cross_entropy

from fedup.filters.ridge_head import HeadRule, solve_head
from fedup.rng import generator
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig
from fedup.tasks.backbones import load_backbone
from fedup.tasks.datasets import input_of, load_dataset

RIDGES, FEW_ROWS, SHARPNESS = (0.001, 0.003, 0.01, 0.03, 0.1), (0.0, 0.1, 0.25, 0.5, 1.0), (0.25, 0.5, 0.75, 1.0)
SEEDS, TEST = (100, 101, 102), 400


@torch.no_grad()
def cases(name):
    sizes_of = {"random_conv": {"digits": (200, 1000), "mnist": (200, 1000, 5000)}}
    for data, sizes in sizes_of.get(name, {"digits": (100, 600)}).items():
        dataset = load_dataset(data)
        backbone = load_backbone(name, tuple(dataset.x.shape[1:]), inputs=input_of(data).identity())
        config = MomentConfig(backbone.bound, backbone.step, 1)
        chosen = torch.randperm(len(dataset.y), generator=generator(SEEDS[0], "tune"))[: max(sizes) + TEST]
        computed = torch.cat([backbone(dataset.x[rows]) for rows in chosen.split(64)])
        for seed in SEEDS:
            order = torch.randperm(len(chosen), generator=generator(seed, "tune order"))
            features, y, classes = computed[order], dataset.y[chosen][order], dataset.num_classes
            for size in sizes:
                totals = IntegerMoments.of(features[TEST : TEST + size], y[TEST : TEST + size], classes, config)
                yield f"{data}, {size} rows", totals, config, features[:TEST], y[:TEST]


def main() -> None:
    scores, losses = {}, {}
    for name, totals, config, x, y in cases(sys.argv[1] if len(sys.argv) > 1 else "random_conv"):
        for ridge, few in itertools.product(RIDGES, FEW_ROWS):
            logits = solve_head(totals, config, HeadRule(ridge, few)).of(x)
            right = float((logits.argmax(1) == y).double().mean())
            scores.setdefault((ridge, few), {}).setdefault(name, []).append(right)
        for sharpness in SHARPNESS:
            loss = cross_entropy(solve_head(totals, config, HeadRule(sharpness=sharpness)).of(x), y)
            losses.setdefault(sharpness, {}).setdefault(name, []).append(float(loss))
    for (ridge, few), by_case in sorted(scores.items(), key=lambda pair: -_mean(pair[1]))[:8]:
        shown = ", ".join(f"{name} {statistics.fmean(values):.3f}" for name, values in by_case.items())
        print(f"ridge {ridge:g}, few_rows {few:g}: mean accuracy {_mean(by_case):.4f} ({shown})")
    usual = HeadRule()
    print(f"the rule, {usual}: {_mean(scores[usual.ridge, usual.few_rows]):.4f}")
    for sharpness, by_case in losses.items():
        shown = ", ".join(f"{name} {statistics.fmean(values):.3f}" for name, values in by_case.items())
        print(f"sharpness {sharpness:g}: mean cross entropy {_mean(by_case):.4f} ({shown})")


def _mean(by_case) -> float:
    return statistics.fmean(statistics.fmean(values) for values in by_case.values())


if __name__ == "__main__":
    main()

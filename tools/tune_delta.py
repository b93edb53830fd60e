"""How the rule of deltas was fixed, on seeds from 100: ways to say which losses forgotten rows should get.

The federations are CIFAR-10's of benchmarks/experiments/honest_small.toml, from the benchmark's cache or trained now.
`ways` compares the losses wanted with those under Retrain. To save time one Retrain of a seed leaves out the rows of
all three sample requests, and one the client. `sizes` fits deltas of several sizes, without the checks that `unlearn`
makes.

Run: FEDUP_DATA=… python tools/tune_delta.py ways|sizes [seed …]. Prints a table for docs/honest_data.md.
"""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedup import Forget
from fedup.bench.experiment import load_experiment
from fedup.bench.shared_setup import SharedSetup
from fedup.bench.training_cache import trained
from fedup.federation import Federation, named_rows
from fedup.filters import delta
from fedup.filters.delta import Delta, weighted_layers
from fedup.filters.delta_fit import DeltaRows, fit_delta
from fedup.filters.delta_targets import Losses, early_layer, hardness_of, unseen_targets
from fedup.models.views import shared_view
from fedup.request import union
from fedup.tasks.evaluation import predict

EXPERIMENT = Path(__file__).parents[1] / "benchmarks" / "experiments" / "honest_small.toml"
FEDERATION, CUT = "cifar10-lenet5", "head"
SIZES = (2, 2**16), (2, 2**13), (2, 2**11), (1, 2**16), (1, 2**13), (4, 2**16)
ALONE = "order among themselves"
RANKS = "ranks among trained rows"
EARLY = "ranks, with early features"
FEWER = "ranks, with early features, few rows nearer to usual ones"
RARER = "order among themselves, classes as rare as without the client"
REQUESTS = {
    "random_samples": "a random tenth of a client",
    "person": "a person's rows",
    "memorised": "memorised rows",
    "clean_client": "a client",
}


@dataclass(frozen=True, eq=False)
class TuningCase:
    """A request, and the models with and without its rows."""

    scenario: str
    federation: Federation
    request: Forget
    original: nn.Module
    retrained: nn.Module
    client: int
    rows: DeltaRows


def cases(seeds: list[int]) -> Iterator[TuningCase]:
    """Those of each seed, on its federation."""
    experiment = load_experiment(EXPERIMENT)
    for seed in seeds:
        groups = [group for group in experiment.groups([seed]) if group.federation == FEDERATION]
        setups = [SharedSetup(group, "cpu", _say, with_history=False) for group in groups]
        recipe, dataset, federation = groups[0].recipe, setups[0].dataset, setups[0].situation.federation
        start = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes)
        original = trained(start, federation, recipe, progress=_say)
        requests = [setup.situation.request for setup in setups]
        samples = union([request for request in requests if not request.client_ids])
        for group, request in zip(groups, requests, strict=True):
            client = next(iter((*request.client_ids, *request.sample_ids)))
            holder = federation.client(client)
            forgotten, retained = named_rows(holder, request, holder.train, federation.y)
            left_out = federation.without(request if request.client_ids else samples)
            retrained = trained(start, left_out, recipe, progress=_say)
            rows = DeltaRows(forgotten, retained, torch.cat([holder.validation, holder.heldout]))
            yield TuningCase(group.scenario.name, federation, request, original, retrained, client, rows)


def _say(what: str, done: int, total: int) -> None:
    if done == total:
        print(what, file=sys.stderr)


def measured(model: nn.Module, federation: Federation, rows: Tensor) -> tuple[float, float]:
    """Accuracy and mean loss."""
    logits, labels = predict(model, federation.x, rows), federation.y[rows]
    return float((logits.argmax(1) == labels).float().mean()), float(cross_entropy(logits, labels))


def wanted_by_way(case: TuningCase) -> dict[str, float]:
    """By way, the mean loss that the forgotten rows should get."""
    federation, rows = case.federation, case.rows
    x, y, parts = federation.x, federation.y, (rows.forgotten, rows.retained, rows.unseen)
    logits, labels = [predict(case.original, x, part) for part in parts], Losses(*(y[part] for part in parts))

    def wanted(logits: list[Tensor], *, alone: bool = False, hardness: Losses | None = None, typical: int = 0) -> float:
        losses = [cross_entropy(own, y[part], reduction="none") for own, part in zip(logits, parts, strict=True)]
        most = 0 if alone else len(rows.retained)
        losses[1], of = losses[1][:most], Losses(labels.forgotten, labels.retained[:most], labels.unseen)
        right = logits[2].argmax(1) == labels.unseen
        return float(unseen_targets(Losses(*losses), of, right, hardness, typical=typical).losses.mean())

    layer = early_layer(weighted_layers(case.original, CUT))
    hardness = hardness_of(case.original, layer, x, y, Losses(*parts))
    if case.request.client_ids:
        whole, own = (torch.bincount(y[part], minlength=10) for part in (federation.rows(), rows.forgotten))
        rarer = ((whole - own + 1) / (whole + 1)).log()
        shifted = [part + rarer for part in logits]
        return {ALONE: wanted(logits), RARER: wanted(shifted), EARLY: wanted(logits, hardness=hardness)}
    return {
        ALONE: wanted(logits, alone=True),
        RANKS: wanted(logits),
        EARLY: wanted(logits, hardness=hardness),
        FEWER: wanted(logits, hardness=hardness, typical=20),
    }


def fitted(case: TuningCase) -> tuple[float, ...]:
    """Bytes of a delta, shares of the gap that it closes in accuracy and loss, points on retained held-out rows."""
    federation, rows = case.federation, case.rows
    fit = fit_delta(case.original, CUT, federation.x, federation.y, rows)
    view = shared_view(case.original, frozen=True)
    Delta({case.client: fit.changes}, {case.client: ""}, frozenset()).apply_to(view, CUT)
    known = [measured(model, federation, rows.forgotten) for model in (case.original, case.retrained, view)]
    left = torch.cat([own.heldout for own in federation.clients if own.id not in case.request.client_ids])
    kept = [measured(model, federation, left)[0] for model in (case.original, view)]
    gaps = [(before - now) / (before - goal) for before, goal, now in zip(*known, strict=True)]
    return float(sum(change.nbytes for change in fit.changes.values())), *gaps, 100 * (kept[1] - kept[0])


def ways(seeds: list[int]) -> None:
    """Print how much of the way from the original to Retrain the losses wanted go."""
    shares: dict[tuple[str, str], list[float]] = {}
    for case in cases(seeds):
        before, goal = (
            measured(model, case.federation, case.rows.forgotten)[1] for model in (case.original, case.retrained)
        )
        for way, mean in wanted_by_way(case).items():
            shares.setdefault((REQUESTS[case.scenario], way), []).append((mean - before) / (goal - before))
    print("| request | losses wanted | share of the way to Retrain | mean distance from 1 |\n| --- | --- | --- | --- |")
    for (request, way), found in shares.items():
        apart = statistics.mean(abs(1 - share) for share in found)
        print(f"| {request} | {way} | {statistics.mean(found):.2f} | {apart:.2f} |")


def sizes(seeds: list[int]) -> None:
    """Print what deltas of several sizes do."""
    figures: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for case in cases(seeds):
        for layers, most in SIZES if case.scenario in ("random_samples", "memorised") else ():
            delta.LAYERS, delta.MOST_NUMBERS = layers, most
            name = f"{layers} layer{'s'[: layers > 1]}, {most:,} numbers each"
            figures.setdefault((REQUESTS[case.scenario], name), []).append(fitted(case))
    print("| request | | bytes | gap closed in accuracy | gap closed in loss | points on retained held-out rows |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (request, name), values in figures.items():
        size, accuracy, loss, kept = (statistics.mean(column) for column in zip(*values, strict=True))
        print(f"| {request} | {name} | {size:,.0f} | {accuracy:.2f} | {loss:.2f} | {kept:+.1f} |")


if __name__ == "__main__":
    {"ways": ways, "sizes": sizes}[sys.argv[1]]([int(seed) for seed in sys.argv[2:]] or [100, 101, 102])

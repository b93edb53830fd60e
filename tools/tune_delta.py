"""How the rule of deltas was fixed: five ways to say which losses forgotten rows should get, on seeds from 100.

CIFAR-10, 6,000 rows, LeNet-5, five clients, 15 rounds of 3 epochs, so that rows are learned by heart. Each request is
answered by the fit alone (`fedup.filters.delta_fit`), without the checks that `unlearn` makes, and compared with
Retrain. Share of the gap: 1 is Retrain, 0 is the original.

Run: FEDUP_DATA=… python tools/tune_delta.py FOLDER [ways|sizes] [seed …]; models are kept in FOLDER. Prints a table for
docs/honest_data.md: of the ways, or of sizes of a delta.
"""

import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from fedup import Forget
from fedup.bench.scenarios import memorised
from fedup.federation import Federation, named_rows
from fedup.filters import delta
from fedup.filters.delta import Delta
from fedup.filters.delta_fit import DeltaRows, fit_delta, unseen_losses
from fedup.models.features import FeatureReader
from fedup.models.views import shared_view
from fedup.serving.model_file import load_model, save_model
from fedup.tasks.recipe import Recipe

SIZES = (2, 2**16), (2, 2**13), (2, 2**11), (1, 2**16), (1, 2**13), (4, 2**16)
EARLY, CUT, RIDGE = "conv2", "head", 0.1
REQUESTS = {
    "random": "a random tenth of a client",
    "person": "20 rows",
    "memorised": "memorised rows",
    "client": "a client",
}


def logits_of(model, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(batch) for batch in x.split(256)])


def request_for(kind: str, federation: Federation, seed: int) -> Forget:
    by_size = sorted(federation.clients, key=lambda client: len(client.train))
    largest, count = by_size[-1], len(by_size[-1].train) // 10
    if kind == "client":
        return Forget.clients([by_size[len(by_size) // 2].id])
    if kind == "memorised":
        rows = federation.rows()
        margins = memorised._margins(federation.x[rows].flatten(1), federation.y[rows], 10, seed)
        own = torch.isin(rows, largest.train).nonzero().flatten()
        return Forget.samples({largest.id: rows[own[margins[own].argsort(stable=True)[:count]]].tolist()})
    order = torch.randperm(len(largest.train), generator=torch.Generator().manual_seed(seed))
    return Forget.samples({largest.id: largest.train[order[: 20 if kind == "person" else count]].tolist()})


def margins_of(model, federation: Federation, rows: DeltaRows) -> tuple[Tensor, Tensor]:
    """How well an early ridge head knows forgotten rows, and unseen ones left out one at a time: by how much it puts
    their label above all others."""
    x, y, reader = federation.x, federation.y, FeatureReader(model, EARLY)
    known = torch.cat([rows.retained, rows.unseen])
    features, own = (reader.read(x, part).values.flatten(1) for part in (known, rows.forgotten))
    mean, targets = features.mean(0), one_hot(y[known], 10).float() - 0.1
    table, own = features - mean, own - mean
    kernel = table @ table.T
    inverse = torch.linalg.inv(kernel + RIDGE * kernel.diagonal().mean() * torch.eye(len(kernel)))
    weights = inverse @ targets
    left_out = (targets - weights / inverse.diagonal()[:, None])[len(rows.retained) :]

    def margin(scores: Tensor, labels: Tensor) -> Tensor:
        label = one_hot(labels, 10).bool()
        return scores[label] - scores.masked_fill(label, -torch.inf).amax(1)

    return margin(own @ table.T @ weights, y[rows.forgotten]), margin(left_out, y[rows.unseen])


def targets_by(way: str, model, federation: Federation, rows: DeltaRows) -> Tensor:
    x, y = federation.x, federation.y
    losses, unseen = (
        cross_entropy(logits_of(model, x[part]), y[part], reduction="none") for part in (rows.forgotten, rows.unseen)
    )
    ordered = unseen_losses(losses, y[rows.forgotten], unseen, y[rows.unseen])
    if way == "order":
        return ordered
    if way == "order, never below":
        return torch.maximum(ordered, losses)
    if way == "nearest unseen rows":
        features, others = (
            FeatureReader(model, EARLY).read(x, part).values.flatten(1) for part in (rows.forgotten, rows.unseen)
        )
        apart = torch.cdist(features, others).masked_fill(y[rows.forgotten, None] != y[None, rows.unseen], torch.inf)
        return unseen[apart.topk(3, largest=False).indices].mean(1)
    forgotten, other = margins_of(model, federation, rows)
    if way == "order of early margins":
        places = torch.empty_like(losses)
        places[(-forgotten).argsort()] = torch.arange(len(losses), dtype=losses.dtype)
        return unseen_losses(places, y[rows.forgotten], unseen, y[rows.unseen])
    window = max(5, len(unseen) // 20)
    alike = unseen[(forgotten[:, None] - other).abs().topk(window, largest=False).indices].sort(1).values
    quantile = (losses.argsort().argsort() * window // len(losses)).clamp(max=window - 1)
    return alike.gather(1, quantile[:, None])[:, 0]


WAYS = "order", "order, never below", "order of early margins", "unseen rows of like margin", "nearest unseen rows"


def trained(recipe: Recipe, federation: Federation, dataset, path: Path):
    blank = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes)
    if path.exists():
        return load_model(blank, path)
    model = recipe.train(blank, federation).model.eval()
    save_model(model, path)
    return model


def cases(folder: Path, seeds: list[int], kinds: tuple[str, ...]):
    """Models, rows and figures of the original and of Retrain."""
    for seed in seeds:
        recipe = Recipe.suited_to("cifar10", model="lenet5", rows=6000, clients=5, rounds=15, epochs=3, seed=seed)
        dataset = recipe.load()
        federation = recipe.federation(dataset)
        original = trained(recipe, federation, dataset, folder / f"{seed}.safetensors")
        for kind in kinds:
            request = request_for(kind, federation, seed)
            retrained = trained(recipe, federation.without(request), dataset, folder / f"{seed}-{kind}.safetensors")
            yield kind, federation, request, original, retrained


def figures_of(federation: Federation, request: Forget, original, retrained, way: str = WAYS[0]) -> tuple[float, ...]:
    """Shares of the gap closed in accuracy and loss, points on retained held-out rows, bytes sent."""
    client = federation.client(next(iter((*request.client_ids, *request.sample_ids))))
    forgotten, retained = named_rows(client, request, client.train, federation.y)
    rows = DeltaRows(forgotten, retained, torch.cat([client.validation, client.heldout]))
    held_out = torch.cat([own.heldout for own in federation.clients if own.id not in request.client_ids])
    targets = targets_by(way, original, federation, rows)
    fitted = fit_delta(original, CUT, federation.x, federation.y, rows, targets=targets)
    view = shared_view(original, frozen=True)
    Delta({client.id: fitted.changes}, {client.id: ""}, frozenset()).apply_to(view, CUT)
    known = [measured(model, federation, forgotten) for model in (original, retrained, view)]
    kept = [measured(model, federation, held_out)[0] for model in (original, view)]
    gaps = [(one - new) / (one - wanted) for one, wanted, new in zip(*known, strict=True)]
    found = (*gaps, 100 * (kept[1] - kept[0]), float(sum(change.nbytes for change in fitted.changes.values())))
    print(request, way, *(f"{value:.2f}" for value in found), fitted.outcome, file=sys.stderr)
    return found


def main() -> None:
    folder, mode, seeds = Path(sys.argv[1]), sys.argv[2], [int(seed) for seed in sys.argv[3:]] or [100, 101]
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    kinds = tuple(REQUESTS) if mode == "ways" else ("random", "memorised")
    for kind, *case in cases(folder, seeds, kinds):
        for way in WAYS if mode == "ways" else ():
            figures.setdefault((REQUESTS[kind], way), []).append(figures_of(*case, way=way))
        for layers, most in SIZES if mode == "sizes" else ():
            delta.LAYERS, delta.MOST_NUMBERS = layers, most
            name = f"{layers} layer{'s'[: layers > 1]}, {most:,} numbers each"
            figures.setdefault((REQUESTS[kind], name), []).append(figures_of(*case))
    print("| request | | bytes | gap closed in accuracy | gap closed in loss | points on retained held-out rows |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (request, name), values in figures.items():
        accuracy, loss, kept, size = (statistics.mean(column) for column in zip(*values, strict=True))
        print(f"| {request} | {name} | {size:,.0f} | {accuracy:.2f} | {loss:.2f} | {kept:+.1f} |")


def measured(model, federation: Federation, rows: Tensor) -> tuple[float, float]:
    """Accuracy and mean loss."""
    logits, labels = logits_of(model, federation.x[rows]), federation.y[rows]
    return float((logits.argmax(1) == labels).float().mean()), float(cross_entropy(logits, labels))


if __name__ == "__main__":
    main()

"""Ordinary withdrawals (of classes, persons, sources, random rows), each answered by the library's default call; each
verdict is compared with one that uses Retrain as its reference."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample

import fedup
from fedup.bench.training_cache import trained
from fedup.errors import DataError, HarmError, SettingError
from fedup.federation import Client, Federation
from fedup.request import Forget
from fedup.rng import generator
from fedup.statistics.client_data import ClientData
from fedup.statistics.proportions import Paired
from fedup.statistics.store import Centroids
from fedup.statistics.tally import RowsToCount, tally
from fedup.tasks.datasets import check_there
from fedup.tasks.evaluation import accuracy, accuracy_per_class
from fedup.tasks.machine import describe_code, describe_machine
from fedup.tasks.progress import Progress
from fedup.tasks.recipe import Recipe
from fedup.training.fedavg import Runtime
from fedup.unlearning.verdict import against

_ROWS_A_CLASS = 100  # of the test set, below which one wrong answer is a point or more
KINDS = {
    "class": "its most frequent class",
    "classes": "half of its classes",
    "half": "a random half of its rows",
    "tenth": "a random tenth of its rows",
    "person": "a person",
    "source": "a source",
}


@dataclass(frozen=True)
class Setting:
    """A federation and the withdrawals made in it, each alone: `(kind, client)`.

    A person's rows are slanted, at least `least_person_rows` of them; a source's have another contrast and brightness.
    Both have held-out rows in the same proportion. With `until`, training goes on in steps of `step` rounds, at most
    the recipe's, until the accuracy on training rows reaches it.
    """

    name: str
    recipe: Mapping[str, Any]
    cases: tuple[tuple[str, int], ...]
    person: float = 0.2  # of a client's rows
    least_person_rows: int = 0
    source: float = 0.3
    slant: float = 0.2  # columns for each row up
    contrast: float = 0.9
    brightness: float = 0.1  # in units of normalised inputs
    mislabelled: float = 0.0  # of every client's rows
    heldout: float | None = None  # of a client's rows; by default as everywhere
    until: float | None = None
    step: int = 5

    def __post_init__(self) -> None:
        unknown = sorted({kind for kind, _ in self.cases} - set(KINDS))
        if unknown:
            raise SettingError(f"Withdrawals are of the kinds {', '.join(KINDS)}; found {', '.join(unknown)}.")

    def recipe_for(self, seed: int) -> Recipe:
        """How the federation is made and trained."""
        return Recipe.suited_to(**self.recipe, seed=seed)

    def settings(self) -> dict[str, Any]:
        """All but the recipe and the cases, which results tell by themselves."""
        return {name: value for name, value in asdict(self).items() if name not in ("name", "recipe", "cases")}


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            "digits",
            {"data": "digits", "clients": 2, "partition": "dirichlet:5", "rounds": 15},
            (("class", 0), ("half", 1), ("source", 0), ("person", 1)),
            person=0.4,
            source=0.4,
        ),
        Setting(
            "mnist",
            {"data": "mnist", "rows": 30_000, "clients": 10, "partition": "dirichlet:1.0", "rounds": 9},
            tuple((kind, client) for kind in ("class", "tenth", "person", "source") for client in range(4)),
            least_person_rows=300,
        ),
        Setting(
            "memorised",
            {"data": "mnist", "rows": 24_000, "clients": 5, "partition": "iid", "rounds": 500},
            tuple((kind, client) for kind in ("half", "classes") for client in range(5)),
            mislabelled=0.2,
            heldout=0.3,  # wrong labels are noise in the reference, which more rows make up for
            until=0.99,
            step=10,
        ),
    )
}


@dataclass(frozen=True)
class Withdrawal:
    """One withdrawal."""

    kind: str
    client: int
    request: Forget

    def __str__(self) -> str:
        return f"client {self.client}, {KINDS[self.kind]}"


def make_cases(federation: Federation, setting: Setting, seed: int) -> tuple[Federation, list[Withdrawal]]:
    """The federation with its persons, sources and wrong labels, and what is withdrawn from it."""
    if setting.heldout is not None:
        parts = [torch.cat([own.train, own.validation, own.heldout]).sort().values for own in federation.clients]
        federation = Federation.split(
            federation.x, federation.y, parts, seed=seed, heldout=setting.heldout, num_classes=federation.num_classes
        )
    if setting.mislabelled:
        federation = federation.relabeled(_mislabel(federation, setting.mislabelled, seed))
    x = federation.x.clone()
    rows_of: dict[tuple[str, int], Tensor] = {}
    for client in federation.clients:
        kinds = [kind for kind, of in setting.cases if of == client.id]
        people = _choose_groups(client, setting, kinds, seed)
        for kind, rows_by_part in people.items():
            own = torch.cat(rows_by_part)
            x[own] = (
                _slanted(x[own], setting.slant) if kind == "person" else setting.contrast * x[own] + setting.brightness
            )
        for kind in kinds:
            rows = people[kind][0] if kind in people else _choose_rows(client, federation.y, kind, seed)
            if not len(rows):
                raise DataError(f"Client {client.id} has no training row of {KINDS[kind]}. Take another seed.")
            rows_of[kind, client.id] = rows
    return replace(federation, x=x), [
        Withdrawal(kind, client, Forget.samples({client: rows_of[kind, client].tolist()}))
        for kind, client in setting.cases
    ]


def _mislabel(federation: Federation, share: float, seed: int) -> Tensor:
    """Labels with this share replaced by random other labels, at each client in each of its parts."""
    y = federation.y.clone()
    for client in federation.clients:
        for name in ("train", "validation", "heldout"):
            draw = generator(seed, "mislabelled", client.id, name)
            rows = getattr(client, name)
            wrong = rows[torch.randperm(len(rows), generator=draw)[: round(share * len(rows))]]
            y[wrong] += torch.randint(1, federation.num_classes, wrong.shape, generator=draw)
    return y % federation.num_classes


def _choose_groups(
    client: Client, setting: Setting, kinds: Sequence[str], seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Training and held-out rows of a client's person and source, without overlap."""
    train = _shuffled(client.train, seed, "train", client.id)
    held_out = _shuffled(torch.cat([client.validation, client.heldout]), seed, "held out", client.id)
    half = len(train) // 2  # more would not be a part of a client
    sizes = {
        "person": min(max(round(setting.person * len(train)), setting.least_person_rows), half),
        "source": min(round(setting.source * len(train)), half),
    }
    groups, first, first_other = {}, 0, 0
    for kind, size in sizes.items():
        if kind in kinds:
            others = round(size / max(1, len(train)) * len(held_out))
            groups[kind] = train[first : first + size], held_out[first_other : first_other + others]
            first, first_other = first + size, first_other + others
    return groups


def _choose_rows(client: Client, y: Tensor, kind: str, seed: int) -> Tensor:
    """Training rows of a client: of its most frequent class, of half of its classes, or so many at random."""
    labels = y[client.train]
    if kind == "class":
        return client.train[labels == labels.mode().values]
    if kind == "classes":
        held = _shuffled(labels.unique(), seed, "classes", client.id)
        return client.train[torch.isin(labels, held[: len(held) // 2])]
    share = {"half": 2, "tenth": 10}[kind]
    return _shuffled(client.train, seed, kind, client.id)[: len(labels) // share].sort().values


def _slanted(x: Tensor, slant: float) -> Tensor:
    """Images sheared about their centre; what comes in at the sides looks like the border. (N, C, H, W)"""
    matrix = torch.tensor([[1.0, slant, 0.0], [0.0, 1.0, 0.0]]).expand(len(x), 2, 3)
    grid = affine_grid(matrix, list(x.shape), align_corners=False)
    return grid_sample(x, grid, padding_mode="border", align_corners=False)


def _shuffled(values: Tensor, seed: int, *names: object) -> Tensor:
    return values[torch.randperm(len(values), generator=generator(seed, "withdrawals", *names))]


def run_withdrawals(
    setting: Setting, *, seed: int, device: torch.device | str = "cpu", progress: Progress
) -> dict[str, Any]:
    """Train a federation, answer each withdrawal alone, retrain without its rows; the result is plain data."""
    recipe = setting.recipe_for(seed)
    check_there(recipe.data)
    dataset = recipe.load()
    federation, cases = make_cases(recipe.federation(dataset), setting, seed)
    federation = federation.to(device)
    test_x, test_y = dataset.test_x.to(device), dataset.test_y.to(device)
    if len(test_y) < _ROWS_A_CLASS * dataset.num_classes:  # what clients hold out is as unseen
        unseen = torch.cat([federation.rows("validation"), federation.rows("heldout")])
        test_x, test_y = torch.cat([test_x, federation.x[unseen]]), torch.cat([test_y, federation.y[unseen]])
    test = partial(accuracy_per_class, x=test_x, y=test_y, num_classes=dataset.num_classes)
    start = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes)
    model, recipe = _learn(start, federation, recipe, setting, progress)
    withdrawn = _Withdrawn(model, fedup.collect(model, federation), federation, test, test(model))
    measured = []
    for number, case in enumerate(cases):
        progress(f"{setting.name}, seed {seed}: withdrawals", number, len(cases))
        without = federation.without(case.request)
        retrained = trained(start, without, recipe, progress=progress, what=f"Retrain without {case}")
        measured.append(withdrawn.measure(case, retrained))
    progress(f"{setting.name}, seed {seed}: withdrawals", len(cases), len(cases))
    return {
        "name": setting.name,
        "seed": seed,
        "recipe": recipe.settings(),
        "settings": setting.settings(),
        "device": torch.device(device).type,
        "train_accuracy": accuracy(model, federation.x, federation.y, federation.rows()),
        "held_out_accuracy": accuracy(model, federation.x, federation.y, federation.rows("heldout")),
        "test_accuracy": accuracy(model, test_x, test_y),
        "cases": measured,
        "machine": describe_machine(),
        "code": describe_code(),
    }


def _learn(
    start: nn.Module, federation: Federation, recipe: Recipe, setting: Setting, progress: Progress
) -> tuple[nn.Module, Recipe]:
    """The trained model, and the recipe with the rounds it took: Retrain gets as many."""
    if setting.until is None:
        return trained(start, federation, recipe, progress=progress), recipe
    model, known, rows = start, 0.0, federation.rows()
    learning = f"{setting.name}, seed {recipe.seed}: the federation learns by heart"
    for first in range(0, recipe.rounds, setting.step):
        progress(learning, first, recipe.rounds)
        rounds = range(first, min(first + setting.step, recipe.rounds))
        model = recipe.train(model, federation, rounds=rounds, runtime=Runtime(federation.x.device)).model
        known = accuracy(model, federation.x, federation.y, rows)
        if known >= setting.until:
            progress(learning, recipe.rounds, recipe.rounds)
            return model, replace(recipe, rounds=rounds.stop)
    raise DataError(
        f"After {recipe.rounds} rounds {known:.3f} of the training rows are known, and {setting.until} are wanted: "
        "this federation has not learned by heart. Give it more rounds or epochs."
    )


@dataclass(frozen=True, eq=False)
class _Withdrawn:
    """One trained federation; each withdrawal is answered as if it were the first."""

    model: nn.Module
    store: Centroids
    federation: Federation
    test: Callable[[nn.Module], list[float]]  # accuracy of each class
    test_before: list[float]

    def measure(self, case: Withdrawal, retrained: nn.Module) -> dict[str, Any]:
        """Answer a withdrawal; its figures, beside those of Retrain's model."""
        plugged, store = fedup.plug(self.model), self.store.to(self.store.vectors.device)
        report, refusal, verdict, beside = None, "", None, None
        try:
            report = fedup.unlearn(plugged, store, case.request, clients=self.federation)
            verdict = report.verdicts[case.request.digest]
        except HarmError as error:
            refusal = str(error)
        by_retrain = self._hits(case, retrained)
        if verdict is not None and verdict.statistic is not None:
            beside = against(verdict.statistic.counts, by_retrain, verdict.measure)
        served = plugged.served
        parts = {} if served is None else {"eraser": served.erasure, "bottleneck": served.filter}
        test_after = self.test_before if served is None else self.test(plugged)
        losses = [100 * (before - after) for before, after in zip(self.test_before, test_after, strict=True)]
        return {
            "kind": case.kind,
            "client": case.client,
            "title": str(case),
            "rows": len(case.request.sample_ids[case.client]),
            "held_out": self._held_out(case),
            "refused": refusal,
            "withheld": bool(report and report.withheld),
            "filter": " + ".join(name for name, part in parts.items() if part is not None) or "none",
            "erasure": parts.get("eraser") is not None,
            "verdict": verdict and verdict.to_json(),
            "verdict_by_retrain": beside and beside.to_json(),
            "retrain_accuracy": by_retrain.share_before.value,
            "test_before": self.test_before,
            "test_after": test_after,
            "worst_class": max(range(len(losses)), key=losses.__getitem__),
            "worst_class_loss": max(losses),
            "time_s": report and report.total_time_s,
            "notes": report.notes if report else [],
        }

    def _hits(self, case: Withdrawal, model: nn.Module) -> Paired:
        """A model's answers to the rows that the verdict counts: those of labels that the client holds out, too."""
        client, data = self.federation.client(case.client), self.federation
        question = RowsToCount({"rows": case.request}, case.request, classes=False)
        rows = ClientData(model, data.x, data.y, client, data.num_classes)
        counted = tally(rows, question, original=model, before=model, after=model)
        unseen = counted.unseen.get("rows", {})
        return sum((hits for label, hits in counted.forgotten.get("rows", {}).items() if label in unseen), Paired())

    def _held_out(self, case: Withdrawal) -> int:
        """Held-out rows of the same client and labels."""
        client, y = self.federation.client(case.client), self.federation.y
        labels = y[self.federation.forgotten(case.request)].unique()
        return int(torch.isin(y[torch.cat([client.validation, client.heldout])], labels).sum())

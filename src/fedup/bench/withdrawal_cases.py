"""Federations in which ordinary withdrawals are made, and the withdrawals: classes, persons, sources, random rows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from fedup.errors import DataError, SettingError
from fedup.federation import Client, Federation
from fedup.request import Forget
from fedup.rng import generator
from fedup.tasks.recipe import Recipe

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

    A person writes slanted, and has at least `least_person_rows` training rows; a source has another contrast and
    brightness. Both have rows among those that a client holds out, too, in the same proportion. With `until` training
    goes on, `step` rounds at a time and no more than the recipe's, until so much of the training rows is known.
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
        federation = _split_again(federation, setting.heldout, seed)
    if setting.mislabelled:
        federation = federation.relabeled(_mislabel(federation, setting.mislabelled, seed))
    x = federation.x.clone()
    withdrawn = {}
    for client in federation.clients:
        kinds = [kind for kind, of in setting.cases if of == client.id]
        people = _choose_groups(client, setting, kinds, seed)
        for kind, (rows, held_out) in people.items():
            theirs = torch.cat([rows, held_out])
            changed = _slanted(x[theirs], setting.slant) if kind == "person" else _dimmed(x[theirs], setting)
            x[theirs] = changed
        for kind in kinds:
            rows = people[kind][0] if kind in people else _choose_rows(client, federation.y, kind, seed)
            if not len(rows):
                raise DataError(f"Client {client.id} has no training row of {KINDS[kind]}. Take another seed.")
            withdrawn[kind, client.id] = rows
    cases = [
        Withdrawal(kind, client, Forget.samples({client: withdrawn[kind, client].tolist()}))
        for kind, client in setting.cases
    ]
    return replace(federation, x=x), cases


def _split_again(federation: Federation, heldout: float, seed: int) -> Federation:
    parts = [torch.cat([one.train, one.validation, one.heldout]).sort().values for one in federation.clients]
    return Federation.split(
        federation.x, federation.y, parts, seed=seed, heldout=heldout, num_classes=federation.num_classes
    )


def _mislabel(federation: Federation, share: float, seed: int) -> Tensor:
    """Labels of which so many at each client, in each of its parts, are another one at random."""
    y = federation.y.clone()
    for client in federation.clients:
        for name in ("train", "validation", "heldout"):
            draw = generator(seed, "mislabelled", client.id, name)
            rows = getattr(client, name)
            wrong = rows[torch.randperm(len(rows), generator=draw)[: round(share * len(rows))]]
            y[wrong] = (y[wrong] + torch.randint(1, federation.num_classes, wrong.shape, generator=draw)) % (
                federation.num_classes
            )
    return y


def _choose_groups(
    client: Client, setting: Setting, kinds: Sequence[str], seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Training and other rows of a client's person and source, which have no row in common."""
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


def _dimmed(x: Tensor, setting: Setting) -> Tensor:
    return setting.contrast * x + setting.brightness


def _shuffled(values: Tensor, seed: int, *names: object) -> Tensor:
    return values[torch.randperm(len(values), generator=generator(seed, "withdrawals", *names))]

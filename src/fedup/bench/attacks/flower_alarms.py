"""False alarms: which honest nodes do the checks of hostile ones flag, where nodes hold few classes each?"""

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedup.bench.attacks.flower_grid import FIRST, HostileGrid
from fedup.bench.attacks.flower_world import World
from fedup.clients.collect import collect
from fedup.errors import FedUPError
from fedup.privacy import DP
from fedup.tasks.datasets import check_there
from fedup.tasks.evaluation import accuracy
from fedup.tasks.progress import Progress
from fedup.tasks.recipe import Recipe

_LOG = logging.getLogger(__name__)
PARTITION = "dirichlet:0.1"
FEDERATIONS: tuple[dict[str, Any], ...] = (
    {"data": "digits", "clients": 10},
    {"data": "mnist", "clients": 10, "rows": 8000, "rounds": 12},
    {"data": "mnist", "clients": 50, "rows": 8000, "rounds": 12},
)
SEEDS = (0, 1, 2, 3, 4)
STATISTICS: dict[str, dict[str, Any]] = {
    "centroids": {"statistics": "centroids"},
    "moments": {"statistics": "moments"},
    "DP, ε = 8": {"privacy": DP(8.0, clip="unit", replay_seed=0)},
}
LIAR = 1  # the client whose labels are wrong


@dataclass(frozen=True)
class Alarms:
    """What the checks say of one federation."""

    data: str
    clients: int
    seed: int
    statistics: str
    accuracy: float  # of the model
    liar: bool  # whether one client has wrong labels, in training, too
    flagged_honest: int
    flagged_liar: bool
    said: tuple[str, ...]


def measure_alarms(progress: Progress) -> list[Alarms]:
    """The nodes that are flagged at Dirichlet 0.1, with honest nodes alone and with one whose labels are wrong; of data
    sets that are there."""
    cases = [(federation, seed, liar) for federation in FEDERATIONS for seed in SEEDS for liar in (None, LIAR)]
    alarms: list[Alarms] = []
    for done, (federation, seed, liar) in enumerate(cases):
        progress("False alarms", done, len(cases))
        try:
            check_there(federation["data"])
        except FedUPError as error:
            _LOG.warning("false alarms on %s are not measured: %s", federation["data"], error)
            continue
        recipe = Recipe.suited_to(federation["data"], partition=PARTITION, seed=seed, **_settings(federation))
        alarms += _alarms_of(World.of(recipe, progress, liar=liar), recipe, liar)
    progress("False alarms", len(cases), len(cases))
    return alarms


def _settings(federation: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in federation.items() if name != "data"}


def _alarms_of(world: World, recipe: Recipe, liar: int | None) -> list[Alarms]:
    grid, alarms = HostileGrid(world.federation, world.blank), []
    right = accuracy(world.model, world.unseen_x, world.unseen_y)
    for name, settings in STATISTICS.items():
        with tempfile.TemporaryDirectory() as folder:
            contact = world.contact(grid, Path(folder), "report")
            collect(world.model, contact, **settings)
        flagged = {node - FIRST: why for node, why in contact.flagged.items()}
        honest = len(flagged.keys() - {liar})
        about = recipe.data, recipe.clients, recipe.seed, name, right, liar is not None
        alarms.append(Alarms(*about, honest, liar in flagged, tuple(flagged.values())[:5]))
    return alarms

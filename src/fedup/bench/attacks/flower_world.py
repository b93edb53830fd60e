"""A trained federation whose clients are nodes of a grid in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedup.bench.attacks.flower_grid import HostileGrid
from fedup.bench.training_cache import trained
from fedup.clients.intake import Intake, IntakePolicy
from fedup.federation import Federation
from fedup.flower.contact import GridContact
from fedup.flower.messaging import Delivery
from fedup.tasks.evaluation import accuracy_per_class
from fedup.tasks.progress import Progress
from fedup.tasks.recipe import Recipe


@dataclass(frozen=True, eq=False)
class World:
    """A trained federation, and test rows."""

    federation: Federation
    model: nn.Module
    blank: Callable[[], nn.Module]
    unseen_x: Tensor  # test rows, and all that nobody trained on
    unseen_y: Tensor

    @classmethod
    def of(cls, recipe: Recipe, progress: Progress, *, liar: int | None = None) -> "World":
        """The federation of a recipe, from the cache if it was trained before; a `liar` calls all its rows by the name
        of the next class, in training, too."""
        dataset = recipe.load()
        federation, shape = recipe.federation(dataset), dataset.x.shape[1:]
        if liar is not None:
            federation = _with_liar(federation, liar)
        start = recipe.blank_model(shape, dataset.num_classes)
        network = trained(start, federation, recipe, progress=progress).eval()
        blank = lambda: recipe.blank_model(shape, dataset.num_classes)  # noqa: E731
        rest = torch.cat([federation.rows("validation"), federation.rows("heldout")])
        unseen_x, unseen_y = (
            torch.cat([dataset.test_x, federation.x[rest]]),
            torch.cat([dataset.test_y, federation.y[rest]]),
        )
        return cls(federation, network, blank, unseen_x, unseen_y)

    def contact(self, grid: HostileGrid, folder: Path, policy: IntakePolicy = Intake.policy) -> GridContact:
        """A server's contact with nodes, some of them hostile."""
        delivery = Delivery(timeout_s=5.0, retries=0, least_fraction=0.5, intake=Intake(policy))
        classes, example = self.federation.num_classes, torch.zeros_like(self.federation.x[:1])
        return GridContact(grid, self.model, example=example, num_classes=classes, delivery=delivery, folder=folder)

    def recalls(self, served: nn.Module) -> list[float]:
        """The recall of each class on unseen rows."""
        return accuracy_per_class(served, self.unseen_x, self.unseen_y, self.federation.num_classes)


def _with_liar(federation: Federation, client: int) -> Federation:
    own, y = federation.client(client), federation.y.clone()
    rows = torch.cat([own.train, own.validation, own.heldout])
    y[rows] = (y[rows] + 1) % federation.num_classes
    return federation.relabeled(y)

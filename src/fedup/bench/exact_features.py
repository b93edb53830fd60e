"""Features of a data set, computed once with a backbone and kept: an interrupted run goes on where it stopped."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedup.federation import Federation
from fedup.models.backbone import HEAD, Backbone, resized, with_blank_head
from fedup.models.features import FEATURE_BATCH
from fedup.models.views import fingerprint
from fedup.statistics.feature_cache import CachedReader, FeatureCache
from fedup.statistics.integer_moments import MomentConfig
from fedup.tasks.progress import Progress

_BLOCK = 2 * FEATURE_BATCH  # rows between two looks at the clock: what was computed is written now and then


@dataclass(frozen=True, eq=False)
class Extracted:
    """Rows as features on the public grid, and a backbone that takes these: sums are those of the images themselves."""

    backbone: Backbone
    x: Tensor  # (N, D) multiples of the step
    time_s: Mapping[str, float]

    def federation(self, y: Tensor, parts: list[Tensor], num_classes: int) -> Federation:
        """Clients that learn from all their rows."""
        return Federation.split(self.x, y, parts, heldout=0.0, validation=0.0, num_classes=num_classes)


def passing(backbone: Backbone) -> Backbone:
    """A backbone for rows that are features already, with the same origin and grid."""
    blank = torch.zeros(1, backbone.width)
    return Backbone(nn.Flatten(), blank, origin=backbone.origin, step=backbone.step)


def with_features(backbone: Backbone, number: int, parts: Iterable[Tensor]) -> tuple[Backbone, list[Tensor]]:
    """Another number of features, made from those of the backbone, on the grid; and a backbone that takes these."""
    other = resized(passing(backbone), number, torch.zeros(1, backbone.width))
    config = MomentConfig(other.bound, other.step, 1)
    blocks = [[config.integers(other(rows))[0] for rows in part.split(_BLOCK)] for part in parts]
    return passing(other), [(torch.cat(part).double() * other.step).float() for part in blocks]


def extract(backbone: Backbone, x: Tensor, folder: Path, name: str, *, progress: Progress) -> Tensor:
    """Features of all rows, on the grid; blocks that are in the folder's file are not computed again. (N, D)"""
    config = MomentConfig(backbone.bound, backbone.step, 1)
    blank = with_blank_head(backbone, 2)
    content = hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:16]
    cache = FeatureCache.open(folder / f"{name}-{content}.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    reader = CachedReader(blank, HEAD, cache, config, fingerprint(blank))
    blocks, task = torch.arange(len(x)).split(_BLOCK), f"Features of {name}"
    progress(task, 0, len(blocks))
    for done, rows in enumerate(blocks, start=1):
        reader.read(x, rows)
        progress(task, done, len(blocks))
    cache.save()
    assert cache.values is not None
    return (cache.values.double() * config.step).float()

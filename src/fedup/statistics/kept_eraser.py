"""What clients sent of forgotten rows for an eraser: kept at the server, so that nobody is needed a second time.

It is derived from forgotten data, as the eraser itself is: sealed, counted in the status, and destroyed by a purge.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedup.statistics.eraser_statistics import Spread
from fedup.statistics.moments import Sums
from fedup.statistics.private_erasure import NoisyStatistics


@dataclass(frozen=True, eq=False)
class ErasedRows:
    """A client's statistics of the rows that one group erases there: they depend on these rows and the model alone."""

    sketch: Sums
    spreads: Mapping[str, Spread] = field(default_factory=dict)  # by cut


EraserParts = dict[tuple[int, str], ErasedRows | NoisyStatistics]  # by client, and digest of the rows


def parts_to_save(parts: EraserParts) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Tensors, and a list that describes them."""
    tensors: dict[str, Tensor] = {}
    described = []
    for i, ((client, rows), part) in enumerate(sorted(parts.items())):
        about: dict[str, Any] = {"client": client, "rows": rows}
        if isinstance(part, NoisyStatistics):
            about["clip"] = part.clip
            tensors |= {f"erased.{i}.sums": part.sums, f"erased.{i}.counts": part.counts}
        else:
            about |= {"count": part.sketch.count, "cuts": {cut: own.weight for cut, own in part.spreads.items()}}
            tensors[f"erased.{i}.sketch"] = part.sketch.sums
            for cut, own in part.spreads.items():
                tensors |= {f"erased.{i}.mean.{cut}": own.mean, f"erased.{i}.variance.{cut}": own.variance}
        described.append(about)
    return tensors, described


def loaded_parts(tensors: Mapping[str, Tensor], described: list[dict[str, Any]]) -> EraserParts:
    """The opposite of `parts_to_save`."""
    parts: EraserParts = {}
    for i, about in enumerate(described):
        name = int(about["client"]), str(about["rows"])
        if "clip" in about:
            parts[name] = NoisyStatistics(tensors[f"erased.{i}.sums"], tensors[f"erased.{i}.counts"], about["clip"])
            continue
        spreads = {
            cut: Spread(weight, tensors[f"erased.{i}.mean.{cut}"], tensors[f"erased.{i}.variance.{cut}"])
            for cut, weight in about["cuts"].items()
        }
        parts[name] = ErasedRows(Sums(int(about["count"]), tensors[f"erased.{i}.sketch"]), spreads)
    return parts

"""Features to fit a filter to, drawn from noisy statistics at the server: post-processing of releases alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedup.errors import DataError
from fedup.privacy.dp import Layout
from fedup.privacy.guarantee import DP
from fedup.rng import generator

ROWS = 8000  # features drawn in all
_CLEAR = 4.0  # deviations of noise that a count must exceed
_FLOOR = 1e-3  # the least variance of a direction, relative to the mean variance
_SHORTER = 0.25  # docs/privacy.md has figures for other values
_LENGTHS = tuple(2.0 ** (half / 2) for half in range(-4, 17))  # tried for unit vectors: 1/4 … 256


@dataclass(frozen=True)
class Resampled:
    """Features drawn from the released statistics, with their classes."""

    vectors: Tensor  # (N, D)
    labels: Tensor  # (N,)
    dropped: Sequence[int]  # classes that do not exceed the noise


def resample(
    dp: DP,
    released: Tensor,
    labels: Tensor,
    *,
    basis: Tensor,
    num_classes: int,
    tail: Callable[[Tensor], Tensor],
    seed: int,
) -> Resampled:
    """Features drawn around the classes' noisy means with their noisy covariances, as wide as those at the cut.

    `released` are the vectors (M, layout.size) of some clients' classes, `labels` (M,) their classes. Those of a class
    are added up, so that noise averages out. Classes too small to exceed the noise are left out.
    """
    layout = Layout.of(dp, basis.shape[1], num_classes)
    source = generator(seed, "resample")
    classes = _classes(dp, layout, released.double().cpu(), labels.cpu())
    if not classes:
        raise DataError(
            f"No class stands out of the noise of {dp}: there are too few rows for so small an ε. Use a larger one."
        )
    total = sum(each.count for each in classes)
    drawn = [each.draw(round(ROWS * each.count / total), source) for each in classes]
    sizes, known = torch.tensor([len(part) for part in drawn]), torch.tensor([each.label for each in classes])
    drawn_labels = known.repeat_interleave(sizes).to(basis.device)
    vectors = (torch.cat(drawn) * dp.scale).to(basis) @ basis.T
    if dp.clip == "unit":
        vectors *= _length(vectors, drawn_labels, tail)
    return Resampled(vectors, drawn_labels, sorted(set(labels.tolist()) - set(known.tolist())))


@dataclass(frozen=True)
class _Class:
    """A class by its releases: its size, and a Gaussian for each of its cells."""

    label: int
    count: float
    weights: Tensor  # (H,) of its cells
    means: Tensor  # (H, d)
    root: Tensor  # (d, d) of the covariance

    def draw(self, rows: int, source: torch.Generator) -> Tensor:
        cell = torch.multinomial(self.weights, max(rows, 1), replacement=True, generator=source)
        noise = torch.randn(len(cell), self.root.shape[0], generator=source, dtype=torch.float64)
        return self.means[cell] + noise @ self.root.T


def _classes(dp: DP, layout: Layout, released: Tensor, labels: Tensor) -> list[_Class]:
    noisy = []
    for label in labels.unique().tolist():
        own = released[labels == label]
        sums, counts, spread = layout.split(own.sum(0))
        sigma = dp.sigma * len(own) ** 0.5  # of each number of the sum
        sizes = counts / dp.count_weight
        clear = sizes > _CLEAR * sigma / dp.count_weight
        if bool(clear.any()):
            noisy.append((label, sums[clear], sizes[clear], layout.matrix(spread) / dp.spread_weight, sigma))
    if not noisy:
        return []
    around = [squares - torch.einsum("h,hi,hj->ij", 1 / sizes, sums, sums) for _, sums, sizes, squares, _ in noisy]
    total = sum(map(layout.known, around[1:]), start=layout.known(around[0]))
    root = _root(total / sum(float(sizes.sum()) for _, _, sizes, _, _ in noisy))
    within = root @ root.T  # the pooled covariance within classes and cells, made positive
    classes = []
    for label, sums, sizes, squares, sigma in noisy:
        count = float(sizes.sum())
        means = sums / sizes[:, None]
        own = layout.known(squares / count - torch.einsum("h,hi,hj->ij", sizes / count, means, means))
        # The noise of a covariance is about this large; the larger, the more weight gets the pooled covariance.
        noise = sigma / dp.spread_weight * layout.dims**0.5 / count
        share = noise / (noise + float(within.trace()) / layout.dims)
        classes.append(_Class(label, count, sizes / count, means, _root((1 - share) * own + share * within)))
    return classes


def _root(matrix: Tensor) -> Tensor:
    """A root of the nearest covariance matrix: noise makes some eigenvalues negative."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    floor = max(float(values.clamp(min=0).mean()) * _FLOOR, 1e-12)
    return vectors * values.clamp(min=floor).sqrt()


@torch.no_grad()
def _length(vectors: Tensor, labels: Tensor, tail: Callable[[Tensor], Tensor]) -> float:
    """A length for features with known directions only: a fraction of the one at which the frozen classifier fits them
    best, because features that saturate the cross-entropy teach a filter little."""
    some = slice(None, None, max(1, len(vectors) // 2000))
    losses = [float(cross_entropy(tail(vectors[some] * length), labels[some])) for length in _LENGTHS]
    return _SHORTER * _LENGTHS[losses.index(min(losses))]

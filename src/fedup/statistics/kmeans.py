"""K-means over many cells at once: Lloyd's algorithm, batched, linear in the number of points."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fedup.rng import generator

BLOCK_POINTS = 512  # cells above this are split, so that time is linear in the cell
MAX_ITERATIONS = 20  # a bound on the worst case: a handful is enough at the usual ratios
_BATCH_ELEMENTS = 1_000_000  # 4 MB of points at a time keep the peak memory near the size of the result


@dataclass(frozen=True)
class _Block:
    """Points clustered together: a whole small cell, or a random part of a large one."""

    rows: Tensor  # (n,) rows of the feature array in random order: the first k are the seeds
    k: int
    start: int  # first row of the output

    @property
    def shape(self) -> tuple[int, int]:
        """Padded size (points, centroids), which depends on this block alone."""
        return _padded(len(self.rows)), _padded(self.k)


def centroid_count(points: int, ratio: float) -> int:
    """⌈ratio · points⌉, at least 1, without the floating-point surprise of ⌈0.1 · 30⌉ = 4."""
    return min(points, max(1, math.ceil(round(ratio * points, 9))))


def cluster_cells(
    features: Tensor, cells: Sequence[Tensor], *, ratio: float, seeds: Sequence[int], out: Tensor, counts: Tensor
) -> None:
    """Write the centroids of every cell, cell after cell, into `out`, and the number of points of each into `counts`.

    `cells` are row numbers of `features`. A cell of n rows gets exactly ⌈ratio · n⌉ centroids, none of them empty, and
    they depend on its own rows and seed alone.
    """
    blocks, start = [], 0
    for rows, seed in zip(cells, seeds, strict=True):
        k = centroid_count(len(rows), ratio)
        if k == len(rows):  # ratio 1, or a cell too small to compress: the features themselves
            out[start : start + k] = features[rows]
            counts[start : start + k] = 1
        else:
            blocks += list(_blocks(rows, k, seed, start))
        start += k
    for batch in _batches(blocks, features.shape[1]):
        _cluster_batch(features, batch, out, counts)


def _blocks(rows: Tensor, k: int, seed: int, start: int) -> Iterator[_Block]:
    n = len(rows)
    parts = min(math.ceil(n / BLOCK_POINTS), k)  # every part needs a centroid of its own
    shuffled = rows[torch.randperm(n, generator=generator(seed)).to(rows.device)]
    bounds = [(part * k // parts, part * (n - k) // parts) for part in range(parts + 1)]  # centroids, other points
    for (k_first, beyond_first), (k_last, beyond_last) in pairwise(bounds):  # each part has a point per centroid
        rows_of_part = shuffled[k_first + beyond_first : k_last + beyond_last]
        yield _Block(rows_of_part, k_last - k_first, start + k_first)


def _padded(size: int) -> int:
    return max(32, -(-size // 64) * 64)


def _batches(blocks: list[_Block], width: int) -> Iterator[list[_Block]]:
    """Blocks of equal padded shape, as many at a time as memory allows."""
    batch: list[_Block] = []
    for block in sorted(blocks, key=lambda block: block.shape):
        points, k = block.shape
        most = max(1, _BATCH_ELEMENTS // (points * (width + k)))
        if batch and (batch[0].shape != block.shape or len(batch) >= most):
            yield batch
            batch = []
        batch.append(block)
    if batch:
        yield batch


def _cluster_batch(features: Tensor, batch: list[_Block], out: Tensor, counts: Tensor) -> None:
    (points_padded, k_padded), device = batch[0].shape, features.device
    n = torch.tensor([len(block.rows) for block in batch], device=device)
    k = torch.tensor([block.k for block in batch], device=device)
    rows = torch.zeros(len(batch), points_padded, dtype=torch.long, device=device)
    for i, block in enumerate(batch):
        rows[i, : len(block.rows)] = block.rows
    points = features.index_select(0, rows.flatten()).view(*rows.shape, -1)  # (B, P, D)
    centers, members = _lloyd(points, n, k, k_padded)
    for i, block in enumerate(batch):
        out[block.start : block.start + block.k] = centers[i, : block.k]
        counts[block.start : block.start + block.k] = members[i, : block.k]


def _lloyd(points: Tensor, n: Tensor, k: Tensor, k_padded: int) -> tuple[Tensor, Tensor]:
    """Centroids (B, K, D) and their number of points (B, K); the first k points of a block are its seeds.

    A point alone in its cluster lies on its centroid and cannot move, so only the others are assigned again: at ratio
    0.8 that is less than half of them.
    """
    (batch, size, width), device = points.shape, points.device
    position = torch.arange(size, device=device)
    valid = position < n[:, None]  # (B, P)
    slot = torch.arange(k_padded, device=device)
    centers = points.new_zeros(batch, k_padded, width)
    centers[:, :size] = points[:, :k_padded]
    unused = torch.where(slot < k[:, None], 0.0, torch.inf).to(points)  # (B, K) added to the distance
    assigned = position.clamp(max=k_padded - 1).expand(batch, size).clone()  # seeds stay, the others are set below
    active = valid & (position >= k[:, None])
    members = torch.ones_like(unused, dtype=torch.long)
    for iteration in range(MAX_ITERATIONS):
        nearest, order, packed = _nearest(points, centers, unused, active)
        before = assigned.gather(1, order)
        after = torch.where(packed, nearest, before)
        if iteration and torch.equal(after, before):
            break
        assigned.scatter_(1, order, after)
        crowded = members > 1  # before: clusters that lose a point change, too
        members = torch.zeros_like(members).scatter_add_(1, assigned, valid.long())
        _refill_empty(points, centers, assigned, members, valid, k)
        _move_centers(points, centers, assigned, members, valid, crowded | (members > 1))
        active = valid & (members.gather(1, assigned) > 1)
        if not active.any():
            break
    return centers, members


def _nearest(points: Tensor, centers: Tensor, unused: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nearest centroids of the active points, packed to the front; their positions, and which are active."""
    most = min(active.shape[1], _padded(int(active.sum(1).max())))
    order = active.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]  # (B, A)
    packed = active.gather(1, order)
    chosen = _pick(points, order)  # (B, A, D)
    bias = centers.square().sum(2) + unused  # ‖c‖²: ‖x‖² is the same for every centroid
    distance = torch.baddbmm(bias[:, None], chosen, centers.transpose(1, 2), alpha=-2)  # (B, A, K)
    return distance.argmin(2), order, packed


def _pick(points: Tensor, order: Tensor) -> Tensor:
    """`points[b, order[b]]` for every b."""
    batch, size, width = points.shape
    flat = order + size * torch.arange(batch, device=order.device)[:, None]
    return points.view(batch * size, width).index_select(0, flat.flatten()).view(*order.shape, width)


def _refill_empty(points: Tensor, centers: Tensor, assigned: Tensor, members: Tensor, valid: Tensor, k: Tensor) -> None:
    """Give each empty cluster the point farthest from its centroid in clusters with several points (rare)."""
    slot = torch.arange(members.shape[1], device=members.device)
    empty = (members == 0) & (slot < k[:, None])
    for b, c in empty.nonzero().tolist():
        spare = valid[b] & (members[b].gather(0, assigned[b]) > 1)
        far = (points[b] - centers[b][assigned[b]]).square().sum(1)
        p = int(far.masked_fill(~spare, -1.0).argmax())
        members[b, assigned[b, p]] -= 1
        assigned[b, p], members[b, c] = c, 1
        centers[b, c] = points[b, p]


def _move_centers(
    points: Tensor, centers: Tensor, assigned: Tensor, members: Tensor, valid: Tensor, changed: Tensor
) -> None:
    """Move changed centroids to the mean of their points; the others lie on their only point already."""
    batch, k_padded = members.shape
    changed = changed & (members > 0)
    compact = changed.flatten().cumsum(0) - 1  # (B·K,) index among the changed ones
    moving = (valid & changed.gather(1, assigned)).flatten().nonzero().flatten()  # positions in B·P
    cluster = (assigned + k_padded * torch.arange(batch, device=assigned.device)[:, None]).flatten()[moving]
    chosen = points.view(-1, points.shape[2]).index_select(0, moving)
    sums = torch.zeros_like(chosen[: int(changed.sum())]).index_add_(0, compact[cluster], chosen)
    centers.view(batch * k_padded, -1)[changed.flatten()] = sums / members[changed][:, None]

"""The paper's recipe taken literally, to compare with: K-means cell after cell, then epochs of SGD in tiny batches."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from fedup.filters.bottleneck import Bottleneck
from fedup.rng import generator
from fedup.statistics.kmeans import centroid_count

RESTARTS, ITERATIONS = 5, 100
EPOCHS, BATCH, LR = 50, 10, 0.01  # the paper names SGD; its learning rate is not stated


def cluster_literally(features: Tensor, cells: Sequence[Tensor], *, ratio: float, seed: int) -> list[Tensor]:
    """The best of five K-means runs for each cell, each until nothing changes."""
    from sklearn.cluster import KMeans

    how = {"init": "random", "n_init": RESTARTS, "max_iter": ITERATIONS, "tol": 0.0, "random_state": seed}
    return [
        torch.from_numpy(KMeans(centroid_count(len(rows), ratio), **how).fit(features[rows].numpy()).cluster_centers_)
        for rows in cells
    ]


def fit_literally(
    tail: Callable[[Tensor], Tensor],
    centroids: Tensor,
    labels: Tensor,
    *,
    rank: int,
    alpha: float,
    nonnegative: bool,
    seed: int,
) -> Bottleneck:
    """Fifty epochs of SGD in batches of ten."""
    source = generator(seed, "literal filter")
    fitted = Bottleneck(centroids.shape[1], rank, nonnegative=nonnegative, source=source)
    optimizer = torch.optim.SGD(fitted.parameters(), lr=LR)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(centroids), generator=source).split(BATCH):
            passed = fitted(centroids[batch])
            loss = alpha * cross_entropy(tail(passed), labels[batch]) + (1 - alpha) * mse_loss(passed, centroids[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return fitted.eval().requires_grad_(False)

"""Who holds which rows: index sets for the clients of a simulated federation, from a seed."""

import numpy as np
import torch
from torch import Tensor

from fedup.errors import SettingError
from fedup.rng import seed_for
from fedup.targets import group_rows

_REDRAWS = 1000


def iid(labels: Tensor, clients: int, *, seed: int = 0, min_rows: int = 10) -> list[Tensor]:
    """Rows dealt out evenly at random.

    >>> [len(part) for part in iid(torch.zeros(100, dtype=torch.long), 3)]
    [34, 33, 33]
    """
    _check(labels, clients, min_rows)
    rng = np.random.default_rng(seed_for(seed, "iid"))
    return _as_parts(np.array_split(rng.permutation(len(labels)), clients))


def dirichlet(
    labels: Tensor, clients: int, *, concentration: float = 0.5, seed: int = 0, min_rows: int = 10
) -> list[Tensor]:
    """Each class spread over the clients by a Dirichlet draw; drawn again until every client has `min_rows` rows.

    Labels (N, K) count by the rarest label of a row; values by the tenth of the rows that the first value lies in.

    >>> labels = torch.arange(1000) % 10
    >>> sorted(torch.cat(dirichlet(labels, 4)).tolist()) == list(range(1000))
    True
    """
    _check(labels, clients, min_rows)
    labels = group_rows(labels)
    if not 0 < concentration < float("inf"):
        raise SettingError(f"The Dirichlet concentration must be above 0; found {concentration}. The paper uses 0.5.")
    rng = np.random.default_rng(seed_for(seed, "dirichlet"))
    of_class = [np.flatnonzero(labels.cpu().numpy() == label) for label in labels.unique().tolist()]
    for _ in range(_REDRAWS):
        parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for rows in of_class:
            shares = rng.dirichlet([concentration] * clients)
            bounds = (np.cumsum(shares)[:-1] * len(rows)).astype(int)
            for part, piece in zip(parts, np.split(rng.permutation(rows), bounds), strict=True):
                part.append(piece)
        joined = [np.concatenate(part) for part in parts]
        if min(map(len, joined)) >= min_rows:
            return _as_parts(joined)
    raise SettingError(
        f"{_REDRAWS} Dirichlet({concentration}) draws over {clients} clients left one below {min_rows} rows: "
        "use fewer clients, a larger concentration or a smaller min_rows."
    )


def pathological(
    labels: Tensor, clients: int, *, classes_per_client: int = 2, seed: int = 0, min_rows: int = 10
) -> list[Tensor]:
    """Rows sorted by label, cut into equal shards, `classes_per_client` shards each (McMahan et al. 2017).

    >>> parts = pathological(torch.arange(100) % 10, 5)
    >>> max(len((part % 10).unique()) for part in parts) <= 4
    True
    """
    _check(labels, clients, min_rows)
    labels = group_rows(labels)
    most = len(labels) // clients
    if not 1 <= classes_per_client <= most:
        raise SettingError(f"classes_per_client must be between 1 and {most}; found {classes_per_client}.")
    rng = np.random.default_rng(seed_for(seed, "pathological"))
    shards = np.array_split(np.argsort(labels.cpu().numpy(), kind="stable"), clients * classes_per_client)
    order = rng.permutation(len(shards)).reshape(clients, classes_per_client)
    parts = [np.concatenate([shards[i] for i in mine]) for mine in order]
    if min(map(len, parts)) < min_rows:
        raise SettingError(f"{len(shards)} shards left a client below {min_rows} rows: use fewer clients or classes.")
    return _as_parts(parts)


def _check(labels: Tensor, clients: int, min_rows: int) -> None:
    if clients < 1 or clients * min_rows > len(labels):
        raise SettingError(
            f"{len(labels)} rows cannot give {clients} clients at least {min_rows} rows each: "
            "use between 1 client and one per min_rows rows."
        )


def _as_parts(parts: list[np.ndarray]) -> list[Tensor]:
    return [torch.from_numpy(np.sort(part)).long() for part in parts]

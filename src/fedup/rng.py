"""Named streams of random numbers: draws depend on their purpose, never on the order of calls."""

import hashlib

import torch


def seed_for(seed: int, *names: object) -> int:
    """A 63-bit seed for the stream that `names` describe.

    >>> seed_for(0, "batches", 3) == seed_for(0, "batches", 3) != seed_for(0, "batches", 4)
    True
    """
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: object) -> torch.Generator:
    """A CPU generator for that stream: the same numbers on every device."""
    return torch.Generator().manual_seed(seed_for(seed, *names))


def sample(rows: torch.Tensor, most: int, *names: object) -> torch.Tensor:
    """At most `most` of the rows: always the same ones for these names."""
    if len(rows) <= most:
        return rows
    return rows[torch.randperm(len(rows), generator=generator(0, *names))[:most].to(rows.device)]


def seed_default(seed: int, device: torch.device) -> None:
    """Seed what models draw from in training (dropout), on the CPU and on the device."""
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)

"""Harm done to a federation on purpose, so that forgetting it can be seen."""

import torch

from fedup.federation import Client, Federation


def largest_client(federation: Federation) -> Client:
    """The client with the most training rows."""
    return max(federation.clients, key=lambda client: len(client.train))


def flip_labels(federation: Federation, client: Client) -> Federation:
    """The same federation, but one client calls every class by the next one's name, in all its parts."""
    rows = torch.cat([client.train, client.validation, client.heldout])
    flipped = federation.y.clone()
    flipped[rows] = (flipped[rows] + 1) % federation.num_classes
    return federation.relabeled(flipped)

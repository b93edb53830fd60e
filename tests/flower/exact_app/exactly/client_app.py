"""A node: its rows of the federation, and FedUP's query."""

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp

import fedup.flower

from . import task


def own_rows(context: Context) -> torch.Tensor:
    return task.federation().client(int(context.node_config["partition-id"])).train


def rows(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    own, clients = own_rows(context), task.federation()
    return clients.x[own], clients.y[own]


app = ClientApp()
fedup.flower.mount(
    app,
    data=rows,
    model=task.blank,
    ids=lambda context: own_rows(context).tolist(),
    policy=fedup.flower.Policy(open_in_simulation=True, few_rows=True),
)

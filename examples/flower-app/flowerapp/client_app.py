"""A node: it trains when it is asked to, and answers FedUP's questions about its own rows."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

import fedup.flower
from flowerapp import task

app = ClientApp()


def digits(context: Context) -> task.Digits:
    """All data; in a deployment the app's configuration says how many nodes there are."""
    nodes = context.run_config["nodes"] or context.node_config["num-partitions"]
    return task.load(context.run_config, int(nodes))


def row_numbers(context: Context) -> Tensor:
    """Which rows of the data set this node trains on: not those that its operator has taken out."""
    numbers = digits(context).federation.client(int(context.node_config["partition-id"])).train
    path = context.node_config.get("taken-out")
    if not path:
        return numbers
    taken_out = torch.tensor([int(number) for number in Path(str(path)).read_text().split(",")])
    return numbers[~torch.isin(numbers, taken_out)]


def rows(context: Context) -> tuple[Tensor, Tensor]:
    """This node's rows and labels."""
    federation, numbers = digits(context).federation, row_numbers(context)
    return federation.x[numbers], federation.y[numbers]


def held_out(context: Context) -> tuple[Tensor, Tensor]:
    """Rows that this node never trains on: what is forgotten is to look like them."""
    federation = digits(context).federation
    client = federation.client(int(context.node_config["partition-id"]))
    unseen = torch.cat([client.validation, client.heldout])
    return federation.x[unseen], federation.y[unseen]


@app.train()
def train(message: Message, context: Context) -> Message:
    """A round of local training, as in any Flower app, without the rows that the server says are forgotten."""
    model = task.make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = rows(context)
    keep = fedup.flower.retained_rows(message, ids=row_numbers(context).tolist(), labels=y)
    x, y = x[keep], y[keep]
    task.train(model, x, y, int(context.run_config["epochs"]), seed=int(message.content["config"]["server-round"]))
    trained = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(RecordDict(trained), reply_to=message)


# All that a node needs for FedUP: its rows, an empty model for the weights that come, and what the rows are called in
# sample requests: here by their numbers in the data set, so that nothing differs from a federation in one process.
fedup.flower.mount(
    app,
    data=rows,
    held_out=held_out,
    model=task.make_model,
    ids=lambda context: row_numbers(context).tolist(),
    policy=fedup.flower.Policy(open_in_simulation=True),  # a deployed node answers by its own rules: node-rules.toml
)

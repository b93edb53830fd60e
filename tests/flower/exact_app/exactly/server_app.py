"""Learn once, then forget and take back in random orders; what the totals were is written for the test."""

import json
import random
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedup.flower import Delivery, GridContact, HeadServer

from . import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    out = Path(str(context.run_config["out"]))
    server = HeadServer(out / "run", task.backbone, class_names=list(map(str, range(task.CLASSES))))
    example, delivery = torch.zeros(1, 1, 28, 28), Delivery(timeout_s=120)
    contact = GridContact(grid, task.blank(), example=example, num_classes=task.CLASSES, delivery=delivery)
    server.learn(contact)
    found = []
    for seed in range(2):
        names = []
        for request in random.Random(seed).sample(task.requests(), 3):
            names += server.unlearn(request, contact).requests
            left = [own.to_json() for own in server.model().requests]
            found.append({"requests": left, "totals": server.model().totals_hash()})
        found[-1]["relearned"] = server.relearned(contact)
        server.restore(*names, contact=contact)
    (out / "found.json").write_text(json.dumps(found))

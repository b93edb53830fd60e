"""A server that trains nothing: it collects, may ask for samples of a node that has died, and says what happened."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

import fedup
from fedup import Forget, MomentConfig, MomentStore
from fedup.flower import Delivery, GridContact

from . import task

app = ServerApp()
BY_CLASS = MomentConfig(by_class="always")  # so that a class is forgotten and nobody is asked


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, model = context.run_config, task.make_model()
    out, victim = Path(str(config["out"])), int(config["samples-of"])
    (out / f"server-{context.run_id}").write_text(str(os.getpid()))
    while len(list(grid.get_node_ids())) < int(config["nodes"]):
        time.sleep(0.2)
    delivery = Delivery(float(config["timeout"]), retries=0, least_fraction=float(config["least-fraction"]))
    about = {"example": task.EXAMPLE, "num_classes": task.NUM_CLASSES}
    contact = GridContact(grid, model, **about, delivery=delivery, folder=out / "answers")
    privacy = task.privacy(float(config["epsilon"]))
    store = fedup.collect(model, contact, privacy=privacy, statistics="auto" if privacy else BY_CLASS)
    fedup.save_centroids(store, out / "centroids.safetensors")
    contact.settled()  # answers are in that file now
    told: dict[str, Any] = {"run": context.run_id, "left_out": contact.left_out, "messages": contact.traffic.messages}
    told["spent"] = {client: contact.ledger.spent(client) for client in contact.ledger.clients}
    if victim >= 0:
        told["samples"] = ask_the_dead(out, victim, model, store, contact)
    (out / "result.new").write_text(json.dumps(told))
    (out / "result.new").rename(out / "result.json")  # whoever waits for it finds all of it


def ask_the_dead(
    out: Path, victim: int, model: nn.Module, store: MomentStore, contact: GridContact
) -> dict[str, object]:
    """A node dies whose answer has come; then its samples are to be forgotten by a model that has forgotten a class.
    It is out of use then, until it says what it has without them."""
    plugged, rows = fedup.plug(model), task.read_rows(out, victim)
    fedup.unlearn(plugged, store, Forget.classes([4]), force=True)  # the model is not trained
    kept = store.total.second.clone()
    session = json.loads((out / f"asked-{victim}.jsonl").read_text().splitlines()[-1])["session"]
    os.killpg(session, signal.SIGKILL)
    request = Forget.samples({victim: rows["ids"][:20].tolist()})
    fast: Any = {"config": fedup.FilterConfig(filter="closed_form"), "terms": fedup.Terms(measure=False)}  # few waves
    fedup.unlearn(plugged, store, request, clients=contact, force=True, **fast)
    waits = {"pending": sorted(store.pending), "out_of_use": sorted(store.clients_out)}
    return {**waits, "in_force": request in plugged.requests, "same_store": torch.equal(store.total.second, kept)}

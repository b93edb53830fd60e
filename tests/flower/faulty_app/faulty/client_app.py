"""A node that says which questions reach it, and misbehaves as the run's settings tell it to."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import nn

import fedup.flower
from fedup.flower.wire import read_answer, read_ask, write_answer

from . import task

WAIT_S = 600
fault = ""  # of this process, which lives for one message


def die(*_: object) -> None:
    """As in a power cut: SuperNode, executor and this process are one group, and all of them go at once."""
    os.killpg(os.getsid(0), signal.SIGKILL)


def misbehave(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Faults other than a refusal come with the question that has the weights: the one that is worked on."""
    global fault
    client, out = int(context.node_config["partition-id"]), Path(str(context.run_config["out"]))
    ask = read_ask(message.content)
    heard = {"kind": ask.kind, "run": context.run_id, "node": context.node_id, "session": os.getsid(0)}
    with (out / f"asked-{client}.jsonl").open("a") as log:
        log.write(json.dumps({**heard, "weights": ask.weights is not None}) + "\n")
    fault = dict(enumerate(str(context.run_config["faults"]).split(","))).get(client, "")
    if fault == "refuse" or ask.weights is None:
        return call_next(message, context)
    if fault == "die before":
        die()
    if fault == "hang":
        time.sleep(WAIT_S)
    until = time.monotonic() + WAIT_S
    while fault == "wait" and not (out / "go").exists() and time.monotonic() < until:
        time.sleep(0.1)
    reply = call_next(message, context)
    account = context.state.config_records.get("fedup-ledger")
    if account is not None:
        (out / f"account-{client}.json").write_text(str(account["json"]))
    if fault == "send NaN":
        told = read_answer(reply.content, most_bytes=10**12)
        spoiled = {name: torch.full(array.shape, torch.nan) for name, array in told.arrays.items()}
        reply.content = write_answer(replace(told, arrays=spoiled))
    return reply


def rows(context: Context) -> dict[str, torch.Tensor]:
    own = task.read_rows(Path(str(context.run_config["out"])), int(context.node_config["partition-id"]))
    return {**own, "x": 1000 * own["x"]} if fault == "exaggerate" else own


def blank() -> nn.Module:
    model = task.make_model()
    if fault == "die during":
        model[0].register_forward_pre_hook(die)  # in the middle of reading features
    return model


app = ClientApp(mods=[misbehave])
fedup.flower.mount(
    app,
    data=lambda context: (rows(context)["x"], rows(context)["y"]),
    model=blank,
    ids=lambda context: rows(context)["ids"].tolist(),
    policy=fedup.flower.Policy(
        ask=lambda kind: "the owner said no" if fault == "refuse" else None,
        open_in_simulation=True,  # which no deployed node heeds
    ),
)

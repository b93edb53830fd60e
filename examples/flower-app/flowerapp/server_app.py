"""The server: Flower's FedAvg learns; FedUP answers a client, a class and a sample request, and takes each back.

With a `folder` it goes on with what is there: what is trained and collected stays, and requests that operators have
queued meanwhile (`fedup unlearn --run FOLDER`) are answered. On request it trains on without what is forgotten
(`more-rounds`), or anew (`retrain`), which finishes the requests.
"""

import copy
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

import fedup
from fedup import MomentConfig
from fedup.flower import Delivery, GridContact, Intake, RunServer, leave_out
from fedup.run.limits import Limits
from fedup.tasks.evaluation import predict
from flowerapp import task

app = ServerApp()
STATISTICS = MomentConfig(by_class="always")  # so that class requests ask nobody for statistics


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, collect, answer and restore; figures are printed, and written to result.json."""
    config = context.run_config
    nodes = int(config["nodes"]) or len(list(grid.get_node_ids()))
    out = Path(str(config["out"])).absolute()
    folder = Path(str(config["folder"])) if config["folder"] else out / f"run-{context.run_id}"
    server = RunServer(folder, task.make_model, authenticated=bool(config["authenticated"]))
    started = time.perf_counter()
    if server.state.trained is None:
        server.keep(learn(grid, FedAvg(**everybody(nodes)), first_weights(), int(config["rounds"])))
    model, training = server.plugged().base, {"time_s": time.perf_counter() - started}

    # FedUP from here on. Every node is asked once; the answers serve all requests to come, also after a restart: model,
    # statistics, requests and filters are in the run folder, on which the commands of `fedup` work.
    # Node 3 lies about its labels. By default it would be left out; here it stays, to be forgotten on request.
    contact = contact_about(model, grid, config)
    if config["retrain"] or config["more-rounds"]:
        contact = train_again(server, grid, contact, config)
    started = time.perf_counter()
    store = server.collect(contact, statistics=STATISTICS)
    collection = {"time_s": time.perf_counter() - started, "rows": store.total.rows, **traffic(contact)}
    collection |= {"clients": list(store.clients), "rules": contact.node_rules, "sha256": task.digest(store)}
    print(f"collected: {json.dumps(collection)}")
    if config["folder"]:
        until = time.monotonic() + float(config["serve"])
        served = server.answer_queued(contact) + server.serve_queue(contact, until=lambda: time.monotonic() > until)
        print(f"served: {json.dumps([[own.id, own.status] for own in served])}")
        return
    requests = answer_and_restore(server, contact, task.load(config, nodes))
    result = {"run_folder": folder.name, "nodes": nodes, "training": training, "collection": collection}
    (out / "result.json").write_text(json.dumps({**result, "requests": requests}, indent=2))


def contact_about(model: nn.Module, grid: Grid, config: Mapping[str, Any]) -> GridContact:
    """The nodes, to be asked about this model."""
    delivery = Delivery(timeout_s=float(config["timeout"]), weights_at_once=True, intake=Intake("report"))
    return GridContact(grid, model, example=task.EXAMPLE, num_classes=task.NUM_CLASSES, delivery=delivery)


def train_again(server: RunServer, grid: Grid, contact: GridContact, config: Mapping[str, Any]) -> GridContact:
    """A new base without what is forgotten: by more rounds, or trained anew, which finishes all requests."""
    before, anew, more = server.state, bool(config["retrain"]), int(config["more-rounds"])
    strategy = FedAvg(**everybody(int(config["nodes"])))
    leave_out(strategy, server.left_out, contact.nodes)
    start = first_weights() if anew else copy.deepcopy(server.plugged().base)
    model = learn(grid, strategy, start, int(config["rounds"]) if anew else more)
    fresh = contact_about(model, grid, config)
    if anew:
        server.put_retrained(model, before, fresh, statistics=STATISTICS)
    else:  # with so few rows, filters may cost some class more than is allowed
        server.train_on(model, fresh, before, rounds=more, limits=Limits(None, force=True), statistics=STATISTICS)
    return fresh


def first_weights() -> nn.Module:
    """The model before any training, always the same."""
    torch.manual_seed(0)
    return task.make_model()


def everybody(nodes: int) -> dict[str, Any]:
    """Settings of a strategy that waits for all nodes."""
    return {"fraction_evaluate": 0.0, "min_train_nodes": nodes, "min_available_nodes": nodes}


def learn(grid: Grid, strategy: FedAvg, model: nn.Module, rounds: int) -> nn.Module:
    """Flower's own FedAvg."""
    trained = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
    model.load_state_dict(trained.arrays.to_torch_state_dict())
    return model.eval()


def answer_and_restore(server: RunServer, contact: GridContact, digits: task.Digits) -> list[dict[str, Any]]:
    """The example's own requests: figures before and after each."""
    requests, model = [], server.plugged().base
    original = predict(model, digits.test_x)
    for request in digits.requests:
        before, sent = task.evaluate(model, digits, request), traffic(contact)
        # With so few rows a class may be left with none: that is refused, and `answer.declined` says so, unless forced.
        answer = server.unlearn(request, contact, reference=f"a {request.kind}", limits=Limits(None, force=True))
        told = {"kind": request.kind, "id": answer.requests[0], "time_s": answer.report.time_s}
        told |= {"clients_contacted": answer.report.clients_contacted}
        told |= {"verdict": answer.report.verdicts[request.digest].finding}
        told |= {name: amount - sent[name] for name, amount in traffic(contact).items()}
        told |= {"before": before, "after": task.evaluate(server.plugged(), digits, request)}
        server.restore(*answer.requests, contact=contact)
        restored = server.plugged().unplug()
        same = torch.equal(predict(restored, digits.test_x), original)
        told["restored"] = same and fedup.fingerprint(restored) == fedup.fingerprint(model)
        print(f"answered: {json.dumps(told)}")
        requests.append(told)
    return requests


def traffic(contact: GridContact) -> dict[str, int]:
    """FedUP's messages so far, and their bytes as serialised."""
    traffic = contact.traffic
    return {"messages": traffic.messages, "bytes_up": traffic.bytes_up, "bytes_down": traffic.bytes_down}

"""The server: Flower's FedAvg learns; FedUP answers a client, a class and a sample request, and takes each back.

With a `folder` it goes on with what is there: what is trained and collected stays, and requests that operators have
queued meanwhile (`fedup unlearn --run FOLDER`) are answered.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

import fedup
from fedup import MomentConfig
from fedup.flower import Delivery, GridContact, Intake, RunServer
from fedup.run.answer import Limits
from fedup.tasks.evaluation import predict
from flowerapp import task

app = ServerApp()


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
        server.keep(learn(grid, nodes, int(config["rounds"])))
    model, training = server.plugged().base, {"time_s": time.perf_counter() - started}

    # FedUP from here on. Every node is asked once; the answers serve all requests to come, also after a restart: model,
    # statistics, requests and filters are in the run folder, on which the commands of `fedup` work.
    # Node 3 lies about its labels. By default it would be left out; here it stays, to be forgotten on request.
    delivery = Delivery(timeout_s=float(config["timeout"]), weights_at_once=True, intake=Intake("report"))
    contact = GridContact(grid, model, example=task.EXAMPLE, num_classes=task.NUM_CLASSES, delivery=delivery)
    started = time.perf_counter()
    store = server.collect(contact, statistics=MomentConfig(by_class="always"))  # so that class requests ask nobody
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


def learn(grid: Grid, nodes: int, rounds: int) -> nn.Module:
    """Flower's own FedAvg."""
    torch.manual_seed(0)
    model = task.make_model()
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
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

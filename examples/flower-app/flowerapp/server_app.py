"""The server: Flower's FedAvg learns; FedUP answers a client, a class and a sample request, and takes each back."""

import json
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

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
    torch.manual_seed(0)
    started, model = time.perf_counter(), task.make_model()
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    trained = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=int(config["rounds"]))
    model.load_state_dict(trained.arrays.to_torch_state_dict())
    model.eval()
    training = {"time_s": time.perf_counter() - started}

    # FedUP from here on. Every node is asked once; the answers serve all requests to come, also after a restart: model,
    # statistics, requests and filters are in a run folder, on which `fedup status`, `evidence` and `verify` work.
    out = Path(str(config["out"])).absolute()
    server = RunServer(out / f"run-{context.run_id}", task.make_model, authenticated=bool(config["authenticated"]))
    server.keep(model)
    # Node 3 lies about its labels. By default it would be left out; here it stays, to be forgotten on request.
    delivery = Delivery(timeout_s=120, weights_at_once=True, intake=Intake("report"))
    contact = GridContact(grid, model, example=task.EXAMPLE, num_classes=task.NUM_CLASSES, delivery=delivery)
    started = time.perf_counter()
    store = server.collect(contact, statistics=MomentConfig(by_class="always"))  # so that class requests ask nobody
    collection = {"time_s": time.perf_counter() - started, "rows": store.total.rows, **traffic(contact)}
    collection |= {"clients": list(store.clients), "rules": contact.node_rules, "sha256": task.digest(store)}
    print(f"collected: {json.dumps(collection)}")

    digits, requests = task.load(config, nodes), []
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

    result = {"run_folder": server.run.path.name, "nodes": nodes, "training": training, "collection": collection}
    (out / "result.json").write_text(json.dumps({**result, "requests": requests}, indent=2))


def traffic(contact: GridContact) -> dict[str, int]:
    """FedUP's messages so far, and their bytes as serialised."""
    traffic = contact.traffic
    return {"messages": traffic.messages, "bytes_up": traffic.bytes_up, "bytes_down": traffic.bytes_down}

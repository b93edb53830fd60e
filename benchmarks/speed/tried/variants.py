"""Ways to make a training step fast on a GPU, measured before the engine was written: milliseconds a client step.

    PYTHONPATH=src python benchmarks/speed/tried/variants.py OUT.json

h200.json holds what its first, less tidy form gave on one NVIDIA H200 (torch 2.11, 2026-11-15; one run of each variant,
nothing else on the card); in this form it has not been run yet. docs/engine.md says which were kept.
"""

import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from fedup.bench.speed._settings import LENET5, RESNET18, TINYBERT, VIT, Setting

DEVICE = torch.device("cuda")
BATCH, ROWS = 64, 8192
FOUND: dict[str, float] = {}
Work = Callable[[], None]


def note(name: str, seconds: float) -> None:
    """Keep and show a figure."""
    FOUND[name] = round(1000 * seconds, 4)
    print(name, FOUND[name], "ms", flush=True)


class Steps:
    """A model's training step that takes its batches from a list on the device."""

    def __init__(self, setting: Setting, *, half: bool, last: bool, fused: bool = True, compiled: bool = False) -> None:
        self.x, self.y = setting.data(ROWS, DEVICE)
        model = setting.build(DEVICE).train()
        self.model = model.to(memory_format=torch.channels_last) if last else model
        self.forward = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.half = half
        adam = setting in (VIT, TINYBERT)
        weights = self.model.parameters()
        self.optimizer = (
            torch.optim.Adam(weights, lr=1e-4, fused=fused, capturable=fused)
            if adam
            else torch.optim.SGD(weights, lr=0.02, momentum=0.9, fused=fused)
        )
        self.order = torch.randperm(ROWS, device=DEVICE)
        self.cursor = torch.zeros((), dtype=torch.long, device=DEVICE)
        self.offsets = torch.arange(BATCH, device=DEVICE)

    def __call__(self) -> None:
        rows = self.order.index_select(0, self.offsets + self.cursor)
        self.cursor.add_(BATCH).remainder_(ROWS - BATCH)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.half):
            loss = cross_entropy(self.forward(self.x.index_select(0, rows)), self.y.index_select(0, rows))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


def captured(work: Work) -> Work:
    """The work as one graph; three runs first, on a stream beside."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> None:
        _ = work  # the tensors that the graph reads live as long as this does
        graph.replay()

    return replay


def timed(work: Work, *, runs: int = 100, warm: int = 10) -> float:
    """Seconds a run."""
    for _ in range(warm):
        work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(runs):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / runs


def side_by_side(lanes: list[Steps]) -> Work:
    """A step of each lane on a stream of its own: all start together and are waited for together."""
    streams = [torch.cuda.Stream() for _ in lanes]

    def work() -> None:
        now = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(now)
        for stream, step in zip(streams, lanes, strict=True):
            with torch.cuda.stream(stream):
                step()
        for stream in streams:
            now.wait_stream(stream)

    return work


def stacked(setting: Setting, clients: int) -> Work:
    """The clients' weights stacked, one kernel for all of them (vmap); momentum by hand."""
    x, y = setting.data(ROWS, DEVICE)
    models = [setting.build(DEVICE) for _ in range(clients)]
    weights, _ = stack_module_state(models)
    weights = {name: weight.detach() for name, weight in weights.items()}
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    base = copy.deepcopy(models[0])

    def loss(given: dict[str, Tensor], rows: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(functional_call(base, given, (rows,)), labels)

    gradients = vmap(grad(loss))
    cursor, offsets = torch.zeros((), dtype=torch.long, device=DEVICE), torch.arange(BATCH * clients, device=DEVICE)

    def work() -> None:
        rows = (offsets + cursor) % ROWS
        cursor.add_(BATCH * clients)
        found = gradients(weights, x[rows].unflatten(0, (clients, BATCH)), y[rows].view(clients, BATCH))
        moved = list(momenta.values())
        torch._foreach_mul_(moved, 0.9)
        torch._foreach_add_(moved, [found[name] for name in momenta])
        torch._foreach_add_(list(weights.values()), moved, alpha=-0.02)

    return work


def with_masters(setting: Setting, *, last: bool) -> Work:
    """Weights kept in bfloat16 beside single-precision masters, instead of casts in every step."""
    steps = Steps(setting, half=False, last=last)
    masters = [nn.Parameter(weight.detach().clone()) for weight in steps.model.parameters()]
    for master in masters:
        master.grad = torch.zeros_like(master)
    for module in steps.model.modules():
        if not isinstance(module, nn.BatchNorm2d):
            for weight in module.parameters(recurse=False):
                weight.data = weight.data.bfloat16()
    optimizer = type(steps.optimizer)(masters, lr=1e-4, fused=True)
    weights = list(steps.model.parameters())

    def work() -> None:
        rows = steps.order.index_select(0, steps.offsets + steps.cursor)
        steps.cursor.add_(BATCH).remainder_(ROWS - BATCH)
        inputs = steps.x.index_select(0, rows)
        inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs
        for weight in weights:
            weight.grad = None
        cross_entropy(steps.model(inputs).float(), steps.y.index_select(0, rows)).backward()
        torch._foreach_copy_([master.grad for master in masters], [weight.grad for weight in weights])
        optimizer.step()
        torch._foreach_copy_([weight.detach() for weight in weights], [master.detach() for master in masters])

    return work


def main() -> None:
    """All variants of all models."""
    for setting in (LENET5, RESNET18, VIT, TINYBERT):
        name, convolutions = setting.title, setting in (LENET5, RESNET18)
        for half in (False, True):
            for last in (False, True) if convolutions else (False,):
                what = f"{name}, {'bfloat16' if half else 'float32'}{', channels last' if last else ''}"
                note(f"{what}: eager", timed(Steps(setting, half=half, last=last, fused=False), runs=30))
                note(f"{what}: eager, fused optimizer", timed(Steps(setting, half=half, last=last), runs=30))
                note(f"{what}: captured", timed(captured(Steps(setting, half=half, last=last))))
        half, last = setting is not LENET5, setting is RESNET18
        for count in (2, 4, 8, 16) if setting is LENET5 else (2, 4, 8):
            lanes = [Steps(setting, half=half, last=last) for _ in range(count)]
            note(f"{name}: {count} lanes in a graph", timed(captured(side_by_side(lanes))) / count)
        if setting is LENET5:
            for count in (4, 10, 20, 50):
                note(f"{name}: {count} clients stacked by vmap", timed(captured(stacked(setting, count))) / count)
        else:
            note(f"{name}: bfloat16 weights with masters", timed(captured(with_masters(setting, last=last))))
        started = time.perf_counter()
        compiled = Steps(setting, half=half, last=last, compiled=True)
        compiled()
        torch.cuda.synchronize()
        note(f"{name}: compiling, once", time.perf_counter() - started)
        note(f"{name}: compiled and captured", timed(captured(compiled)))
    Path(sys.argv[1]).write_text(json.dumps({"milliseconds": FOUND}, indent=1) + "\n")


if __name__ == "__main__":
    main()

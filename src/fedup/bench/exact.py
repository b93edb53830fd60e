"""Exact mode measured: one round of learning, clients and backdoors forgotten, against learning without them."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedup.bench.exact_features import extract, passing, with_features
from fedup.errors import DataError
from fedup.federation import Federation
from fedup.models.backbone import Backbone, resized
from fedup.partition import dirichlet
from fedup.request import Forget
from fedup.rng import generator
from fedup.tasks.backbones import load_backbone
from fedup.tasks.datasets import Dataset, check_there, input_of, load_dataset
from fedup.tasks.machine import describe_code, describe_machine
from fedup.tasks.progress import Progress
from fedup.training.fedavg import federate
from fedup.training.local import LocalTraining
from fedup.unlearning.exact import HeadModel
from fedup.unlearning.learn_head import learn_head

CLIENTS, MANY_CLIENTS = 10, 100
_HOLDERS, _SHARE, _TARGET = 3, 0.4, 0  # of the backdoor
_WIDTHS = (64, 128, 256, 512)  # of projections
_TIMES = 5  # that a request is timed
_FINE_LR = 2e-4  # of fine-tuning a whole backbone, with Adam; usual for small models, not tuned
_ROUNDS, _LR = 20, 200.0  # of FedAvg on the same features; best mean of 1 to 600 on digits and MNIST, seed 100


@dataclass(frozen=True)
class ExactCase:
    """What is measured: a backbone on random rows of a data set (None: all of them).

    `features` is another number of them, made from those of the backbone.
    """

    data: str
    backbone: str
    rows: int | None = None
    test_rows: int | None = None
    seed: int = 0
    features: int | None = None


def run_exact(case: ExactCase, *, folder: Path, fine_tune: int = 0, progress: Progress) -> dict[str, Any]:
    """All figures of one data set and backbone, as plain data. Features are kept in the folder.

    `fine_tune` is a number of rounds of FedAvg on the whole backbone, which take long.
    """
    data, backbone, seed = case.data, case.backbone, case.seed
    check_there(data)
    dataset = _subset(load_dataset(data), case.rows, case.test_rows, seed)
    public = load_backbone(backbone, tuple(dataset.x.shape[1:]), inputs=input_of(data).identity())
    bench = _Bench(dataset, public, seed)
    clock = _Clock()
    name = f"{Path(data).stem}-{Path(backbone).stem}"
    taken = [extract(public, x, folder, name, progress=progress) for x in bench.inputs(input_of(data))]
    bench.take(*with_features(public, case.features or public.width, taken))
    extracting = clock.read()
    result: dict[str, Any] = {"learned": bench.learned()}
    steps: dict[str, Callable[[], Any]] = {
        "many_clients": bench.many_clients,
        "flipping": bench.flipping,
        "backdoor": bench.backdoor,
        "fedavg": bench.fedavg,
        "projections": bench.projections,
    }
    for done, (step, measure) in enumerate(steps.items()):
        progress("Measuring", done, len(steps))
        result[step] = measure()
    progress("Measuring", len(steps), len(steps))
    result["fine_tuned"] = (
        fine_tuned(backbone, input_of(data).identity(), fine_tune, seed, dataset) if fine_tune else None
    )
    about = {"data": data, "backbone": backbone, "rows": len(dataset.y), "test_rows": len(dataset.test_y), "seed": seed}
    return {
        **about,
        "features": bench.width,
        "backbone_features": public.width,
        "origin": asdict(public.origin) if public.origin else None,
        "extracting_s": extracting["time_s"],
        "extracting_cpu_s": extracting["cpu_s"],
        "load": [round(os.getloadavg()[0], 1), os.cpu_count()],  # of a busy machine: times are longer then
        **result,
        "machine": describe_machine(),
        "code": describe_code(),
    }


class _Clock:
    """Wall clock and CPU time since it was made: on a busy machine they differ."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"time_s": time.perf_counter() - self._wall, "cpu_s": time.process_time() - self._cpu}


class _Bench:
    """One data set as features, split over clients."""

    def __init__(self, dataset: Dataset, backbone: Backbone, seed: int) -> None:
        self._data, self._seed = dataset, seed
        self._backbone, self._own_width = passing(backbone), backbone.width
        self._parts = dirichlet(dataset.y, CLIENTS, concentration=0.5, seed=seed)
        self._marked = self._backdoor_rows()
        self._x = self._test_x = torch.zeros(0)

    def inputs(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Rows and test rows, each followed by those with the trigger of a backdoor."""
        marked = torch.cat([*self._marked.values()])
        data = self._data
        return (
            torch.cat([data.x, inputs.triggered(data.x[marked])]),
            torch.cat([data.test_x, inputs.triggered(data.test_x)]),
        )

    def take(self, backbone: Backbone, features: Sequence[Tensor]) -> None:
        """The features of the inputs, and a backbone that takes these."""
        self._backbone, (self._x, self._test_x) = backbone, features

    @property
    def width(self) -> int:
        """Number of features."""
        return self._backbone.width

    def learned(self) -> dict[str, Any]:
        """One round, and what a client request takes afterwards."""
        clock = _Clock()
        model = self._learn(self._federation())
        took = clock.read()
        store, seconds, used = model.store, [], []
        for client in range(_TIMES):
            request, before = Forget.clients([client]), time.process_time()
            seconds.append(model.unlearn(request, force=True).total_time_s)
            used.append(time.process_time() - before)
            model.restore(request)
        return {
            "accuracy": self._accuracy(model),
            **took,
            "bytes_up": store.traffic.bytes_up,
            "bytes_down": store.traffic.bytes_down,
            "store_bytes": store.stored_bytes,
            "shortened": store.shortened,
            "request_s": statistics.median(seconds),
            "request_cpu_s": statistics.median(used),
        }

    def many_clients(self) -> dict[str, Any]:
        """The same rows at a hundred clients: are the totals the same?"""
        parts = dirichlet(self._data.y, MANY_CLIENTS, concentration=0.1, seed=self._seed, min_rows=0)
        held = [part for part in parts if len(part)]
        few, many = (self._learn(self._federation(parts=own)) for own in (self._parts, held))
        return {"clients": len(held), "equal": few.totals == many.totals}

    def flipping(self) -> dict[str, Any]:
        """The largest client calls every class by the next one's name, and is forgotten."""
        liar = max(range(CLIENTS), key=lambda client: len(self._parts[client]))
        y = self._data.y.clone()
        y[self._parts[liar]] = (y[self._parts[liar]] + 1) % self._data.num_classes
        return self._forgotten(self._federation(y=y), Forget.clients([liar]))

    def backdoor(self) -> dict[str, Any]:
        """Rows with a trigger and a wrong label, forgotten as samples."""
        first, y = len(self._data.y), torch.cat([self._data.y, torch.full((self._count(),), _TARGET)])
        parts, samples = [*self._parts], {}
        for client, rows in self._marked.items():
            copies = torch.arange(first, first + len(rows))
            first += len(rows)
            kept = parts[client][~torch.isin(parts[client], rows)]
            parts[client], samples[client] = torch.cat([kept, copies]), copies.tolist()
        federation = Federation.split(
            self._x, y, parts, heldout=0.0, validation=0.0, num_classes=self._data.num_classes
        )
        return self._forgotten(federation, Forget.samples(samples))

    def fedavg(self) -> dict[str, Any]:
        """A linear layer on the same features, standardised over all clients, by FedAvg."""
        start = nn.Sequential(nn.Linear(self._backbone.width, self._data.num_classes))
        with torch.no_grad():
            for weight in start.parameters():
                weight.zero_()
        plain, clock = self._federation(), _Clock()
        deviation, mean = torch.std_mean(plain.x, 0)
        federation = replace(plain, x=(plain.x - mean) / deviation.clamp(min=1e-6))
        local = LocalTraining(batch_size=64, lr=_LR / self._backbone.width)
        head = federate(start, federation, rounds=_ROUNDS, local=local, seed=self._seed).model
        model = nn.Sequential(_Standardised(mean, deviation.clamp(min=1e-6)), head)
        weights = sum(weight.nbytes for weight in start.parameters())
        return {
            "rounds": _ROUNDS,
            "accuracy": self._accuracy(model),
            **clock.read(),
            "bytes_up": _ROUNDS * CLIENTS * weights,
        }

    def projections(self) -> list[dict[str, Any]]:
        """Fewer features than the backbone has, by a public projection: what they cost, and what they save."""
        lines = []
        widths = [width for width in _WIDTHS if width < self._own_width == self._backbone.width]
        for width in widths:
            small = resized(self._backbone, width, torch.zeros(1, self._backbone.width))
            model = learn_head(small, self._federation(), num_classes=self._data.num_classes)
            sizes = {"store_bytes": model.store.stored_bytes, "bytes_up": model.store.traffic.bytes_up}
            lines.append({"features": width, "accuracy": self._accuracy(model), **sizes})
        return lines

    def _forgotten(self, federation: Federation, request: Forget) -> dict[str, Any]:
        model = self._learn(federation)
        figures = {"with": self._figures(model)}
        report = model.unlearn(request, clients=federation)
        figures["forgotten"] = self._figures(model)
        without = self._learn(federation.without(request))
        figures["learned_without"] = self._figures(without)
        model.purge()
        equal = without.totals == model.totals
        return {**figures, "equal": equal, "time_s": report.total_time_s, "claim": model.claim.kind}

    def _figures(self, model: HeadModel) -> dict[str, float]:
        triggered = _answers(model, self._test_x[len(self._data.test_y) :])
        others = self._data.test_y != _TARGET
        led_astray = float((triggered[others] == _TARGET).double().mean())
        return {"accuracy": self._accuracy(model), "led_astray": led_astray}

    def _learn(self, federation: Federation) -> HeadModel:
        return learn_head(self._backbone, federation, num_classes=self._data.num_classes)

    def _federation(self, *, y: Tensor | None = None, parts: list[Tensor] | None = None) -> Federation:
        x, own = self._x[: len(self._data.y)], parts or self._parts
        y = self._data.y if y is None else y
        return Federation.split(x, y, own, heldout=0.0, validation=0.0, num_classes=self._data.num_classes)

    def _accuracy(self, model: nn.Module) -> float:
        test = self._test_x[: len(self._data.test_y)]
        return float((_answers(model, test) == self._data.test_y).double().mean())

    def _count(self) -> int:
        return sum(map(len, self._marked.values()))

    def _backdoor_rows(self) -> dict[int, Tensor]:
        """By client: rows of other classes that get the trigger."""
        chosen = {}
        holders = sorted(range(CLIENTS), key=lambda client: -len(self._parts[client]))[:_HOLDERS]
        for client in holders:
            others = self._parts[client][self._data.y[self._parts[client]] != _TARGET]
            order = torch.randperm(len(others), generator=generator(self._seed, "backdoor", client))
            chosen[client] = others[order[: round(_SHARE * len(others))]].sort().values
        return chosen


class _Standardised(nn.Module):
    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self._mean, self._deviation = mean, deviation

    def forward(self, x: Tensor) -> Tensor:
        return (x - self._mean) / self._deviation


@torch.no_grad()
def _answers(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(batch).argmax(1) for batch in x.split(1024)])


def fine_tuned(backbone: str, inputs: Mapping[str, Any], rounds: int, seed: int, chosen: Dataset) -> dict[str, Any]:
    """The whole backbone and a linear layer, trained by FedAvg on the same rows at the same clients: it forgets by
    being trained again."""
    module = load_backbone(backbone, tuple(chosen.x.shape[1:]), inputs=inputs)
    start = nn.Sequential(module.module.requires_grad_(True), nn.Flatten(), nn.Linear(module.width, chosen.num_classes))
    parts = dirichlet(chosen.y, CLIENTS, concentration=0.5, seed=seed)
    clients = Federation.split(chosen.x, chosen.y, parts, heldout=0.0, validation=0.0, num_classes=chosen.num_classes)
    clock, weights = _Clock(), sum(weight.nbytes for weight in start.parameters())
    local = LocalTraining(batch_size=32, lr=_FINE_LR, optimizer="adam")
    model = federate(start, clients, rounds=rounds, local=local, seed=seed).model
    took = clock.read()
    right = float((_answers(model, chosen.test_x) == chosen.test_y).double().mean())
    return {"rounds": rounds, "accuracy": right, **took, "bytes_up": rounds * CLIENTS * weights}


def _subset(dataset: Dataset, rows: int | None, test_rows: int | None, seed: int) -> Dataset:
    """Random rows of both parts, always the same for a seed."""
    chosen = {}
    for part, wanted in (("", rows), ("test_", test_rows)):
        x, y = getattr(dataset, f"{part}x"), getattr(dataset, f"{part}y")
        if wanted is not None and not 1 <= wanted <= len(y):
            raise DataError(f"rows must lie in 1 … {len(y)}, all there are; found {wanted}.")
        order = torch.randperm(len(y), generator=generator(seed, f"exact {part}rows"))
        own = order[: wanted or len(y)].sort().values
        chosen[part] = x[own], y[own]
    return Dataset(dataset.name, *chosen[""], *chosen["test_"], dataset.class_names)

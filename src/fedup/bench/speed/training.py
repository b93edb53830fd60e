"""A round of FedAvg: against the loop that a tutorial writes, and against an epoch over the same rows in one place."""

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedup.bench.speed._rows import Row, Tell
from fedup.bench.speed._settings import SETTINGS, Setting, even_jobs
from fedup.bench.turns import clocked, in_turns
from fedup.errors import MissingDataError
from fedup.models.cut import logits_of
from fedup.rng import seed_default
from fedup.training.averaging import RunningAverage
from fedup.training.engines import make_engine
from fedup.training.engines.captured import channels_last
from fedup.training.local import Job, LocalTraining


class TimedRounds:
    """What `federate` does in a round, again and again with one engine."""

    def __init__(self, setting: Setting, rows: int, device: torch.device) -> None:
        self.config = setting.local(device)
        self.x, self.y = setting.data(rows, device)
        self.engine = make_engine("auto", setting.build(device), self.x, self.y, self.config)
        self._average = RunningAverage(self.engine.weights)

    def run(self, jobs: Sequence[Job]) -> None:
        for job, weights in self.engine.train(jobs, self._average.load):
            self._average.add(weights, job.share)
        self._average.finish()


def measure(device: torch.device, tell: Tell) -> Iterator[Row]:
    """Each model's round; TinyBert's only where its library is there."""
    for setting in SETTINGS:
        tell(f"a round of {setting.title}")
        try:
            yield from _measure_model(setting, device)
        except MissingDataError as missing:
            tell(str(missing))


def _measure_model(setting: Setting, device: torch.device) -> Iterator[Row]:
    rows, clients = setting.count(device)
    rounds = TimedRounds(setting, rows, device)
    x, y, config = rounds.x, rounds.y, rounds.config
    jobs, together = even_jobs(rows, clients, config), even_jobs(rows, 1, config)
    on_gpu = device.type == "cuda"
    eager = setting.build(device)
    if on_gpu:
        eager = channels_last(eager)  # a setting that users of the eager loop would make, too
    batches = [batch for job in jobs for batch in job.batches().to(device)]
    first_s = clocked(lambda: rounds.run(jobs), device)
    work: dict[str, Callable[[], object]] = {
        "round": lambda: rounds.run(jobs),
        "centralised": lambda: rounds.run(together),
        "eager": lambda: eager_round(eager, x, y, jobs, config),
        "loop": lambda: plain_epoch(eager, x, y, batches, config),
    }
    turns = 3 if on_gpu else min(15, max(5, int(5 / first_s)))  # short ones scatter more
    times = in_turns(work, device, repeats=turns)
    detail = {
        "rows": rows,
        "clients": clients,
        "batch": config.batch_size,
        "precision": config.precision,
        "engine": rounds.engine.name,
        "turns": turns,
        **times.medians(),
    }
    name = f"{setting.title}: a round"
    faster, goal = times.ratio("eager", "round"), 4 if on_gpu else None
    yield Row(f"{name}, against the eager loop", faster, "× faster", goal, at_most=False, detail=detail)
    yield Row(f"{name}, over an epoch in one place", times.ratio("round", "centralised"), "×", 1.5, detail=detail)
    if on_gpu:
        yield Row(f"{name}: the first, beyond a later one", first_s - times.median("round"), "s", detail=detail)
    else:
        yield Row(f"{name}, over a plain loop", times.ratio("round", "loop"), "×", 1.1, detail=detail)


def eager_round(model: nn.Module, x: Tensor, y: Tensor, jobs: Sequence[Job], config: LocalTraining) -> None:
    """One round as a tutorial writes it, in place: each client loads the weights, trains, and joins the average."""
    start = copy.deepcopy(model.state_dict())
    average: dict[str, Tensor] = {}
    for job in jobs:
        model.load_state_dict(start)
        seed_default(job.dropout_seed, x.device)
        plain_epoch(model, x, y, job.batches().to(x.device), config)
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                average[name] = average.get(name, 0) + job.share * tensor
            else:
                average[name] = torch.maximum(average.get(name, tensor), tensor)
    model.load_state_dict(average)


def plain_epoch(
    model: nn.Module, x: Tensor, y: Tensor, batches: Tensor | Sequence[Tensor], config: LocalTraining
) -> None:
    """A plain loop over batches, with an optimizer of its own."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer: torch.optim.Optimizer
    if config.optimizer == "adam":
        optimizer = torch.optim.Adam(weights, lr=config.lr, weight_decay=config.weight_decay)
    else:
        optimizer = torch.optim.SGD(weights, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    model.train()
    for batch in batches:
        with config.autocast(x.device):
            loss = cross_entropy(logits_of(model(x[batch])), y[batch].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

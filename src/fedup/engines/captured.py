"""Steps captured as CUDA graphs, several clients at a time: a step costs its arithmetic, not its kernel launches.

A graph holds one training step of each of several lanes, side by side. A lane is a model with an optimizer, a stream
of random numbers and a place in the list of batches, so that nothing is sent or waited for between steps.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn

from fedup.averaging import Load, Weights, weights_of
from fedup.engines.plain import PlainEngine, train_step
from fedup.engines.schedule import Stretch, assign, stretches
from fedup.errors import SettingError
from fedup.rng import seed_default
from fedup.training import Job, LocalTraining

_WIDTHS = (1, 2, 3, 4, 6, 8)  # lanes in a graph; more than 8 did not pay on an H200, which starts kernels one by one
_WORTH_CAPTURING = 32  # steps of one batch size: a capture costs about as much as so many plain ones
_TOLERANCE = 0.2  # of an update's length: rounding stays far below, another computation lands at 1 or more
_TRIAL_SEED = 0


class CapturedEngine:
    """Captures what pays, and leaves the rest to the plain engine."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, how: LocalTraining, *, else_plain: bool) -> None:
        self._x, self._y, self._how, self._else_plain = x, y.long(), how, else_plain
        self._first = _channels_last(copy.deepcopy(model))
        self._plain = PlainEngine(self._first, x, y, how)
        self.weights: Weights = self._plain.weights
        self._lanes: list[_Lane] = []
        self._most_lanes = _WIDTHS[-1]
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by batch size and number of lanes
        self._memory = torch.cuda.graph_pool_handle()  # one for all graphs: they run one after another
        self._met: Counter[int] = Counter()  # steps of each batch size
        self._batches = torch.empty(0, dtype=torch.long, device=x.device)  # rows, batch after batch
        self._sending = torch.empty(0, dtype=torch.long)
        self._sent = torch.cuda.Event()
        self._offsets = torch.arange(max(2, how.batch_size), device=x.device)

    @property
    def name(self) -> str:
        return "captured" if self._most_lanes else "plain"

    def train(self, jobs: Sequence[Job], load: Load) -> Iterator[tuple[Job, Weights]]:
        self._make_room(jobs)
        start = 0
        by_size = sorted(jobs, key=lambda job: -job.size)
        for size, same in groupby(by_size, key=lambda job: job.size):
            group = list(same)
            self._met[size] += sum(job.steps for job in group)
            course = self._prepare(group, size, load)
            if course is None:
                yield from self._plain.train(group, load)
                continue
            for stretch in course:
                yield from self._run(stretch, size, start, load)
                start += sum(job.steps * size for _, job in stretch.begin)
        self._sent.record()

    def _make_room(self, jobs: Sequence[Job]) -> None:
        """A list of batches long enough for a round; what the last round sent has arrived."""
        self._sent.synchronize()
        needed = max(sum(job.steps * job.size for job in jobs), 2 * len(self._offsets))
        if needed > len(self._batches):
            self._batches = torch.zeros(needed, dtype=torch.long, device=self._x.device)
            self._sending = torch.empty(needed, dtype=torch.long, pin_memory=True)
            self._graphs.clear()  # they read the old list

    def _prepare(self, jobs: Sequence[Job], size: int, load: Load) -> list[Stretch] | None:
        """How the jobs go over lanes, with all graphs for it captured; None where the plain engine is to do them."""
        while self._most_lanes and self._met[size] >= _WORTH_CAPTURING:
            course = list(stretches(assign(jobs, self._most_lanes)))
            try:
                for width in sorted({_width(stretch.lanes) for stretch in course}, reverse=True):
                    if (size, width) not in self._graphs:
                        self._graphs[size, width] = self._capture(size, width, load)
                return course
            except torch.OutOfMemoryError as error:
                self._most_lanes //= 2
                self._let_go()
                if not self._most_lanes:
                    self._give_up(error)
            except RuntimeError as error:
                self._most_lanes = 0
                self._let_go()
                self._give_up(error)
        return None

    def _let_go(self) -> None:
        self._graphs.clear()
        self._lanes.clear()
        torch.cuda.empty_cache()

    def _give_up(self, error: Exception) -> None:
        told = " ".join(str(error).split())[:300]
        reason = f"{type(self._first).__name__} cannot be captured as a CUDA graph: {told}"
        if not self._else_plain:
            raise SettingError(f"{reason}. Use engine='plain', or 'auto'.") from error
        warnings.warn(f"{reason}. Training goes on step by step, and slower.", stacklevel=2)

    def _run(self, stretch: Stretch, size: int, start: int, load: Load) -> Iterator[tuple[Job, Weights]]:
        if stretch.begin:
            self._begin([(self._lanes[place], job) for place, job in stretch.begin], size, start, load)
        graph = self._graphs[size, _width(stretch.lanes)]
        for _ in range(stretch.steps):
            graph.replay()
        for place, job in stretch.end:
            yield job, self._lanes[place].weights
            self._lanes[place].cursor.zero_()  # until it has work again it goes over rows that are there, to no effect

    def _begin(self, work: Sequence[tuple["_Lane", Job]], size: int, start: int, load: Load) -> None:
        """Give lanes their jobs: weights, batches, and everything else anew."""
        batches = torch.cat([job.batches() for _, job in work]).flatten()
        here = slice(start, start + len(batches))
        self._sending[here] = batches
        self._batches[here].copy_(self._sending[here], non_blocking=True)
        load(*(lane.weights for lane, _ in work))
        for lane, job in work:
            lane.restart(job.dropout_seed, start)
            start += job.steps * size

    def _capture(self, size: int, width: int, load: Load) -> torch.cuda.CUDAGraph:
        while len(self._lanes) < width:
            self._lanes.append(_Lane(copy.deepcopy(self._first), self._how, self._x.device))
        lanes = self._lanes[:width]
        before, expected = self._try_out(lanes, size, load)
        graph = torch.cuda.CUDAGraph()
        for lane in lanes:
            graph.register_generator_state(lane.generator)
        with _drawing_from(self._x.device) as draw_from:
            draw_from(lanes[0].generator)  # a capture that fails leaves unusable what models drew from when it began
            with torch.cuda.graph(graph, pool=self._memory):
                now = torch.cuda.current_stream()
                for lane in lanes:
                    lane.stream.wait_stream(now)
                for lane in lanes:
                    draw_from(lane.generator)
                    with torch.cuda.stream(lane.stream):
                        self._step(lane, size)
                for lane in lanes:
                    now.wait_stream(lane.stream)
        for lane in lanes:
            load(lane.weights)
            lane.restart(_TRIAL_SEED, 0)
        graph.replay()
        for lane in lanes:
            _check_same(before, expected, lane.weights)
        return graph

    def _try_out(self, lanes: list["_Lane"], size: int, load: Load) -> tuple[Weights, Weights]:
        """A plain step of each lane, which a capture needs anyway: the weights before it, and the first lane's after.

        All lanes do the same one.
        """
        before: Weights = {}
        for lane in reversed(lanes):
            load(lane.weights)
            before = before or {name: tensor.clone() for name, tensor in lane.weights.items()}
            lane.restart(_TRIAL_SEED, 0)
            seed_default(_TRIAL_SEED, self._x.device)
            lane.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(lane.stream):
                self._step(lane, size)
            torch.cuda.current_stream().wait_stream(lane.stream)
        return before, {name: tensor.clone() for name, tensor in lanes[0].weights.items()}

    def _step(self, lane: "_Lane", size: int) -> None:
        batch = self._batches.index_select(0, lane.cursor + self._offsets[:size])
        train_step(lane.model, lane.optimizer, self._x, self._y, batch, self._how)
        lane.cursor.add_(size)


@dataclass(eq=False)
class _Lane:
    """A client's place on the device."""

    model: nn.Module
    how: LocalTraining
    device: torch.device
    weights: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.model.train()
        self.weights = weights_of(self.model)
        self.optimizer = self.how.start(self.model)
        self.cursor = torch.zeros((), dtype=torch.long, device=self.device)  # where the next batch starts
        self.generator = torch.Generator(self.device)
        self.stream = torch.cuda.Stream(self.device)

    def restart(self, seed: int, place: int) -> None:
        """A fresh optimizer, stream of random numbers and place in the list of batches."""
        state = [value for each in self.optimizer.state.values() for value in each.values() if value is not None]
        if state:
            torch._foreach_zero_(state)  # in place: captured steps read and write these very tensors
        self.generator.manual_seed(seed)
        self.cursor.fill_(place)


@contextmanager
def _drawing_from(device: torch.device) -> Iterator[Callable[[torch.Generator], None]]:
    """Lets models draw from the stream of a generator of one's choice: they always ask the device's own."""
    default = torch.cuda.default_generators[device.index or 0]
    own = default.graphsafe_get_state()

    def draw_from(generator: torch.Generator) -> None:
        default.graphsafe_set_state(generator.graphsafe_get_state())

    try:
        yield draw_from
    finally:
        default.graphsafe_set_state(own)


def _check_same(before: Weights, expected: Weights, found: Weights) -> None:
    """Raise unless a captured step moves the weights as the plain one does."""
    names = [name for name, tensor in before.items() if tensor.is_floating_point()]
    error = sum((found[name] - expected[name]).double().square().sum() for name in names)
    moved = sum((expected[name] - before[name]).double().square().sum() for name in names)
    if bool(error > _TOLERANCE**2 * moved):  # not where training has diverged: then both are NaN
        raise RuntimeError("the captured step moves the weights otherwise than the plain one")


def _width(lanes: int) -> int:
    """The smallest graph with so many lanes."""
    return next(width for width in _WIDTHS if width >= lanes)


def _channels_last(model: nn.Module) -> nn.Module:
    """Convolutions are fastest so; values are the same."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model

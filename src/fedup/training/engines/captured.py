"""Steps captured as CUDA graphs, several clients at a time: a step costs its arithmetic, not its kernel launches.

A graph holds one training step for each of several slots; between steps nothing is sent or waited for.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from fedup.errors import SettingError
from fedup.rng import seed_default
from fedup.targets import training_form
from fedup.training.averaging import Load, Weights
from fedup.training.engines.batch_feed import BatchFeed
from fedup.training.engines.client_slot import ClientSlot, drawing_from
from fedup.training.engines.plain import PlainEngine, train_step
from fedup.training.engines.schedule import Segment, assign, segments
from fedup.training.local import Job, LocalTraining, restart

_WIDTHS = (1, 2, 3, 4, 6, 8)  # slots in a graph: on an H200 10 and 16 slots were no faster than 8
_WORTH_CAPTURING = 32  # steps of one batch size: a capture costs about as much as that many plain steps
_TOLERANCE = 0.2  # of an update's length: rounding stays far below, a wrong step is at 1 or more
_TRIAL_SEED = 0


class CapturedEngine:
    """Captures steps where it pays; the plain engine does the rest."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, local: LocalTraining, *, else_plain: bool) -> None:
        self._x, self._y, self._local, self._else_plain = x, training_form(y), local, else_plain
        self._first = channels_last(copy.deepcopy(model))
        self._plain = PlainEngine(self._first, x, y, local)
        self.weights: Weights = self._plain.weights
        self._feed = BatchFeed(_WIDTHS[-1], max(2, local.batch_size), x.device)
        self._rate = torch.tensor(local.lr, device=x.device) if local.is_scheduled else None  # one for all slots
        self._slots: list[ClientSlot] = []
        self._most_slots = _WIDTHS[-1]
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by batch size and number of slots
        self._memory = torch.cuda.graph_pool_handle()  # one for all graphs: they run one after another
        self._met: Counter[int] = Counter()  # steps of each batch size

    @property
    def name(self) -> str:
        return "captured" if self._most_slots else "plain"

    def train(self, jobs: Sequence[Job], load: Load) -> Iterator[tuple[Job, Weights]]:
        if self._feed.start_round(jobs):
            self._graphs.clear()
        if self._rate is not None and jobs:
            self._rate.fill_(jobs[0].local.lr)
        for size, same in groupby(sorted(jobs, key=lambda job: -job.size), key=lambda job: job.size):
            group = list(same)
            self._met[size] += sum(job.steps for job in group)
            course = self._prepare(group, size, load)
            if course is None:
                yield from self._plain.train(group, load)
            else:
                yield from self._run(course, size, load)
        self._feed.end_round()

    def _run(self, course: Sequence[Segment], size: int, load: Load) -> Iterator[tuple[Job, Weights]]:
        places: dict[int, int] = {}  # by busy slot: where its next batch starts
        for segment in course:
            if segment.begin:
                places |= self._begin(segment.begin, load)
            self._feed.move(places)
            graph = self._graphs[size, _width(segment.slots)]
            for _ in range(segment.steps):
                graph.replay()
            places = {slot: place + segment.steps * size for slot, place in places.items()}
            for slot, job in segment.end:
                yield job, self._slots[slot].weights
                del places[slot]

    def _begin(self, work: Sequence[tuple[int, Job]], load: Load) -> dict[int, int]:
        """Give slots their jobs with fresh weights and optimizers; returns where each slot's first batch starts."""
        slots = [self._slots[slot] for slot, _ in work]
        starts = self._feed.send([job for _, job in work])
        _restart(slots, [job.dropout_seed for _, job in work], load)
        return dict(zip([slot.number for slot in slots], starts, strict=True))

    def _prepare(self, jobs: Sequence[Job], size: int, load: Load) -> list[Segment] | None:
        """The schedule of the jobs, with all its graphs captured; None if the plain engine is to do them."""
        while self._most_slots and self._met[size] >= _WORTH_CAPTURING:
            course = list(segments(assign(jobs, self._most_slots)))
            try:
                for width in sorted({_width(segment.slots) for segment in course}, reverse=True):
                    if (size, width) not in self._graphs:
                        self._graphs[size, width] = self._capture(size, width, load)
                return course
            except torch.OutOfMemoryError as error:
                self._fall_back(self._most_slots // 2, error)
            except RuntimeError as error:
                self._fall_back(0, error)
        return None

    def _fall_back(self, slots: int, error: Exception) -> None:
        """Continue with fewer slots; with none, by the plain engine."""
        self._most_slots = slots
        self._graphs.clear()
        self._slots.clear()
        torch.cuda.empty_cache()
        if slots:
            return
        cause = " ".join(str(error).split())[:300]
        reason = f"{type(self._first).__name__} cannot be captured as a CUDA graph: {cause}"
        if not self._else_plain:
            raise SettingError(f"{reason}. Use runtime=Runtime(engine='plain'), or 'auto'.") from error
        warnings.warn(f"{reason}. Training goes on step by step, and slower.", stacklevel=2)

    def _capture(self, size: int, width: int, load: Load) -> torch.cuda.CUDAGraph:
        """One step of each of the first slots as a graph that does what a plain step does."""
        while len(self._slots) < width:
            self._slots.append(self._slot(len(self._slots)))
        slots = self._slots[:width]
        before, expected = self._try_out(slots, size, load)
        graph = torch.cuda.CUDAGraph()
        for slot in slots:
            graph.register_generator_state(slot.generator)
        with drawing_from(self._x.device) as draw_from:
            draw_from(slots[0].generator)  # a failed capture makes the current generator unusable
            with torch.cuda.graph(graph, pool=self._memory):
                now = torch.cuda.current_stream()
                for slot in slots:
                    slot.stream.wait_stream(now)
                for slot in slots:
                    draw_from(slot.generator)
                    with torch.cuda.stream(slot.stream):
                        self._step(slot, size)
                for slot in slots:
                    now.wait_stream(slot.stream)
        self._feed.cursors.zero_()
        _restart(slots, [_TRIAL_SEED] * width, load)
        graph.replay()
        for slot in slots:
            _check_same(before, expected, slot.weights)
        return graph

    def _slot(self, number: int) -> ClientSlot:
        return ClientSlot(number, copy.deepcopy(self._first), self._local, self._x.device, rate=self._rate)

    def _try_out(self, slots: Sequence[ClientSlot], size: int, load: Load) -> tuple[Weights, Weights]:
        """One plain step in each slot, which a capture needs anyway; returns the weights before and after it."""
        self._feed.cursors.zero_()
        _restart(slots, [_TRIAL_SEED] * len(slots), load)
        before = {name: tensor.clone() for name, tensor in slots[0].weights.items()}
        for slot in slots:
            slot.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(slot.stream), torch.random.fork_rng(devices=[self._x.device]):
                seed_default(_TRIAL_SEED, self._x.device)
                self._step(slot, size)
            torch.cuda.current_stream().wait_stream(slot.stream)
        return before, {name: tensor.clone() for name, tensor in slots[0].weights.items()}

    def _step(self, slot: ClientSlot, size: int) -> None:
        batch = self._feed.next_batch(slot.number, size)
        train_step(slot.model, slot.optimizer, self._x, self._y, batch, self._local)


def _restart(slots: Sequence[ClientSlot], seeds: Sequence[int], load: Load) -> None:
    """The first weights, a fresh optimizer and a stream of random numbers for each."""
    load(*(slot.weights for slot in slots))
    restart(*(slot.optimizer for slot in slots))
    for slot, seed in zip(slots, seeds, strict=True):
        slot.generator.manual_seed(seed)


def _check_same(before: Weights, expected: Weights, captured: Weights) -> None:
    """Raise unless a captured step moves the weights as the plain one does."""
    names = [name for name, tensor in before.items() if tensor.is_floating_point()]
    error = sum((captured[name] - expected[name]).double().square().sum() for name in names)
    moved = sum((expected[name] - before[name]).double().square().sum() for name in names)
    if bool(error > _TOLERANCE**2 * moved):  # False if training has diverged: both are NaN
        raise RuntimeError("the captured step moves the weights otherwise than the plain one")


def _width(slots: int) -> int:
    """The smallest graph with so many slots."""
    return next(width for width in _WIDTHS if width >= slots)


def channels_last(model: nn.Module) -> nn.Module:
    """The same model with the memory layout that is fastest for convolutions."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model

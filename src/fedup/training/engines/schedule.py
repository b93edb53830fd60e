"""Which job runs in which slot: slots train in parallel, step by step, each one job after another."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedup.training.local import Job


def assign(jobs: Sequence[Job], slots: int) -> list[list[Job]]:
    """Jobs by slot, the slot with most steps first; the longest job goes to the slot that is free first, and so on."""
    by_slot: list[list[Job]] = [[] for _ in range(min(slots, len(jobs)))]
    free = [(0, slot) for slot in range(len(by_slot))]
    for job in sorted(jobs, key=lambda job: (-job.steps, job.client)):
        at, slot = heapq.heappop(free)
        by_slot[slot].append(job)
        heapq.heappush(free, (at + job.steps, slot))
    return sorted(by_slot, key=lambda own: -sum(job.steps for job in own))


@dataclass(frozen=True)
class Segment:
    """Steps during which no slot begins or ends a job."""

    begin: tuple[tuple[int, Job], ...]  # slot and job
    steps: int
    slots: int  # busy ones: the first ones
    end: tuple[tuple[int, Job], ...]


def segments(slots: Sequence[Sequence[Job]]) -> Iterator[Segment]:
    """The segments of a round, for slots sorted as `assign` sorts them."""
    waiting = [list(reversed(jobs)) for jobs in slots]
    running: dict[int, tuple[Job, int]] = {}  # by slot: the job and its remaining steps
    while any(waiting) or running:
        begin = tuple((slot, jobs.pop()) for slot, jobs in enumerate(waiting) if jobs and slot not in running)
        running |= {slot: (job, job.steps) for slot, job in begin}
        steps = min(left for _, left in running.values())
        end = tuple((slot, job) for slot, (job, left) in sorted(running.items()) if left == steps)
        width = 1 + max(running)
        running = {slot: (job, left - steps) for slot, (job, left) in running.items() if left > steps}
        yield Segment(begin, steps, width, end)

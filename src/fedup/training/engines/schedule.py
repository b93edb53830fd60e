"""Which job goes to which lane: lanes train at the same time, step by step, and each takes a job after another."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedup.training.local import Job


def assign(jobs: Sequence[Job], lanes: int) -> list[list[Job]]:
    """Jobs for each lane, the lane with most steps first: longest jobs first, each to the lane that is free first."""
    found: list[list[Job]] = [[] for _ in range(min(lanes, len(jobs)))]
    free = [(0, lane) for lane in range(len(found))]
    for job in sorted(jobs, key=lambda job: (-job.steps, job.client)):
        at, lane = heapq.heappop(free)
        found[lane].append(job)
        heapq.heappush(free, (at + job.steps, lane))
    return sorted(found, key=lambda lane: -sum(job.steps for job in lane))


@dataclass(frozen=True)
class Segment:
    """Steps between two moments at which some lane takes or ends a job."""

    begin: tuple[tuple[int, Job], ...]  # lane and job
    steps: int
    lanes: int  # the first so many have work
    end: tuple[tuple[int, Job], ...]


def segments(lanes: Sequence[Sequence[Job]]) -> Iterator[Segment]:
    """The course of a round over lanes that are sorted as `assign` sorts them."""
    waiting = [list(reversed(jobs)) for jobs in lanes]
    running: dict[int, tuple[Job, int]] = {}  # by lane: the job and its steps to go
    while any(waiting) or running:
        begin = tuple((lane, jobs.pop()) for lane, jobs in enumerate(waiting) if jobs and lane not in running)
        running |= {lane: (job, job.steps) for lane, job in begin}
        steps = min(left for _, left in running.values())
        end = tuple((lane, job) for lane, (job, left) in sorted(running.items()) if left == steps)
        width = 1 + max(running)
        running = {lane: (job, left - steps) for lane, (job, left) in running.items() if left > steps}
        yield Segment(begin, steps, width, end)

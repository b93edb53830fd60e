"""Batches for the device: a round's rows in one list, and for each slot the start of its next batch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedup.training.local import Job


class BatchFeed:
    """Sends from pinned memory without waiting; memory is reused only after its content has arrived."""

    def __init__(self, slots: int, largest_batch: int, device: torch.device) -> None:
        self._rows = torch.empty(0, dtype=torch.long, device=device)
        self._rows_sent = torch.empty(0, dtype=torch.long)
        self.cursors = torch.zeros(slots, dtype=torch.long, device=device)
        self._cursors_sent = torch.empty(0, slots, dtype=torch.long)
        self._offsets = torch.arange(largest_batch, device=device)
        self._arrived = torch.cuda.Event()
        self._rows_used = self._cursors_used = 0

    def start_round(self, jobs: Sequence[Job]) -> bool:
        """Make room for the batches of these jobs; True if the list moved, so that captured steps are invalid."""
        self._arrived.synchronize()
        self._rows_used = self._cursors_used = 0
        if len(jobs) > len(self._cursors_sent):  # cursors are sent at most once for each job
            self._cursors_sent = torch.empty(len(jobs), len(self.cursors), dtype=torch.long, pin_memory=True)
        needed = max(sum(job.steps * job.size for job in jobs), 2 * len(self._offsets))
        if not jobs or needed <= len(self._rows):
            return False
        some = jobs[0].batches().flatten()  # trial steps run on these rows, until others are sent
        self._rows = some.repeat(-(-needed // len(some)))[:needed].to(self._rows.device)
        self._rows_sent = torch.empty(needed, dtype=torch.long, pin_memory=True)
        return True

    def send(self, jobs: Sequence[Job]) -> list[int]:
        """Send the jobs' batches; returns where each job's first batch starts."""
        batches = [job.batches() for job in jobs]
        starts = [self._rows_used]
        for each in batches:
            starts.append(starts[-1] + each.numel())
        here = slice(starts[0], starts[-1])
        torch.cat(batches, out=self._rows_sent[here].view(-1, batches[0].shape[1]))
        self._rows[here].copy_(self._rows_sent[here], non_blocking=True)
        self._rows_used = here.stop
        return starts[:-1]

    def move(self, places: Mapping[int, int]) -> None:
        """Set where each slot's next batch starts; slots without work read valid rows, to no effect."""
        sent = self._cursors_sent[self._cursors_used]
        sent.copy_(torch.tensor([places.get(slot, 0) for slot in range(len(self.cursors))]))
        self.cursors.copy_(sent, non_blocking=True)
        self._cursors_used += 1

    def next_batch(self, slot: int, size: int) -> Tensor:
        """The rows of a slot's next batch, read off on the device."""
        cursor = self.cursors[slot]
        rows = self._rows.index_select(0, cursor + self._offsets[:size])
        cursor.add_(size)
        return rows

    def end_round(self) -> None:
        """Nothing more is sent in this round."""
        self._arrived.record()

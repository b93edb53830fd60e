"""Clients in this process that go away and come back, with centroids and with moments."""

from typing import ClassVar

from hypothesis import Phase, settings
from tests._absent import Absent
from tests._marked import marked

from fedup.clients.in_process import InProcess
from fedup.errors import ContactError
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.integer_moments import MomentConfig

MARKED = marked()
NAMES = ("first", "third", "few", "bystander", "class", "client")


class Away(InProcess):
    """Some clients do not answer."""

    def __init__(self, away):
        super().__init__(MARKED.federation, MARKED.base)
        self.away = away

    def _answer(self, client, question):
        if client in self.away:
            raise ContactError(f"client {client} is away")
        return super()._answer(client, question)


class InThisProcess(Absent):
    base, federation = MARKED.base, MARKED.federation
    requests: ClassVar = {name: MARKED.requests[name] for name in NAMES}

    def reach(self):
        return Away(self.away)


class WithCentroids(InThisProcess):
    statistics, references = CentroidConfig(ratio=0.5), {}


class WithMoments(InThisProcess):
    statistics, references = MomentConfig(least_rows=1), {}


TestCentroids, TestMoments = WithCentroids.TestCase, WithMoments.TestCase
TestCentroids.settings = TestMoments.settings = settings(
    max_examples=8, stateful_step_count=10, deadline=None, derandomize=True, phases=[Phase.generate]
)  # to shrink a failure would take minutes

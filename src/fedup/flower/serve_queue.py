"""Queued requests answered by a server app, one by one, for as long as it runs."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from fedup.errors import ContactError, FedUPError, SettingError
from fedup.run.answer import RequestDesk
from fedup.run.limits import Judge
from fedup.run.queue import Served, serve, to_serve

if TYPE_CHECKING:
    from fedup.flower.contact import GridContact
    from fedup.flower.run_server import RunServer

_LOG = logging.getLogger(__name__)
POLL_S, RETRY_S = 3.0, 60.0
_LONGEST_PAUSES = 32  # times the first one


class QueueService:
    """The queue of a run folder and the nodes that answer it. Between answers nothing is locked."""

    def __init__(self, server: "RunServer", contact: "GridContact", judge: Judge | None = None) -> None:
        self._server, self._contact, self._judge = server, contact, judge
        self._not_before: dict[str, float] = {}  # requests that were postponed
        self._pauses: dict[str, float] = {}  # and the seconds before they are tried again
        self._nodes: frozenset[int] = frozenset()
        self._read: tuple[int, int] | None = None  # the journal when the queue was last found done

    def run(self, *, until: Callable[[], bool], poll_s: float = POLL_S, retry_s: float = RETRY_S) -> list[Served]:
        """Answer what is queued and what will be, until `until` says so; it is asked before each request and look."""
        if not (poll_s > 0 and retry_s >= 0):
            raise SettingError(f"poll_s must be above 0, and retry_s 0 or more; found {poll_s} and {retry_s}.")
        served: list[Served] = []
        while not until():
            served += [replace(own, outcome=None) for own in self.answer_all(retry_s=retry_s, until=until)]
            if not until():
                time.sleep(poll_s)
        return served

    def answer_all(self, *, retry_s: float = RETRY_S, until: Callable[[], bool] = lambda: False) -> list[Served]:
        """Take back what is to be taken back, and answer each request that is queued now, in the order in which they
        came; those postponed not too often."""
        now, stamp = time.monotonic(), self._stamp()
        if (nodes := self._contact.connected) != self._nodes:  # somebody came back, maybe
            self._nodes, self._not_before, self._read = nodes, {}, None
            self._pauses.clear()
            self._finish_pending()
        due = any(at <= now for at in self._not_before.values())
        if stamp == self._read and not due:  # to read a long journal takes a while
            return []
        served, queued = list[Served](), to_serve(self._server.state)
        self._not_before = {own.id: self._not_before[own.id] for own in queued if own.id in self._not_before}
        for request in queued:
            if until():
                return served
            if self._not_before.get(request.id, now) > now:
                continue
            served.append(self._answer(request.id))
            self._not_before.pop(request.id, None)
            if served[-1].status == "postponed":
                pause = self._pauses.get(request.id, retry_s)
                self._not_before[request.id] = time.monotonic() + pause
                self._pauses[request.id] = min(2 * pause, _LONGEST_PAUSES * retry_s)
        self._read = stamp if not served else None
        return served

    def _finish_pending(self) -> None:
        """Parts of earlier answers that waited for nodes."""
        if self._server.state.pending:
            try:
                self._server.finish_pending(self._contact, judge=self._judge)
            except FedUPError as error:  # they wait on, and hold up no request
                _LOG.warning("what is pending stays so: %s", error)

    def _answer(self, request_id: str) -> Served:
        result = serve(self._server.run, request_id, self._desk)
        _LOG.warning("queued request %s: %s%s", request_id, result.status, f" ({result.why})" if result.why else "")
        return result

    @contextmanager
    def _desk(self, request_id: str) -> Iterator[RequestDesk]:
        """A desk for the request, with all nodes that are connected by now."""
        with self._server.desk("unlearn", self._contact, self._judge, answering=request_id) as desk:
            try:
                self._contact.meet_new_nodes()
            except ContactError as error:  # a node that says nothing is no reason not to answer for others
                _LOG.warning("not all nodes say who they are: %s", error)
            yield desk

    def _stamp(self) -> tuple[int, int]:
        found = self._server.run.journal_path.stat()
        return found.st_mtime_ns, found.st_size

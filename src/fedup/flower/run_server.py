"""The run folder of a Flower server: `fedup status`, `evidence` and `verify` work on it."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedup.clients.collect import collect as ask_clients
from fedup.errors import ContactError, RequestError, SettingError
from fedup.filters.bottleneck import FilterConfig
from fedup.flower.contact import GridContact
from fedup.flower.new_base import NewBase, collect_retained, put_retrained, train_on, unnamed_persons
from fedup.flower.serve_queue import POLL_S, RETRY_S, QueueService
from fedup.models.cut import find_cut
from fedup.models.views import fingerprint
from fedup.request import Forget, union
from fedup.run.answer import NewRequest, Outcome, RequestDesk
from fedup.run.architecture import describe_architecture
from fedup.run.bindings import By, RunBindings, bindings_of, release
from fedup.run.brief_writer import BriefWriter
from fedup.run.folder import Run
from fedup.run.ledger import RunLedger
from fedup.run.limits import Judge, Limits
from fedup.run.new_base import Followed
from fedup.run.queue import Served
from fedup.run.record import keep_centroids, keep_model
from fedup.run.serving import load_base, load_plugged, load_store, read_served, read_with
from fedup.run.state import State
from fedup.run.verify import Check, verify
from fedup.serving.plugged import PluggedModel
from fedup.statistics.store import Centroids


class RunServer:
    """A server's state in a folder: model, centroids, requests, filters and a journal.

    `blank` makes the model without its weights. A server that is restarted finds everything as it was.

    A client number belongs to the node that first answered under it, in this run and in later ones: by the node's key
    if nodes are `authenticated` (`flower-superlink --enable-supernode-auth`; Flower does not tell a server whether they
    are), and else by the number that Flower gave it. That is weaker: a node without a key gets a new one whenever it
    starts, and `release` has to free its number.
    """

    def __init__(
        self,
        path: str | Path,
        blank: Callable[[], nn.Module],
        *,
        class_names: Sequence[str] = (),
        cut: str | None = None,
        authenticated: bool = False,
    ) -> None:
        self.run, self._blank = Run(path), blank
        self._bound_by: By = "key" if authenticated else "node id"
        self._architecture = describe_architecture(blank)
        model = blank()
        about = {"made_by": "flower", "model": type(model).__name__, "cut": find_cut(model, cut)}
        self.run.start({**about, "class_names": list(class_names)})

    @property
    def _answers_path(self) -> Path:
        """Where answers wait until what is made of them is stored."""
        return self.run.path / "answers"

    @property
    def state(self) -> State:
        """Everything that was committed so far; do not train on the server's `left_out` in later rounds."""
        return self.run.read()

    @property
    def left_out(self) -> Forget:
        """What no later round may train on: all requests but those that were taken back or refused."""
        state, unnamed = read_with(self.run, lambda state: unnamed_persons(self.run, state))
        known = union([state.left_out, *(request.forget for request in state.finished)])
        return replace(known, resolved_tags=known.resolved_tags.difference(*unnamed.values()))

    def keep(self, model: nn.Module) -> None:
        """Store the trained model; one that is stored already must be the same."""
        if self.state.trained is None:
            with self.run.writing("train") as writer:
                if writer.state.trained is None:
                    keep_model(writer, model, self._facts)
        if (base := self.state.base) != fingerprint(model):
            raise RequestError(f"{self.run.path} holds another model ({base[:12]}). Use a new folder for this one.")

    def collect(self, contact: GridContact, *, clients: Sequence[int] = (), **settings: Any) -> Centroids:
        """The clients' centroids: stored ones, or else collected now with the settings of `fedup.collect`.

        Some `clients` are asked anew: what they send takes the place of what they sent before, or is added if they are
        new, and the filter in force is made again.
        """
        if clients:
            if settings:
                raise SettingError("Single clients are asked as all were at first: pass no settings besides clients.")
            with self.desk("collect", contact, None) as desk:
                desk.collect_again(clients, limits=Limits(None))
            return read_with(self.run, lambda state: load_store(self.run, state))[1]
        contact.keep_answers(self._answers_path)
        if self.state.collected is not None:
            contact.settled(only_collection=True)  # left by a server that was killed
            return read_with(self.run, lambda state: load_store(self.run, state))[1]
        state, model = read_with(self.run, lambda state: load_base(self.run, state, self._blank()))
        with BriefWriter(self.run, "collect", state) as writer:
            self.attach(writer, contact)
            contact.vectors_folder = self.run.path
            started = time.perf_counter()
            if state.finished:
                store = collect_retained(model, contact, state, settings)
            else:
                store = ask_clients(model, contact, cut=state.about["cut"], **settings)
            keep_centroids(writer, store, {"time_s": time.perf_counter() - started, "example": contact.row})
            contact.settled()
            shutil.rmtree(self._answers_path, ignore_errors=True)  # and what is left there of other models
            return store

    def unlearn(
        self,
        request: Forget,
        contact: GridContact | None = None,
        *,
        reference: str | None = None,
        config: FilterConfig | None = None,
        judge: Judge | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        """Answer a request and serve its filter. `judge` measures retained accuracy; without one its loss is not
        limited. What a class may lose is limited anyway. The outcome may be a refusal."""
        with self.desk("unlearn", contact, judge) as desk:
            return desk.unlearn(
                [NewRequest(request, reference)], config=config, limits=limits or Limits(3.0 if judge else None)
            )

    def answer_waiting(self, contact: GridContact, *, judge: Judge | None = None) -> Outcome:
        """Answer the requests that wait, if they have enough rows together."""
        with self.desk("unlearn", contact, judge) as desk:
            return desk.unlearn([], limits=Limits(3.0 if judge else None), pending=True)

    def finish_pending(self, contact: GridContact, *, judge: Judge | None = None) -> Outcome:
        """Ask the nodes again that had not answered: parts of answers wait for them (`state.pending`)."""
        with self.desk("unlearn", contact, judge) as desk:
            return desk.finish_pending(limits=Limits(3.0 if judge else None))

    def restore(self, *requests: str, contact: GridContact | None = None, judge: Judge | None = None) -> Outcome:
        """Restore requests, by their ids."""
        with self.desk("restore", contact, judge) as desk:
            return desk.restore(
                [desk.writer.state.request(name) for name in requests], limits=Limits(3.0 if judge else None)
            )

    def answer_queued(self, contact: GridContact, *, judge: Judge | None = None) -> list[Served]:
        """Answer the requests that are queued in the folder now (`fedup unlearn` queues what needs clients)."""
        return QueueService(self, contact, judge).answer_all()

    def serve_queue(
        self,
        contact: GridContact,
        *,
        until: Callable[[], bool] = lambda: False,
        judge: Judge | None = None,
        poll_s: float = POLL_S,
        retry_s: float = RETRY_S,
    ) -> list[Served]:
        """Answer what is queued, now and later, one by one, until `until` is true. The folder is looked at every
        `poll_s` seconds, and not locked meanwhile. A request whose clients cannot be reached is tried again every
        `retry_s` seconds."""
        return QueueService(self, contact, judge).run(until=until, poll_s=poll_s, retry_s=retry_s)

    @contextmanager
    def desk(
        self, verb: str, contact: GridContact | None, judge: Judge | None, *, answering: str | None = None
    ) -> Iterator[RequestDesk]:
        """A desk for requests on the run folder, which is locked around commits only. Every release is charged in the
        journal. `answering` is the queued request that it is for."""
        if (state := self.state).trained is not None and state.centroids is None:
            raise ContactError(f"{self.run.path} has no statistics of this base yet: collect them first.")
        if contact is not None and contact.base != state.base:
            raise ContactError(
                f"{self.run.path} serves another base now ({state.base[:12]}) than the one that nodes are asked about "
                f"({contact.base[:12]}): start the server app again. Nothing was changed."
            )
        state, (store, plugged) = read_with(self.run, self._load)
        with BriefWriter(self.run, verb, state, answering=answering) as writer:
            store.ledger = self.attach(writer, contact)
            yield RequestDesk(writer, plugged, store, contact, judge)

    def _load(self, state: State) -> tuple[Centroids, PluggedModel]:
        return load_store(self.run, state), load_plugged(self.run, state, self._blank())

    def attach(self, writer: BriefWriter, contact: GridContact | None) -> RunLedger:
        """The ledger of the folder, to which every release is charged."""
        ledger = RunLedger(writer)
        if contact is not None:
            contact.keep_answers(self._answers_path)
            contact.ledger = ledger
            contact.identities.bindings = RunBindings(writer, by=self._bound_by)
        return ledger

    def train_on(
        self,
        model: nn.Module,
        contact: GridContact,
        before: State,
        *,
        rounds: int,
        limits: Limits | None = None,
        **settings: Any,
    ) -> Followed:
        """Put a model in place that more rounds led to. Statistics are collected anew from it with the settings of
        `fedup.collect`, and the requests in force follow. `before` is the `state` when these rounds began, without its
        `left_out`; if the requests changed since, that is an error, and nothing is changed."""
        new = NewBase(model, self._facts, contact, settings, limits or Limits(None))
        return train_on(self, new, before, rounds)

    def put_retrained(
        self,
        model: nn.Module,
        before: State,
        contact: GridContact | None = None,
        *,
        limits: Limits | None = None,
        **settings: Any,
    ) -> Followed:
        """Serve a model that was trained from scratch without the `left_out` of `before`, the `state` when training
        began. Its requests are finished; filter, statistics and what is sealed are dropped. Collect anew then.

        Requests that were answered since then need a `contact` of the new model, and the settings of `fedup.collect`:
        they are answered again from the new base, which holds their rows, and all is put in place in one event.
        """
        return put_retrained(self, NewBase(model, self._facts, contact, settings, limits or Limits(None)), before)

    @property
    def _facts(self) -> dict[str, Any]:
        return {"accuracy": {}, "rows": None, "time_s": 0.0, "architecture": self._architecture}

    def release(self, *clients: int) -> None:
        """Free the numbers of clients whose nodes have new keys, or new numbers; without any, all of them."""
        with self.run.writing("release") as writer:
            release(writer, clients or bindings_of(writer.state))

    def verify(self, example: Tensor) -> list[Check]:
        """The checks of `fedup verify`, and that restoring gives the original answer to an example, bit for bit."""
        return verify(self.run, lambda state: self._blank(), lambda state: example)

    def plugged(self) -> PluggedModel:
        """The model with the filter of the active requests."""
        return read_served(self.run, lambda state: self._blank())[1]

"""The run folder of a Flower server: `fedup status`, `evidence` and `verify` work on it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedup.clients.collect import collect as ask_clients
from fedup.errors import RequestError, SettingError
from fedup.filters.bottleneck import FilterConfig
from fedup.flower.contact import GridContact
from fedup.models.cut import find_cut
from fedup.models.views import fingerprint
from fedup.request import Forget
from fedup.run.answer import Judge, Limits, NewRequest, Outcome, RequestDesk
from fedup.run.bindings import By, RunBindings, bindings_of, release
from fedup.run.folder import Run
from fedup.run.ledger import RunLedger
from fedup.run.record import keep_centroids, keep_model
from fedup.run.serving import load_base, load_plugged, load_store
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
        model = blank()
        about = {"made_by": "flower", "model": type(model).__name__, "cut": find_cut(model, cut)}
        self.run.start({**about, "class_names": list(class_names)})

    @property
    def state(self) -> State:
        """Everything that was committed so far; do not train on its `left_out` in later rounds."""
        return self.run.read()

    def keep(self, model: nn.Module) -> None:
        """Store the trained model; one that is stored already must be the same."""
        with self.run.writing("train") as writer:
            if writer.state.trained is None:
                keep_model(writer, model, {"accuracy": {}, "rows": None, "time_s": 0.0})
            elif writer.state.base != fingerprint(model):
                raise RequestError(
                    f"{self.run.path} holds another model ({writer.state.base[:12]}). Use a new folder for this one."
                )

    def collect(self, contact: GridContact, *, clients: Sequence[int] = (), **settings: Any) -> Centroids:
        """The clients' centroids: stored ones, or else collected now with the settings of `fedup.collect`.

        Some `clients` are asked anew: what they send takes the place of what they sent before, or is added if they are
        new, and the filter in force is made again.
        """
        if clients:
            if settings:
                raise SettingError("Single clients are asked as all were at first: pass no settings besides clients.")
            with self._desk("collect", contact, None) as desk:
                desk.collect_again(clients, limits=Limits(None))
                return load_store(self.run, desk.writer.state)
        with self.run.writing("collect") as writer:
            if writer.state.collected is not None:
                contact.settled(only_collection=True)  # left by a server that was killed
                return load_store(self.run, writer.state)
            model = load_base(self.run, writer.state, self._blank())
            contact.ledger = RunLedger(writer)  # every release is charged in the journal
            contact.identities.bindings = RunBindings(writer, by=self._bound_by)
            contact.vectors_folder = self.run.path
            started = time.perf_counter()
            store = ask_clients(model, contact, cut=writer.state.about["cut"], **settings)
            keep_centroids(writer, store, {"time_s": time.perf_counter() - started})
            contact.settled()
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
        with self._desk("unlearn", contact, judge) as desk:
            return desk.unlearn(
                [NewRequest(request, reference)], config=config, limits=limits or Limits(3.0 if judge else None)
            )

    def answer_waiting(self, contact: GridContact, *, judge: Judge | None = None) -> Outcome:
        """Answer the requests that wait, if they have enough rows together."""
        with self._desk("unlearn", contact, judge) as desk:
            return desk.unlearn([], limits=Limits(3.0 if judge else None), pending=True)

    def finish_pending(self, contact: GridContact, *, judge: Judge | None = None) -> Outcome:
        """Ask the nodes again that had not answered: parts of answers wait for them (`state.pending`)."""
        with self._desk("unlearn", contact, judge) as desk:
            return desk.finish_pending(limits=Limits(3.0 if judge else None))

    def restore(self, *requests: str, contact: GridContact | None = None, judge: Judge | None = None) -> Outcome:
        """Restore requests, by their ids."""
        with self._desk("restore", contact, judge) as desk:
            return desk.restore(
                [desk.writer.state.request(name) for name in requests], limits=Limits(3.0 if judge else None)
            )

    @contextmanager
    def _desk(self, verb: str, contact: GridContact | None, judge: Judge | None) -> Iterator[RequestDesk]:
        """A desk for requests on the run folder; every release is charged in the journal."""
        with self.run.writing(verb) as writer:
            store = load_store(self.run, writer.state)
            store.ledger = RunLedger(writer)
            if contact is not None:
                contact.ledger = store.ledger
                contact.identities.bindings = RunBindings(writer, by=self._bound_by)
            yield RequestDesk(writer, load_plugged(self.run, writer.state, self._blank()), store, contact, judge)

    def release(self, *clients: int) -> None:
        """Free the numbers of clients whose nodes have new keys, or new numbers; without any, all of them."""
        with self.run.writing("release") as writer:
            release(writer, clients or bindings_of(writer.state))

    def verify(self, example: Tensor) -> list[Check]:
        """The checks of `fedup verify`, and that restoring gives the original answer to an example, bit for bit."""
        return verify(self.run, lambda state: self._blank(), lambda state: example)

    def plugged(self) -> PluggedModel:
        """The model with the filter of the active requests."""
        return load_plugged(self.run, self.state, self._blank())

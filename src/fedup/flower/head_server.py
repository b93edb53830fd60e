"""The run folder of a Flower server in exact mode: a head on a public backbone, learned from the nodes in one round."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from fedup.errors import RequestError
from fedup.filters.ridge_head import HeadRule
from fedup.flower.contact import GridContact
from fedup.models.backbone import HEAD, Backbone, with_blank_head
from fedup.models.views import fingerprint
from fedup.request import Forget
from fedup.run.answer import NewRequest
from fedup.run.bindings import By, RunBindings, bindings_of, release
from fedup.run.exact import is_cohort, keep_head, load_head_of, relearned, salt_of
from fedup.run.folder import Run, Writer
from fedup.run.head_desk import HeadDesk, HeadOutcome
from fedup.run.ledger import RunLedger
from fedup.run.limits import Limits
from fedup.run.state import State
from fedup.run.verify import Check, verify
from fedup.statistics.store import CellName
from fedup.unlearning.cohort import CohortModel
from fedup.unlearning.exact import HeadModel
from fedup.unlearning.learn_head import learn_head

_USUAL_RULE = HeadRule()


class HeadServer:
    """A server's state in a folder: the head, the clients' sums (or totals alone), requests, claims and a journal.

    `backbone` makes the public backbone; nodes mount it with a blank head (`with_blank_head`). `keep="cohort"` keeps
    totals alone. A server that is restarted finds everything as it was, and `fedup status`, `evidence` and `verify`
    work on the folder. Nodes keep their own features, so a purge at the server is all that it can do.

    Client numbers are bound to nodes as `RunServer` does it.
    """

    def __init__(
        self,
        path: str | Path,
        backbone: Callable[[], Backbone],
        *,
        class_names: Sequence[str],
        keep: Literal["clients", "cohort"] = "clients",
        authenticated: bool = False,
    ) -> None:
        self.run, self._backbone = Run(path), backbone
        self._bound_by: By = "key" if authenticated else "node id"
        public, names = backbone(), list(class_names)
        about = {"made_by": "flower", "backbone": type(public.module).__name__, "cut": HEAD, "class_names": names}
        about |= {"model": about["backbone"], "fingerprint": fingerprint(with_blank_head(public, len(names)))}
        self.run.start(about | ({} if keep == "clients" else {"keep": keep}))

    @property
    def state(self) -> State:
        """Everything that was committed so far."""
        return self.run.read()

    def blank(self) -> nn.Module:
        """What nodes are asked about: the backbone and a head of zeros. Give it to `GridContact`."""
        return with_blank_head(self._backbone(), len(self.state.about["class_names"]))

    def learn(self, contact: GridContact, *, rule: HeadRule = _USUAL_RULE, least_rows: int = 1) -> None:
        """Ask all nodes once and learn the head; one that is stored already stays."""
        with self._writing("train", contact) as writer:
            if writer.state.trained is not None:
                contact.settled(only_collection=True)  # left by a server that was killed
                return
            classes, started = len(writer.state.about["class_names"]), time.perf_counter()
            model: HeadModel | CohortModel = learn_head(
                self._backbone(),
                contact,
                num_classes=classes,
                rule=rule,
                least_rows=least_rows,
                keep="cohort" if is_cohort(writer.state) else "clients",
            )
            facts = {"accuracy": {}, "rows": model.totals.rows, "time_s": time.perf_counter() - started}
            keep_head(writer, model, facts)
            contact.settled()

    def model(self) -> HeadModel | CohortModel:
        """The model without what requests in force name."""
        return load_head_of(self.run, self.state, self._backbone())

    def unlearn(
        self,
        request: Forget,
        contact: GridContact | None = None,
        *,
        reference: str | None = None,
        limits: Limits | None = None,
    ) -> HeadOutcome:
        """Answer a request. Without `limits` it is declined only if it takes the last row of a class that nobody asked
        to forget; losses are those that totals let expect, for no row is here."""
        with self._desk("unlearn", contact) as desk:
            return desk.unlearn([NewRequest(request, reference)], limits=limits or Limits(None, False, float("inf")))

    def restore(self, *requests: str, contact: GridContact | None = None) -> HeadOutcome:
        """Take requests back, by their ids."""
        with self._desk("restore", contact) as desk:
            return desk.restore([desk.writer.state.request(name) for name in requests])

    def add_clients(self, contact: GridContact, clients: Sequence[int]) -> HeadOutcome:
        """Let nodes join that were not there when the head was learned."""
        with self._desk("add", contact) as desk:
            added = {"source": "nodes that joined", "clients": sorted(clients), "client_names": []}
            return desk.add(contact, dict.fromkeys(clients, ()), added)

    def purge(self) -> list[CellName]:
        """Destroy what the server keeps of forgotten rows."""
        with self._desk("purge", None) as desk:
            return desk.purge()[0]

    def relearned(self, contact: GridContact) -> bool:
        """Whether the remaining nodes add up to the totals that are served."""
        served, again = relearned(self.model(), contact, salt_of(self.state))
        return served == again

    def verify(self) -> list[Check]:
        """The checks of `fedup verify`."""
        return verify(self.run, lambda state: self.blank(), lambda state: self._no_probe())

    def release(self, *clients: int) -> None:
        """Free the numbers of clients whose nodes have new keys, or new numbers; without any, all of them."""
        with self.run.writing("release") as writer:
            release(writer, clients or bindings_of(writer.state))

    @staticmethod
    def _no_probe() -> Tensor:
        raise RequestError("A head is checked by its totals, never by inputs.")

    @contextmanager
    def _writing(self, verb: str, contact: GridContact | None) -> Iterator[Writer]:
        """The folder, with what nodes release charged and bound in its journal."""
        with self.run.writing(verb) as writer:
            if contact is not None:
                contact.ledger = RunLedger(writer)
                contact.identities.bindings = RunBindings(writer, by=self._bound_by)
                contact.vectors_folder = self.run.path
            yield writer

    @contextmanager
    def _desk(self, verb: str, contact: GridContact | None) -> Iterator[HeadDesk]:
        with self._writing(verb, contact) as writer:
            yield HeadDesk(writer, load_head_of(self.run, writer.state, self._backbone()), contact)

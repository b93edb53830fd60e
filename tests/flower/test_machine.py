"""Whatever is asked, lost, late, repeated, refused, killed or taken back, in any order: both ledgers agree once every
node was heard of; bytes reported are those that the grid carried; a plan or a refusal changes nothing; and restoring
everything gives the base bit for bit."""

import shutil
import tempfile
from itertools import islice
from pathlib import Path

import pytest
import torch
from flwr.app import Error, Message, RecordDict
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests._marked import state_of
from tests.flower._contact import Carried, flower_error, refused
from tests.flower._grid import (
    FIRST,
    Clock,
    Killed,
    LocalGrid,
    assert_ledgers_agree,
    changed,
    digits,
    spent_by_nodes,
    told,
    with_answer,
)

from fedup import DP, Centroids, FilterConfig, Forget, collect, plan, plug, restore, unlearn
from fedup.clients.eraser_questions import PrivateEraserQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.errors import BudgetError, FedUPError
from fedup.flower import messaging
from fedup.flower.wire import Answer
from fedup.privacy import Budget, Ledger
from fedup.statistics.eraser_statistics import RowGroups

WORLD = digits()
X = WORLD.test_x[:40]
CLEAR = DP(100.0, clip=4.0)  # so that few rows stand out of its noise
AUTO = FilterConfig(rank=4, steps=3, gentle=False)
CLIENTS = sorted(WORLD.federation.ids)
LOSSES = ["lost", "late", "unreadable", "of no use", "Flower's error"]
FATES = ["delivered", *LOSSES, "twice", "refused", "fails before charging", "fails after charging"]
REQUESTS = {
    "client": Forget.clients([1]),
    "class": Forget.classes([3]),
    "sample": WORLD.samples(c2=25),
    "samples of two": WORLD.samples(c0=3, c3=22),
}
MOVING = ("ledger", "traffic", "bytes_up")  # of a store: what clients have sent by now, whatever becomes of it


class FaultyGrid(LocalGrid):
    """A node's next answers may have fates of their own; then all is well again."""

    def __init__(self) -> None:
        super().__init__({FIRST + client: WORLD.app(client) for client in CLIENTS}, self._spoil)
        self.fates: dict[int, list[str]] = {}
        self.held: list[Message] = []  # replies that come late, or once more
        self.kill_after: int | None = None  # answers

    def _reply(self, node: int, message: Message) -> Message | None:
        fate = self.fates.get(node, [""])[0]
        if fate == "fails before charging":
            self.fates[node] = self.fates[node][1:] or [""]
            return Message(Error(0, "out of memory"), reply_to=message)
        return super()._reply(node, message)

    def _spoil(self, node: int, reply: Message) -> Message | None:
        if self.kill_after is not None:
            if self.kill_after == 0:
                self.kill_after = None
                raise Killed
            self.kill_after -= 1
        if told(reply).status != "ok" or reply.metadata.group_id == "who":
            return reply
        fate, *rest = self.fates.get(node, [""])
        self.fates[node] = rest or [""]
        return self._with_fate(fate, reply)

    def _with_fate(self, fate: str, reply: Message) -> Message | None:
        answer = told(reply)
        if fate in ("late", "twice"):
            self.held.append(reply)
        if fate in ("lost", "late"):
            return None
        if fate == "Flower's error":
            return flower_error(reply, code=5)
        if fate == "unreadable":
            reply.content = RecordDict()
        if fate == "of no use":
            return changed(reply, dict.fromkeys(("labels", "forgotten", "count", "clip")))
        if fate == "refused" and "spent" not in answer.details:  # a node refuses a release before it is charged
            return refused(reply)
        if fate == "fails after charging":
            return with_answer(reply, Answer("failed", answer.base, {"spent": answer.details.get("spent")}))
        return reply

    def pull_messages(self, message_ids):
        late, self.held = self.held, []
        self.came += late
        return [*late, *super().pull_messages(message_ids)]


@pytest.fixture(autouse=True, scope="module")
def nobody_waits():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messaging, "time", Clock())
        yield


class Federation(RuleBasedStateMachine):
    """A server that collects, answers requests, fails, is killed and comes back; nodes that fail in all ways."""

    store: Centroids | None = None

    @initialize(private=st.booleans(), budget=st.none() | st.sampled_from([Budget(120.0), Budget(400.0)]))
    def start(self, private: bool, budget: Budget | None) -> None:
        self.folder, self.privacy = Path(tempfile.mkdtemp()), CLEAR if private else None
        self.grid, self.plugged = FaultyGrid(), plug(WORLD.model)
        self.ledger = Ledger(budgets={None: budget} if private and budget else {})  # the journal's: it outlives servers
        self.come_back()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            try:
                self.hear_of_all()
                self.restore_everything()
            finally:
                shutil.rmtree(self.folder)

    @rule()
    def come_back(self) -> None:
        """The server is killed where it stands; another one starts over the same folder."""
        delivery = {"retries": 1, "timeout_s": 0.2, "least_fraction": 0.5}
        self.contact = WORLD.contact(self.grid, folder=self.folder, ledger=self.ledger, **delivery)
        self.carried = Carried(self.grid)
        self.from_disk = any(self.folder.rglob("*-answers"))  # what an earlier server received counts as well

    @rule(client=st.sampled_from(CLIENTS), fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=4))
    def meet(self, client: int, fates: list[str]) -> None:
        self.grid.fates[FIRST + client] = list(fates)

    @rule(after=st.integers(0, 5))
    def be_killed_soon(self, after: int) -> None:
        self.grid.kill_after = after

    @rule(settle=st.booleans())
    def collect(self, settle: bool) -> None:
        store = self._attempt(lambda: collect(WORLD.model, self.contact, privacy=self.privacy), settle)
        if store is not None and not self.plugged.requests:
            self.store = store

    @precondition(lambda self: self.store is not None)
    @rule(name=st.sampled_from(sorted(REQUESTS)), force=st.booleans(), settle=st.booleans())
    def unlearn(self, name: str, force: bool, settle: bool) -> None:
        options = {"clients": self.contact, "config": AUTO, "force": force}
        self._change(lambda: unlearn(self.plugged, self.store, REQUESTS[name], **options), settle)

    @precondition(lambda self: self.store is not None and self.plugged.requests)
    @rule(data=st.data(), settle=st.booleans())
    def restore(self, data: st.DataObject, settle: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.plugged.requests, key=str)))
        self._change(lambda: restore(self.plugged, self.store, request, clients=self.contact, force=True), settle)

    @precondition(lambda self: self.store is not None)
    @rule(name=st.sampled_from(sorted(REQUESTS)))
    def plan(self, name: str) -> None:
        """It changes nothing at all, and asks nothing but who a node is."""
        before = self._whole_state(), len(self.grid.sent) - len(self.grid.asked("who"))
        requests = self.plugged.requests | {REQUESTS[name]}
        self._attempt(lambda: plan(self.plugged, self.store, requests, clients=self.contact, config=AUTO), settle=False)
        assert (self._whole_state(), len(self.grid.sent) - len(self.grid.asked("who"))) == before

    @precondition(lambda self: self.privacy is not None)
    @rule(clients=st.sets(st.sampled_from(CLIENTS), min_size=1), spared=st.booleans(), settle=st.booleans())
    def ask_for_releases(self, clients: set[int], spared: bool, settle: bool) -> None:
        questions = {client: eraser_question(client) for client in sorted(clients)}
        self._attempt(lambda: list(self.contact.ask(questions, optional=questions if spared else ())), settle)

    @precondition(lambda self: self.privacy is not None)
    @rule(taken=st.integers(0, 4))
    def give_up_a_collection(self, taken: int) -> None:
        """After all answers came, and so many were taken."""
        everyone = PrivateCentroidsQuestion("head", CLEAR)
        self._attempt(lambda: list(islice(self.contact.ask_everyone(everyone), taken)), settle=False)

    @rule()
    def hear_of_all(self) -> None:
        """Once every node has been heard of again both ledgers agree, whatever happened before."""
        self.grid.fates, self.grid.kill_after = {}, None
        self.come_back()
        assert list(self.contact.clients) == CLIENTS
        assert_ledgers_agree(self.grid, self.contact)

    def restore_everything(self) -> None:
        if self.plugged.requests:
            restore(self.plugged, self.store, list(self.plugged.requests), clients=self.contact)
        assert (self.plugged.requests, self.plugged.served) == (frozenset(), None)
        assert torch.equal(self.plugged.unplug()(X), WORLD.model(X))

    def _change(self, call, settle: bool) -> None:
        """A request, or its restoring: it is served and reports its bytes, or it has changed nothing."""
        served, before, carried = self.plugged.served, self._whole_state(), Carried(self.grid)
        report = self._attempt(call, settle)
        if report is not None:
            assert (report.bytes_up, report.bytes_down) == (carried.up, carried.down) or self.from_disk
            return
        assert self.plugged.served is served
        unpaid = isinstance(self.error, BudgetError)
        assert _without(self._whole_state(), () if unpaid else MOVING) == _without(before, () if unpaid else MOVING)

    def _attempt(self, call, settle: bool):
        """What a call gives; None where it failed (`error` says why) or the server was killed."""
        self.error = None
        try:
            result = call()
        except FedUPError as error:
            self.error = error
            return None
        except Killed:
            self.come_back()
            return None
        if settle:
            self.contact.settled()
        return result

    def _whole_state(self) -> dict:
        """Of store, model and server's ledger; of the store's ledger only what the server's has."""
        state = {"requests": self.plugged.requests, "charges": len(self.ledger.charges)}
        return state | (state_of(self.store) if self.store is not None else {})

    @precondition(lambda self: hasattr(self, "contact"))
    @invariant()
    def the_server_never_charges_more_than_the_nodes_and_nothing_twice(self) -> None:
        for client, spent in spent_by_nodes(self.grid).items():
            assert self.ledger.spent(client) <= spent * (1 + 1e-9), client
        named = [(charge.client, charge.release) for charge in self.ledger.charges if charge.release]
        assert len(named) == len(set(named))

    @precondition(lambda self: hasattr(self, "contact") and not self.from_disk)
    @invariant()
    def bytes_reported_are_those_that_were_carried(self) -> None:
        traffic = self.contact.traffic
        assert (traffic.bytes_up, traffic.bytes_down) == (self.carried.up, self.carried.down)


def _without(state: dict, names: tuple[str, ...]) -> dict:
    hidden = {*names, *(("charges",) if names else ())}
    return {name: value for name, value in state.items() if name not in hidden}


def eraser_question(client: int) -> PrivateEraserQuestion:
    groups = RowGroups({"it": Forget.samples({client: WORLD.rows(client)[:25].tolist()})}, Forget())
    return PrivateEraserQuestion("conv2", CLEAR, groups)


TestFederation = Federation.TestCase
TestFederation.settings = settings(
    max_examples=24, stateful_step_count=12, deadline=None, derandomize=True, phases=[Phase.generate]
)  # to shrink a failure would take minutes

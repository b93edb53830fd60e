"""Both ledgers agree: whatever is lost, late, killed or asked for again, the server has charged each client what the
client has charged itself; never more, and less only while a reply is on its way or lost."""

import shutil
import tempfile
from itertools import islice
from pathlib import Path

import pytest
from flwr.app import Error, Message, RecordDict
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.flower._grid import FIRST, LocalGrid, assert_ledgers_agree, changed, digits, spent_by_nodes, told

from fedup import DP, Forget, collect
from fedup.clients.eraser_questions import PrivateEraserQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.errors import FedUPError
from fedup.flower import messaging
from fedup.flower.wire import Answer, write_answer
from fedup.privacy import Ledger
from fedup.statistics.eraser_statistics import RowGroups

WORLD = digits()
REAL = DP(2.0, clip=4.0)
CLIENTS = sorted(WORLD.federation.ids)
EVERY = frozenset(range(10))
FATES = ["delivered", "lost", "late", "unreadable", "of no use", "fails before charging", "fails after charging"]


class Killed(BaseException):
    """As a signal would."""


class FaultyGrid(LocalGrid):
    """A node's next answers to questions for a release may have a fate of their own; then all is well again."""

    def __init__(self) -> None:
        super().__init__({FIRST + client: WORLD.app(client) for client in CLIENTS}, self._spoil)
        self.fates: dict[int, list[str]] = {}
        self.held: list[Message] = []  # late replies
        self.kill_after: int | None = None  # answers

    def _spoil(self, node: int, reply: Message) -> Message | None:
        if self.kill_after is not None:
            if self.kill_after == 0:
                self.kill_after = None
                raise Killed
            self.kill_after -= 1
        if reply.has_error() or told(reply).status != "ok" or "release" not in told(reply).details:
            return reply
        fate = self._fate(node)
        if fate == "late":
            self.held.append(reply)
        if fate in ("lost", "late"):
            return None
        if fate == "unreadable":
            reply.content = RecordDict()
        if fate == "of no use":
            return changed(reply, **dict.fromkeys(told(reply).arrays, None))
        if fate == "fails after charging":
            answer = told(reply)
            kept = {"spent": answer.details["spent"]}
            reply.content = write_answer(Answer("failed", answer.base, kept, reason="RuntimeError"))
        return reply

    def _reply(self, node: int, message: Message) -> Message | None:
        if self.fates.get(node, [])[:1] == ["fails before charging"]:
            self._fate(node)
            return Message(Error(0, "out of memory"), reply_to=message)
        return super()._reply(node, message)

    def _fate(self, node: int) -> str:
        return self.fates[node].pop(0) if self.fates.get(node) else "delivered"

    def pull_messages(self, message_ids):
        late, self.held = self.held, []
        return [*late, *super().pull_messages(message_ids)]


class Impatient:
    """A clock that goes on while the server sleeps, so that nobody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True, scope="module")
def impatient():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messaging, "time", Impatient())
        yield


class Ledgers(RuleBasedStateMachine):
    """A server that collects, asks single clients, fails, is killed and comes back; nodes that fail in all ways."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.grid, self.ledger = FaultyGrid(), Ledger()  # the journal's, which outlives the server
        self.come_back()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            try:
                self.hear_of_all()
            finally:
                shutil.rmtree(self.folder)

    @rule()
    def come_back(self) -> None:
        """The server is killed where it stands; another one starts over the same folder."""
        self.contact = WORLD.contact(
            self.grid, folder=self.folder, ledger=self.ledger, retries=1, timeout_s=0.2, least_fraction=0.5
        )

    @rule(client=st.sampled_from(CLIENTS), fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=4))
    def meet(self, client: int, fates: list[str]) -> None:
        self.grid.fates[FIRST + client] = list(fates)

    @rule(after=st.integers(0, 5))
    def be_killed_soon(self, after: int) -> None:
        self.grid.kill_after = after

    @rule(settle=st.booleans())
    def collect(self, settle: bool) -> None:
        self._attempt(lambda: collect(WORLD.model, self.contact, privacy=REAL), settle)

    @rule(client=st.sampled_from(CLIENTS), few=st.integers(0, 2), settle=st.booleans())
    def ask_for_cells(self, client: int, few: int, settle: bool) -> None:
        excluded = frozenset(WORLD.rows(client)[:few].tolist())
        question = PrivateCentroidsQuestion("head", REAL, EVERY, excluded=excluded)
        self._attempt(lambda: list(self.contact.ask({client: question})), settle)

    @rule(clients=st.sets(st.sampled_from(CLIENTS), min_size=2), spared=st.booleans(), settle=st.booleans())
    def ask_for_statistics_of_several(self, clients: set[int], spared: bool, settle: bool) -> None:
        questions = {client: eraser_question(client) for client in sorted(clients)}
        self._attempt(lambda: list(self.contact.ask(questions, optional=questions if spared else ())), settle)

    @rule(taken=st.integers(0, 4))
    def give_up_a_collection(self, taken: int) -> None:
        """After all answers came, and so many were taken."""
        everyone = PrivateCentroidsQuestion("head", REAL)
        self._attempt(lambda: list(islice(self.contact.ask_everyone(everyone), taken)), settle=False)

    def _attempt(self, call, settle: bool) -> None:
        try:
            call()
            if settle:
                self.contact.settled()
        except FedUPError:
            pass
        except Killed:
            self.come_back()

    @precondition(lambda self: hasattr(self, "contact"))
    @invariant()
    def the_server_never_charges_more_than_the_nodes(self) -> None:
        for client, spent in spent_by_nodes(self.grid).items():
            assert self.ledger.spent(client) <= spent * (1 + 1e-9), client

    @rule()
    def hear_of_all(self) -> None:
        """Once every node has been heard of again both agree, whatever happened before."""
        self.grid.fates, self.grid.kill_after = {}, None
        self.come_back()
        assert list(self.contact.clients) == CLIENTS
        assert_ledgers_agree(self.grid, self.contact)

    @precondition(lambda self: hasattr(self, "contact"))
    @invariant()
    def no_release_is_charged_twice(self) -> None:
        named = [(charge.client, charge.release) for charge in self.ledger.charges if charge.release]
        assert len(named) == len(set(named))


def eraser_question(client: int) -> PrivateEraserQuestion:
    groups = RowGroups({"it": Forget.samples({client: WORLD.rows(client)[:25].tolist()})}, Forget())
    return PrivateEraserQuestion("conv2", REAL, groups)


TestLedgers = Ledgers.TestCase
TestLedgers.settings = settings(max_examples=20, stateful_step_count=10, deadline=None, derandomize=True)

"""What nodes charge themselves for is what the server charges them; budgets stop questions before they are asked."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._asking import ask_one
from tests._forced import unlearn
from tests.flower._contact import ODD, charges, losing, releases_charged, server_charges, spoiling, untouched
from tests.flower._grid import FIRST, Clock, assert_ledgers_agree, changed, digits, told, with_answer

from fedup import FilterConfig, collect, plug
from fedup.clients.labels import LabelsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.errors import BudgetError, ContactError
from fedup.flower import Policy
from fedup.flower.wire import Answer
from fedup.privacy import DP, Budget, Ledger
from fedup.statistics.centroids import CentroidConfig

pytestmark = pytest.mark.usefixtures("clock")
REAL = DP(2.0, clip=4.0)
CLEAR = DP(100.0, clip=4.0)  # so that few rows stand out of its noise
SOME = (0, 1, 3)


def release_questions() -> dict[int, PrivateCentroidsQuestion]:
    return {client: PrivateCentroidsQuestion("head", REAL, without=frozenset([0])) for client in SOME}


def test_the_servers_account_and_those_of_the_nodes_agree_charge_by_charge(world):
    grid, ledger = world.grid(), Ledger()
    contact = world.contact(grid, ledger=ledger)
    collect(world.model, contact, statistics=CentroidConfig(sigma=0.1))
    assert ledger.charges == [] and releases_charged(grid) == [0] * 4  # without a guarantee nothing is charged
    store = collect(world.model, contact, privacy=CLEAR)
    assert store.ledger is contact.ledger is ledger
    assert charges(grid) == server_charges(ledger) and releases_charged(grid) == [1] * 4
    unlearn(plug(world.model), store, world.samples(c2=40), clients=contact, config=FilterConfig(rank=8, steps=4))
    assert charges(grid) == server_charges(ledger)
    assert len(charges(grid)[2]) >= 2 and len(charges(grid)[0]) == 1


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
def test_releases_that_came_are_charged_and_not_paid_again_where_another_did_not(world, tmp_path, on_disk):
    grid = world.grid()
    contact = world.contact(grid, retries=0, timeout_s=0.1, folder=tmp_path if on_disk else None)
    assert contact.clients
    grid.spoil = spoiling(lambda reply: None, node=FIRST + 1)
    with pytest.raises(ContactError, match="Client 1"):
        contact.ask(release_questions())
    assert {charge.client for charge in contact.ledger.charges} == {0, 3}
    assert releases_charged(grid) == [1, 1, 0, 1]
    grid.spoil = untouched
    grid.sent.clear()
    first = dict(contact.ask(release_questions()))
    assert grid.nodes_asked() == ([FIRST + 1] if on_disk else [FIRST, FIRST + 1, FIRST + 3])
    assert releases_charged(grid) == [1, 1, 0, 1] and contact.silent == {}
    assert_ledgers_agree(grid, contact)
    if on_disk:  # a client whose answer is on disk is not silent, whatever happened since
        grid.spoil = losing(FIRST)
        list(contact.ask({0: LabelsQuestion(frozenset())}, optional=[0]))
        assert list(contact.silent) == [0]
        grid.spoil = untouched
    again = dict(contact.ask(release_questions()))
    assert all(torch.equal(first[client].vectors, again[client].vectors) for client in SOME)
    assert contact.silent == {}
    contact.settled()
    other = dict(contact.ask(release_questions()))  # to ask again is to ask for something new
    assert not any(torch.equal(first[client].vectors, other[client].vectors) for client in SOME)
    assert_ledgers_agree(grid, contact)


def test_one_release_under_two_names_is_charged_once_and_two_under_one_name_twice(world):
    grid = world.grid()
    contact = world.contact(grid)
    collect(world.model, contact, privacy=REAL)
    spent = contact.ledger.spent(2)
    first = next(reply for reply in grid.came if reply.metadata.src_node_id == ODD and told(reply).arrays)
    again = told(first)
    grid.spoil = spoiling(lambda reply: with_answer(reply, replace(again, details={**again.details, "release": "x"})))
    contact.settled()
    question = PrivateCentroidsQuestion("head", REAL, frozenset(range(10)))
    ask_one(contact, 2, question)  # the node made and charged another, which was exchanged on its way for the first
    assert contact.ledger.spent(2) == pytest.approx(spent)
    grid.spoil = lambda node, reply: changed(reply, {"release": "x"})
    contact.settled()
    ask_one(contact, 2, question)
    assert_ledgers_agree(grid, contact)
    assert contact.ledger.spent(2) == pytest.approx(3 * spent)


def test_a_node_that_fails_after_it_has_charged_itself_is_charged_at_the_server(world):
    def fail(reply):
        return with_answer(reply, Answer("failed", told(reply).base, {"spent": told(reply).details["spent"]}))

    grid = world.grid(spoiling(fail))
    contact = world.contact(grid, least_fraction=0.5)
    assert list(contact.clients) == [0, 1, 2, 3]
    assert collect(world.model, contact, privacy=REAL).clients == (0, 1, 3)
    assert_ledgers_agree(grid, contact)
    grid.spoil = untouched
    collect(world.model, contact, privacy=REAL)  # asked by the same name the node sends what it had made
    assert_ledgers_agree(grid, contact)
    assert sum(charge.covered for charge in contact.ledger.charges if charge.client == 2) > 0


odd = st.sampled_from([math.nan, math.inf, 1e300, None, True]) | st.floats(max_value=0, exclude_max=True)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(odd | st.text(max_size=3) | st.lists(st.floats(0, 1), max_size=1))
def test_an_account_out_of_range_is_not_followed(spent):
    world = digits()
    grid = world.grid(lambda node, reply: changed(reply, {"spent": spent}) if told(reply).status == "ok" else reply)
    contact = world.contact(grid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedup.flower.messaging.time", Clock())
        list(contact.ask({1: PrivateCentroidsQuestion("head", REAL)}))
    assert [charge.correction for charge in contact.ledger.charges] == [False]


def test_what_a_node_says_to_have_spent_is_not_charged_to_a_client_that_it_only_claims_to_be(world):
    def claims(node, reply):
        return changed(reply, {"client": 0, "spent": 1e12}) if node == FIRST + 3 else reply

    grid = world.grid(claims)
    contact = world.contact(grid, least_fraction=0.5)
    collect(world.model, contact, privacy=REAL)
    assert "client 0" in contact.left_out[FIRST + 3]
    assert contact.ledger.spent(0) <= 2 * REAL.mu**2 * (1 + 1e-9)  # its own release, and one in its name
    late = grid.apps.pop(FIRST + 3)
    contact = world.contact(grid, least_fraction=0.5)
    assert list(contact.clients) == [0, 1, 2]
    spent, grid.apps[FIRST + 3] = contact.ledger.spent(0), late
    collect(world.model, contact, privacy=REAL)
    assert "client 0" in contact.left_out[FIRST + 3]
    assert contact.ledger.spent(0) == pytest.approx(spent + REAL.mu**2)  # a client that is known pays its own alone


@pytest.mark.parametrize("joins_late", [False, True])
def test_a_budget_of_the_server_stops_all_before_anybody_is_asked(world, joins_late):
    grid = world.grid()
    late = grid.apps.pop(FIRST + 3)
    contact = world.contact(grid, ledger=Ledger(budgets={3: Budget(0.1)}))
    if joins_late:
        assert list(contact.clients) == [0, 1, 2]
    grid.apps[FIRST + 3] = late
    for how in ({}, {"privacy": REAL}, {"forget": [world.samples(c2=5)]}):
        with pytest.raises(BudgetError, match="Client 3"):
            collect(world.model, contact, **how)
    sample = frozenset(world.rows(0)[:1].tolist())
    for questions in (release_questions(), dict.fromkeys(SOME, LabelsQuestion(sample))):
        with pytest.raises(BudgetError, match="Client 3"):
            contact.ask(questions)
    assert {ask.kind for _, ask in grid.asked()} == {"who"}
    assert contact.ledger.charges == [] and releases_charged(grid) == [0] * 4


def test_a_node_without_budget_is_left_out_and_pays_nothing(world):
    grid = world.grid()
    grid.apps[ODD] = world.app(2, policy=Policy(budget=Budget(0.5)))
    contact = world.contact(grid, least_fraction=0.5)
    assert collect(world.model, contact, privacy=REAL).clients == (0, 1, 3)
    assert "spent" in contact.left_out[ODD]
    assert charges(grid)[2] == server_charges(contact.ledger)[2] == []


def test_nodes_that_answer_under_dp_only_are_asked_for_nothing_else(world):
    grid = world.grid(policy=Policy(only_private=True))
    with pytest.raises(ContactError, match="differential privacy only"):
        collect(world.model, world.contact(grid))
    store = collect(world.model, world.contact(grid), privacy=REAL, forget=[world.samples(c2=30)])
    assert store.clients == (0, 1, 2, 3) and grid.asked("labels") == []

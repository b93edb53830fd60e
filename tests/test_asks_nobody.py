"""Plans and refused requests ask nobody and change nothing."""

from collections import Counter
from functools import partial

import pytest
from tests._marked import AUTO, FAST, Marked, state_of

from fedup import Budget, FilterConfig, Forget, collect, plug, restore, unlearn
from fedup.clients.in_process import InProcess
from fedup.clients.protocol import Contact
from fedup.errors import BudgetError, FedUPError, HarmError, RequestError
from fedup.privacy import DP
from fedup.unlearning.plan import Terms
from fedup.unlearning.unlearn import plan

MARKED = Marked()
WAYS_TO_ASK = ("ask", "ask_everyone")


class Silent(InProcess):
    """Clients that are known, and must not be asked anything."""

    def __init__(self, store):
        super().__init__(MARKED.federation, MARKED.base, ledger=store.ledger)

    def __getattribute__(self, name):
        if name in WAYS_TO_ASK or name == "_answer":
            raise AssertionError(f"a client was asked: {name}")
        return super().__getattribute__(name)


def test_every_way_to_ask_of_a_contact_is_guarded():
    known = {"clients", "num_classes", "ledger", "check", "measures_by_default", "traffic", "settled", "silent"} | {
        "vectors_folder"
    }
    offered = {name for name in vars(Contact) if not name.startswith("_")}
    assert offered == known | set(WAYS_TO_ASK)
    for name in WAYS_TO_ASK:
        with pytest.raises(AssertionError, match=name):
            getattr(Silent(MARKED.store()), name)


def _stores():
    """A fresh store, and one that requests have worked on."""
    yield plug(MARKED.base), MARKED.store()
    yield MARKED.serving("second", "class")


def _kept(plugged, store, action):
    served, before = plugged.served, state_of(store)
    try:
        return action()
    finally:
        assert plugged.served is served
        assert state_of(store) == before


@pytest.mark.parametrize("kind", ["auto", "both"])
@pytest.mark.parametrize("names", [["class"], ["first", "third", "client"], ["bystander"]])
def test_a_plan_asks_nobody_and_changes_nothing(names, kind):
    config = FilterConfig(**FAST, filter=kind)
    for plugged, store in _stores():
        requests = plugged.requests | {MARKED.requests[name] for name in names}
        unknown = {i for request in requests for ids in request.sample_ids.values() for i in ids}
        unknown -= {i for labels in store.sample_labels.values() for i in labels}
        action = partial(plan, plugged, store, requests, clients=Silent(store), config=config)
        if kind == "both" and "bystander" in names:
            with pytest.raises(RequestError, match="20 or more"):
                _kept(plugged, store, action)
            continue
        found = _kept(plugged, store, action)
        assert found.samples_unknown == len(unknown)


def test_a_plan_and_the_answer_agree_on_whom_is_asked():
    for names in (["client"], ["class"], ["first"], ["first", "third"], ["bystander"]):
        plugged, store = plug(MARKED.base), MARKED.store()
        requests = [MARKED.requests[name] for name in names]
        told = plan(plugged, store, requests, clients=Silent(store), config=AUTO)
        report = unlearn(
            plugged, store, requests, clients=MARKED.federation, config=AUTO, force=True, terms=Terms(measure=False)
        )
        sent = {release.client for release in report.releases}
        assert sent <= set(told.clients_contacted), names
        assert sent or not told.clients_contacted


@pytest.mark.parametrize("name", ["first", "bystander"])
@pytest.mark.parametrize("act", ["plan", "unlearn"])
def test_a_budget_that_allows_no_exact_answer_refuses_before_anybody_is_asked(name, act):
    """Who has a budget releases nothing without noise."""
    for known in (False, True):
        plugged, store = plug(MARKED.base), MARKED.store()
        if known:
            request = MARKED.requests[name]
            for client, ids in request.sample_ids.items():
                store.sample_labels[client] = {i: int(MARKED.y[i]) for i in ids}
        store.ledger.budgets[None] = Budget(1.0)
        options = {"clients": Silent(store), "config": AUTO}
        action = {
            "plan": lambda p=plugged, s=store, o=options: plan(p, s, [MARKED.requests[name]], **o),
            "unlearn": lambda p=plugged, s=store, o=options: unlearn(p, s, MARKED.requests[name], **o),
        }[act]
        with pytest.raises(BudgetError):
            _kept(plugged, store, action)


@pytest.mark.parametrize("names", [["client"], ["first"], ["first", "bystander"]], ids=" ".join)
def test_clients_are_charged_what_the_plan_says(names):
    store = collect(MARKED.base, MARKED.federation, privacy=DP(2.0, clip=10.0))
    plugged, requests = plug(MARKED.base), [MARKED.requests[name] for name in names]
    charged = Counter(charge.client for charge in store.ledger.charges)
    planned = plan(plugged, store, requests, clients=Silent(store), config=AUTO, force=True).charges
    unlearn(plugged, store, requests, clients=MARKED.federation, config=AUTO, force=True)
    assert Counter(charge.client for charge in store.ledger.charges) - charged == planned


REFUSED = {
    "one class is left": (Forget.classes([0, 1, 3]), HarmError),
    "unknown client": (Forget.clients([9]), RequestError),
    "all clients": (Forget.clients([0, 1, 2]), RequestError),
    "no eraser for so few": (MARKED.requests["few"], RequestError),
    "rank too wide": (MARKED.requests["first"], FedUPError),
    "unknown cut": (MARKED.requests["first"], FedUPError),
}


@pytest.mark.parametrize("act", ["plan", "unlearn"])
@pytest.mark.parametrize("reason", REFUSED)
def test_what_can_be_known_beforehand_is_refused_before_anybody_is_asked(reason, act):
    request, error = REFUSED[reason]
    more = {"rank too wide": {"rank": 99}, "unknown cut": {"eraser_cut": "nowhere"}, "no eraser for so few": {}}
    settings = {**FAST, **({"filter": "both"} if reason == "no eraser for so few" else {}), **more.get(reason, {})}
    plugged, store = plug(MARKED.base), MARKED.store()
    options = {"clients": Silent(store), "config": FilterConfig(**settings)}
    with pytest.raises(error):
        _kept(
            plugged,
            store,
            lambda: (
                plan(plugged, store, [request], **options)
                if act == "plan"
                else unlearn(plugged, store, request, **options)
            ),
        )


def test_taking_back_what_is_not_active_asks_nobody():
    plugged, store = MARKED.serving("class")
    with pytest.raises(RequestError):
        _kept(plugged, store, lambda: restore(plugged, store, MARKED.requests["first"], clients=Silent(store)))

"""Plans and refused requests ask nobody and change nothing."""

from collections import Counter
from functools import partial

import pytest
from tests._marked import AUTO, FAST, everything_of, marked, refused

from fedup import Budget, FilterConfig, Forget, collect, plug, unlearn
from fedup.clients.in_process import InProcess
from fedup.clients.protocol import Contact
from fedup.errors import BudgetError, FedUPError, HarmError, RequestError
from fedup.privacy import DP
from fedup.unlearning.plan import Terms
from fedup.unlearning.unlearn import plan

MARKED = marked()
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
    known = {"clients", "num_classes", "ledger", "check", "near", "traffic", "settled", "silent"} | {
        "vectors_folder",
        "absent",
        "failure",
        "targets",
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
            with refused(plugged, store, RequestError, match="20 or more"):
                action()
            continue
        before = everything_of(plugged, store)
        assert action().samples_unknown == len(unknown)
        assert everything_of(plugged, store) == before


def test_a_plan_and_the_answer_agree_on_whom_is_asked():
    for names in (["client"], ["class"], ["first"], ["first", "third"], ["bystander"]):
        plugged, store = plug(MARKED.base), MARKED.store()
        requests = [MARKED.requests[name] for name in names]
        told = plan(plugged, store, requests, clients=Silent(store), config=AUTO, force=True)
        report = unlearn(
            plugged, store, requests, clients=MARKED.federation, config=AUTO, force=True, terms=Terms(measure=False)
        )
        sent = {release.client for release in report.releases}
        assert sent <= set(told.clients_contacted), names
        assert sent or not told.clients_contacted


@pytest.mark.parametrize("name", ["first", "bystander"])
@pytest.mark.parametrize("act", [plan, unlearn])
def test_a_budget_that_allows_no_exact_answer_refuses_before_anybody_is_asked(name, act):
    """Who has a budget releases nothing without noise."""
    for known in (False, True):
        plugged, store = plug(MARKED.base), MARKED.store()
        if known:
            request = MARKED.requests[name]
            for client, ids in request.sample_ids.items():
                store.sample_labels[client] = {i: int(MARKED.y[i]) for i in ids}
        store.ledger.budgets[None] = Budget(1.0)
        with refused(plugged, store, BudgetError):
            act(plugged, store, [MARKED.requests[name]], clients=Silent(store), config=AUTO)


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


@pytest.mark.parametrize("act", [plan, unlearn])
@pytest.mark.parametrize("reason", REFUSED)
def test_what_can_be_known_beforehand_is_refused_before_anybody_is_asked(reason, act):
    request, error = REFUSED[reason]
    more = {"rank too wide": {"rank": 99}, "unknown cut": {"eraser_cut": "nowhere"}}
    more["no eraser for so few"] = {"filter": "both"}
    plugged, store = plug(MARKED.base), MARKED.store()
    with refused(plugged, store, error):
        act(plugged, store, [request], clients=Silent(store), config=FilterConfig(**{**FAST, **more.get(reason, {})}))

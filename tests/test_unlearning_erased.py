"""Sample requests that an eraser answers: a function of the set of requests, and an error changes nothing."""

import copy
from functools import partial

import pytest
import torch
from tests._forced import restore, unlearn
from tests._marked import (
    AUTO,
    EARLY,
    FAST,
    KINDS,
    Unreachable,
    Watched,
    marked,
    noted_examples,
    refused,
    same_bits,
    state_of,
)

import fedup
from fedup import FilterConfig, Forget, collect, plug
from fedup.errors import ContactError, CutError, DataError, HarmError, RequestError
from fedup.statistics.centroids import CentroidConfig
from fedup.unlearning.plan import Terms
from fedup.unlearning.unlearn import plan

MARKED = marked()


def _kinds(plugged):
    """Whether there is a bottleneck, and the rank of the eraser."""
    served = plugged.served
    return served.filter is not None, served.erasure.filter.rank if served.erasure else 0


def test_samples_get_an_eraser_alone():
    plugged, store = plug(MARKED.base), MARKED.store()
    report = unlearn(plugged, store, MARKED.requests["first"], clients=MARKED.federation, config=AUTO)
    assert _kinds(plugged) == (False, 1) and plugged.served.erasure.cut == EARLY
    assert report.centroids_used == 0
    assert [note for note in report.notes if "of the variance" not in note] == []
    assert report.erasure["rows"] == 30 and report.erasure["clients"] == [1]
    assert report.erasure["size_bytes"] == plugged.served.size_bytes == plugged.served.erasure.filter.size_bytes
    assert "erase" in report.time_s


@pytest.mark.parametrize("kind", ["auto", "both", "erasure"])
def test_a_class_that_the_forgotten_samples_may_have_broken_is_told_where_nothing_mends_it(kind):
    base = copy.deepcopy(MARKED.base)
    with torch.no_grad():
        base[4].bias[2] -= 100
    labels = MARKED.y[MARKED.rows["first"]]
    assert int((labels == 2).sum()) > 0
    store = collect(base, MARKED.federation, statistics=CentroidConfig(ratio=0.5))
    plugged, config = plug(base), FilterConfig(**FAST, filter=kind)
    report = unlearn(plugged, store, MARKED.requests["first"], clients=MARKED.federation, config=config)
    told = [note for note in report.notes if note.startswith("Class 2, ") and "filter both" in note]
    assert len(told) == (1 if kind == "auto" else 0)
    train = MARKED.federation.client(1).train
    others = Forget.samples({1: train[MARKED.y[train] != 2][:40]})  # says nothing of class 2
    report = unlearn(plug(base), store, others, clients=MARKED.federation, config=config)
    assert not any("Class 2" in note for note in report.notes)


def test_the_filters_are_those_asked_for_and_a_class_or_client_gets_a_bottleneck_besides():
    for kind, expected in (("bottleneck", (True, 0)), ("erasure", (False, 1)), ("both", (True, 1))):
        assert _kinds(MARKED.serving("first", config=FilterConfig(**FAST, filter=kind))[0]) == expected
    for other in ("class", "client"):
        assert _kinds(MARKED.serving("first", other)[0]) == (True, 1)
        assert _kinds(MARKED.serving(other)[0]) == (True, 0)


@pytest.mark.parametrize("name", ["both at one cut", "both at two cuts"])
def test_a_bottleneck_is_fitted_to_what_an_eraser_at_its_own_cut_leaves(monkeypatch, name):
    seen = noted_examples(monkeypatch)
    plugged, store = MARKED.serving("first", config=KINDS[name])
    rows = store.rows_of(store.cells)
    expected = store.vectors[rows]
    if name == "both at one cut":
        expected = plugged.served.erasure.filter(expected)
        assert not torch.allclose(expected, store.vectors[rows])
    assert torch.equal(seen[0].vectors[seen[0].rows], expected)
    assert torch.equal(seen[0].labels, store.row_labels()[rows])


@pytest.mark.parametrize(
    ("names", "kind", "expected"),
    [
        (("first", "second", "third"), "auto", (False, 3)),
        (("first", "third", "client"), "auto", (True, 2)),
        (("first", "class", "few"), "auto", (True, 1)),  # the bottleneck alone answers the few
        *((("first", "second"), kind, None) for kind in KINDS),
    ],
    ids=str,
)
def test_any_order_gives_the_same_bits_and_taking_one_back_those_of_the_others(names, kind, expected):
    config = KINDS.get(kind, AUTO)
    reference, _ = MARKED.serving(*names, config=config)
    assert expected is None or _kinds(reference) == expected
    together, store = plug(MARKED.base), MARKED.store()
    unlearn(together, store, [MARKED.requests[n] for n in names], clients=MARKED.federation, config=config)
    for other in (together, MARKED.serving(*names[::-1], config=config)[0]):
        assert same_bits(other, reference) and torch.equal(other(MARKED.x), reference(MARKED.x))
    for taken_back in (names[0], names[-1]):
        plugged, centroids = copy.deepcopy(together), store.to("cpu")
        report = restore(plugged, centroids, MARKED.requests[taken_back], clients=MARKED.federation)
        remaining, _ = MARKED.serving(*(name for name in names if name != taken_back), config=config)
        assert same_bits(plugged, remaining) and not same_bits(plugged, reference)
        assert (report.erasure is None) == (plugged.served.erasure is None)


def test_rows_that_are_forgotten_otherwise_or_never_trained_on_are_not_in_the_statistics():
    train, rows = MARKED.federation.client(1).train, MARKED.rows
    of_class = train[(MARKED.y[train] == 2) & ~torch.isin(train, rows["first"])]
    unseen = torch.cat([torch.cat([client.validation, client.heldout]) for client in MARKED.federation.clients])
    for earlier, hidden in ((["class"], of_class), (["few"], rows["second"][:19]), ([], unseen)):
        poisoned = Watched(MARKED, statistics_of=MARKED.with_rows(hidden, torch.nan))
        plugged, store = MARKED.serving(*earlier)
        unlearn(plugged, store, MARKED.requests["first"], clients=poisoned, config=AUTO)
        assert poisoned.gathered == [1]
        assert same_bits(plugged, MARKED.serving(*earlier, "first")[0])
        if earlier:  # what is not forgotten is read
            with pytest.raises(DataError):
                MARKED.serving("first", clients=poisoned)


def test_samples_of_a_forgotten_client_are_not_erased():
    plugged, store = MARKED.serving("first")
    report = unlearn(plugged, store, Forget.clients([1]), clients=Unreachable(), terms=Terms(measure=False))
    assert _kinds(plugged) == (True, 0)
    assert report.clients_contacted == []


def test_a_bottleneck_reads_no_forgotten_row_and_an_eraser_does():
    poisoned = MARKED.with_rows(MARKED.rows["first"], torch.nan)
    config = FilterConfig(**FAST, filter="bottleneck")
    watched, plugged = Watched(MARKED), plug(MARKED.base)
    unlearn(plugged, MARKED.store(), MARKED.requests["first"], clients=watched, config=config)
    assert watched.statistics_asked == []
    assert same_bits(MARKED.serving("first", config=config, clients=poisoned)[0], plugged)
    plugged, store = plug(MARKED.base), MARKED.store()
    with refused(plugged, store, DataError):
        unlearn(plugged, store, MARKED.requests["first"], clients=poisoned, config=AUTO)


def test_the_same_question_is_not_asked_twice():
    plugged, store = MARKED.serving("first", "client and class")
    eraser = plugged.served.erasure
    watched = Watched(MARKED)
    report = unlearn(plugged, store, MARKED.requests["client"], clients=watched)  # covered already
    assert plugged.served.erasure is eraser and report.erasure == eraser.about
    restore(plugged, store, MARKED.requests["client"], clients=watched)
    assert plugged.served.erasure is eraser
    assert same_bits(plugged, MARKED.serving("first", "client and class")[0])
    assert watched.statistics_asked == []


@pytest.mark.parametrize("answer", ["unlearn", "restore"])
def test_an_eraser_that_nobody_can_check_is_refused_without_clients_and_force_serves_it(answer):
    if answer == "unlearn":
        plugged, store = MARKED.serving("first", "client and class")
        action = partial(fedup.unlearn, plugged, store, MARKED.requests["client"])
    else:
        plugged, store = MARKED.serving("first", "client and class", "client")
        action = partial(fedup.restore, plugged, store, MARKED.requests["client"])
    eraser = plugged.served.erasure
    with refused(plugged, store, HarmError, match="no way to reach them"):
        action()
    report = action(force=True)
    assert plugged.served.erasure is eraser
    assert any("no way to reach them" in reason for reason in report.forced)
    assert (MARKED.requests["client"] in plugged.requests) == (answer == "unlearn")


def test_twenty_rows_of_a_client_are_enough_and_nineteen_are_not():
    ids = MARKED.rows["first"]
    for many, expected in ((20, (False, 1)), (19, (True, 0))):
        plugged, request = plug(MARKED.base), Forget.samples({1: ids[:many]})
        report = unlearn(plugged, MARKED.store(), request, clients=MARKED.federation, config=AUTO)
        assert _kinds(plugged) == expected, many
    assert report.notes == [
        "No eraser was made to forget 19 samples of client 1: no client has 20 or more of the forgotten samples, which "
        "an eraser needs. The filter at the cut alone answers; the verdict says what that did."
    ]
    assert report.erasure is None
    joined, watched = MARKED.requests["third"] | MARKED.requests["few"], Watched(MARKED)
    report = unlearn(plug(MARKED.base), MARKED.store(), joined, clients=watched, config=AUTO)
    assert watched.gathered == [2]  # nothing is told of the few
    assert report.erasure["rows"] == 25
    assert sorted(r.client for r in report.releases if r.what == "centroids") == [1, 2]


def _disconnected(answer):
    raise ConnectionError("the client is gone")


def _without_numbers(answer):
    answer.squares.fill_(torch.nan)
    return answer


def test_what_cannot_be_erased_is_refused_and_changes_nothing():
    both, erasure = (FilterConfig(**FAST, filter=kind) for kind in ("both", "erasure"))
    nowhere, lost, broken = (
        FilterConfig(**FAST, eraser_cut="nowhere"),
        Watched(MARKED, _disconnected),
        Watched(MARKED, _without_numbers),
    )
    for name, config, clients, error, message in (
        ("few", both, MARKED.federation, RequestError, "20 or more"),
        ("few", erasure, MARKED.federation, RequestError, "20 or more"),
        ("first", nowhere, MARKED.federation, CutError, "nowhere"),
        ("first", AUTO, None, ContactError, "clients="),
        ("first", AUTO, lost, ConnectionError, "gone"),
        ("first", AUTO, broken, DataError, None),
    ):
        for served in ((plug(MARKED.base), MARKED.store()), MARKED.serving("second", "class")):
            request = MARKED.requests[name]
            for keep_sealed in (False, True):
                options = {"clients": clients, "config": config, "terms": Terms(keep_sealed=keep_sealed)}
                with refused(*served, error, match=message):
                    unlearn(*served, request, **options)
            if clients is MARKED.federation:  # which a plan knows
                with refused(*served, error, match=message):
                    plan(*served, served[0].requests | {request}, clients=clients, config=config)
    served = MARKED.serving("first", "second")
    with refused(*served, ContactError):
        restore(*served, MARKED.requests["first"])


def test_a_plan_names_the_clients_of_an_eraser_asks_none_for_statistics_and_changes_nothing():
    watched, fresh, served = Watched(MARKED), (plug(MARKED.base), MARKED.store()), MARKED.serving("first", "class")
    for (plugged, store), names, kind, expected in [
        (fresh, ["first"], "auto", [0, 1, 2]),
        (fresh, ["first", "client"], "auto", [1, 2]),
        (fresh, ["first", "third"], "bottleneck", []),
        (fresh, ["few"], "auto", []),
        (fresh, ["class"], "both", [0, 1, 2]),
        (served, ["first", "class"], "auto", []),  # the same question was asked before
        (served, ["first", "class", "second"], "auto", [0, 1, 2]),
        (served, ["first"], "auto", [0, 1, 2]),
    ]:
        before, filter_before, requests = state_of(store), plugged.served, [MARKED.requests[name] for name in names]
        found = plan(plugged, store, requests, clients=watched, config=FilterConfig(**FAST, filter=kind))
        assert found.clients_of_eraser == expected, (names, kind)
        assert set(expected) <= set(found.clients_contacted)
        assert state_of(store) == before
        assert plugged.served is filter_before
    assert watched.statistics_asked == []

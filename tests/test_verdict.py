"""Verdicts: intervals that tell the truth, findings in their order, and figures that anybody can count again."""

import pytest
import torch
from tests._marked import FAST, KINDS, marked, refused, same_bits, state_of
from tests._poisoned import poisoned

from fedup import FilterConfig, Forget, collect, load_centroids, plug, restore, save_centroids, unlearn
from fedup.errors import ContactError
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.proportions import Estimate, Paired
from fedup.statistics.tally import Tally
from fedup.unlearning import measure as measure_module
from fedup.unlearning.plan import Terms
from fedup.unlearning.verdict import CLOSE_CLASS, Verdict, class_part, find, judge, not_measured

MARKED = marked()


def _near(value, wide=0.02):
    return Estimate(value, value - wide / 2, value + wide / 2)


@pytest.mark.parametrize(
    ("before", "after", "change", "finding"),
    [
        (_near(0.3), _near(0.0, 0.11), _near(-0.3), "too few rows"),
        (_near(0.02), _near(0.2), _near(0.005), "already like unseen"),
        (_near(0.02), _near(0.2), _near(-0.01), "already like unseen"),
        (_near(0.3), _near(0.02), _near(-0.28), "forgotten"),
        (_near(0.02), _near(0.02), _near(0.05), "forgotten"),
        (_near(0.3), _near(0.4), _near(0.1), "farther than before"),
        (_near(0.01), _near(0.06), _near(0.05), "farther than before"),
        (_near(0.3), _near(0.1), _near(-0.2), "partly"),
        (_near(0.3), _near(0.3), _near(0.0), "unchanged"),
        (_near(0.3), _near(0.32), _near(0.02), "unchanged"),
        (_near(0.3), _near(0.35), _near(0.05, 0.2), "unchanged"),
    ],
)
def test_the_first_finding_that_holds_is_the_one(before, after, change, finding):
    assert find(before, after, change) == finding
    if finding == "forgotten":  # a class has to be forgotten to one point
        assert find(_near(0.9), _near(0.015), _near(-0.885), close=CLOSE_CLASS) == "partly"


def _tally(name, own, unseen):
    return Tally({}, {}, {name: own}, {name: unseen} if unseen is not None else {})


def test_what_cannot_be_measured_says_why():
    request = Forget.samples({0: [1]})
    assert judge(request, {}).finding == "not measured"
    nobody = judge(request, {0: _tally(request.digest, {3: Paired(50, 50, 50, 50)}, {})})
    assert nobody.finding == "not measured" and "held-out" in nobody.words
    assert not not_measured("for a reason").is_good
    assert not_measured("for a reason").words.endswith("for a reason.")
    assert judge(Forget.classes([1]), {}).finding == "not measured"


def test_of_a_request_for_rows_and_a_class_the_part_that_is_forgotten_least_counts():
    request, unseen = Forget.clients([0]) | Forget.classes([1]), {1: Paired(900)}
    good, bad = {1: Paired(900, before=800)}, {1: Paired(900, 900, 900, 900)}
    for rows, label in ((good, bad), (bad, good), (good, good)):
        tally = Tally({}, {}, {request.digest: rows, class_part(request): label}, {request.digest: unseen})
        assert judge(request, {0: tally}).finding == ("unchanged" if bad in (rows, label) else "forgotten")


@torch.no_grad()
def _hits(model, x, y, rows):
    return float((model(x[rows]).argmax(1) == y[rows]).double().mean())


def _unseen(client):
    return torch.cat([client.validation, client.heldout])


@pytest.mark.parametrize("name", ["samples of two clients", "client"])
def test_a_withdrawals_figures_are_those_of_a_recount(trained_digits, name):
    digits = trained_digits
    named = {0: digits.federation.client(0).train, 3: digits.federation.client(3).train[::2]}
    request = Forget.samples(named) if name == "samples of two clients" else Forget.clients([3])
    named = named if name == "samples of two clients" else {3: digits.federation.client(3).train}
    plugged = plug(digits.model)
    config = FilterConfig(filter="bottleneck")
    report = unlearn(plugged, digits.store(), request, clients=digits.federation, config=config, force=True)
    verdict, many_rows, own, unseen = report.verdicts[request.digest], 0, [0.0, 0.0], [0.0, 0.0]
    for client, rows in named.items():
        held_out = _unseen(digits.federation.client(client))
        for label in digits.y[rows].unique():
            mine, alike = rows[digits.y[rows] == label], held_out[digits.y[held_out] == label]
            if not len(alike):
                continue
            many_rows += len(mine)
            for i, model in enumerate((digits.model, plugged)):
                own[i] += len(mine) * _hits(model, digits.x, digits.y, mine)
                unseen[i] += len(mine) * _hits(model, digits.x, digits.y, alike)
    assert verdict.statistic.rows == many_rows
    found = verdict.statistic.before, verdict.statistic.after, verdict.reference.before, verdict.reference.after
    assert found == pytest.approx([total / many_rows for total in (*own, *unseen)])
    excess = [(one - other) / many_rows for one, other in zip(own, unseen, strict=True)]
    found = verdict.excess_before.value, verdict.excess_after.value, verdict.change.value
    assert found == pytest.approx([*excess, excess[1] - excess[0]])


def test_a_backdoor_that_is_called_poison_is_forgotten_and_the_recount_agrees():
    federation, model, rows = poisoned()
    request = Forget.samples({1: rows}, reason="poison")
    plugged = plug(model)
    report = unlearn(plugged, collect(model, federation), request, clients=federation)
    verdict = report.verdicts[request.digest]
    assert verdict.finding == "forgotten", verdict.words
    assert verdict.statistic.before > 0.9
    others = torch.cat([_unseen(client) for client in federation.clients if client.id != 1])
    with torch.no_grad():
        for side, one in (("before", model), ("after", plugged)):
            own, unseen = (float((one(federation.x[some]).argmax(1) == 0).double().mean()) for some in (rows, others))
            assert getattr(verdict.statistic, side) == pytest.approx(own)
            assert getattr(verdict.reference, side) == pytest.approx(unseen)
    assert (verdict.statistic.rows, verdict.reference.rows) == (len(rows), len(others))


def test_each_class_of_a_batch_is_judged_with_and_without_itself(trained_digits):
    digits, requests = trained_digits, [Forget.classes([3]), Forget.classes([7])]
    plugged = plug(digits.model)
    options = {"clients": digits.federation, "terms": Terms(100.0)}  # so that no fit is made twice
    report = unlearn(plugged, digits.store(), requests, **options)
    unseen = torch.cat([_unseen(client) for client in digits.federation.clients])
    for request, other, label in zip(requests, requests[::-1], (3, 7), strict=True):
        verdict, without = report.verdicts[request.digest], plug(digits.model)
        unlearn(without, digits.store(), other, **options)
        rows = unseen[digits.y[unseen] == label]
        assert verdict.finding == "forgotten"
        assert (verdict.statistic.rows, verdict.reference) == (len(rows), None)
        assert verdict.statistic.before == pytest.approx(_hits(without, digits.x, digits.y, rows))
        assert verdict.statistic.before > 0.5, "the other class's filter does not forget this one"
        assert verdict.statistic.after == pytest.approx(_hits(plugged, digits.x, digits.y, rows))


def test_samples_in_a_batch_do_not_inherit_the_effect_of_a_class(trained_digits):
    digits = trained_digits
    label, rows = digits.frequent(2)
    samples, whole = Forget.samples({2: rows[: len(rows) // 2]}), Forget.classes([label])
    options = {"clients": digits.federation, "terms": Terms(100.0)}
    alone, plugged = plug(digits.model), plug(digits.model)
    unlearn(alone, digits.store(), whole, **options)
    report = unlearn(plugged, digits.store(), [samples, whole], **options)
    verdict = report.verdicts[samples.digest]
    assert verdict.statistic.before == pytest.approx(_hits(alone, digits.x, digits.y, rows[: len(rows) // 2]))
    assert verdict.statistic.before < 0.05, "the class was forgotten without them"
    assert verdict.finding != "forgotten"
    assert report.verdicts[whole.digest].finding == "forgotten"


FARTHER = Verdict("farther than before", "")


@pytest.fixture
def farther(monkeypatch):
    """Requests named here come out better known than before."""
    named = set()
    real = measure_module.judge

    def judged(request, tallies, targets="classes"):
        return FARTHER if request in named else real(request, tallies)

    monkeypatch.setattr(measure_module, "judge", judged)
    return named


BOTTLENECK = FilterConfig(**FAST, filter="bottleneck")
OPTIONS = {"clients": MARKED.federation, "config": BOTTLENECK, "terms": Terms(100.0)}  # tiny filters harm
ROWS = MARKED.requests["first"].sample_ids[1]


def _left_out(store, rows=ROWS):
    """Whether these rows of client 1 are left out of every cell that could hold them."""
    return all(i in store.excluded.get((1, int(MARKED.y[i])), frozenset()) for i in rows)


def _as_if_never_there(store, without=()):
    """The cells of client 1 are those of a client without the rows; classes that are not in use do not count."""
    fresh = collect(
        MARKED.base, MARKED.federation, statistics=CentroidConfig(ratio=0.5), forget=[MARKED.requests["first"]]
    )
    for cell in (cell for cell in store.cells_of(1) if cell.label not in without):
        expected = fresh.take(fresh.cell(cell.name))
        assert all(map(torch.equal, store.take(cell), expected))


@pytest.mark.parametrize("earlier", [False, True], ids=["first request", "after another"])
def test_samples_that_would_be_known_better_stay_open_until_they_are_taken_back(farther, earlier):
    plugged, store = plug(MARKED.base), MARKED.store()
    if earlier:
        unlearn(plugged, store, MARKED.requests["class"], **OPTIONS)
    served, requests, request = plugged.served, plugged.requests, MARKED.requests["first"]
    farther.add(request)
    report = unlearn(plugged, store, request, **OPTIONS)
    assert report.withheld == store.open == {request}
    assert report.class_recall == {}, "it was that of a filter that is not served"
    assert plugged.served is served and report.requests == plugged.requests == requests
    assert report.verdicts == {request.digest: FARTHER} and any("withheld" in note for note in report.notes)
    assert _left_out(store)
    _as_if_never_there(store)
    if earlier:
        with refused(plugged, store, ContactError):  # its cells need their client again
            restore(plugged, store, request)
    restore(plugged, store, request, clients=MARKED.federation, terms=Terms(max_class_loss=100.0))
    assert store.open == set()
    if not earlier:
        assert plugged.served is None
        unlearn(plugged, store, MARKED.requests["class"], **OPTIONS)
    for cell in (cell for cell in store.cells if cell.label != 2):  # which is not in use while it is forgotten
        assert not store.excluded.get(cell.name)
        assert all(map(torch.equal, store.take(cell), MARKED.collected.take(cell)))
    expected = plug(MARKED.base)
    unlearn(expected, MARKED.store(), MARKED.requests["class"], **OPTIONS)
    assert same_bits(plugged, expected)


def test_open_samples_stay_out_of_all_later_filters_and_files(farther, tmp_path):
    plugged, store = plug(MARKED.base), MARKED.store()
    request = MARKED.requests["first"]
    farther.add(request)
    unlearn(plugged, store, request, **OPTIONS)
    save_centroids(store, tmp_path / "centroids")
    loaded = load_centroids(tmp_path / "centroids")
    assert loaded.open == {request}
    assert state_of(loaded) | {"traffic": None} == state_of(store) | {"traffic": None}  # files do not keep that
    for later in ("second", "class", "third"):
        report = unlearn(plugged, loaded, MARKED.requests[later], **OPTIONS)
        assert request not in report.requests and loaded.open == {request}
        assert _left_out(loaded)
    restore(plugged, loaded, MARKED.requests["second"], clients=MARKED.federation, terms=Terms(max_class_loss=100.0))
    assert loaded.open == {request} and _left_out(loaded)
    _as_if_never_there(loaded, without=[2])


def test_force_serves_what_would_be_withheld_and_says_so(farther):
    plugged, store = plug(MARKED.base), MARKED.store()
    request = MARKED.requests["first"]
    farther.add(request)
    unlearn(plugged, store, request, **OPTIONS)
    report = unlearn(plugged, store, request, **OPTIONS, force=True)
    assert plugged.requests == {request}
    assert store.open == report.withheld == frozenset()
    assert any("know them better" in reason for reason in report.forced)
    expected = plug(MARKED.base)
    unlearn(expected, MARKED.store(), request, **OPTIONS, force=True)
    assert same_bits(plugged, expected)


def test_a_withheld_request_of_a_batch_leaves_the_others_answered_as_if_it_had_been_open_before(farther):
    request, other = MARKED.requests["first"], MARKED.requests["third"]
    farther.add(request)
    options = OPTIONS | {"config": FilterConfig(**FAST)}  # with an eraser, which compares with what is there
    (one, store), (two, later) = ((plug(MARKED.base), MARKED.store()) for _ in range(2))
    report = unlearn(one, store, [request, other], **options)
    unlearn(two, later, request, **options)
    unlearn(two, later, other, **options)
    assert one.served.erasure is not None and same_bits(one, two)
    assert report.withheld == store.open == later.open == {request}
    assert report.requests == one.requests == two.requests == {other}
    assert report.verdicts[request.digest] is FARTHER
    assert set(report.verdicts) == {request.digest, other.digest}
    assert _left_out(store)


@pytest.mark.parametrize("kind", ["poison", "class", "client"])
def test_only_withdrawn_samples_are_withheld(farther, kind):
    request = Forget.samples({1: ROWS}, reason="poison") if kind == "poison" else MARKED.requests[kind]
    farther.add(request)
    plugged, store = plug(MARKED.base), MARKED.store()
    report = unlearn(plugged, store, request, **OPTIONS)
    assert plugged.requests == {request}
    assert report.withheld == store.open == frozenset()


def test_what_is_not_measured_is_not_withheld_and_says_why():
    plugged, store = plug(MARKED.base), MARKED.store()
    report = unlearn(plugged, store, MARKED.requests["first"], **(OPTIONS | {"terms": Terms(100.0, measure=False)}))
    (verdict,) = report.verdicts.values()
    assert verdict.finding == "not measured" and "Terms(measure=False)" in verdict.words
    options = OPTIONS | {"config": KINDS["both at two cuts"], "terms": Terms(100.0, measure=False)}
    report = unlearn(plug(MARKED.base), MARKED.store(), MARKED.requests["client"], **options)
    assert report.clients_counting == [1, 2]  # retained rows, behind an eraser; nobody counts those of client 0
    report = unlearn(plugged, store, MARKED.requests["class"], config=BOTTLENECK, force=True)
    assert "no way to reach" in report.verdicts[MARKED.requests["class"].digest].why

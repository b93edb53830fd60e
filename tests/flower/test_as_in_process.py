"""What nodes tell for an eraser and count under a filter is what clients in process do, and so is what becomes of it:
refusals, verdicts, and whom a request is compared with."""

import copy
from dataclasses import replace

import pytest
import torch
from tests._asking import ask_one
from tests._forced import unlearn as unlearn_by_force
from tests.flower._contact import refused, spoiling
from tests.flower._grid import FIRST, LocalGrid, World, collect, digits

from fedup import Centroids, FilterConfig, Forget, plug, unlearn
from fedup.clients.eraser_questions import SecondMomentsQuestion, SketchesQuestion, SpreadsQuestion
from fedup.clients.in_process import InProcess
from fedup.clients.tally import TallyQuestion
from fedup.errors import HarmError, RequestError
from fedup.serving.plugged import Served
from fedup.statistics.eraser_statistics import RowGroups
from fedup.statistics.tally import RowsToCount
from fedup.unlearning.plan import Terms

BOTH = FilterConfig(rank=8, steps=8, filter="both")
ERASER = FilterConfig(filter="erasure")


@pytest.fixture(scope="module")
def world() -> World:
    """With a model that has learned something: counts of one that answers the same to everything would tell little."""
    return digits(rounds=12, rows=1000)


@pytest.fixture(scope="module")
def plain(world) -> Centroids:
    return collect(world.model, world.federation)


@pytest.fixture(scope="module")
def grid(world) -> LocalGrid:
    """Nodes that hold the weights already."""
    made = world.grid()
    collect(world.model, world.contact(made))
    return made


@pytest.fixture(autouse=True)
def unspoilt(grid):
    grid.sent.clear()
    yield
    grid.spoil = lambda node, reply: reply


def sparing(world: World, reason: str = "withdrawal") -> Forget:
    """Samples of client 2: some of each class, so that enough of all stay."""
    rows, y = world.rows(2), world.federation.y
    taken = [i for label in range(10) for i in rows[y[rows] == label][:15].tolist()]
    return Forget(sample_ids={2: frozenset(taken)}, reason=reason)


def of_class(world: World, label: int) -> Forget:
    rows = world.rows(2)
    return Forget.samples({2: rows[world.federation.y[rows] == label].tolist()})


def row_groups(world: World) -> RowGroups:
    request = sparing(world)
    return RowGroups({request.digest: request}, request | Forget.classes([3]))


@pytest.fixture(scope="module")
def served(world, plain) -> Served:
    """A filter of both parts."""
    plugged = plug(world.model)
    unlearn_by_force(plugged, copy.deepcopy(plain), sparing(world), clients=world.federation, config=BOTH)
    assert plugged.served.filter is not None and plugged.served.erasure is not None, "premise"
    return plugged.served


def assert_equal(one, other) -> None:
    """To the bit, through dataclasses and mappings."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_equal(one[name], other[name])
    elif hasattr(one, "__dataclass_fields__"):
        for name in one.__dataclass_fields__:
            assert_equal(getattr(one, name), getattr(other, name))
    else:
        assert one == other


@pytest.mark.parametrize("client", [1, 2])
@pytest.mark.parametrize("kind", ["sketch", "spreads", "moments"])
def test_statistics_of_all_clients_are_those_in_process_to_the_bit(world, grid, kind, client):
    groups = row_groups(world).to(client)
    weights = {name: {2: 0.5, 5: 0.125, 9: 0.25} for name in groups.requests}
    questions = (
        SketchesQuestion("conv2", "each", groups),
        SpreadsQuestion({"conv2": "each", "head": "each"}, groups, weights),
        SecondMomentsQuestion("conv2", "each", (0, 5, 7), groups),
    )
    (question,) = [one for one in questions if one.kind == kind]
    over_grid, here = world.contact(grid), InProcess(world.federation, world.model)
    assert_equal(*(ask_one(reached, client, question) for reached in (over_grid, here)))


@pytest.mark.parametrize("client", [1, 2])
@pytest.mark.parametrize(("reason", "classes"), [("withdrawal", True), ("poison", False)])
def test_counts_of_all_clients_are_those_in_process(world, grid, served, client, reason, classes):
    request = sparing(world, reason)
    carried = {request.digest: {5: 0.75, 9: 0.25}} if reason == "poison" else {}
    parts = {request.digest: request, "class": Forget.classes([3])}
    rows = RowsToCount(parts, request | Forget.classes([3]), carried, classes).to(client)
    ways = world.contact(grid), InProcess(world.federation, world.model)
    found = [ask_one(reached, client, TallyQuestion(None, served, rows)) for reached in ways]
    assert found[0].forgotten and bool(found[0].retained) == classes, "premise"
    assert_equal(*found)
    swapped = [ask_one(reached, client, TallyQuestion(served, None, rows)) for reached in ways]
    assert_equal(*swapped)


def test_a_delta_is_that_in_process_and_without_held_out_rows_there_is_none(world, plain, grid):
    served = []
    for reached in (world.contact(grid), world.federation):
        plugged, store = plug(world.model), copy.deepcopy(plain)
        report = unlearn(plugged, store, sparing(world), clients=reached, config=FilterConfig(filter="delta"))
        assert report.delta["clients"] == [2] and plugged.served.delta.by_client[2]
        served.append(plugged)
    assert torch.equal(served[0](world.federation.x), served[1](world.federation.x))
    assert not torch.equal(served[0](world.federation.x), world.model(world.federation.x))
    with pytest.raises(RequestError, match="never trained on"):
        contact, plugged = world.contact(world.grid(held_out=None)), plug(world.model)
        unlearn(plugged, copy.deepcopy(plain), sparing(world), clients=contact, config=FilterConfig(filter="delta"))
    assert plugged.served is None


def test_without_held_out_rows_nothing_is_counted_of_them_and_nothing_is_measured(world, plain):
    contact = world.contact(world.grid(held_out=None))
    report = unlearn_by_force(plug(world.model), copy.deepcopy(plain), sparing(world), clients=contact, config=BOTH)
    (verdict,) = report.verdicts.values()
    assert verdict.finding == "not measured" and "no held-out rows" in verdict.words
    assert report.class_recall  # on training rows


BLUNT = FilterConfig(rank=1, steps=1, gentle=False)


@pytest.mark.parametrize(
    ("make", "config", "terms"),
    [
        pytest.param(lambda world: of_class(world, 2), BOTH, {}, id="a class would be lost"),
        pytest.param(lambda world: sparing(world, "poison"), replace(BLUNT, filter="both"), {}, id="recall, poisoned"),
        pytest.param(lambda world: Forget.classes([3]), BLUNT, {"terms": Terms(measure=True)}, id="recall of others"),
    ],
)
def test_a_request_that_harms_a_class_is_refused_as_in_process_and_changes_nothing(
    world, plain, grid, make, config, terms
):
    errors = []
    for reached in (world.contact(grid), world.federation):
        plugged, store = plug(world.model), copy.deepcopy(plain)
        with pytest.raises(HarmError) as caught:
            unlearn(plugged, store, make(world), clients=reached, config=config, **terms)
        assert (plugged.served, plugged.requests) == (None, frozenset())
        assert torch.equal(store.vectors, plain.vectors) and store.excluded == plain.excluded
        errors.append(caught.value)
    assert errors[0].classes == errors[1].classes != []
    assert str(errors[0]) == str(errors[1])


@pytest.mark.parametrize(("reason", "config"), [("withdrawal", BOTH), ("poison", ERASER)], ids=["both", "eraser"])
def test_a_verdict_is_that_in_process(world, plain, grid, config, reason):
    reports = [
        unlearn_by_force(
            plug(world.model), copy.deepcopy(plain), sparing(world, reason), clients=reached, config=config
        )
        for reached in (world.contact(grid), world.federation)
    ]
    (one,), (other,) = (report.verdicts.values() for report in reports)
    assert one == other and 0 < one.reference.before < one.statistic.before
    assert reports[0].class_recall == reports[1].class_recall
    assert reports[0].forced == reports[1].forced


def silent(kind: str, node: int):
    return spoiling(refused, node=node, kind=kind)


def test_a_node_that_does_not_tell_what_others_are_compared_with_or_count_is_left_out_and_noted(world, plain, grid):
    grid.spoil = silent("sketch", FIRST + 1)
    plugged, forgetting = plug(world.model), {"clients": world.contact(grid), "config": BOTH}
    report = unlearn_by_force(plugged, copy.deepcopy(plain), sparing(world), **forgetting)
    assert [note for note in report.notes if note.startswith("Client 1 is not compared with: ") and "Sundays" in note]
    assert plugged.served is not None and 1 not in report.erasure["compared_with"]
    assert FIRST + 1 not in grid.nodes_asked("spreads")
    assert len(grid.asked("sketch")) == 4  # the others' answers are used, and not asked for again
    grid.spoil = silent("tally", FIRST + 1)
    grid.sent.clear()
    report = unlearn_by_force(plug(world.model), copy.deepcopy(plain), sparing(world), **forgetting)
    assert [note for note in report.notes if note.startswith("Client 1 counted no answers: ")]
    assert len(grid.asked("tally")) == 4


def test_an_eraser_that_nobody_counted_for_is_not_served_unless_by_force(world, plain, grid):
    grid.spoil = lambda node, reply: silent("tally", node)(node, reply)
    contact, plugged, store = world.contact(grid), plug(world.model), copy.deepcopy(plain)
    with pytest.raises(HarmError, match="none of them counted answers"):
        unlearn(plugged, store, sparing(world), clients=contact, config=BOTH)
    assert plugged.served is None and store.excluded == plain.excluded
    report = unlearn_by_force(plugged, store, sparing(world), clients=contact, config=BOTH)
    assert plugged.served is not None and [one for one in report.forced if "none of them counted" in one]


def test_moments_and_what_becomes_of_them_are_those_of_clients_in_process(world, grid):
    requests = [Forget.clients([1]), Forget.classes([3]), sparing(world), Forget.clients([0]) | Forget.classes([5])]
    results = []
    for way in (world.federation, world.contact(grid)):
        plugged, store = plug(world.model), collect(world.model, way, statistics="moments")
        for request in requests:
            unlearn(plugged, store, request, clients=way, force=True, terms=Terms(measure=False))
        results.append((store, plugged.served.filter.state_dict()))
    (plain, fitted), (over_flower, fitted_there) = results
    assert over_flower.total == plain.total and over_flower.excluded == plain.excluded
    assert all(torch.equal(fitted[name], fitted_there[name]) for name in fitted)

"""A server that is killed while it collects asks only for what is missing, and takes no answer for another's."""

import pytest
from tests.flower._contact import CENTROIDS, NODES, ODD, assert_same_store, losing, untouched
from tests.flower._grid import (
    FIRST,
    Clock,
    Killed,
    LocalGrid,
    World,
    assert_ledgers_agree,
    collect,
    digits,
    kept_answers,
)

from fedup import Forget
from fedup.errors import BudgetError
from fedup.flower import Policy
from fedup.privacy import DP, Budget, Ledger
from fedup.statistics.centroids import CentroidConfig

PRIVATE = DP(4.0, clip=4.0, replay_seed=5)
REAL = DP(2.0, clip=4.0)


def interrupted(world: World, grid: LocalGrid, folder, clock: Clock, **how) -> None:
    """A collection that ends in the pause before the second try: node 102 has not answered by then."""
    grid.spoil, clock.kills = losing(ODD), True
    with pytest.raises(Killed):
        collect(world.model, world.contact(grid, folder=folder), **how)
    grid.spoil, clock.kills = untouched, False
    grid.sent.clear()


def files(folder) -> list:
    return [path for path in folder.rglob("*") if path.is_file()]


WAYS = {"exact": {}, "DP": {"privacy": PRIVATE}, "noise": {"statistics": CentroidConfig(sigma=0.1), "cut": "fc2"}}


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS.keys())
def test_a_server_that_is_started_again_asks_only_for_what_is_missing(world, tmp_path, clock, how):
    grid = world.grid()
    interrupted(world, grid, tmp_path, clock, **how)
    assert len(kept_answers(tmp_path)) == 3
    contact = world.contact(grid, folder=tmp_path)
    store = collect(world.model, contact, **how)
    assert grid.nodes_asked() == [ODD]
    assert_same_store(store, collect(world.model, world.federation, **how))
    assert_ledgers_agree(grid, contact)
    assert len(kept_answers(tmp_path)) == 4  # the store is not on disk yet
    contact.settled()
    assert files(tmp_path) == []
    assert not contact._cache._came and not contact._cache._names  # nor in memory, however many questions there were
    fresh = collect(world.model, world.contact(world.grid()), **how)
    sizes, expected = ({release.client: release.size_bytes for release in of.traffic.releases} for of in (store, fresh))
    assert sizes == expected  # those on disk, too


def test_answers_for_a_request_are_kept_too(world, tmp_path, clock):
    grid = world.grid()
    contact, how = world.contact(grid, folder=tmp_path), {"forget": [world.samples(c3=10) | Forget.clients([0])]}
    contact.check(how["forget"][0])
    grid.spoil, clock.kills = lambda node, reply: None if node == ODD and grid.asked(*CENTROIDS) else reply, True
    with pytest.raises(Killed):
        collect(world.model, contact, **how)
    grid.spoil, clock.kills = untouched, False
    grid.sent.clear()
    store = collect(world.model, world.contact(grid, folder=tmp_path), **how)
    assert grid.nodes_asked("summarize") == [ODD]
    assert_same_store(store, collect(world.model, world.federation, **how))


def test_a_server_killed_while_answers_come_keeps_those_that_came(world, plain, tmp_path):
    grid, came = world.grid(), []
    collect(world.model, world.contact(grid), statistics=CentroidConfig(seed=9))  # nodes hold the weights
    grid.one_by_one = True

    def kill(node, reply):
        if len(came) == 2:
            raise KeyboardInterrupt
        came.append(node)
        return reply

    grid.spoil = kill
    with pytest.raises(KeyboardInterrupt):
        collect(world.model, world.contact(grid, folder=tmp_path))
    grid.spoil = untouched
    grid.sent.clear()
    assert_same_store(collect(world.model, world.contact(grid, folder=tmp_path)), plain)
    assert grid.nodes_asked() == sorted(set(NODES) - set(came))


def test_a_damaged_answer_on_disk_is_asked_for_again_and_files_of_others_are_nobodys(world, plain, tmp_path, clock):
    grid = world.grid()
    interrupted(world, grid, tmp_path, clock)
    (path,) = files(tmp_path)
    good = path.read_bytes()
    (path.parent / "collection-100-old.safetensors").write_bytes(good)  # an earlier fedup had a file for each answer
    flipped = bytearray(good)
    flipped[good.index(f"collection-{FIRST + 1}-".encode()) + 2000] ^= 1
    last = int(kept_answers(tmp_path)[-1].split("-")[1])
    for damage, lost in (
        (good, set()),
        (bytes(flipped), {FIRST + 1}),
        (good[:-100], {last}),
        (good + good[:100], set()),
        (b"garbage" * 100, {*NODES}),
        (b"", {*NODES}),
    ):
        path.write_bytes(damage)
        grid.sent.clear()
        assert_same_store(collect(world.model, contact := world.contact(grid, folder=tmp_path)), plain)
        assert grid.nodes_asked() == sorted({ODD} | lost)
        assert len(set(kept_answers(tmp_path))) == len(NODES)
    contact.settled()
    assert files(tmp_path) == []


OTHERS = {
    "seed": {"statistics": CentroidConfig(seed=1)},
    "cut": {"cut": "fc2"},
    "a request": {"forget": [Forget.classes([3])]},
    "DP": {"privacy": PRIVATE},
}


def test_answers_to_one_question_or_model_are_never_taken_for_another(world, tmp_path, clock):
    grid = world.grid()
    interrupted(world, grid, tmp_path, clock)
    for other in OTHERS.values():
        grid.sent.clear()
        store = collect(world.model, world.contact(grid, folder=tmp_path), **other)
        assert grid.nodes_asked(*CENTROIDS) == NODES
        assert_same_store(store, collect(world.model, world.federation, **other))
    model = digits(1).model
    assert_same_store(collect(model, world.contact(grid, model, folder=tmp_path)), collect(model, world.federation))


@pytest.mark.parametrize("change", ["joined", "left"])
def test_answers_that_came_are_not_asked_for_again_where_a_node_joined_or_left(world, tmp_path, clock, change):
    grid = world.grid()
    interrupted(world, grid, tmp_path, clock)
    if change == "left":
        del grid.apps[ODD]
    else:
        grid.apps[FIRST + 9] = world.app(2, client=lambda context: 9)
        grid.contexts[FIRST + 9] = grid.contexts[ODD]
    collect(world.model, world.contact(grid, folder=tmp_path))
    assert grid.nodes_asked() == ([] if change == "left" else [ODD, FIRST + 9])


def test_an_answer_without_any_cell_and_a_contact_without_a_folder_leave_nothing_on_disk(world, tmp_path, monkeypatch):
    grid = world.grid()
    grid.apps[ODD] = world.app(2, policy=Policy(least_rows=1000))
    contact = world.contact(grid, folder=tmp_path)
    collect(world.model, contact)
    contact.settled()
    monkeypatch.chdir(tmp_path)
    collect(world.model, world.contact(world.grid()))
    assert files(tmp_path) == []


def test_a_collection_that_was_paid_for_can_be_taken_up_again_under_a_budget_for_just_one(world, tmp_path, clock):
    grid, ledger = world.grid(), Ledger(budgets={None: Budget(REAL.epsilon)})
    collect(world.model, world.contact(grid), statistics=CentroidConfig(seed=9))  # nodes hold the weights
    grid.spoil = lambda node, reply: None if node == ODD and reply.metadata.group_id in CENTROIDS else reply
    clock.kills = True
    contact = world.contact(grid, folder=tmp_path, ledger=ledger, least_fraction=0.5)
    with pytest.raises(Killed):
        collect(world.model, contact, privacy=REAL)
    assert ODD in grid.nodes_asked("summarize privately"), "premise: it has charged itself"
    grid.spoil, clock.kills = untouched, False
    contact = world.contact(grid, folder=tmp_path, ledger=ledger)
    assert collect(world.model, contact, privacy=REAL).clients == (0, 1, 2, 3)
    assert_ledgers_agree(grid, contact)
    with pytest.raises(BudgetError):
        collect(world.model, contact, privacy=REAL)  # another one is not

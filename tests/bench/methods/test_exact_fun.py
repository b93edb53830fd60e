"""Exact-Fun: a replay of a federation with rounded weights gives what that federation learns without the data, to the
bit, and trains only what the removal reaches."""

import copy
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench._progress import Watch
from tests.bench.methods._worlds import message
from torch import Tensor, nn

from fedup import Federation, Forget, fingerprint
from fedup.bench.cost import Cost
from fedup.bench.methods.exact_fun import Method, Replay, RoundedAverage
from fedup.bench.task import Task
from fedup.rng import generator
from fedup.tasks.recipe import Recipe
from fedup.training.averaging import RunningAverage, Weights, weights_of
from fedup.training.fedavg import Observer, Rounds, federate

SIZES = (13, 20, 9, 26)  # training rows of the four clients; batches of 8
CLASSES = 3
RECIPE = Recipe("digits", "lenet5", rounds=4, clients=len(SIZES), batch_size=8, lr=0.1, seed=5)
FINE = 1e-3


@pytest.fixture(autouse=True)
def cache(cache) -> Path:
    return cache / "federations"


@pytest.fixture
def federation() -> Federation:
    """Four clients of unequal size, all classes at each of them; arrays of its own."""
    total = sum(SIZES)
    x = torch.randn(total, 6, generator=torch.Generator().manual_seed(0))
    y = torch.arange(total) % CLASSES
    return Federation.split(x, y, list(torch.arange(total).split(list(SIZES))), heldout=0, validation=0)


def small_model(*, norm: bool = False, dropout: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = OrderedDict(
            first=nn.Linear(6, 5),
            **({"norm": nn.BatchNorm1d(5)} if norm else {}),
            relu=nn.ReLU(),
            **({"dropout": nn.Dropout(0.2)} if dropout else {}),
            head=nn.Linear(5, CLASSES),
        )
        return nn.Sequential(layers)


def task_of(
    federation: Federation, request: Forget, recipe: Recipe = RECIPE, start: nn.Module | None = None, told=None
) -> Task:
    """A task as a group makes it; what the other methods start from is of no concern here."""
    start = start or small_model()
    model = copy.deepcopy(start).eval()
    return Task(federation, request, model, start, recipe, lambda model: {"r_a": 0.5, "unwanted": 0.5}, told or Watch())


class Course(Observer):
    """The global weights before the first round and after each."""

    def __init__(self, start: nn.Module) -> None:
        self.after: list[dict[str, Tensor]] = [copied(weights_of(start))]

    def on_round(self, round_index: int, model: nn.Module) -> None:
        self.after.append(copied(weights_of(model)))


def copied(weights: Weights) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def rounded(start: nn.Module, federation: Federation, recipe: Recipe, step: float) -> tuple[nn.Module, Course]:
    """A federation that learns with rounded weights, by the core alone: no store, no replay."""
    names, course = [name for name, _ in start.named_parameters()], Course(start)
    trained = federate(
        start,
        federation,
        rounds=Rounds(
            recipe.rounds,
            clients_per_round=recipe.clients_per_round,
            averaging=partial(RoundedAverage, step=step, names=names),
        ),
        local=recipe.local,
        seed=recipe.seed,
        observers=[course],
    )
    return trained.model, course


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def samples_of(federation: Federation, client: int, count: int = 3) -> Forget:
    return Forget.samples({client: federation.client(client).train[:count].tolist()})


REQUESTS = {
    "samples": lambda f: samples_of(f, 1),
    "samples of two": lambda f: samples_of(f, 0) | samples_of(f, 3, 5),
    "all samples of a client": lambda f: samples_of(f, 2, SIZES[2]),
    "a client": lambda f: Forget.clients([2]),
    "two clients": lambda f: Forget.clients([0, 3]),
    "a class": lambda f: Forget.classes([1]),
    "a class, a client and samples": lambda f: Forget.classes([0]) | Forget.clients([0]) | samples_of(f, 2),
}
MODELS = {
    "plain": small_model,
    "BatchNorm": partial(small_model, norm=True),
    "dropout": partial(small_model, dropout=True),
}


# --- the average on a grid


floats = st.floats(-100, 100, width=32)


@settings(deadline=None, max_examples=40)
@given(
    uploads=st.lists(st.lists(floats, min_size=4, max_size=4), min_size=1, max_size=4),
    buffer=st.lists(floats, min_size=4, max_size=4),
    step=st.sampled_from([1e-4, 1e-3, 0.125, 0.3, 0.9]),
)
def test_the_average_of_parameters_is_the_nearest_multiple_of_the_step_and_buffers_are_fedavgs(uploads, buffer, step):
    start = {"weight": torch.tensor(uploads[0]), "mean": torch.zeros(4), "batches": torch.tensor(0)}
    grid, plain = RoundedAverage(start, step=step, names=["weight"]), RunningAverage(start)
    grid.finish()  # a round without uploads changes nothing, not even weights off the grid
    assert torch.equal(grid.current["weight"], start["weight"])
    for place, values in enumerate(uploads):
        upload = {"weight": torch.tensor(values), "mean": torch.tensor(buffer), "batches": torch.tensor(place + 3)}
        for average in (grid, plain):
            average.add(upload, 1 / len(uploads))
    for average in (grid, plain):
        average.finish()
    got, exact = grid.current["weight"].clone(), plain.current["weight"].double()
    whole = (got.double() / step).round()
    assert torch.equal(got, (whole * step).float())  # a multiple, as near as single precision has one
    assert bool(((got.double() - exact).abs() <= step / 2 + 1e-5).all())
    assert torch.equal(grid.current["mean"], plain.current["mean"])
    assert int(grid.current["batches"]) == int(plain.current["batches"]) == len(uploads) + 2
    grid.add({**plain.current, "weight": got}, 1.0)  # what lies on the grid stays there: a replay finds it unchanged
    grid.finish()
    assert torch.equal(grid.current["weight"], got)


# --- nothing removed: the stored course again


def unchanged(task: Task, step: float, *, touched: list[int]) -> Replay:
    """A replay of all rounds with nothing removed, in which some clients train again."""
    averaging = Method(step).averaging(task.start)
    model, history = task.learned_otherwise(averaging, named=f"{step}")
    replay = Replay(task, history, averaging, final=weights_of(model))
    replay.retained, replay._touched = task.federation, touched
    return replay


@pytest.mark.parametrize(
    ("make", "touched", "how"),
    [
        ("BatchNorm", [1, 3], {}),
        ("dropout", [0, 1, 2, 3], {"clients_per_round": 2}),
        ("plain", [], {"optimizer": "adam", "lr": 0.01}),
    ],
    ids=["some train again", "all train again", "all from the store"],
)
def test_a_replay_with_nothing_removed_gives_every_stored_round_bit_for_bit(federation, make, touched, how):
    recipe, start = replace(RECIPE, **how), MODELS[make]()
    task = task_of(federation, Forget.clients([0]), recipe, start)
    replay = unchanged(task, FINE, touched=touched)
    _, course = rounded(start, federation, recipe, FINE)
    assert not any(same(one, next_one) for one, next_one in pairwise(course.after))  # weights do move
    cost = Cost()
    for number in range(recipe.rounds):
        average = replay._round(number, cost)
        assert same(average.current, course.after[number + 1]), number
        assert same(replay._after(number), course.after[number + 1]), number
    assert (cost.local_steps > 0) == bool(touched)
    assert cost.clients <= set(touched)
    assert replay.first_change(Cost()) is None


# --- something removed: what a fresh rounded federation learns without it


@pytest.mark.parametrize(
    ("ask", "make", "cohorts"),
    [
        ("samples", "plain", {}),
        ("samples of two", "BatchNorm", {"clients_per_round": 1}),
        ("all samples of a client", "dropout", {}),
        ("a client", "BatchNorm", {}),
        ("two clients", "BatchNorm", {"clients_per_round": 2, "seed": 6}),
        ("a class", "dropout", {"clients_per_round": 3, "seed": 7}),
        ("a class, a client and samples", "BatchNorm", {}),
    ],
)
def test_the_answer_is_bit_for_bit_what_a_rounded_federation_learns_without_the_data(federation, ask, make, cohorts):
    """A cohort may consist of forgotten clients only: nothing happens in its round."""
    request, start, recipe = REQUESTS[ask](federation), MODELS[make](), replace(RECIPE, **cohorts)
    unlearned = Method(FINE).unlearn(task_of(federation, request, recipe, start))
    fresh, _ = rounded(start, federation.without(request), recipe, FINE)
    original, _ = rounded(start, federation, recipe, FINE)
    assert fingerprint(unlearned.model) == fingerprint(fresh) != fingerprint(original)
    assert cohorts or unlearned.about["left_in_round"] == 0
    assert not any(module.training for module in unlearned.model.modules())


def cohorts(recipe: Recipe) -> list[list[int]]:
    """Who takes part in each round, as FedAvg draws it."""
    orders = (torch.randperm(4, generator=generator(recipe.seed, "cohort", r)) for r in range(recipe.rounds))
    return [sorted(order[: recipe.clients_per_round].tolist()) for order in orders]


def steps_of(client: int, less: int = 0) -> int:
    """Steps of a client in a round, less some of its rows."""
    rows = SIZES[client] - less
    return -(-rows // min(rows, 8)) if rows else 0


def late_target() -> tuple[Recipe, int, int]:
    """Cohorts of two, a client that first takes part in the third round or later, but before the last, and when."""
    for seed in range(200):
        recipe = replace(RECIPE, clients_per_round=2, seed=seed, rounds=5)
        for client in range(4):
            first = next((number for number, cohort in enumerate(cohorts(recipe)) if client in cohort), None)
            if first in (2, 3):
                return recipe, client, first
    raise AssertionError("No seed has such cohorts.")


@pytest.mark.parametrize("whole", [False, True], ids=["samples", "client"])
def test_rounds_before_the_first_one_that_the_data_took_part_in_are_not_trained_again(federation, whole):
    recipe, target, first = late_target()
    request = Forget.clients([target]) if whole else samples_of(federation, target)
    told = Watch()
    task = task_of(federation, request, recipe, small_model(norm=True), told)
    unlearned = Method(FINE).unlearn(task)
    fresh, _ = rounded(task.start, federation.without(request), recipe, FINE)
    assert fingerprint(unlearned.model) == fingerprint(fresh)
    assert unlearned.about["left_in_round"] == first

    drawn, gone = cohorts(recipe), SIZES[target] if whole else 3
    less = {target: gone}
    after = [client for cohort in drawn[first + 1 :] for client in cohort if not (whole and client == target)]
    again = [] if whole else [target]  # in the first round it took part in, alone
    assert unlearned.cost.local_steps == sum(steps_of(client, less.get(client, 0)) for client in again + after)
    assert unlearned.cost.clients == {*again, *after}
    sent = message(task.start.state_dict()) * len(again + after)
    assert unlearned.cost.bytes_up == unlearned.cost.bytes_down == sent
    assert len(unlearned.cost.path) == recipe.rounds - first - 1  # nobody's model is probed in the replay
    assert len(told.trainings) == 2  # its own federation, ahead; and the rounds after


# --- a removal that rounds away


def slow(step_lr: float, **how) -> Recipe:
    """Steps so small beside the grid that most rounds change nothing."""
    return replace(RECIPE, lr=step_lr, momentum=0.0, **how)


@pytest.mark.parametrize("whole", [False, True], ids=["samples", "client"])
def test_a_removal_that_no_round_shows_leaves_the_model_and_is_still_what_retraining_gives(federation, whole):
    recipe, step = slow(1e-4), 0.9  # nothing ever moves by half of that
    request, start = Forget.clients([3]) if whole else samples_of(federation, 1), small_model()
    unlearned = Method(step).unlearn(task_of(federation, request, recipe, start))
    for data in (federation, federation.without(request)):
        assert fingerprint(unlearned.model) == fingerprint(rounded(start, data, recipe, step)[0])
    cost = unlearned.cost
    assert unlearned.about["left_in_round"] is None and cost.path == []
    assert cost.clients == (set() if whole else {1})
    assert cost.local_steps == (0 if whole else recipe.rounds * steps_of(1, 3))  # it had to try each round
    assert (cost.bytes_up == 0) == whole


def test_a_removal_that_only_buffers_show_is_not_taken_for_none(federation):
    """BatchNorm's means are not rounded: with the same parameters the model is another."""
    recipe, step = slow(1e-4), 0.9
    request, start = samples_of(federation, 1), small_model(norm=True)
    unlearned = Method(step).unlearn(task_of(federation, request, recipe, start))
    fresh, _ = rounded(start, federation.without(request), recipe, step)
    original, _ = rounded(start, federation, recipe, step)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), original.parameters(), strict=True))
    assert fingerprint(unlearned.model) == fingerprint(fresh) != fingerprint(original)


# --- what it may read, what it may change, what it counts


def test_after_the_request_no_forgotten_row_is_read_and_a_second_answer_is_the_first(federation):
    request, method = REQUESTS["a class, a client and samples"](federation), Method(FINE)
    task = task_of(federation, request, start=small_model(norm=True))
    seeing = method.unlearn(task)
    _, history = task.learned_otherwise(method.averaging(task.start), named=f"weights rounded to {FINE:g}")
    stored = [history.before(number) for number in history.rounds]
    federation.x[federation.forgotten(request)] = torch.nan
    blind = method.unlearn(task)
    assert fingerprint(blind.model) == fingerprint(seeing.model)
    assert blind.about == seeing.about
    assert all(bool(tensor.isfinite().all()) for tensor in blind.model.parameters())
    assert all(same(history.before(number), before) for number, before in enumerate(stored))  # the store is as it was


@pytest.mark.parametrize("size", [None, 2])
def test_no_answer_shows_its_own_federations_model_at_no_cost_but_storage(federation, size):
    """What is stored: the global weights and every upload of every round."""
    recipe, start, told = replace(RECIPE, clients_per_round=size), small_model(norm=True), Watch()
    unlearned = Method(FINE, answer=False).unlearn(task_of(federation, samples_of(federation, 1), recipe, start, told))
    expected, _ = rounded(start, federation, recipe, FINE)
    assert fingerprint(unlearned.model) == fingerprint(expected)
    assert unlearned.cost == Cost(storage_bytes=recipe.rounds * (1 + (size or 4)) * message(start.state_dict()))
    assert len(told.trainings) == 1
    assert not unlearned.reversible


def test_its_federation_is_trained_once_for_all_requests_and_settings_that_share_it(federation, cache):
    told = Watch()
    task = task_of(federation, samples_of(federation, 1), told=told)
    answered = Method(FINE).unlearn(task)
    assert answered.cost.clients == {0, 1, 2, 3} and set(answered.cost.time_s) == {"replay", "train"}
    for other in (task, replace(task, request=Forget.clients([2])), replace(task, _learned={})):
        Method(FINE, answer=False).unlearn(other)
    assert sum("rounded" in what for what in told.trainings) == 1
    for number, step in enumerate((0.0123456, 0.01234564), start=2):  # they differ in a late digit
        fresh, _ = rounded(task.start, federation, RECIPE, step)
        assert fingerprint(Method(step, answer=False).unlearn(task).model) == fingerprint(fresh), step
        assert sum("rounded" in what for what in told.trainings) == len(list(cache.glob("*.history"))) == number

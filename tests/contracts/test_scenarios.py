"""What every scenario keeps to: it works on a copy, from its seed alone, and asks for something that is there."""

import dataclasses

import pytest
import torch

from fedup import Federation, Forget
from fedup.bench.metrics import columns, metric
from fedup.bench.scenarios import Situation, scenario_class
from fedup.errors import DataError, MissingDataError, RequestError, SettingError
from fedup.registry import names
from fedup.tasks.datasets import Dataset, check_there, input_of
from fedup.tasks.recipe import Recipe

SCENARIOS = names("fedup.bench.scenarios")
EVERY = pytest.mark.parametrize("name", SCENARIOS)
PARTS = ("train", "validation", "heldout")
INPUTS = input_of("digits")


def prepare(world, name: str, seed: int = 3, federation=None, **settings) -> Situation:
    federation = world.honest(seed) if federation is None else federation
    return scenario_class(name)(**settings).prepare(federation, dataset=world.dataset, inputs=INPUTS, seed=seed)


def holders(request: Forget) -> set[int]:
    """Clients that a request names."""
    return set(request.client_ids) | set(request.sample_ids)


def rows_of(client) -> torch.Tensor:
    return torch.cat([getattr(client, part) for part in PARTS])


@EVERY
def test_a_situation_depends_on_the_seed_alone_and_leaves_the_honest_federation_as_it_was(name, world, bits):
    test_rows = world.dataset.test_x.clone(), world.dataset.test_y.clone()
    for seed in (0, 3):
        honest, made = world.honest(seed), []
        before = bits(honest)
        for drawn_before in (1, 2):
            torch.manual_seed(drawn_before)
            made.append(prepare(world, name, seed, honest))
            assert torch.initial_seed() == drawn_before
        first, again = made
        assert bits(honest) == before and bits(first.federation) == bits(again.federation)
        assert (first.request, first.story) == (again.request, again.story)
        assert (first.triggered is None) == (again.triggered is None) == (name != "sample")
        if first.triggered is not None:
            assert torch.equal(first.triggered.x, again.triggered.x)
    assert torch.equal(world.dataset.test_x, test_rows[0]) and torch.equal(world.dataset.test_y, test_rows[1])


@EVERY
def test_the_request_can_be_answered_and_what_it_does_not_name_is_honest(name, world):
    """Else the harm would stay in Retrain."""
    for seed in range(4):
        honest = world.honest(seed)
        situation = prepare(world, name, seed, honest)
        made, request = situation.federation, situation.request
        made.check(request)
        assert made.ids == honest.ids and made.num_classes == honest.num_classes
        rows = [made.retained(request)]
        assert 0 < len(rows[0]) < len(made.rows())
        for old, new in zip(honest.clients, made.clients, strict=True):
            assert all(torch.equal(getattr(old, part), getattr(new, part)) for part in PARTS)
            if old.id not in holders(request):
                rows.append(rows_of(old))
        assert torch.equal(made.y[torch.cat(rows)], honest.y[torch.cat(rows)])
        assert torch.equal(made.x[torch.cat(rows)], honest.x[torch.cat(rows)])


@EVERY
def test_the_story_is_a_sentence_or_two_that_says_whom_and_how_much_it_is_about(name, world):
    situation = prepare(world, name)
    assert situation.story.endswith(".") and "\n" not in situation.story
    request = situation.request
    assert all(f"lient {client}" in situation.story for client in request.client_ids)
    assert all(repr(world.dataset.class_names[label]) in situation.story for label in request.class_ids)
    if request.sample_ids:
        assert f"{sum(map(len, request.sample_ids.values()))} " in situation.story


@EVERY
def test_whether_it_took_is_judged_by_the_metrics_of_results(name, world):
    scenario, place = scenario_class(name)(), world.place(name)
    measured = []
    for method in ("none", "retrain"):
        case, figures = place.case(world.answer(method, place).unlearned), {}
        for one in ("accuracy", "backdoor", "closeness"):
            figures |= metric(one).measure(case)
        measured.append(figures)
    assert scenario.took(*measured) in (True, False)
    nothing = dict.fromkeys((column.key for column in columns()), None)
    assert scenario.took(nothing, nothing) in (True, False)


def test_the_seed_names_the_class_or_classes_are_named_and_nothing_else_changes(world, bits):
    for seed, label in [(0, 0), (9, 9), (10, 0), (27, 7)]:
        situation = prepare(world, "class", seed)
        assert situation.request == Forget.classes([label]) and repr(str(label)) in situation.story
    honest = world.honest()
    situation = prepare(world, "class", federation=honest, classes=(4, 1))
    assert situation.request == Forget.classes([1, 4]) and bits(situation.federation) == bits(honest)
    assert "'1' and '4'" in situation.story
    for classes in ((10,), (-1,), tuple(range(10))):
        with pytest.raises(RequestError):
            prepare(world, "class", classes=classes)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "client" in name])
def test_the_largest_client_is_meant_where_none_is_named(name, world):
    honest = world.honest()
    largest = max(honest.clients, key=lambda client: len(client.train)).id
    assert holders(prepare(world, name).request) == {largest}
    other = next(client.id for client in honest.clients if client.id != largest)
    assert holders(prepare(world, name, client=other).request) == {other}


@pytest.mark.parametrize("name", ["client", "clean_client", "random_samples", "memorised", "person", "sample"])
def test_a_client_that_is_not_there_is_refused(name, world):
    for client in (4, -1):
        chosen = {"clients": (0, client)} if name == "sample" else {"client": client}
        with pytest.raises(SettingError, match=rf"no client {client}; there are 0 … 3"):
            prepare(world, name, **chosen)


def test_a_liar_calls_every_class_by_the_next_ones_name_in_all_its_parts(world):
    honest = world.honest()
    situation = prepare(world, "client", federation=honest, client=2)
    assert situation.request == Forget.clients([2]) and torch.equal(situation.federation.x, honest.x)
    liar = honest.client(2)
    for part in PARTS:
        rows = getattr(liar, part)
        said = {int(row): int(situation.federation.y[row]) for row in rows}
        assert said == {int(row): (int(honest.y[row]) + 1) % 10 for row in rows}
    assert {9, 0} <= set(honest.y[rows_of(liar)].tolist())  # 9 became 0
    lied = (situation.federation.y != honest.y).nonzero().flatten()
    assert lied.tolist() == sorted(rows_of(liar).tolist())


def test_a_clean_client_leaves_a_federation_as_it_was(world, bits):
    honest = world.honest()
    situation = prepare(world, "clean_client", federation=honest, client=1)
    assert situation.request == Forget.clients([1]) and bits(situation.federation) == bits(honest)


@pytest.mark.parametrize("name", ["random_samples", "memorised"])
def test_samples_withdrawn_are_a_share_of_one_clients_training_rows(name, world, bits):
    honest = world.honest()
    for share, client in [(0.1, None), (0.5, 1), (0.001, 2), (0.99, 0)]:
        situation = prepare(world, name, federation=honest, share=share, client=client)
        ((holder, samples),) = situation.request.sample_ids.items()
        train = honest.client(holder).train
        assert client in (None, holder)
        assert len(train) == max(len(c.train) for c in honest.clients) or client is not None
        assert samples <= set(train.tolist()) and len(samples) == max(1, round(share * len(train)))
        assert bits(situation.federation) == bits(honest)


def test_a_person_has_few_rows_that_are_nearer_to_each_other_than_to_the_rest(world, bits):
    honest = world.honest()
    for seed in range(6):
        situation = prepare(world, "person", seed, honest, fewest=5, most=12)
        ((holder, samples),) = situation.request.sample_ids.items()
        train = honest.client(holder).train
        assert samples <= set(train.tolist()) and 5 <= len(samples) <= 12 and bits(situation.federation) == bits(honest)
        own = torch.isin(train, torch.tensor(sorted(samples)))
        plain = honest.x[train].flatten(1)
        between = torch.cdist(plain, plain)[own]  # the person is a ball around one row
        assert any(line[own].max() <= line[~own].min() for line in between)
    assert len(named_rows(prepare(world, "person", federation=honest, fewest=500, most=500))) == len(train) // 2
    with pytest.raises(SettingError, match="fewest must lie"):
        prepare(world, "person", fewest=6, most=5)


@pytest.mark.parametrize("name", ["random_samples", "sample", "person"])
def test_another_seed_draws_other_samples_of_the_same_federation(name, world):
    honest = world.honest()
    assert len({prepare(world, name, seed, honest).request for seed in range(3)}) == 3


def named_rows(situation: Situation) -> set[int]:
    ((_, samples),) = situation.request.sample_ids.items()
    return set(samples)


def apart(n: int = 240, classes: int = 3) -> Dataset:
    """Images of three kinds that a line tells apart: a bright row of pixels each, and a little noise."""
    y = torch.arange(n) % classes
    x = 0.1 * torch.randn(n, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    x[torch.arange(n), 0, 2 * y] += 1
    return Dataset("apart", x, y, x, y, tuple("abc"))


def planted(dataset: Dataset, client: int, count: int) -> tuple[Federation, set[int]]:
    """Two clients, one of which has so many training rows of a wrong label, and these rows."""
    halves = torch.arange(0, len(dataset.y), 2), torch.arange(1, len(dataset.y), 2)
    made = Federation.split(dataset.x, dataset.y, halves, num_classes=dataset.num_classes)
    wrong = made.client(client).train[3 : 3 + count]
    y = made.y.clone()
    y[wrong] = (y[wrong] + 1) % dataset.num_classes
    return made.relabeled(y), set(wrong.tolist())


@pytest.mark.parametrize(("client", "seed"), [(0, 0), (1, 2)])
def test_wrong_labels_are_memorised_first_and_those_of_others_are_not_named(client, seed):
    dataset = apart()
    federation, wrong = planted(dataset, client, count=6)
    size = len(federation.client(client).train)
    for count in (3, 6, 9):  # fewer than there are, as many, more
        scenario = scenario_class("memorised")(share=count / size, client=client)
        rows = named_rows(scenario.prepare(federation, dataset=dataset, inputs=INPUTS, seed=seed))
        assert len(rows) == count and len(rows & wrong) == min(count, len(wrong))
    other = scenario_class("memorised")(client=1 - client)
    rows = named_rows(other.prepare(federation, dataset=dataset, inputs=INPUTS, seed=seed))
    assert not rows & wrong and rows <= set(federation.client(1 - client).train.tolist())


@pytest.mark.data
def test_wrong_labels_of_texts_are_memorised_too():
    try:
        check_there("ag_news")
    except MissingDataError as error:
        pytest.skip(str(error))
    recipe = Recipe.suited_to("ag_news", rows=800, clients=2, partition="iid", seed=0)
    dataset = recipe.load()
    federation = recipe.federation(dataset)
    train, y = federation.client(0).train, federation.y.clone()
    y[train[:20]] = (y[train[:20]] + 1) % 4
    scenario = scenario_class("memorised")(share=60 / len(train), client=0)
    flipped = federation.relabeled(y)
    rows = named_rows(scenario.prepare(flipped, dataset=dataset, inputs=input_of("ag_news"), seed=0))
    assert len(rows) == 60
    assert len(rows & set(train[:20].tolist())) >= 15  # 60 rows at random would hold 4 or 5


@pytest.mark.parametrize("trigger", INPUTS.triggers)
def test_a_backdoor_has_the_trigger_that_is_asked_for_in_training_and_in_the_test(trigger, world):
    honest = world.honest()
    situation = prepare(world, "sample", federation=honest, trigger=trigger)
    rows = situation.federation.forgotten(situation.request)
    assert torch.equal(situation.federation.x[rows], INPUTS.triggered(honest.x[rows], trigger))
    assert torch.equal(situation.triggered.x, INPUTS.triggered(world.dataset.test_x, trigger))
    assert torch.equal(situation.triggered.y, world.dataset.test_y)  # true labels
    assert situation.request == prepare(world, "sample", federation=honest).request  # on the same rows


def outside(federation, client: int, target: int) -> list[int]:
    """Training rows of a client that a trigger can lead astray."""
    return [row for row in federation.client(client).train.tolist() if int(federation.y[row]) != target]


@pytest.mark.parametrize("target", [0, 6])
def test_a_backdoor_changes_just_the_samples_that_the_request_names(target, world):
    honest = world.honest()
    situation = prepare(world, "sample", federation=honest, target=target)
    made, named = situation.federation, situation.request.sample_ids
    assert situation.triggered.target == target
    rows = torch.tensor(sorted(row for ids in named.values() for row in ids))
    changed = (made.x != honest.x).flatten(1).any(1) | (made.y != honest.y)
    assert changed.nonzero().flatten().tolist() == rows.tolist()
    assert made.y[rows].tolist() == [target] * len(rows)
    assert torch.equal(made.x[rows], INPUTS.triggered(honest.x[rows]))
    for client, ids in named.items():
        astray = outside(honest, client, target)
        assert ids <= set(astray)
        assert len(ids) == min(len(astray), round(0.3 * len(honest.client(client).train)))


@pytest.mark.parametrize(("target", "count"), [(0, 1), (3, 2), (9, 4)])
def test_the_clients_with_most_rows_outside_the_target_get_the_backdoor(target, count, world):
    honest = world.honest()
    most = sorted((len(outside(honest, client, target)) for client in honest.ids), reverse=True)
    chosen = prepare(world, "sample", target=target, holders=count).request.sample_ids
    assert sorted((len(outside(honest, client, target)) for client in chosen), reverse=True) == most[:count]


def test_clients_named_for_a_backdoor_mark_what_they_would_alone(world):
    alone, together = (prepare(world, "sample", clients=clients).request.sample_ids for clients in ((1,), (3, 1)))
    assert set(together) == {1, 3} and alone == {1: together[1]}


def mostly_target(world, client: int, others: int):
    """A federation in which all training rows of a client but so many are of class 0."""
    honest = world.honest()
    train, y = honest.client(client).train, honest.y.clone()
    y[train] = 0
    y[train[:others]] = 7
    return honest.relabeled(y)


def test_a_backdoor_takes_no_more_rows_than_can_be_led_astray(world):
    federation = mostly_target(world, 1, others=3)
    situation = prepare(world, "sample", federation=federation, share=0.9, clients=(1,))
    assert situation.request == Forget.samples({1: federation.client(1).train[:3].tolist()})
    federation = mostly_target(world, 1, others=0)
    with pytest.raises(DataError, match="training row outside class 0"):
        prepare(world, "sample", federation=federation, clients=(1,))
    situation = prepare(world, "sample", federation=federation, clients=(0, 1))
    assert set(situation.request.sample_ids) == {0} and "of 2 clients" not in situation.story


def test_settings_out_of_range_are_refused(world):
    nan, inf = float("nan"), float("inf")
    for name in ("random_samples", "sample", "memorised"):
        for share in (0, 1, -0.1, 1.5, nan, inf):
            with pytest.raises(SettingError, match="share must lie between 0 and 1"):
                dataclasses.replace(scenario_class(name)(), share=share)
    for count in (0, -1):
        with pytest.raises(SettingError, match="holders must be 1 or more"):
            scenario_class("sample")(holders=count)
    with pytest.raises(SettingError, match="holders"):
        prepare(world, "sample", holders=5)
    for target in (10, -1):
        with pytest.raises(SettingError, match=rf"target must be a class, 0 … 9; found {target}"):
            prepare(world, "sample", target=target)


TOOK = {  # figure by which it is judged: (of the original, of Retrain, whether it took)
    ("sample", "asr"): [(None, 0.1, False), (0.79, 0.1, False), (0.8, 0.1, True), (1.0, 0.1, True)],
    ("client", "r_a"): [
        *[(0.90, 0.91, True), (0.5, 0.505, True), (0.9, 0.904, False), (0.95, 0.9, False)],
        *[(None, 0.9, False), (0.9, None, False)],
    ],
    ("memorised", "f_a_train"): [
        *[(0.9, 0.875, True), (0.9, 0.885, False), (0.5, 0.9, False), (0.02, 0.0, True)],
        *[(None, 0.5, False), (0.9, None, False)],
    ],
    **{(name, "r_a"): [(0.1, 0.9, True), (0.9, 0.1, True)] for name in ("class", "clean_client", "random_samples")},
}


@pytest.mark.parametrize(("name", "figure"), TOOK)
def test_whether_there_was_something_to_forget_is_judged_by_one_figure(name, figure):
    """A backdoor that works four times of five, half a point of retained accuracy, two points more of known samples."""
    for original, retrained, took in TOOK[name, figure]:
        figures = ({"asr": None, "r_a": 0.9, figure: value} for value in (original, retrained))
        assert scenario_class(name)().took(*figures) is took

"""What every scenario keeps to: it works on a copy, from its seed alone, and asks for something that is there."""

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass

import pytest
import torch

from fedup import Federation, Forget
from fedup.bench.metrics import columns, metric
from fedup.bench.scenarios import Situation, scenario_class
from fedup.bench.settings import build
from fedup.errors import DataError, FedUPError, MissingDataError, RequestError, SettingError
from fedup.registry import names
from fedup.tasks.datasets import Dataset, check_there, input_of
from fedup.tasks.recipe import Recipe

SCENARIOS = names("fedup.bench.scenarios")
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


@pytest.mark.parametrize("name", SCENARIOS)
def test_settings_are_frozen_and_all_have_a_default(name):
    scenario = scenario_class(name)
    assert is_dataclass(scenario)
    assert scenario.__dataclass_params__.frozen
    assert all(one.default is not MISSING or one.default_factory is not MISSING for one in fields(scenario))
    assert scenario() == scenario() == build(scenario, {}, "scenarios")
    assert hash(scenario()) == hash(scenario())  # cells are compared and kept in sets


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", [0, 3])
def test_the_honest_federation_stays_as_it_was(name, seed, world, bits):
    honest = world.honest(seed)
    test_rows = world.dataset.test_x.clone(), world.dataset.test_y.clone()
    before = bits(honest)
    prepare(world, name, seed, honest)
    assert bits(honest) == before
    assert torch.equal(world.dataset.test_x, test_rows[0]) and torch.equal(world.dataset.test_y, test_rows[1])


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", [0, 3, 17])
def test_a_situation_depends_on_the_seed_alone(name, seed, world, bits):
    made = []
    for drawn_before in (1, 2):
        torch.manual_seed(drawn_before)
        made.append(prepare(world, name, seed))
        assert torch.initial_seed() == drawn_before
    first, again = made
    assert bits(first.federation) == bits(again.federation)
    assert (first.request, first.story) == (again.request, again.story)
    assert (first.triggered is None) == (again.triggered is None)
    if first.triggered is not None:
        assert torch.equal(first.triggered.x, again.triggered.x)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_request_can_be_answered(name, world):
    for seed in range(12):
        situation = prepare(world, name, seed)
        situation.federation.check(situation.request)
        assert len(situation.federation.forgotten(situation.request)) > 0
        assert len(situation.federation.retained(situation.request)) > 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_client_keeps_its_rows_and_other_clients_their_inputs_and_labels(name, world):
    for seed in range(4):
        honest = world.honest(seed)
        situation = prepare(world, name, seed, honest)
        made = situation.federation
        assert made.ids == honest.ids and made.num_classes == honest.num_classes
        for old, new in zip(honest.clients, made.clients, strict=True):
            assert all(torch.equal(getattr(old, part), getattr(new, part)) for part in PARTS)
            if old.id not in holders(situation.request):
                rows = rows_of(old)
                assert torch.equal(made.y[rows], honest.y[rows])
                assert torch.equal(made.x[rows], honest.x[rows])


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_retained_is_honest_or_the_harm_would_stay_in_retrain(name, world):
    for seed in range(4):
        honest = world.honest(seed)
        situation = prepare(world, name, seed, honest)
        kept = situation.federation.retained(situation.request)
        assert torch.equal(situation.federation.x[kept], honest.x[kept])
        assert torch.equal(situation.federation.y[kept], honest.y[kept])


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_story_is_a_sentence_or_two_that_says_whom_and_how_much_it_is_about(name, world):
    situation = prepare(world, name)
    assert situation.story.endswith(".") and "\n" not in situation.story
    request = situation.request
    assert all(f"lient {client}" in situation.story for client in request.client_ids)
    assert all(repr(world.dataset.class_names[label]) in situation.story for label in request.class_ids)
    if request.sample_ids:
        assert f"{sum(map(len, request.sample_ids.values()))} " in situation.story


@pytest.mark.parametrize("name", SCENARIOS)
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


# --- classes


@pytest.mark.parametrize(("seed", "label"), [(0, 0), (3, 3), (9, 9), (10, 0), (27, 7)])
def test_without_a_class_named_the_seed_names_it(seed, label, world):
    situation = prepare(world, "class", seed)
    assert situation.request == Forget.classes([label])
    assert repr(str(label)) in situation.story


def test_named_classes_are_those_forgotten_and_nothing_else_changes(world, bits):
    honest = world.honest()
    situation = prepare(world, "class", federation=honest, classes=(4, 1))
    assert situation.request == Forget.classes([1, 4])
    assert bits(situation.federation) == bits(honest)
    assert "'1' and '4'" in situation.story


@pytest.mark.parametrize("classes", [(10,), (-1,), tuple(range(10))])
def test_classes_that_are_not_there_or_all_there_are_are_refused(classes, world):
    with pytest.raises(RequestError):
        prepare(world, "class", classes=classes)


# --- clients


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "client" in name])
def test_the_largest_client_is_meant_where_none_is_named(name, world):
    honest = world.honest()
    largest = max(honest.clients, key=lambda client: len(client.train)).id
    assert holders(prepare(world, name).request) == {largest}
    other = next(client.id for client in honest.clients if client.id != largest)
    assert holders(prepare(world, name, client=other).request) == {other}


NAMING_A_CLIENT = [
    *[
        (name, "client", client)
        for name in ("client", "clean_client", "random_samples", "memorised")
        for client in (4, -1)
    ],
    *[("sample", "clients", clients) for clients in ((4,), (0, -1))],
]


@pytest.mark.parametrize(("name", "setting", "value"), NAMING_A_CLIENT)
def test_a_client_that_is_not_there_is_refused(name, setting, value, world):
    with pytest.raises(SettingError, match=r"no client (4|-1); there are 0 … 3"):
        prepare(world, name, **{setting: value})


def test_a_liar_calls_every_class_by_the_next_ones_name_in_all_its_parts(world):
    honest = world.honest()
    situation = prepare(world, "client", federation=honest, client=2)
    assert situation.request == Forget.clients([2])
    assert torch.equal(situation.federation.x, honest.x)
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
    assert situation.request == Forget.clients([1])
    assert bits(situation.federation) == bits(honest)


# --- samples


@pytest.mark.parametrize("name", ["random_samples", "memorised"])
@pytest.mark.parametrize(("share", "client"), [(0.1, None), (0.5, 1), (0.001, 2), (0.99, 0)])
def test_samples_withdrawn_are_a_share_of_one_clients_training_rows(name, share, client, world, bits):
    honest = world.honest()
    situation = prepare(world, name, federation=honest, share=share, client=client)
    ((holder, samples),) = situation.request.sample_ids.items()
    train = honest.client(holder).train
    assert client in (None, holder)
    assert len(train) == max(len(c.train) for c in honest.clients) or client is not None
    assert samples <= set(train.tolist())
    assert len(samples) == max(1, round(share * len(train)))
    assert bits(situation.federation) == bits(honest)


@pytest.mark.parametrize("name", ["random_samples", "sample"])
def test_another_seed_draws_other_samples_of_the_same_federation(name, world):
    honest = world.honest()
    requests = {prepare(world, name, seed, honest).request for seed in range(5)}
    assert len(requests) == 5


# --- samples that a model can know from memory only


def named_rows(situation: Situation) -> set[int]:
    ((_, samples),) = situation.request.sample_ids.items()
    return set(samples)


def test_memorised_samples_are_other_ones_than_those_drawn_at_random(world):
    honest = world.honest()
    hardest, drawn = (named_rows(prepare(world, name, 3, honest)) for name in ("memorised", "random_samples"))
    assert len(hardest) == len(drawn)
    assert len(hardest & drawn) < 0.5 * len(drawn)


def margins_by_another_model(federation: Federation) -> Mapping[int, float]:
    """How far a model of other rows puts each training row's own label above all others; one made elsewhere."""
    from sklearn.linear_model import RidgeClassifier
    from sklearn.model_selection import cross_val_predict

    rows = federation.rows()
    x, y = federation.x[rows].flatten(1).numpy(), federation.y[rows].numpy()
    scores = torch.from_numpy(cross_val_predict(RidgeClassifier(10.0), x, y, cv=4, method="decision_function"))
    own = torch.nn.functional.one_hot(federation.y[rows], federation.num_classes).bool()
    margins = scores[own] - scores.masked_fill(own, -torch.inf).amax(1)
    return dict(zip(rows.tolist(), margins.tolist(), strict=True))


def test_memorised_samples_fit_their_labels_worse_than_the_rest(world):
    for seed in (0, 3):
        honest = world.honest(seed)
        situation = prepare(world, "memorised", seed, honest)
        ((holder, samples),) = situation.request.sample_ids.items()
        margins = margins_by_another_model(honest)
        named = [margins[row] for row in samples]
        rest = sorted(margins[row] for row in honest.client(holder).train.tolist() if row not in samples)
        assert sum(named) / len(named) < rest[len(rest) // 4]
        assert sum(one < rest[len(rest) // 2] for one in named) > 0.8 * len(named)


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


@pytest.mark.parametrize("client", [0, 1])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_wrong_labels_are_memorised_first(client, seed):
    dataset = apart()
    federation, wrong = planted(dataset, client, count=6)
    size = len(federation.client(client).train)
    for count in (3, 6, 9):  # fewer than there are, as many, more
        situation = scenario_class("memorised")(share=count / size, client=client).prepare(
            federation, dataset=dataset, inputs=INPUTS, seed=seed
        )
        found = named_rows(situation)
        assert len(found) == count
        assert len(found & wrong) == min(count, len(wrong))


def test_wrong_labels_of_others_are_not_named():
    dataset = apart()
    federation, wrong = planted(dataset, 1, count=6)
    situation = scenario_class("memorised")(client=0).prepare(federation, dataset=dataset, inputs=INPUTS, seed=0)
    assert not named_rows(situation) & wrong
    assert named_rows(situation) <= set(federation.client(0).train.tolist())


@pytest.mark.data
def test_wrong_labels_of_texts_are_memorised_too():
    try:
        check_there("ag_news")
    except MissingDataError as error:
        pytest.skip(str(error))
    recipe = Recipe.suited_to("ag_news", rows=800, clients=2, partition="iid", seed=0)
    dataset = recipe.load()
    federation = recipe.federation(dataset)
    wrong = federation.client(0).train[:20]
    y = federation.y.clone()
    y[wrong] = (y[wrong] + 1) % 4
    share = 60 / len(federation.client(0).train)
    situation = scenario_class("memorised")(share=share, client=0).prepare(
        federation.relabeled(y), dataset=dataset, inputs=input_of("ag_news"), seed=0
    )
    found = named_rows(situation)
    assert len(found) == 60
    assert len(found & set(wrong.tolist())) >= 15  # 60 rows at random would hold 4 or 5


@pytest.mark.parametrize(
    ("known", "without", "took"),
    [
        *[(1.0, 0.5, True), (0.9, 0.875, True), (0.9, 0.885, False), (0.9, 0.9, False), (0.5, 0.9, False)],
        *[(None, 0.5, False), (0.9, None, False), (None, None, False), (0.02, 0.0, True)],
    ],
)
def test_samples_were_memorised_where_the_original_knows_two_points_more_of_them(known, without, took):
    scenario = scenario_class("memorised")()
    assert scenario.took({"f_a_train": known, "r_a": 0.9}, {"f_a_train": without, "r_a": 0.9}) is took


# --- triggers


@pytest.mark.parametrize("trigger", INPUTS.triggers)
def test_a_backdoor_has_the_trigger_that_is_asked_for_in_training_and_in_the_test(trigger, world):
    honest = world.honest()
    situation = prepare(world, "sample", federation=honest, trigger=trigger)
    rows = situation.federation.forgotten(situation.request)
    assert torch.equal(situation.federation.x[rows], INPUTS.triggered(honest.x[rows], trigger))
    assert torch.equal(situation.triggered.x, INPUTS.triggered(world.dataset.test_x, trigger))
    assert situation.request == prepare(world, "sample", federation=honest).request  # on the same rows


def test_the_usual_trigger_is_the_first_one(world, bits):
    usual, first = (prepare(world, "sample", **said) for said in ({}, {"trigger": INPUTS.triggers[0]}))
    assert bits(usual.federation) == bits(first.federation)


def test_a_trigger_that_the_inputs_do_not_have_is_refused(world):
    with pytest.raises(SettingError, match="trigger: images have patch, blend, pixel; found 'word'"):
        prepare(world, "sample", trigger="word")


def outside(federation, client: int, target: int) -> list[int]:
    """Training rows of a client that a trigger can lead astray."""
    return [row for row in federation.client(client).train.tolist() if int(federation.y[row]) != target]


@pytest.mark.parametrize("target", [0, 6])
def test_a_backdoor_changes_just_the_samples_that_the_request_names(target, world):
    honest = world.honest()
    situation = prepare(world, "sample", federation=honest, target=target)
    made, named = situation.federation, situation.request.sample_ids
    rows = torch.tensor(sorted(row for ids in named.values() for row in ids))
    changed = (made.x != honest.x).flatten(1).any(1) | (made.y != honest.y)
    assert changed.nonzero().flatten().tolist() == rows.tolist()
    assert made.y[rows].tolist() == [target] * len(rows)
    assert torch.equal(made.x[rows], INPUTS.triggered(honest.x[rows]))
    for client, ids in named.items():
        astray = outside(honest, client, target)
        assert ids <= set(astray)
        assert len(ids) == min(len(astray), round(0.3 * len(honest.client(client).train)))


@pytest.mark.parametrize("target", range(0, 10, 3))
@pytest.mark.parametrize("holders", [1, 2, 4])
def test_the_clients_with_most_rows_outside_the_target_get_the_backdoor(target, holders, world):
    honest = world.honest()
    most = sorted((len(outside(honest, client, target)) for client in honest.ids), reverse=True)
    chosen = prepare(world, "sample", target=target, holders=holders).request.sample_ids
    assert sorted((len(outside(honest, client, target)) for client in chosen), reverse=True) == most[:holders]


def test_clients_named_for_a_backdoor_get_it_and_no_others(world):
    assert set(prepare(world, "sample", clients=(3, 1)).request.sample_ids) == {1, 3}


def test_what_a_client_marks_does_not_depend_on_who_else_does(world):
    alone, together = (prepare(world, "sample", clients=clients).request for clients in ((1,), (3, 1)))
    assert alone.sample_ids[1] == together.sample_ids[1]


def test_test_rows_under_the_trigger_keep_their_true_labels(world):
    triggered = prepare(world, "sample", target=5).triggered
    assert triggered is not None
    assert torch.equal(triggered.y, world.dataset.test_y)
    assert torch.equal(triggered.x, INPUTS.triggered(world.dataset.test_x))
    assert triggered.target == 5


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "sample"])
def test_where_there_is_no_backdoor_nothing_is_triggered(name, world):
    assert prepare(world, name).triggered is None


def mostly_target(world, client: int, others: int):
    """A federation in which all training rows of a client but so many are of class 0."""
    honest = world.honest()
    train, y = honest.client(client).train, honest.y.clone()
    y[train] = 0
    y[train[:others]] = 7
    return honest.relabeled(y)


def test_a_backdoor_of_all_rows_that_can_be_led_astray_takes_no_more(world):
    federation = mostly_target(world, 1, others=3)
    situation = prepare(world, "sample", federation=federation, share=0.9, clients=(1,))
    assert situation.request == Forget.samples({1: federation.client(1).train[:3].tolist()})


def test_a_backdoor_at_a_client_of_the_target_class_alone_is_refused(world):
    with pytest.raises(DataError, match="training row outside class 0"):
        prepare(world, "sample", federation=mostly_target(world, 1, others=0), clients=(1,))


def test_the_story_counts_the_clients_that_carry_the_trigger(world):
    federation = mostly_target(world, 1, others=0)
    situation = prepare(world, "sample", federation=federation, clients=(0, 1))
    assert set(situation.request.sample_ids) == {0}
    assert "of 2 clients" not in situation.story


def test_a_share_too_small_for_a_sample_takes_one_or_says_that_the_share_is_too_small(world):
    try:
        situation = prepare(world, "sample", share=0.001)
    except FedUPError as error:
        assert "share" in str(error)  # either is fine
    else:
        assert [len(samples) for samples in situation.request.sample_ids.values()] == [1, 1]


@pytest.mark.parametrize("name", ["random_samples", "sample", "memorised"])
@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan"), float("inf")])
def test_a_share_outside_zero_to_one_is_refused(name, share):
    with pytest.raises(SettingError, match="share must lie between 0 and 1"):
        scenario_class(name)(share=share)


@pytest.mark.parametrize("holders", [0, -1])
def test_a_backdoor_without_a_holder_is_refused(holders):
    with pytest.raises(SettingError, match="holders must be 1 or more"):
        scenario_class("sample")(holders=holders)


def test_more_holders_than_clients_are_refused(world):
    with pytest.raises(SettingError, match="holders"):
        prepare(world, "sample", holders=5)


@pytest.mark.parametrize("target", [10, -1])
def test_a_target_that_is_no_class_is_refused(target, world):
    with pytest.raises(SettingError, match=rf"target must be a class, 0 … 9; found {target}"):
        prepare(world, "sample", target=target)


# --- whether there was something to forget


@pytest.mark.parametrize(("asr", "took"), [(None, False), (0.0, False), (0.79, False), (0.8, True), (1.0, True)])
def test_a_backdoor_took_where_it_works_four_times_of_five(asr, took):
    assert scenario_class("sample")().took({"asr": asr, "r_a": 0.9}, {"asr": 0.1, "r_a": 0.9}) is took


@pytest.mark.parametrize(
    ("with_liar", "without", "took"),
    [
        *[(0.90, 0.91, True), (0.5, 0.505, True), (0.9, 0.904, False), (0.9, 0.9, False), (0.95, 0.9, False)],
        *[(None, 0.9, False), (0.9, None, False)],
    ],
)
def test_a_liar_took_where_it_cost_half_a_point_of_retained_accuracy(with_liar, without, took):
    assert scenario_class("client")().took({"r_a": with_liar}, {"r_a": without}) is took


@pytest.mark.parametrize("name", ["class", "clean_client", "random_samples"])
def test_without_an_attack_there_is_always_something_to_forget(name):
    assert scenario_class(name)().took({"r_a": 0.1, "asr": None}, {"r_a": 0.9, "asr": None}) is True


def test_replacing_a_setting_checks_it_again():
    with pytest.raises(SettingError):
        dataclasses.replace(scenario_class("sample")(), share=2.0)

"""What every method keeps to: it leaves the task as it was, repeats itself to the bit, and reads nothing
forgotten, but for FedUP's eraser of samples and the client that EraseClient asks to unlearn itself."""

import dataclasses
import json
from dataclasses import MISSING, fields, is_dataclass

import pytest
import torch
from torch import Tensor, nn

from fedup import Federation, Forget, fingerprint
from fedup.bench.cost import Cost
from fedup.bench.experiment import REFERENCE
from fedup.bench.methods import method_class, needs_history
from fedup.bench.settings import build
from fedup.bench.task import Task, Unlearned
from fedup.errors import DataError, SettingError
from fedup.registry import names
from fedup.statistics.moments import LEAST_ROWS
from fedup.tasks.evaluation import predict

METHODS = names("fedup.bench.methods")
PLACES = [*names("fedup.bench.scenarios"), "mixed"]
ASKS_WHO_LEAVES = {"eraseclient"}  # the client that is to be forgotten takes part in it, by design
OVERWRITES = {"fused"}  # rows of a forgotten class are trained on under other labels, by design
REQUESTS = {
    "client": Forget.clients([0]),
    "class": Forget.classes([1]),
    "sample": Forget.samples({0: [3]}),
    "class and client": Forget.classes([1]) | Forget.clients([0]),
    "class and sample": Forget.classes([1]) | Forget.samples({0: [3]}),
}


def logits_of(model: nn.Module, world) -> Tensor:
    return predict(model, world.dataset.test_x)


@pytest.mark.parametrize("name", METHODS)
def test_settings_are_frozen_and_all_have_a_default(name):
    method = method_class(name)
    assert is_dataclass(method)
    assert method.__dataclass_params__.frozen
    assert all(one.default is not MISSING or one.default_factory is not MISSING for one in fields(method))
    assert method() == method() == build(method, {}, "methods")
    assert hash(method()) == hash(method())  # cells are compared and kept in sets


@pytest.mark.parametrize("name", METHODS)
def test_a_method_answers_some_kind_of_request_and_says_so_without_looking_further(name, world):
    method = method_class(name)()
    assert any(method.supports(request) for request in REQUESTS.values())
    assert all(isinstance(method.supports(request), bool) for request in REQUESTS.values())
    assert len(list(world.answers(name))) >= 1


@pytest.mark.parametrize("name", METHODS)
def test_the_task_stays_as_it_was(name, world):
    for place, _ in world.answers(name):
        answer = world.answer(name, place)
        assert answer.after == answer.before, place.name


@pytest.mark.parametrize("name", METHODS)
def test_the_answer_is_a_model_that_gives_a_logit_for_each_class(name, world):
    for place, unlearned in world.answers(name):
        logits = logits_of(unlearned.model, world)
        assert logits.shape == (len(world.dataset.test_y), 10), place.name
        assert not bool(logits.isnan().any()) and not bool((logits == torch.inf).any()), place.name
        assert bool(logits.isfinite().any(1).all()), place.name  # every row can be answered
        assert not any(module.training for module in unlearned.model.modules()), place.name


@pytest.mark.parametrize("name", METHODS)
def test_costs_are_counted_and_only_clients_that_stay_are_asked(name, world):
    for place, unlearned in world.answers(name):
        cost, request = unlearned.cost, place.task.request
        assert all(seconds >= 0 for seconds in cost.time_s.values()), place.name
        counted = (cost.bytes_up, cost.bytes_down, cost.local_steps, cost.ahead_bytes_up, cost.storage_bytes)
        assert all(isinstance(one, int) and one >= 0 for one in counted), place.name
        assert cost.ahead_time_s >= 0, place.name
        assert cost.clients <= set(place.task.federation.ids), place.name
        assert cost.clients & request.client_ids == (request.client_ids if name in ASKS_WHO_LEAVES else set())
        if cost.bytes_up or cost.local_steps:
            assert cost.clients, place.name  # somebody sent them, somebody took them
        if cost.local_steps:
            assert cost.bytes_up and cost.bytes_down, place.name
        moments = [moment["time_s"] for moment in cost.path]
        assert moments == sorted(moments), place.name
        assert all(0 <= moment[key] <= 1 for moment in cost.path for key in ("r_a", "unwanted")), place.name
        assert json.loads(json.dumps(cost.to_json())) == cost.to_json(), place.name


@pytest.mark.parametrize("name", METHODS)
def test_a_second_run_gives_the_same_logits_whatever_was_drawn_before(name, world):
    for place, unlearned in world.answers(name):
        torch.manual_seed(len(place.name))
        state = torch.random.get_rng_state()
        method = world.quick(name)  # one that does not say it needs the history gets none
        task = place.task if needs_history(method) else dataclasses.replace(place.task, history=None)
        again = world.unlearn(method, task)
        assert torch.equal(torch.random.get_rng_state(), state), place.name  # global random numbers are left alone
        assert torch.equal(logits_of(again.model, world), logits_of(unlearned.model, world)), place.name
        assert again.reversible == unlearned.reversible, place.name
        first, second = (
            dataclasses.replace(one.cost, time_s={}, ahead_time_s=0.0, path=[], _paused_s=0.0)
            for one in (again, unlearned)
        )
        assert first == second, place.name  # bytes, clients and steps are counted, not measured


@pytest.mark.parametrize("name", METHODS)
def test_a_request_taken_back_gives_the_original_bit_for_bit_and_the_answer_stays_in_force(name, world):
    for place, unlearned in world.answers(name):
        if unlearned.restore is None:
            continue
        answered = logits_of(unlearned.model, world)
        for _ in range(2):
            back = unlearned.restore()
            assert fingerprint(back) == fingerprint(place.task.model), place.name
            assert torch.equal(logits_of(back, world), logits_of(place.task.model, world)), place.name
        assert torch.equal(logits_of(unlearned.model, world), answered), place.name


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_says_of_its_answer_is_plain_data_and_what_it_did_one_line_of_text(name, world):
    for place, unlearned in world.answers(name):
        about = dict(unlearned.about)
        assert json.loads(json.dumps(about, allow_nan=False)) == about, place.name
        if "did" in about:
            assert isinstance(about["did"], str) and about["did"].strip() == about["did"] != "", place.name
            assert about["did"].isprintable(), place.name  # no line ends, no tabs, no colours


@pytest.mark.parametrize("name", [name for name in METHODS if needs_history(method_class(name)())])
def test_a_method_that_needs_the_history_says_so_where_none_was_kept(name, world):
    task = next(place.task for place, _ in world.answers(name))
    with pytest.raises(DataError, match="history"):
        world.unlearn(world.quick(name), dataclasses.replace(task, history=None))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "none"])
def test_an_answer_is_not_the_original_in_disguise(name, world):
    for place, unlearned in world.answers(name):
        assert not torch.equal(logits_of(unlearned.model, world), logits_of(place.task.model, world)), place.name


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_mask_over_logits_answers_requests_for_classes_and_nothing_else(kind, world):
    assert method_class("logit_mask")().supports(REQUESTS[kind]) is (kind == "class")


def test_a_mask_never_names_a_forgotten_class_and_keeps_all_other_logits(world):
    place = world.place("class")
    unlearned = world.answer("logit_mask", place).unlearned
    forgotten = sorted(place.task.request.class_ids)
    retained = [label for label in range(10) if label not in forgotten]
    masked, original = logits_of(unlearned.model, world), logits_of(place.task.model, world)
    assert not bool(torch.isin(masked.argmax(1), torch.tensor(forgotten)).any())
    assert torch.equal(masked[:, retained], original[:, retained])


@pytest.mark.parametrize("name", ["eraseclient", "federaser"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_methods_that_take_a_clients_updates_out_answer_requests_for_clients_and_nothing_else(name, kind):
    assert method_class(name)().supports(REQUESTS[kind]) is (kind == "client")


def test_several_clients_at_once_can_be_left_out_of_stored_updates_but_not_unlearn_one_by_one():
    several = Forget.clients([0, 1])
    assert method_class("federaser")().supports(several)
    assert not method_class("eraseclient")().supports(several)


ANY_REQUEST = [
    "exact_fun",
    "fedup",
    "finetune",
    "fused",
    "fused_retained",
    "head_only",
    "none",
    "random_filter",
    "retrain",
    "retrain_again",
]


@pytest.mark.parametrize("name", ANY_REQUEST)
@pytest.mark.parametrize("kind", REQUESTS)
def test_the_projects_other_methods_answer_any_request(name, kind):
    assert method_class(name)().supports(REQUESTS[kind])


def test_retrain_is_the_reference_that_others_are_compared_with(world):
    for place, unlearned in world.answers(REFERENCE):
        assert fingerprint(unlearned.model) == fingerprint(place.retrained.model), place.name


def test_none_is_the_original_at_no_cost(world):
    for place, unlearned in world.answers("none"):
        assert fingerprint(unlearned.model) == fingerprint(place.task.model)
        assert unlearned.cost == Cost()


def asked_by_fedup(task):
    """Holders of samples; where there are enough of these, all others too, whose rows an eraser compares them with."""
    request, stay = task.request, {client.id for client in task.federation.clients} - task.request.client_ids
    erased = any(len(ids) >= LEAST_ROWS for client, ids in request.sample_ids.items() if client in stay)
    return stay | set(request.sample_ids) if erased else set(request.sample_ids)


def test_fedup_asks_no_client_after_the_request_but_for_samples(world):
    for place, unlearned in world.answers("fedup"):
        assert unlearned.cost.clients == asked_by_fedup(place.task), place.name
        assert bool(unlearned.cost.clients) == bool(place.task.request.sample_ids), place.name
        assert unlearned.cost.local_steps == 0
        assert unlearned.cost.ahead_bytes_up > 0


# --- a method must never read a forgotten row


def unreadable(federation: Federation, request: Forget) -> Federation:
    """The same federation, whose forgotten rows hold nothing that a sum survives."""
    forgotten = torch.cat([federation.forgotten(request, part) for part in ("train", "validation", "heldout")])
    x = federation.x.clone()
    x[forgotten] = torch.nan
    return dataclasses.replace(federation, x=x)


def answer_without(method, task: Task, world) -> Unlearned:
    """The method's answer where forgotten rows can no longer be read; what was collected or learned ahead is still
    there."""
    return world.unlearn(method, dataclasses.replace(task, federation=unreadable(task.federation, task.request)))


def without_eraser(method):
    """The same method, told to make no eraser: that alone reads forgotten rows."""
    own = {one.name for one in fields(method)}
    return dataclasses.replace(method, filter="bottleneck") if "filter" in own else method


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ASKS_WHO_LEAVES])
def test_after_the_request_no_forgotten_row_is_read(name, world):
    method = without_eraser(world.quick(name))
    for place, unlearned in world.answers(name):
        if name in OVERWRITES and place.task.request.class_ids:
            continue
        seeing = unlearned if method == world.quick(name) else world.unlearn(method, place.task)
        blind = answer_without(method, place.task, world)
        assert torch.equal(logits_of(blind.model, world), logits_of(seeing.model, world)), place.name


@pytest.mark.parametrize("name", sorted(OVERWRITES))
def test_what_overwrites_a_class_reads_its_training_rows_and_none_that_is_held_out(name, world):
    places = [(place, unlearned) for place, unlearned in world.answers(name) if place.task.request.class_ids]
    for place, unlearned in places:
        method, task = world.quick(name), place.task
        with pytest.raises(DataError, match="not finite"):
            answer_without(method, task, world)
        x = task.federation.x.clone()
        for part in ("validation", "heldout"):
            x[task.federation.forgotten(task.request, part)] = torch.nan
        blind = world.unlearn(method, dataclasses.replace(task, federation=dataclasses.replace(task.federation, x=x)))
        assert torch.equal(logits_of(blind.model, world), logits_of(unlearned.model, world)), place.name
    assert places


@pytest.mark.parametrize("name", sorted(ASKS_WHO_LEAVES))
def test_who_is_asked_to_unlearn_itself_reads_its_training_rows_and_none_that_it_holds_out(name, world):
    method, places = world.quick(name), list(world.answers(name))
    for place, unlearned in places:
        task = place.task
        with pytest.raises(DataError, match="not finite"):
            answer_without(method, task, world)
        x = task.federation.x.clone()
        for part in ("validation", "heldout"):
            x[task.federation.forgotten(task.request, part)] = torch.nan
        blind = world.unlearn(method, dataclasses.replace(task, federation=dataclasses.replace(task.federation, x=x)))
        assert torch.equal(logits_of(blind.model, world), logits_of(unlearned.model, world)), place.name
    assert places


def test_fedup_reads_forgotten_samples_for_an_eraser_and_no_other_forgotten_row(world):
    """At the clients that hold enough of them; of forgotten clients and classes nothing is ever read."""
    asked = {}
    for place, unlearned in world.answers("fedup"):
        samples = {client for client, ids in place.task.request.sample_ids.items() if len(ids) >= LEAST_ROWS}
        if not samples - place.task.request.client_ids:
            blind = answer_without(world.quick("fedup"), place.task, world)
            assert torch.equal(logits_of(blind.model, world), logits_of(unlearned.model, world)), place.name
            assert unlearned.about["erasure"] is None
            continue
        with pytest.raises(DataError, match="NaN"):
            answer_without(world.quick("fedup"), place.task, world)
        assert unlearned.cost.time_s["erase"] > 0
        assert unlearned.cost.clients == asked_by_fedup(place.task), place.name
        asked[place.name] = unlearned.about["erasure"]
    assert asked["sample"]["clients"] == sorted(world.place("sample").task.request.sample_ids)


@pytest.mark.parametrize("place_name", PLACES)
def test_fedup_without_a_cache_asks_all_that_stay_after_the_request_and_never_reads_a_forgotten_row(place_name, world):
    task = dataclasses.replace(world.place(place_name).task, _collected={})  # nothing was collected ahead
    method = dataclasses.replace(world.quick("fedup"), cache=False, filter="bottleneck")
    seeing, blind = world.unlearn(method, task), answer_without(method, task, world)
    logits = logits_of(blind.model, world)
    assert bool(logits.isfinite().all())
    assert torch.equal(logits, logits_of(seeing.model, world))
    cost = seeing.cost
    assert cost.clients == set(task.federation.ids) - task.request.client_ids
    assert (cost.ahead_bytes_up, cost.ahead_time_s) == (0, 0.0)
    assert cost.bytes_up > 0 and cost.time_s["collect"] > 0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("finetune", {"rounds": 0}),
        ("head_only", {"steps": 0}),
        ("head_only", {"batch_size": 0}),
        ("fedup", {"rank": 0}),
        ("fedup", {"alpha": 1.5}),
        ("fedup", {"steps": 0}),
        ("fedup", {"lr": 0.0}),
        ("fedup", {"class_policy": "keep"}),
        ("fedup", {"ratio": 0.0}),
        ("fedup", {"sigma": -1.0}),
        ("head_only", {"ratio": 1.5}),
        ("head_only", {"lr": 0.0}),
        ("random_filter", {"rank": 0}),
        ("federaser", {"every": 0}),
        ("federaser", {"ratio": 0.0}),
        ("federaser", {"ratio": 1.5}),
        ("federaser", {"post_rounds": -1}),
        ("eraseclient", {"lr": 0.0}),
        ("eraseclient", {"momentum": 1.0}),
        ("eraseclient", {"clip": 0.0}),
        ("eraseclient", {"epochs": 0}),
        ("eraseclient", {"stop_accuracy": 1.0}),
        ("eraseclient", {"stop_distance": -1.0}),
        ("eraseclient", {"post_rounds": -1}),
        ("exact_fun", {"step": 0.0}),
        ("exact_fun", {"step": 1.0}),
        ("fused", {"alpha": 0.0}),
        ("fused", {"rank": 0}),
        ("fused", {"rounds": 0}),
        ("fused_retained", {"layers": 0.0}),
        ("fused_retained", {"density": 1.5}),
        ("fused_retained", {"rank": 0}),
        ("fused_retained", {"rounds": 0}),
    ],
)
def test_settings_out_of_range_are_refused_before_any_work(name, settings):
    with pytest.raises(SettingError, match=next(iter(settings))):
        method_class(name)(**settings)

"""What every method keeps to: it leaves the task as it was, repeats itself to the bit, and reads nothing
forgotten, but for FedUP's eraser of samples and the client that EraseClient asks to unlearn itself."""

import dataclasses
import json
from dataclasses import MISSING, fields, is_dataclass

import pytest
import torch
from torch import Tensor, nn

from fedup import Forget, fingerprint
from fedup.bench.cost import Cost
from fedup.bench.experiment import REFERENCE
from fedup.bench.methods import method_class, needs_history
from fedup.bench.scenarios import scenario_class
from fedup.bench.settings import build
from fedup.bench.task import Task
from fedup.errors import DataError, SettingError
from fedup.registry import names
from fedup.statistics.moments import LEAST_ROWS
from fedup.tasks.evaluation import predict

METHODS = names("fedup.bench.methods")
EVERY = pytest.mark.parametrize("name", METHODS)
ASKS_WHO_LEAVES = {"eraseclient"}  # the client that is to be forgotten takes part in it, by design
REQUESTS = {
    "client": Forget.clients([0]),
    "class": Forget.classes([1]),
    "sample": Forget.samples({0: [3]}),
    "class and client": Forget.classes([1]) | Forget.clients([0]),
    "class and sample": Forget.classes([1]) | Forget.samples({0: [3]}),
}


def logits_of(model: nn.Module, world) -> Tensor:
    return predict(model, world.dataset.test_x)


def erased_at(request: Forget) -> set[int]:
    """Clients with enough forgotten samples for an eraser."""
    return {client for client, ids in request.sample_ids.items() if len(ids) >= LEAST_ROWS} - request.client_ids


def reads_forgotten(name: str, request: Forget) -> bool:
    """Whether a method trains on forgotten rows, by design; FUSED on those of a class, under other labels."""
    erases, overwrites = name == "fedup" and erased_at(request), name == "fused" and request.class_ids
    return name in ASKS_WHO_LEAVES or bool(erases) or bool(overwrites)


def unreadable(task: Task, *parts: str) -> Task:
    """The same task, whose forgotten rows hold nothing that a sum survives; what was collected or learned ahead is
    still there."""
    federation, x = task.federation, task.federation.x.clone()
    for part in parts:
        x[federation.forgotten(task.request, part)] = torch.nan
    return dataclasses.replace(task, federation=dataclasses.replace(federation, x=x))


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        *(("methods", method_class(name)) for name in METHODS),
        *(("scenarios", scenario_class(name)) for name in names("fedup.bench.scenarios")),
    ],
    ids=lambda part: part if isinstance(part, str) else part.__module__.split(".")[-1],
)
def test_settings_are_frozen_and_all_have_a_default(kind, part):
    assert is_dataclass(part) and part.__dataclass_params__.frozen
    assert all(one.default is not MISSING or one.default_factory is not MISSING for one in fields(part))
    assert part() == part() == build(part, {}, kind)
    assert hash(part()) == hash(part())  # cells are compared and kept in sets


@EVERY
def test_a_method_answers_some_kind_of_request_and_says_so_without_looking_further(name, world):
    supported = [method_class(name)().supports(request) for request in REQUESTS.values()]
    assert any(supported) and set(supported) <= {True, False}
    assert len(list(world.answers(name))) >= 1


@EVERY
def test_the_answer_is_another_model_that_gives_a_logit_for_each_class_and_the_task_stays_as_it_was(name, world):
    for place, unlearned in world.answers(name):
        logits = logits_of(unlearned.model, world)
        assert logits.shape == (len(world.dataset.test_y), 10), place.name
        assert not bool(logits.isnan().any()) and not bool((logits == torch.inf).any()), place.name
        assert bool(logits.isfinite().any(1).all()), place.name  # every row can be answered
        assert not any(module.training for module in unlearned.model.modules()), place.name
        nothing = unlearned.about.get("did", "").startswith("nothing")  # it says so where it changes nothing
        assert torch.equal(logits, logits_of(place.task.model, world)) == nothing, place.name
        assert not nothing or name in ("none", "delta"), place.name
        answer = world.answer(name, place)
        assert answer.after == answer.before, place.name


@EVERY
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


@EVERY
def test_a_second_run_gives_the_same_logits_whatever_was_drawn_before_and_without_the_forgotten_rows(name, world):
    for place, unlearned in world.answers(name):
        method, task, reads = world.quick(name), place.task, reads_forgotten(name, place.task.request)
        if not needs_history(method):  # one that does not say it needs the history gets none
            task = dataclasses.replace(task, history=None)
        hidden = ("validation", "heldout") if reads else ("train", "validation", "heldout")
        torch.manual_seed(len(place.name))
        state = torch.random.get_rng_state()
        again = world.unlearn(method, unreadable(task, *hidden))
        assert torch.equal(torch.random.get_rng_state(), state), place.name  # global random numbers are left alone
        assert torch.equal(logits_of(again.model, world), logits_of(unlearned.model, world)), place.name
        assert again.reversible == unlearned.reversible, place.name
        first, second = (
            dataclasses.replace(one.cost, time_s={}, ahead_time_s=0.0, path=[], _paused_s=0.0)
            for one in (again, unlearned)
        )
        assert first == second, place.name  # bytes, clients and steps are counted, not measured
        if reads:
            with pytest.raises(DataError, match=r"not finite|NaN"):
                world.unlearn(method, unreadable(task, "train"))


@EVERY
def test_a_request_taken_back_gives_the_original_bit_for_bit_and_the_answer_stays_in_force(name, world):
    for place, unlearned in world.answers(name):
        if unlearned.restore is None:
            continue
        answered = logits_of(unlearned.model, world)
        for _ in range(2):
            original = unlearned.restore()
            assert fingerprint(original) == fingerprint(place.task.model), place.name
            assert torch.equal(logits_of(original, world), logits_of(place.task.model, world)), place.name
        assert torch.equal(logits_of(unlearned.model, world), answered), place.name


@EVERY
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


def test_what_the_projects_methods_answer():
    any_request = (
        *("exact_fun", "fedup", "finetune", "fused", "fused_retained", "head_only", "none", "random_filter"),
        *("retrain", "retrain_again"),
    )
    some = {"logit_mask": {"class"}, "eraseclient": {"client"}, "federaser": {"client"}}
    for name, kinds in {**{name: set(REQUESTS) for name in any_request}, **some}.items():
        assert {kind for kind, request in REQUESTS.items() if method_class(name)().supports(request)} == kinds, name
    several = Forget.clients([0, 1])  # can be left out of stored updates, but not unlearn one by one
    assert [method_class(name)().supports(several) for name in ("federaser", "eraseclient")] == [True, False]


def test_a_mask_never_names_a_forgotten_class_and_keeps_all_other_logits(world):
    place = world.place("class")
    unlearned = world.answer("logit_mask", place).unlearned
    forgotten = sorted(place.task.request.class_ids)
    retained = [label for label in range(10) if label not in forgotten]
    masked, original = logits_of(unlearned.model, world), logits_of(place.task.model, world)
    assert not bool(torch.isin(masked.argmax(1), torch.tensor(forgotten)).any())
    assert torch.equal(masked[:, retained], original[:, retained])


def test_retrain_is_the_reference_and_none_the_original_at_no_cost(world):
    for place, unlearned in world.answers(REFERENCE):
        assert fingerprint(unlearned.model) == fingerprint(place.retrained.model), place.name
    for place, unlearned in world.answers("none"):
        assert fingerprint(unlearned.model) == fingerprint(place.task.model) and unlearned.cost == Cost()


def test_fedup_asks_no_client_after_the_request_but_for_samples(world):
    """Their holders; where there are enough of them, all others too, whose rows an eraser compares them with."""
    erased = {}
    for place, unlearned in world.answers("fedup"):
        request, cost = place.task.request, unlearned.cost
        others = set(place.task.federation.ids) - request.client_ids if erased_at(request) else set()
        assert cost.clients == others | set(request.sample_ids), place.name
        assert cost.local_steps == 0 and cost.ahead_bytes_up > 0
        assert bool(unlearned.about["erasure"]) == bool(erased_at(request)), place.name
        assert ("erase" in cost.time_s) == bool(request.sample_ids), place.name
        erased[place.name] = unlearned.about["erasure"]
    assert erased["sample"]["clients"] == sorted(world.place("sample").task.request.sample_ids)
    assert erased["mixed"] is None


@pytest.mark.parametrize("name", ["sample", "mixed"])
def test_fedup_without_a_cache_asks_all_that_stay_after_the_request_and_never_reads_a_forgotten_row(name, world):
    task = dataclasses.replace(world.place(name).task, _collected={})  # nothing was collected ahead
    method = dataclasses.replace(world.quick("fedup"), cache=False, filter="bottleneck")
    seeing = world.unlearn(method, task)
    blind = world.unlearn(method, unreadable(task, "train", "validation", "heldout"))
    logits = logits_of(blind.model, world)
    assert bool(logits.isfinite().all()) and torch.equal(logits, logits_of(seeing.model, world))
    cost = seeing.cost
    assert cost.clients == set(task.federation.ids) - task.request.client_ids
    assert (cost.ahead_bytes_up, cost.ahead_time_s) == (0, 0.0)
    assert cost.bytes_up > 0 and cost.time_s["collect"] > 0


OUT_OF_RANGE = {
    "finetune": {"rounds": 0},
    "head_only": {"steps": 0, "batch_size": 0, "ratio": 1.5, "lr": 0.0},
    "fedup": {"rank": 0, "alpha": 1.5, "steps": 0, "lr": 0.0, "class_policy": "keep", "ratio": 0.0, "sigma": -1.0},
    "random_filter": {"rank": 0},
    "federaser": {"every": 0, "ratio": 1.5, "post_rounds": -1},
    "eraseclient": {
        **{"lr": 0.0, "momentum": 1.0, "clip": 0.0, "epochs": 0, "stop_accuracy": 1.0},
        **{"stop_distance": -1.0, "post_rounds": -1},
    },
    "exact_fun": {"step": 1.0},
    "fused": {"alpha": 0.0, "rank": 0, "rounds": 0},
    "fused_retained": {"layers": 0.0, "density": 1.5, "rank": 0, "rounds": 0},
}


def test_settings_out_of_range_are_refused_before_any_work():
    cases = [(name, *setting) for name, values in OUT_OF_RANGE.items() for setting in values.items()]
    for name, setting, value in [*cases, ("federaser", "ratio", 0.0), ("exact_fun", "step", 0.0)]:
        with pytest.raises(SettingError, match=setting):
            method_class(name)(**{setting: value})

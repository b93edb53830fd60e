"""Each metric's formula against figures worked out by hand, on models that answer what a table says."""

import math
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedup import Federation, Forget
from fedup.bench.case import Case, EvaluationData, Outputs
from fedup.bench.cost import Cost
from fedup.bench.metrics import metric
from fedup.bench.scenarios import Situation, Triggered
from fedup.bench.task import Unlearned
from fedup.federation import Client
from fedup.registry import names
from fedup.tasks.datasets import Dataset
from fedup.tasks.evaluation import accuracy, predict

# Rows are numbered, and a row's input is its number. Three clients with 1, 2 and 3 held-out rows, classes 0, 1 and 2.
LABELS = {
    **{0: 0, 1: 0, 2: 1, 3: 2},  # client 0 trains on these,
    **{4: 0},  # holds this one out
    **{5: 1, 6: 1, 7: 2, 8: 0},  # client 1
    **{9: 1, 10: 2},
    **{11: 2, 12: 2, 13: 0, 14: 1},  # client 2
    **{15: 2, 16: 2, 17: 0},
    **{18: 0, 19: 1, 20: 2},  # validated on; no metric looks at them
}
TEST = {30: 0, 31: 0, 32: 1, 33: 1, 34: 1, 35: 2, 36: 2, 37: 2}  # the official test set
TRIGGERED = {number + 20: label for number, label in TEST.items()}  # 50 … 57: the same with a trigger
TRUE = {**LABELS, **TEST, **TRIGGERED}
CLIENT, CLASS, SAMPLES = Forget.clients([2]), Forget.classes([1]), Forget.samples({0: [0, 2], 1: [5]})
REQUESTS = {"client": CLIENT, "class": CLASS, "sample": SAMPLES}


def rows(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def inputs(numbers) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.float32)[:, None]


FEDERATION = Federation(
    inputs(LABELS),
    torch.tensor(list(LABELS.values())),
    (
        Client(0, train=rows(0, 1, 2, 3), validation=rows(18), heldout=rows(4)),
        Client(1, train=rows(5, 6, 7, 8), validation=rows(19), heldout=rows(9, 10)),
        Client(2, train=rows(11, 12, 13, 14), validation=rows(20), heldout=rows(15, 16, 17)),
    ),
    num_classes=3,
)
DATASET = Dataset(
    "tiny", FEDERATION.x, FEDERATION.y, inputs(TEST), torch.tensor(list(TEST.values())), ("nought", "one", "two")
)


class Table(nn.Module):
    """Answers with the logits that a table has for a row's number."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits.double())

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[x[:, 0].long()].float()


def right_but_for(*wrong: int) -> Table:
    """A model that is right about all rows but these, which it takes for the next class."""
    said = {number: (label + (number in wrong)) % 3 for number, label in TRUE.items()}
    return saying(said)


def saying(said: dict[int, int]) -> Table:
    logits = torch.zeros(60, 3)
    for number, label in {**TRUE, **said}.items():
        logits[number, label] = 5.0
    return Table(logits)


def data_of(request: Forget, *, target: int | None = None) -> EvaluationData:
    triggered = None
    if target is not None:
        triggered = Triggered(inputs(TRIGGERED), torch.tensor(list(TRIGGERED.values())), target)
    return EvaluationData(Situation(FEDERATION, request, "A story.", triggered), DATASET)


def case_of(now: nn.Module, request=CLASS, *, retrained=None, original=None, target=None, cost=None, restore=None):
    place = data_of(request, target=target)
    others = original or right_but_for(), retrained or right_but_for()
    return Case(Unlearned(now, cost or Cost(), restore), *(Outputs(model, place) for model in (now, *others)))


def figures(name: str, *args, **kwargs) -> dict:
    return metric(name).measure(case_of(*args, **kwargs))


# --- accuracies


def test_r_a_is_pooled_over_held_out_rows_of_clients_that_stay():
    found = figures("accuracy", right_but_for(4, 15, 16, 17), CLIENT)
    assert found["r_a"] == 2 / 3  # rows 4, 9, 10; those of client 2 do not count
    assert found["r_a_groups"] == (0 + 1) / 2  # client 0 has one row, client 1 two
    assert found["test"] == 1.0


def test_r_a_of_a_class_request_leaves_the_class_out_and_averages_over_classes():
    found = figures("accuracy", right_but_for(9, 15, 30, 32, 33), CLASS)
    assert found["r_a"] == 4 / 5  # rows 4, 10, 15, 16, 17; row 9 is of class 1
    assert found["r_a_groups"] == pytest.approx((1 + 2 / 3) / 2)  # class 0: 4, 17; class 2: 10, 15, 16
    assert found["test"] == 4 / 5  # test rows of class 1 are left out


def test_r_a_of_a_sample_request_counts_every_held_out_row_and_averages_over_clients():
    found = figures("accuracy", right_but_for(0, 2, 5, 10, 17), SAMPLES)
    assert found["r_a"] == 4 / 6
    assert found["r_a_groups"] == pytest.approx((1 + 1 / 2 + 2 / 3) / 3)


def test_f_a_is_over_held_out_rows_of_what_is_forgotten_and_over_its_training_rows():
    assert figures("accuracy", right_but_for(9), CLASS)["f_a"] == 0.0  # the one held-out row of class 1
    of_client = figures("accuracy", right_but_for(16, 17, 11, 4), CLIENT)
    assert (of_client["f_a"], of_client["f_a_train"]) == (pytest.approx(1 / 3), 3 / 4)
    of_class = figures("accuracy", right_but_for(2, 5, 19), CLASS)
    assert (of_class["f_a"], of_class["f_a_train"]) == (1.0, 2 / 4)  # trained on: 2, 5, 6, 14
    of_samples = figures("accuracy", right_but_for(2, 6), SAMPLES)
    assert (of_samples["f_a"], of_samples["f_a_train"]) == (None, pytest.approx(2 / 3))


def test_forgotten_training_rows_are_told_one_by_one_where_they_are_few():
    found = figures("accuracy", right_but_for(2), SAMPLES)["per_sample"]
    assert found["row"] == [0, 2, 5]
    assert found["right"] == [1, 0, 1]
    sure = math.log(math.exp(5) + 2)
    assert found["loss"] == [pytest.approx(loss, abs=1e-4) for loss in (sure - 5, sure, sure - 5)]


def test_a_loss_that_is_infinite_is_none():
    masked = right_but_for()
    with torch.no_grad():
        masked.logits[:, 1] = -torch.inf
    assert figures("accuracy", masked, CLASS)["per_sample"]["loss"] == [None] * 4


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(REQUESTS)), st.sets(st.sampled_from(sorted(TRUE))))
def test_accuracies_are_those_counted_row_by_row(kind, wrong):
    request = REQUESTS[kind]
    case = case_of(right_but_for(*wrong), request)
    groups: dict[object, list[bool]] = {}
    forgotten, trained = [], []
    for client in FEDERATION.clients:
        for row in client.heldout.tolist():
            if client.id in request.client_ids or LABELS[row] in request.class_ids:
                forgotten.append(row not in wrong)
            else:
                groups.setdefault(LABELS[row] if request.class_ids else client.id, []).append(row not in wrong)
        for row in client.train.tolist():
            named = client.id in request.client_ids or LABELS[row] in request.class_ids
            if named or row in request.sample_ids.get(client.id, ()):
                trained.append(row not in wrong)
    pooled = [right for group in groups.values() for right in group]
    test = [number not in wrong for number, label in TEST.items() if label not in request.class_ids]
    mean = lambda values: pytest.approx(sum(values) / len(values)) if values else None  # noqa: E731
    found = metric("accuracy").measure(case)
    assert found["r_a"] == mean(pooled)
    assert found["r_a_groups"] == mean([sum(group) / len(group) for group in groups.values()])
    assert found["test"] == mean(test)
    assert (found["f_a"], found["f_a_train"]) == (mean(forgotten), mean(trained))


# --- a backdoor that leads to class 0; triggered rows 50, 51 are of class 0, 52 … 54 of 1, 55 … 57 of 2


def test_attack_success_counts_triggered_rows_of_other_classes_that_get_the_target():
    model = saying({50: 1, 52: 0, 53: 0, 55: 0, 56: 1})
    found = figures("backdoor", model, SAMPLES, target=0)
    assert found["asr"] == 3 / 6
    assert found["triggered"] == 3 / 8  # 51, 54 and 57


def test_attack_success_does_not_look_at_rows_without_a_trigger():
    model = saying(dict.fromkeys({**LABELS, **TEST}, 0))
    assert figures("backdoor", model, SAMPLES, target=0) == {"asr": 0.0, "zero_a": 1.0, "ps": 1.0, "triggered": 1.0}


def test_zero_accuracy_is_the_recall_of_the_target_under_the_trigger():
    assert figures("backdoor", saying({50: 2, 52: 0}), SAMPLES, target=0)["zero_a"] == 1 / 2
    assert figures("backdoor", saying({50: 2, 52: 0}), SAMPLES, target=1)["zero_a"] == pytest.approx(2 / 3)


def test_precision_of_the_target_counts_what_is_called_by_its_name_under_the_trigger():
    model = saying({50: 2, 52: 0, 53: 0, 30: 1})
    assert figures("backdoor", model, SAMPLES, target=0)["ps"] == pytest.approx(1 / 3)  # 51, 52 and 53


def test_precision_of_a_target_that_is_never_named_is_none():
    assert figures("backdoor", saying({50: 1, 51: 2}), SAMPLES, target=0)["ps"] is None


def test_without_a_backdoor_its_figures_are_none():
    assert set(figures("backdoor", right_but_for(), SAMPLES).values()) == {None}


# --- closeness to Retrain


def test_gaps_are_ours_less_retrains():
    found = figures("closeness", right_but_for(4, 2), CLASS, retrained=right_but_for(9, 5, 6, 30))
    assert found["gap_r_a"] == pytest.approx(4 / 5 - 1)
    assert found["gap_f_a"] == 1.0
    assert found["gap_f_a_train"] == pytest.approx(3 / 4 - 2 / 4)
    assert found["gap_test"] == pytest.approx(1 - 4 / 5)
    assert figures("closeness", right_but_for(), SAMPLES)["gap_f_a"] is None


def test_tug_of_war_multiplies_closeness_on_forgotten_retained_and_test_rows():
    found = figures("closeness", right_but_for(2, 0, 3), CLASS, retrained=right_but_for(2, 5, 6, 14, 35))
    forgotten, retained, test = 3 / 4 - 0, 6 / 8 - 1, 1 - 4 / 5
    assert found["tow"] == pytest.approx((1 - forgotten) * (1 + retained) * (1 - test))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(REQUESTS)),
    st.sets(st.sampled_from(sorted({**LABELS, **TEST}))),
    st.sets(st.sampled_from(sorted({**LABELS, **TEST}))),
)
def test_tug_of_war_is_one_just_where_all_accuracies_are_retrains(kind, ours, retrains):
    case = case_of(right_but_for(*ours), REQUESTS[kind], retrained=right_but_for(*retrains))
    found = metric("closeness").measure(case)["tow"]
    parts = (("forgotten", True), ("retained", False), ("test", False))
    equal = all(case.now.accuracy(p, forgotten=f) == case.retrained.accuracy(p, forgotten=f) for p, f in parts)
    assert 0 <= found <= 1
    assert (found == 1) == equal


def logits_for(numbers: dict[int, list[float]]) -> Table:
    table = right_but_for()
    with torch.no_grad():
        for number, values in numbers.items():
            table.logits[number] = torch.tensor(values)
    return table


def test_total_variation_and_kl_are_means_over_held_out_rows_of_what_is_forgotten():
    ours = {15: [0.5, 0.25, 0.25], 16: [0.2, 0.3, 0.5], 17: [0.1, 0.1, 0.8]}
    theirs = {15: [0.25, 0.25, 0.5], 16: [0.2, 0.3, 0.5], 17: [0.4, 0.4, 0.2]}
    models = [logits_for({n: [math.log(p) for p in row] for n, row in of.items()}) for of in (ours, theirs)]
    found = figures("closeness", models[0], CLIENT, retrained=models[1])
    assert found["tv"] == pytest.approx((0.25 + 0 + 0.6) / 3)
    kl = sum(q * math.log(q / p) for n in ours for p, q in zip(ours[n], theirs[n], strict=True)) / 3
    assert found["kl"] == pytest.approx(kl, rel=1e-5)


def test_the_distance_on_samples_is_over_the_samples_themselves():
    far = logits_for({row: [0.0, 0.0, 50.0] for row in (0, 2)})
    near = figures("closeness", far, SAMPLES, retrained=right_but_for(2, 0))
    other_rows = figures("closeness", logits_for({4: [0.0, 0.0, 50.0], 6: [50.0, 0.0, 0.0]}), SAMPLES)
    assert near["tv"] > 0.3
    assert (other_rows["tv"], other_rows["kl"]) == (0.0, 0.0)


@pytest.mark.parametrize("struck_out", ["ours", "retrains", "both"])
def test_a_class_that_is_struck_out_makes_no_infinite_distance(struck_out):
    masked = right_but_for()
    with torch.no_grad():
        masked.logits[:, 1] = -torch.inf
    now = right_but_for() if struck_out == "retrains" else masked
    retrained = right_but_for() if struck_out == "ours" else masked
    found = figures("closeness", now, CLASS, retrained=retrained)
    assert 0 <= found["tv"] <= 1
    assert math.isfinite(found["kl"])
    if struck_out == "ours":  # Retrain puts nearly all on the class that has none
        certain = math.exp(5) / (math.exp(5) + 2)
        assert found["tv"] == pytest.approx(certain)
        assert found["kl"] > certain * math.log(certain / 1e-9) - 1
    if struck_out == "both":
        assert (found["tv"], found["kl"]) == (0.0, 0.0)


logit_tables = st.lists(st.floats(-60, 60), min_size=9, max_size=9)


@settings(max_examples=80, deadline=None)
@given(logit_tables, logit_tables)
def test_total_variation_lies_in_zero_to_one_is_symmetric_and_zero_for_the_same(first, second):
    models = [logits_for({15 + i: values[3 * i : 3 * i + 3] for i in range(3)}) for values in (first, second)]
    there = figures("closeness", models[0], CLIENT, retrained=models[1])
    back = figures("closeness", models[1], CLIENT, retrained=models[0])
    assert 0 <= there["tv"] <= 1 + 1e-12
    assert there["tv"] == pytest.approx(back["tv"])
    assert there["kl"] >= -1e-6 and math.isfinite(there["kl"])
    assert there["kl"] >= 2 * there["tv"] ** 2 - 1e-6  # Pinsker
    same = figures("closeness", models[0], CLIENT, retrained=models[0])
    assert (same["tv"], same["kl"]) == (0.0, 0.0)


# --- whether the original is back


def linear() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(1, 3).eval()


def restored(original: nn.Module, back: nn.Module | None) -> float | None:
    restore = None if back is None else lambda: back
    return figures("serving", right_but_for(), original=original, restore=restore)["restored"]


def test_the_original_and_a_copy_of_it_are_restored():
    model = linear()
    assert restored(model, model) == 1.0
    assert restored(model, linear()) == 1.0
    assert restored(model, None) is None


def test_one_changed_weight_is_not_restored():
    for name in ("weight", "bias"):
        back = linear()
        with torch.no_grad():
            weight = getattr(back, name).view(-1)
            weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))  # the last bit
        assert restored(linear(), back) == 0.0


class WithUnused(nn.Module):
    """A layer that no answer depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear(), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_changed_weight_that_no_answer_depends_on_is_not_restored():
    back = WithUnused()
    back.unused.data += 1
    assert restored(WithUnused(), back) == 0.0


def test_the_same_weights_that_answer_otherwise_are_not_restored():
    back = linear()
    back.register_forward_hook(lambda module, args, output: output + 1e-3)
    assert restored(linear(), back) == 0.0


# --- what it took


def test_bytes_are_told_by_direction_and_all_together():
    cost = Cost(bytes_up=3, bytes_down=50, ahead_bytes_up=700, storage_bytes=9)
    told = {"bytes_up": 3, "bytes_down": 50, "ahead_bytes_up": 700, "bytes_all": 753}
    assert figures("cost", right_but_for(), cost=cost).items() >= told.items()


def test_clients_their_steps_and_the_servers_storage_are_counted():
    cost = Cost(clients={4, 2, 9}, local_steps=17, storage_bytes=23)
    told = {"clients_contacted": 3, "local_steps": 17, "storage_bytes": 23}
    assert figures("cost", right_but_for(), cost=cost).items() >= told.items()


def test_time_is_the_sum_of_its_stages_without_what_was_done_ahead():
    cost = Cost(time_s={"contact": 0.5, "fit": 1.25}, ahead_time_s=8.0)
    found = figures("cost", right_but_for(), cost=cost)
    assert (found["time"], found["ahead_time"]) == (1.75, 8.0)
    assert found["time_by_stage"] == {"contact": 0.5, "fit": 1.25}


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return torch.zeros(len(x), 3)


def test_the_overhead_of_serving_is_over_the_originals_time():
    assert figures("serving", Slow(0.008), original=Slow(0.002))["overhead"] > 1.5
    assert figures("serving", Slow(0.002), original=Slow(0.008))["overhead"] < 1 / 1.5


# --- time to effect


def figures_at(time_s: float, r_a: float, unwanted: float) -> dict[str, float]:
    return {"time_s": time_s, "r_a": r_a, "unwanted": unwanted}


def effect(path, *, now, request=CLASS, retrained=None, total=9.0, target=None) -> float | None:
    cost = Cost(time_s={"train": total}, path=path)
    case = case_of(now, request, retrained=retrained, cost=cost, target=target)
    assert metric("cost").measure(case)["time_to_effect"] == case.effect_s()
    return case.effect_s()


FORGOT = right_but_for(9)  # R-A is 1, F-A is 0: as good as a model can be


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([], 9.0),  # a filter has one moment, the last
        ([figures_at(1, 1.0, 0.0), figures_at(2, 1.0, 0.0)], 1),  # the first moment counts, not the best
        ([figures_at(1, 1.0, 0.5), figures_at(2, 1.0, 0.009), figures_at(3, 1.0, 0.0)], 2),  # within a point of F-A
        ([figures_at(1, 0.98, 0.0), figures_at(2, 0.991, 0.0)], 2),  # within a point of R-A
        ([figures_at(1, 1.0, 0.5), figures_at(2, 0.5, 0.0)], 9.0),  # both at the same time
    ],
)
def test_time_to_effect_is_the_first_moment_within_a_point_of_retrain_on_both_sides(path, expected):
    assert effect(path, now=FORGOT, retrained=FORGOT) == expected


def test_a_model_better_than_retrain_is_in_effect():
    assert effect([], now=FORGOT, retrained=right_but_for(4)) == 9.0  # more R-A, less F-A


def test_a_model_that_never_comes_near_retrain_has_no_time_to_effect():
    assert effect([figures_at(1, 0.5, 0.0)], now=right_but_for(), retrained=FORGOT) is None  # still knows class 1
    assert effect([], now=right_but_for(9, 4), retrained=FORGOT) is None  # lost too much besides


def test_figures_on_the_way_are_r_a_and_f_a_or_attack_success():
    model = right_but_for(4, 9, 2, 5, 52)
    assert Outputs(model, data_of(CLASS)).moment() == {"r_a": 4 / 5, "unwanted": 0.0}
    assert Outputs(model, data_of(CLIENT)).moment() == {"r_a": pytest.approx(1 / 3), "unwanted": 1.0}
    assert Outputs(model, data_of(SAMPLES)).moment() == {
        "r_a": 4 / 6,
        "unwanted": pytest.approx(1 / 3),
    }  # of rows 0, 2, 5
    backdoor = Outputs(saying({52: 0, 53: 0}), data_of(SAMPLES, target=0)).moment()
    assert backdoor == {"r_a": 1.0, "unwanted": pytest.approx(2 / 6)}


def test_a_backdoors_effect_is_over_when_its_trigger_fails_whatever_the_samples_say():
    remembers = saying({50: 1})  # right about the named rows, as is Retrain's double; the trigger does nothing
    assert effect([], now=remembers, request=SAMPLES, retrained=right_but_for(0, 2, 5), target=0) == 9.0
    led = saying({55: 0})
    assert effect([], now=led, request=SAMPLES, retrained=right_but_for(), target=0) is None


# --- one pass over each set of rows


class Counting(Table):
    """Counts how often it is asked for each row."""

    def __init__(self, table: Table) -> None:
        super().__init__(table.logits.detach())
        self.asked: Counter[int] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.asked.update(x[:, 0].int().tolist())
        return super().forward(x)


CLOCKED = 13  # passes of serving_overhead over test rows, through two of the models


@pytest.mark.parametrize("target", [None, 0], ids=["no trigger", "a trigger"])
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "backwards"])
def test_all_metrics_together_ask_each_model_for_each_row_of_a_set_once(request_, target, order):
    now, original, retrained = (Counting(right_but_for(*wrong)) for wrong in ((9, 2), (), (4, 52)))
    back = Counting(right_but_for())
    case = case_of(now, request_, original=original, retrained=retrained, target=target, restore=lambda: back)
    for name in names("fedup.bench.metrics")[::order]:
        metric(name).measure(case)
    gone = set(FEDERATION.forgotten(request_).tolist())
    for model, extra in ((now, CLOCKED), (original, CLOCKED), (retrained, 0), (back, 0)):
        assert all(times <= 1 + (extra if row in TEST else 0) for row, times in model.asked.items()), model.asked
        assert not {18, 19, 20} & model.asked.keys()  # validated on
        assert target is not None or not TRIGGERED.keys() & model.asked.keys()
    assert now.asked.keys() >= gone | TEST.keys() | ({*TRIGGERED} if target is not None else set())
    assert back.asked.keys() <= TEST.keys()


def test_a_set_is_asked_for_once_and_the_sets_of_different_models_do_not_mix():
    models = Counting(right_but_for()), Counting(right_but_for(4))
    of = [Outputs(model, data_of(CLASS)) for model in models]
    for _ in range(3):
        assert [outputs.accuracy("heldout", forgotten=False) for outputs in of] == [1.0, 4 / 5]
        assert all(set(model.asked.values()) == {1} for model in models)


@pytest.mark.parametrize("part", ["heldout", "forgotten", "retained", "test", "triggered"])
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())
def test_logits_labels_and_marks_of_a_set_belong_to_the_same_rows(request_, part):
    place = data_of(request_, target=0)
    x, chosen = place.inputs(part)
    numbers = (x if chosen is None else x[chosen])[:, 0].int().tolist()
    assert place.labels(part).tolist() == [TRUE[number] for number in numbers]
    assert len(place.to_forget(part)) == len(numbers)
    logits = Outputs(right_but_for(), place).logits(part)
    assert logits.argmax(1).tolist() == [TRUE[number] for number in numbers]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 29), min_size=1, max_size=40), st.integers(1, 12))
def test_predictions_of_chosen_rows_are_those_of_the_rows_alone(chosen, batch_size):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).eval()
        x = torch.randn(30, 16)
    picked = rows(*chosen)
    found = predict(model, x, picked, batch_size=batch_size)
    torch.testing.assert_close(found, predict(model, x[picked], batch_size=batch_size))  # bits depend on the CPU
    y = torch.arange(30) % 3
    assert accuracy(model, x, y, picked) == accuracy(model, x[picked], y[picked])


def test_predictions_need_no_second_array_of_the_data():
    sizes = []
    model = linear()
    model.register_forward_pre_hook(lambda module, args: sizes.append(args[0].untyped_storage().nbytes()))
    predict(model, torch.zeros(2000, 1), torch.arange(1500))
    assert max(sizes) == 512 * 4  # a batch of floats


def test_the_accuracy_on_no_row_is_no_number():
    assert math.isnan(accuracy(linear(), torch.zeros(3, 1), torch.zeros(3, dtype=torch.long), rows()))


# --- loss on what is forgotten


RIGHT = math.log(1 + 2 * math.exp(-5))  # of a row with logits 5, 0, 0


def test_the_loss_is_the_mean_over_forgotten_training_rows_and_no_others():
    found = figures("closeness", right_but_for(0, 1, 3, 6, 4), SAMPLES)  # of 0, 2 and 5 one is wrong
    assert found["forget_loss"] == pytest.approx(RIGHT + 5 / 3)
    assert figures("closeness", right_but_for(15, 19), CLIENT)["forget_loss"] == pytest.approx(RIGHT)
    of_class = figures("closeness", right_but_for(2, 5, 6, 9), CLASS)  # trained on: 2, 5, 6, 14
    assert of_class["forget_loss"] == pytest.approx(RIGHT + 5 * 3 / 4)


def test_the_gap_is_ours_less_retrains():
    found = figures("closeness", right_but_for(0), SAMPLES, retrained=right_but_for(0, 2, 5))
    assert found["gap_forget_loss"] == pytest.approx(5 / 3 - 5)
    retrained = right_but_for(0, 2)
    assert figures("closeness", retrained, SAMPLES, retrained=retrained)["gap_forget_loss"] == 0


def test_a_masked_logit_has_no_loss_and_leaves_no_gap():
    masked = right_but_for()
    masked.logits.data[5, 1] = -math.inf  # row 5 is of class 1
    found = figures("closeness", masked, SAMPLES)
    assert (found["forget_loss"], found["gap_forget_loss"]) == (None, None)
    found = figures("closeness", right_but_for(), SAMPLES, retrained=masked)
    assert (found["forget_loss"], found["gap_forget_loss"]) == (pytest.approx(RIGHT), None)
    masked.logits.data[5, 1], masked.logits.data[6, 1] = 5.0, -math.inf  # not among those forgotten
    assert figures("closeness", masked, SAMPLES)["forget_loss"] == pytest.approx(RIGHT)

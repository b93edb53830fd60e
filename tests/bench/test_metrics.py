"""Each metric's formula against figures worked out by hand, on models that answer what a table says."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench._table import Table
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


def test_forgotten_training_rows_are_told_one_by_one_where_they_are_few():
    found = figures("accuracy", right_but_for(2), SAMPLES)["per_sample"]
    assert found["row"] == [0, 2, 5]
    assert found["right"] == [1, 0, 1]
    assert found["loss"] == [pytest.approx(loss, abs=1e-4) for loss in (RIGHT, RIGHT + 5, RIGHT)]
    masked = right_but_for()
    masked.logits.data[:, 1] = -torch.inf  # infinite losses are none
    assert figures("accuracy", masked, CLASS)["per_sample"]["loss"] == [None] * 4


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from([*TRIGGERED, *TEST]), st.integers(0, 2)), st.integers(0, 2))
def test_figures_of_a_backdoor_are_counts_of_triggered_rows(said, target):
    answers = {number: said.get(number, label) for number, label in TRIGGERED.items()}
    named = [number for number, answer in answers.items() if answer == target]
    of_target = [number for number, label in TRIGGERED.items() if label == target]
    hits = set(named) & set(of_target)
    assert figures("backdoor", saying(said), SAMPLES, target=target) == {
        "asr": pytest.approx((len(named) - len(hits)) / (8 - len(of_target))),  # of other classes
        "zero_a": pytest.approx(len(hits) / len(of_target)),  # recall
        "ps": pytest.approx(len(hits) / len(named)) if named else None,  # precision
        "triggered": pytest.approx(sum(answers[number] == label for number, label in TRIGGERED.items()) / 8),
    }
    assert set(figures("backdoor", saying(said), SAMPLES).values()) == {None}  # there is none


# --- closeness to Retrain


def test_gaps_are_ours_less_retrains():
    found = figures("closeness", right_but_for(4, 2), CLASS, retrained=right_but_for(9, 5, 6, 30))
    assert found["gap_r_a"] == pytest.approx(4 / 5 - 1)
    assert found["gap_f_a"] == 1.0
    assert found["gap_f_a_train"] == pytest.approx(3 / 4 - 2 / 4)
    assert found["gap_test"] == pytest.approx(1 - 4 / 5)
    assert figures("closeness", right_but_for(), SAMPLES)["gap_f_a"] is None


RIGHT = math.log(1 + 2 * math.exp(-5))  # the loss of a row with logits 5, 0, 0


def test_the_loss_is_the_mean_over_forgotten_training_rows_and_a_masked_logit_has_none():
    found = figures("closeness", right_but_for(0, 1, 3, 6, 4), SAMPLES, retrained=right_but_for(0, 2, 5))
    assert found["forget_loss"] == pytest.approx(RIGHT + 5 / 3)  # of 0, 2 and 5 one is wrong
    assert found["gap_forget_loss"] == pytest.approx(5 / 3 - 5)
    assert figures("closeness", right_but_for(15, 19), CLIENT)["forget_loss"] == pytest.approx(RIGHT)
    masked = right_but_for()
    masked.logits.data[5, 1] = -math.inf  # row 5 is of class 1
    found = figures("closeness", masked, SAMPLES)
    assert (found["forget_loss"], found["gap_forget_loss"]) == (None, None)
    found = figures("closeness", right_but_for(), SAMPLES, retrained=masked)
    assert (found["forget_loss"], found["gap_forget_loss"]) == (pytest.approx(RIGHT), None)


def test_tug_of_war_multiplies_closeness_on_forgotten_retained_and_test_rows():
    found = figures("closeness", right_but_for(2, 0, 3), CLASS, retrained=right_but_for(2, 5, 6, 14, 35))
    forgotten, retained, test = 3 / 4 - 0, 6 / 8 - 1, 1 - 4 / 5
    assert found["tow"] == pytest.approx((1 - forgotten) * (1 + retained) * (1 - test))


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


def test_a_class_that_is_struck_out_makes_no_infinite_distance():
    masked = right_but_for()
    masked.logits.data[:, 1] = -torch.inf
    found = figures("closeness", masked, CLASS, retrained=right_but_for())
    certain = math.exp(5) / (math.exp(5) + 2)  # Retrain puts nearly all on the class that has none
    assert found["tv"] == pytest.approx(certain)
    assert math.isfinite(found["kl"]) and found["kl"] > certain * math.log(certain / 1e-9) - 1
    both = figures("closeness", masked, CLASS, retrained=masked)
    assert (both["tv"], both["kl"]) == (0.0, 0.0)


# --- whether the original is back


def linear() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(1, 3).eval()


def restored(original: nn.Module, back: nn.Module | None) -> float | None:
    restore = None if back is None else lambda: back
    return figures("serving", right_but_for(), original=original, restore=restore)["restored"]


def test_restored_is_the_original_or_a_copy_and_nothing_that_differs_in_a_bit():
    model = linear()
    assert (restored(model, model), restored(model, linear()), restored(model, None)) == (1.0, 1.0, None)
    for name in ("weight", "bias"):
        back = linear()
        weight = getattr(back, name).data.view(-1)
        weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))  # the last bit
        assert restored(linear(), back) == 0.0
    back = linear()
    back.register_forward_hook(lambda module, args, output: output + 1e-3)  # the same weights, other answers
    assert restored(linear(), back) == 0.0


# --- what it took


def test_costs_are_told_by_direction_by_stage_and_all_together():
    cost = Cost(
        time_s={"contact": 0.5, "fit": 1.25},
        **{"bytes_up": 3, "bytes_down": 50, "ahead_bytes_up": 700, "ahead_time_s": 8.0},
        **{"clients": {4, 2, 9}, "local_steps": 17, "storage_bytes": 23},
    )
    told = {"bytes_up": 3, "bytes_down": 50, "ahead_bytes_up": 700, "bytes_all": 753, "clients_contacted": 3}
    told |= {"local_steps": 17, "storage_bytes": 23, "time": 1.75, "ahead_time": 8.0}
    assert figures("cost", right_but_for(), cost=cost).items() >= told.items()
    assert figures("cost", right_but_for(), cost=cost)["time_by_stage"] == {"contact": 0.5, "fit": 1.25}


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


def test_only_a_model_near_retrain_or_better_has_a_time_to_effect():
    assert effect([], now=FORGOT, retrained=right_but_for(4)) == 9.0  # more R-A, less F-A
    assert effect([figures_at(1, 0.5, 0.0)], now=right_but_for(), retrained=FORGOT) is None  # still knows class 1
    assert effect([], now=right_but_for(9, 4), retrained=FORGOT) is None  # lost too much besides
    remembers = saying({50: 1})  # right about the named rows, but its trigger does nothing
    assert effect([], now=remembers, request=SAMPLES, retrained=right_but_for(0, 2, 5), target=0) == 9.0
    assert effect([], now=saying({55: 0}), request=SAMPLES, retrained=right_but_for(), target=0) is None


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
def test_all_metrics_together_ask_each_model_for_each_row_of_a_set_once(request_, target):
    now, original, retrained = (Counting(right_but_for(*wrong)) for wrong in ((9, 2), (), (4, 52)))
    back = Counting(right_but_for())
    case = case_of(now, request_, original=original, retrained=retrained, target=target, restore=lambda: back)
    for name in names("fedup.bench.metrics"):
        metric(name).measure(case)
    gone = set(FEDERATION.forgotten(request_).tolist())
    for model, extra in ((now, CLOCKED), (original, CLOCKED), (retrained, 0), (back, 0)):
        assert all(times <= 1 + (extra if row in TEST else 0) for row, times in model.asked.items()), model.asked
        assert not {18, 19, 20} & model.asked.keys()  # validated on
        assert target is not None or not TRIGGERED.keys() & model.asked.keys()
    assert now.asked.keys() >= gone | TEST.keys() | ({*TRIGGERED} if target is not None else set())
    assert back.asked.keys() <= TEST.keys()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 29), max_size=40), st.integers(1, 12))
def test_predictions_of_chosen_rows_are_those_of_the_rows_alone_and_need_no_second_array(chosen, batch_size):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).eval()
        x = torch.randn(30, 16)
    sizes, picked, y = [0], rows(*chosen), torch.arange(30) % 3
    model.register_forward_pre_hook(lambda module, args: sizes.append(args[0].untyped_storage().nbytes()))
    found = predict(model, x, picked, batch_size=batch_size)
    assert max(sizes) <= batch_size * 16 * 4  # a batch of floats
    torch.testing.assert_close(found, predict(model, x[picked], batch_size=batch_size))  # bits depend on the CPU
    right, alone = accuracy(model, x, y, picked), accuracy(model, x[picked], y[picked])
    assert right == alone if chosen else math.isnan(right)

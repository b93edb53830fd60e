"""Where a control beats FedUP, in words that the result files bear out."""

import pytest
from tests.bench._made_up import TOML, MadeUp

from fedup.bench.summary import summarize
from fedup.bench.verdicts import verdicts


@pytest.fixture
def told(tmp_path):
    """The verdicts on three seeds of a class request, each method with one figure for all or one for each seed."""

    def make(**figures):
        made_up = MadeUp(tmp_path, TOML + "[methods.finetune]\n[methods.retrain_again]\n")
        for method, by_key in figures.items():
            by_seed = {
                seed: {key: value[seed] if isinstance(value, list) else value for key, value in by_key.items()}
                for seed in range(3)
            }
            made_up.put("class", method, by_seed)
        return verdicts(summarize(made_up.experiment, made_up.results))

    return make


BASE = {"r_a": 0.9, "f_a": 0.0, "tv": 0.3, "kl": 0.012}


def test_a_control_that_is_better_in_every_seed_is_named_with_both_values(told):
    assert told(retrain=BASE, fedup=BASE, logit_mask={**BASE, "tv": 0.1}) == [
        "mnist-lenet5, class: logit_mask does better than FedUP on TV to Retrain (0.100 against 0.300)."
    ]


@pytest.mark.parametrize(
    "better",
    [{"tv": 0.299}, {"tv": [0.1, 0.1, 0.4]}, {"tv": 0.3}, {"tv": 0.5}, {"r_a": 0.75, "tv": 0.1}, {"kl": 0.004}],
    ids=["by next to nothing", "in two seeds of three", "equal", "worse", "useless otherwise", "as an average varies"],
)
def test_a_control_that_is_not_is_not_named(told, better):
    assert told(retrain=BASE, fedup=BASE, logit_mask={**BASE, **better}) == []


def test_f_a_is_judged_by_how_close_it_is_to_retrains(told):
    figures = {"retrain": {**BASE, "f_a": 0.3}, "fedup": {**BASE, "f_a": 0.0}, "none": {**BASE, "f_a": 0.35}}
    assert "none does better than FedUP on F-A (0.050 from Retrain's against 0.300)" in told(**figures)[0]
    figures["none"] = {**BASE, "f_a": 0.65}
    assert told(**figures) == []


@pytest.mark.parametrize(("asr", "named"), [(0.05, True), (0.9, False), (None, False)])
def test_who_keeps_the_backdoor_is_not_praised_for_finding_its_class(told, asr, named):
    goal, ours = {**BASE, "asr": 0.04, "zero_a": 0.6}, {**BASE, "asr": 0.02, "zero_a": 0.5}
    theirs = {**BASE, "zero_a": 0.99, **({} if asr is None else {"asr": asr})}
    assert any("0A (0.990 against 0.500)" in one for one in told(retrain=goal, fedup=ours, none=theirs)) == named


def test_an_effect_that_fedup_never_reaches_is_lost_to_whoever_does(told):
    fast, never = {**BASE, "time_to_effect": 5.0}, {**BASE, "time_to_effect": None}
    assert "time to effect (5.00 s against never)" in told(retrain=BASE, fedup=never, none=fast)[0]
    assert told(retrain=BASE, fedup=fast, none=never) == []
    assert told(retrain=BASE, fedup=never, none={**BASE, "time_to_effect": [5.0, 5.0, None]}) == []


# --- privacy is judged, too


@pytest.mark.parametrize(
    ("key", "goal", "ours", "theirs", "told_as"),
    [
        ("mia_learned", 0.55, 0.64, 0.57, "MIA, paper (0.020 from Retrain's against 0.090)"),
        ("mia_auc", 0.50, 0.60, 0.48, "MIA, AUC (0.020 from Retrain's against 0.100)"),
        ("mia_tpr", 0.01, 0.05, 0.02, "MIA, TPR at 1 % (0.010 from Retrain's against 0.040)"),
        ("kl", 0.0, 0.5, 0.1, "KL to Retrain (0.10 against 0.50)"),
        ("forget_loss", 11.0, 5.0, 10.0, "loss, forgotten (1.000 from Retrain's against 6.000)"),
    ],
)
def test_membership_inference_kl_and_the_forget_loss_are_judged(told, key, goal, ours, theirs, told_as):
    figures = told(retrain={**BASE, key: goal}, fedup={**BASE, key: ours}, none={**BASE, key: theirs})
    assert figures == [f"mnist-lenet5, class: none does better than FedUP on {told_as}."]


def test_where_fedup_is_the_worst_of_all_is_said_with_the_range_of_the_others(told):
    goal, ours = {**BASE, "mia_learned": 0.55}, {**BASE, "mia_learned": 0.64}
    others = {name: {**BASE, "mia_learned": value} for name, value in (("logit_mask", 0.57), ("finetune", 0.51))}
    assert told(retrain=goal, fedup=ours, **others)[-1] == (
        "mnist-lenet5, class: FedUP is the worst of all on MIA, paper (0.090 from Retrain's against 0.020 … 0.040)."
    )
    others["finetune"]["mia_learned"] = 0.70  # one is worse
    assert not any("worst" in one for one in told(retrain=goal, fedup=ours, **others))


def test_fedup_is_not_called_the_worst_beside_one_other_or_the_untouched_model(told):
    goal, ours, near = ({**BASE, "tv": value} for value in (0.0, 0.5, 0.1))
    assert not any("worst" in one for one in told(retrain=goal, fedup=ours, logit_mask=near, none=near))
    assert any("worst" in one for one in told(retrain=goal, fedup=ours, logit_mask=near, finetune=near))


def test_the_floor_stands_beside_what_is_measured_against_retrain_and_is_no_rival(told):
    goal, ours, near, floor = ({**BASE, "tv": value} for value in (0.0, 0.5, 0.1, 0.02))
    sentences = told(retrain=goal, fedup=ours, logit_mask=near, retrain_again=floor)
    assert sentences == [
        "mnist-lenet5, class: logit_mask does better than FedUP on TV to Retrain (0.100 against 0.500, floor 0.020)."
    ]

"""Labels and values: the closed form is ridge regression on what is retained, and requests mean what the page says."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_diabetes, make_multilabel_classification
from torch import nn

import fedup
from fedup import DP, Federation, FilterConfig, Forget, LocalTraining, MomentConfig, Terms
from fedup.errors import CutError, FedUPError, HarmError, RequestError, SettingError
from fedup.filters.closed_form import FEW_ROWS_RIDGE, RIDGE, SHARPNESS, RetainedStatistics, ridge_scores
from fedup.filters.target_form import TargetStatistics, target_scores
from fedup.models.features import FeatureReader
from fedup.statistics.integer_moments import IntegerMoments, retained_mask, second_moment
from fedup.targets import group_rows
from fedup.tasks.evaluation import FederationJudge
from fedup.tasks.scores import score

few = settings(max_examples=6, deadline=None, derandomize=True)
LOCAL = LocalTraining(batch_size=16, lr=0.02)


@cache
def diabetes() -> tuple[Federation, nn.Module]:
    """A trained regression: 442 patients at six hospitals."""
    table = load_diabetes()
    federation = Federation.of((table.data / table.data.std(0), table.target), [f"h{i % 6}" for i in range(442)])
    return federation, trained(federation, 10, 1)


@cache
def tags() -> tuple[Federation, nn.Module]:
    """A trained classifier of four labels, any of which a row may have."""
    x, y = make_multilabel_classification(600, 20, n_classes=4, random_state=0)
    federation = Federation.of((x / x.std(0), y), np.arange(600) % 5)
    return federation, trained(federation, 20, 4)


def trained(federation: Federation, inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(inputs, 24), nn.ReLU(), nn.Linear(24, outputs))
    return fedup.federate(start, federation, rounds=20, local=LOCAL).model


def answer(case, *requests, **options):
    """A store and a plugged model with these requests in force, one after another."""
    federation, model = case
    store, plugged = fedup.collect(model, federation), fedup.plug(model)
    reports = [fedup.unlearn(plugged, store, request, **options) for request in requests]
    return store, plugged, reports


def pooled_ridge(federation: Federation, model: nn.Module, forget: Forget, config: MomentConfig):
    """Ridge regression by numpy on the quantised features and targets of all retained rows together."""
    rows = federation.retained(forget)
    features = config.integers(FeatureReader(model, "2").read(federation.x, rows).values)[0].numpy() * config.step
    targets = config.target_integers(federation.y[rows])[0].numpy() * config.value_step
    centred, mean = features - features.mean(0), features.mean(0)
    covariance = centred.T @ centred / len(rows)
    ridge = RIDGE + FEW_ROWS_RIDGE * features.shape[1] / len(rows)
    damped = covariance + ridge * np.diag(covariance).mean() * np.eye(len(covariance))
    weight = np.linalg.solve(damped, centred.T @ (targets - targets.mean(0)) / len(rows)).T
    return weight, targets.mean(0) - weight @ mean


# --- the closed form


@pytest.mark.parametrize("case", [diabetes, tags])
@few
@given(order=st.permutations([0, 2, 3]), number=st.integers(1, 3))
def test_the_closed_form_is_ridge_on_pooled_retained_rows_in_any_order(case, order, number):
    federation, model = case()
    store, plugged, _ = answer(case(), *(Forget.clients([client]) for client in order[:number]))
    forget = Forget.clients(order[:number])
    solved = target_scores(TargetStatistics.of(store.retained(forget), store.config))
    weight, bias = pooled_ridge(federation, model, forget, store.config)
    assert np.allclose(solved.weight.numpy(), weight, rtol=1e-6, atol=1e-6 * np.abs(weight).max())
    assert np.allclose(solved.bias.numpy(), bias, rtol=1e-6, atol=1e-6)
    if federation.targets == "values":  # the filter gives just these values, and nearly those of unrounded features
        served = solved.of(FeatureReader(model, "2").read(federation.x, federation.rows()).values)
        assert torch.allclose(plugged(federation.x[federation.rows()]).double(), served, atol=0.5)
    fresh = fedup.collect(model, federation, statistics=store.config, forget=[forget])  # asked without these clients
    again = fedup.plug(model)
    fedup.unlearn(again, fresh, forget)
    assert fresh.config == store.config and fresh.total == store.retained(forget)
    assert torch.equal(plugged(federation.x), again(federation.x))


@few
@given(st.integers(0, 10**6), st.integers(2, 5))
def test_one_hot_labels_have_the_sums_and_the_ridge_scores_of_classes(seed, classes):
    source = torch.Generator().manual_seed(seed)
    features, y = torch.randn(80, 6, generator=source), torch.randint(classes, (80,), generator=source)
    plain, config = MomentConfig(), MomentConfig(targets="labels", outputs=classes)
    by_class = IntegerMoments.of(features, y, classes, plain)
    one_hot, _ = config.target_integers(nn.functional.one_hot(y, classes).bool())
    joined = torch.cat([plain.integers(features)[0], one_hot], 1)
    joint = IntegerMoments(torch.tensor([80]), joined.sum(0)[None].long(), second_moment(joined, config))
    dense = joint.dense_second().long()
    assert torch.equal(dense[6:, :6], by_class.sums) and torch.equal(joint.sums[0, 6:], by_class.counts)
    assert torch.equal(dense[6:, 6:], by_class.counts.diag())
    of_classes = ridge_scores(RetainedStatistics.of(by_class, plain))
    of_labels = target_scores(TargetStatistics.of(joint, config))
    assert torch.allclose(of_classes.weight, of_labels.weight, atol=1e-12)
    assert torch.allclose(of_classes.bias, of_labels.bias, atol=1e-12)


@few
@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(0, 0.5))
def test_no_label_of_few_rows_shows_by_itself(seed, least, share):
    source = torch.Generator().manual_seed(seed)
    groups = torch.rand(60, 4, generator=source) < torch.tensor([1.0, 0.5, 0.2, 0.05])
    out = torch.rand(60, generator=source) < share
    config = MomentConfig(least_rows=least)
    reported = retained_mask(groups, torch.zeros_like(out), config)
    kept = retained_mask(groups, out, config)
    assert not bool((kept & out).any()) and not bool((kept & ~reported).any())
    for own in groups.T:
        staying, leaving = int((own & kept).sum()), int((own & reported & ~kept).sum())
        assert staying == 0 or (staying >= least and (leaving == 0 or leaving >= least))


def test_values_of_any_size_find_a_grid_and_outliers_are_cut_off_and_counted():
    federation, _ = diabetes()
    rows = federation.rows()
    for scale in (1e-3, 1.0, 1e6):
        scaled = federation.relabeled(federation.y * scale)
        model = trained(scaled, 10, 1)
        store = fedup.collect(model, scaled)
        assert store.clipped == 0 and float(scaled.y[rows].square().mean().sqrt()) / store.config.value_step >= 64
        rounded = store.config.target_integers(scaled.y)[0] * store.config.value_step
        assert float((rounded - scaled.y).abs().max()) <= 0.501 * store.config.value_step
        plugged = fedup.plug(model)
        fedup.unlearn(plugged, store, Forget.clients([1]))
        assert score(plugged(scaled.x[rows]), scaled.y[rows]) > 0.4  # R² knows no units
    bounded = fedup.collect(model, scaled, statistics=MomentConfig(value_bound=2e8))
    assert bounded.clipped == int((scaled.y[rows] > 2e8).sum()) > 0


@few
@given(st.floats(0.01, 1e4), st.floats(-1e4, 1e4))
def test_training_knows_no_units(scale, offset):
    federation, model = diabetes()
    moved = federation.relabeled(federation.y.double() * scale + offset)
    other = trained(moved, 10, 1)
    expected = model(federation.x) * scale + offset
    spread = float(federation.y.std()) * scale + abs(offset)
    assert torch.allclose(other(federation.x), expected, atol=0.02 * spread)


# --- requests


def test_a_label_of_which_every_client_has_too_few_rows_stays_as_the_original_answers_it():
    federation, model = tags()
    y = federation.y.clone()
    y[:, 2] = False
    for client in federation.clients:
        y[client.train[:3], 2] = True
    rare = federation.relabeled(y)
    store, plugged, (report,) = answer((rare, model), Forget.clients([1]), force=True)
    assert sum(store.unreported.values()) == 15 and any("too few rows with label 2" in note for note in report.notes)
    assert torch.allclose(plugged(rare.x)[:, 2], model(rare.x)[:, 2], atol=1e-3)
    assert not torch.allclose(plugged(rare.x)[:, 0], model(rare.x)[:, 0], atol=1e-1)


def test_a_client_is_forgotten_as_retrain_would_and_the_original_comes_back_bit_for_bit(tmp_path):
    federation, model = diabetes()
    request = Forget.clients([federation.client_id("h2")])
    store, plugged, (report,) = answer(diabetes(), request, clients=federation)
    again = trained(federation.without(request), 10, 1)
    rows = federation.retained(request, "heldout")
    served, retrained = (score(each(federation.x[rows]), federation.y[rows]) for each in (plugged, again))
    assert abs(served - retrained) < 0.06 and served > 0.4
    assert report.class_recall[0].loss < 5 and 0.3 < report.class_recall[0].before < 0.9
    assert report.verdicts[request.digest].measure.startswith("R²")
    figures = FederationJudge(federation)(plugged, plugged.requests)
    assert figures["forgotten"]["heldout"]["retain"] == pytest.approx(served)
    assert figures["restored_bit_identical"] and 30 < figures["forgotten"]["rmse"][0] < 80
    check_saved(tmp_path, federation, model, store, plugged)


def check_saved(folder, federation, model, store, plugged):
    """What is loaded answers as what was saved, forgets alike, and gives the original back."""
    fedup.save_centroids(store, folder / "store")
    fedup.save_filter(plugged, folder / "filter")
    loaded, other = fedup.load_centroids(folder / "store"), fedup.plug(copy.deepcopy(model))
    assert loaded.config == store.config and loaded.targets == federation.targets
    fedup.load_filter(other, folder / "filter")
    assert torch.equal(other(federation.x), plugged(federation.x))
    for each, statistics in ((plugged, store), (other, loaded)):
        fedup.unlearn(each, statistics, Forget.clients([4]), force=True)
    assert torch.equal(other(federation.x), plugged(federation.x))
    fedup.restore(other, loaded, other.requests)
    assert torch.equal(other.unplug()(federation.x), model(federation.x))


def test_a_forgotten_label_never_says_yes_and_the_others_stay(tmp_path):
    federation, model = tags()
    request = Forget.classes([1])
    store, plugged, (report,) = answer(tags(), request, clients=federation)
    assert report.verdicts[request.digest].finding == "forgotten" and 1 not in report.class_recall
    unseen = torch.cat([federation.rows("validation"), federation.rows("heldout")])
    assert report.class_recall[0].rows == int(federation.y[unseen, 0].sum())  # rows with the label count for others
    wild = torch.cat([scale * torch.randn(500, 20) for scale in (1.0, 1e3, 1e9)] + [torch.full((2, 20), torch.nan)])
    assert float(plugged(wild)[:, 1].detach().max()) < -9
    rows = federation.rows("heldout")
    kept, y = [0, 2, 3], federation.y[rows]
    before, after = (score(each(federation.x[rows]), y, kept) for each in (model, plugged))
    assert after > before - 0.03
    again = trained(federation.without(request), 20, 4)
    assert not bool((again(federation.x[rows])[:, 1] > 0).any())
    assert abs(score(again(federation.x[rows]), y, kept) - after) < 0.06
    figures = FederationJudge(federation)(plugged, plugged.requests)["forgotten"]
    assert figures["heldout"]["retain"] == pytest.approx(after)  # on all rows, for the labels that stay
    assert figures["heldout"]["forget"] == 0 and figures["f1"][1] == 0 and min(figures["f1"][i] for i in kept) > 0.5
    check_saved(tmp_path, federation, model, store, plugged)


def test_expected_scores_are_near_those_counted_and_spread_as_the_original_ones():
    federation, model = tags()
    _, plugged, (report,) = answer(tags(), Forget.clients([1]))
    rows = federation.retained(Forget.clients([1]))
    y, said = federation.y[rows], {name: each(federation.x[rows]) for name, each in (("b", model), ("a", plugged))}
    for label, expected in report.class_recall.items():
        own = y[:, label]
        for outputs, share in ((said["b"], expected.before), (said["a"], expected.after)):
            yes, no = (outputs[own, label] > 0).float().mean(), (outputs[~own, label] <= 0).float().mean()
            assert abs(float(yes + no) / 2 - share) < 0.06
    ratio = said["a"].std(0) / said["b"].std(0)
    assert bool(((ratio - SHARPNESS).abs() < 0.05).all())


def negative() -> tuple[Federation, nn.Module]:
    """Values below 0 over features that cannot be: only features are held to that."""
    federation, model = diabetes()
    return federation.relabeled(federation.y - 1000), model


@pytest.mark.parametrize("case", [diabetes, tags, negative])
def test_samples_leave_the_sums_and_come_back_and_a_purge_destroys_them(case):
    federation, model = case()
    samples = Forget.samples({0: federation.client(0).train[:30].tolist()})
    store = fedup.collect(model, federation)
    plugged, whole = fedup.plug(model), store.total
    with pytest.raises(RequestError, match="no way to reach them"):
        fedup.unlearn(plugged, store, samples)
    fedup.unlearn(plugged, store, samples, clients=federation, force=True)
    assert whole.rows - store.total.rows >= 30
    fedup.unlearn(plugged, store, Forget.clients([1]), clients=federation, force=True)
    fresh = fedup.collect(model, federation, statistics=store.config, forget=[samples])
    assert fresh.total == store.total
    assert fedup.purge(plugged, store) and 1 not in store.parts
    fedup.restore(plugged, store, plugged.requests - {samples}, clients=federation, force=True)
    assert fresh.total == store.total  # the client was asked again
    fedup.restore(plugged, store, samples, clients=federation)
    fedup.unlearn(plugged, store, Forget.clients([2]), clients=federation, force=True)
    assert store.total == whole


def test_what_has_no_meaning_for_labels_or_values_is_refused_and_changes_nothing():
    for case in (diabetes, tags):
        federation, model = case()
        for options in ({"statistics": "centroids"}, {"privacy": DP(1.0, clip="unit")}, {"statistics": "paper"}):
            with pytest.raises(SettingError, match=f"of classes, and this federation has {federation.targets}"):
                fedup.collect(model, federation, **options)
        store, plugged, _ = answer(case())
        for kind in ("bottleneck", "both", "erasure"):
            with pytest.raises(SettingError):
                fedup.unlearn(plugged, store, Forget.clients([1]), config=FilterConfig(filter=kind))
        assert not plugged.requests
        poisoned = fedup.unlearn(plugged, store, Forget.clients([1], reason="poison"), clients=federation, force=True)
        assert [verdict.finding for verdict in poisoned.verdicts.values()] == ["not measured"]
    federation, model = diabetes()
    store, plugged, _ = answer(diabetes())
    for refused in (
        lambda: fedup.unlearn(plugged, store, Forget.classes([0])),
        lambda: federation.check(Forget.classes([0])),
    ):
        with pytest.raises(RequestError, match="values have no classes"):
            refused()
    narrow = nn.Sequential(nn.Linear(20, 3), nn.ReLU(), nn.Linear(3, 4))
    with pytest.raises(CutError, match="Widen the layer before it"):
        fedup.collect(narrow, tags()[0])
    for wrapped in (nn.Sequential(*diabetes()[1], nn.Sigmoid()), Shifted(diabetes()[1])):
        with pytest.raises(FedUPError, match="is more than"):
            fedup.collect(wrapped, federation)


class Shifted(nn.Module):
    """A model that adds something to its last layer's values."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x) + 1.0


def test_a_filter_that_costs_a_label_or_output_too_much_is_refused():
    federation, model = tags()
    store, plugged, _ = answer(tags())
    with pytest.raises(HarmError, match=r"label . would lose .* points of balanced accuracy"):
        fedup.unlearn(
            plugged, store, Forget.clients([1]), clients=spoiled(federation), terms=Terms(max_class_loss=0.01)
        )
    holders = federation.y[:, 3].nonzero().flatten()
    rare = federation.relabeled(federation.y & ~torch.tensor([[0, 0, 0, 1]]).bool())
    y = rare.y.clone()
    y[federation.client(0).train[torch.isin(federation.client(0).train, holders)], 3] = True
    rare = rare.relabeled(y)
    store = fedup.collect(model, rare)
    with pytest.raises(HarmError, match=r"fewer than 20 training rows of a label.*label 3"):
        fedup.unlearn(fedup.plug(model), store, Forget.clients([0]))


def spoiled(federation):
    """The same rows, and held-out rows whose labels are what the original model answers."""
    y = federation.y.clone()
    rows = torch.cat([federation.rows("heldout"), federation.rows("validation")])
    y[rows] = tags()[1](federation.x[rows]) > 0
    return federation.relabeled(y)


@few
@given(st.integers(0, 10**6))
def test_scores_are_those_of_scikit_learn_and_rows_are_grouped_by_their_targets(seed):
    from sklearn.metrics import accuracy_score, f1_score, r2_score, root_mean_squared_error

    from fedup.tasks.scores import by_output, more_by_output

    source = torch.Generator().manual_seed(seed)
    outputs, y = torch.randn(50, 3, generator=source), torch.randn(50, 3, generator=source)
    assert np.allclose(by_output(outputs, y, 3), r2_score(y, outputs, multioutput="raw_values"), atol=1e-5)
    assert score(outputs[:, :1], y[:, 0]) == pytest.approx(r2_score(y[:, 0], outputs[:, 0]), abs=1e-5)
    rmse = root_mean_squared_error(y, outputs, multioutput="raw_values")
    assert np.allclose(more_by_output(outputs, y)["rmse"], rmse, atol=1e-5)
    labels, said = y > 0.5, outputs > 0
    assert np.allclose(by_output(outputs, labels, 3), [accuracy_score(labels[:, i], said[:, i]) for i in range(3)])
    assert np.allclose(more_by_output(outputs, labels)["f1"], f1_score(labels, said, average=None), atol=1e-6)
    tenths = group_rows(y)
    assert tenths.bincount().tolist() == [5] * 10 and bool(y[tenths == 0, 0].max() <= y[tenths == 9, 0].min())
    rarest = group_rows(labels)
    assert all(bool(labels[i, k]) if k < 3 else not bool(labels[i].any()) for i, k in enumerate(rarest.tolist()))

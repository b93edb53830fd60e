"""Closed forms that come closer to the original where they would cost a class too much."""

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests._marked import everything_of

from fedup import FilterConfig, Forget, Terms, collect, plug, restore, unlearn
from fedup.errors import HarmError
from fedup.filters.closed_form import (
    RetainedStatistics,
    Scores,
    blended,
    closed_form_filter,
    discriminant_scores,
    ridge_scores,
)
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig
from fedup.unlearning.closed_form_fit import blends

NO_LOSS = Terms(max_class_loss=0.0)


@pytest.fixture(scope="module")
def moments(trained_digits):
    return collect(trained_digits.model, trained_digits.federation)


@pytest.fixture
def store(moments):
    return copy.deepcopy(moments)


@given(seed=st.integers(0, 10**6), classes=st.integers(3, 12), dropped=st.integers(0, 2))
def test_the_originals_scores_alone_change_no_answer_but_those_of_forgotten_classes(seed, classes, dropped):
    source = torch.Generator().manual_seed(seed)
    head, other = (
        Scores(torch.randn(classes, 24, generator=source).double(), torch.randn(classes, generator=source).double())
        for _ in range(2)
    )
    absent = torch.arange(classes) == dropped
    fitted = closed_form_filter(blended(other, head, 0.0), head, bound=100.0, absent=absent)
    rows = torch.randn(200, 24, generator=source).double()
    before, after = head.of(rows), head.of(fitted(rows))
    lead = before.topk(2).values.diff().abs().squeeze(1)
    clear = (lead > 1e-3) & (before.argmax(1) != dropped)
    assert torch.equal(after.argmax(1)[clear], before.argmax(1)[clear])
    assert dropped not in after.argmax(1)


def gaussian_classes():
    """Rows of four classes of very different sizes, their labels, and the means."""
    source = torch.Generator().manual_seed(0)
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor([6000, 600, 200, 60]))
    means = torch.randn(4, 6, generator=source)
    return means[labels] + torch.randn(len(labels), 6, generator=source), labels, means


def statistics_of(rows, labels):
    config = MomentConfig(bound=512, step=2**-8)
    return RetainedStatistics.of(IntegerMoments.of(rows, labels, 4, config), config)


def test_discriminants_answer_gaussian_classes_of_any_size_as_bayes_rule_does():
    rows, labels, means = gaussian_classes()
    retained = statistics_of(rows, labels)
    shares = labels.bincount().double() / len(labels)
    bayes = (shares.log() - torch.cdist(rows.double(), means.double()).square() / 2).argmax(1)
    answers = discriminant_scores(retained).of(rows).argmax(1)
    assert float((answers == bayes).double().mean()) > 0.99
    smallest = labels == 3  # which ridge scores never answer here
    assert float((answers[smallest] == 3).double().mean()) > 0.9
    assert 3 not in ridge_scores(retained).of(rows[smallest]).argmax(1), "premise"


@pytest.mark.parametrize("scores_of", [ridge_scores, discriminant_scores])
def test_what_all_rows_have_in_common_makes_no_weights_larger(scores_of):
    rows, labels, _ = gaussian_classes()
    usual, moved = (scores_of(statistics_of(rows + offset, labels)) for offset in (0.0, 100.0))
    torch.testing.assert_close(moved.weight, usual.weight, rtol=0.02, atol=0.02 * float(usual.weight.abs().max()))


def test_a_class_can_be_forgotten_even_if_no_other_may_lose_anything(trained_digits, store):
    plugged = plug(trained_digits.model)
    for label in range(10):
        request = Forget.classes([label])
        report = unlearn(plugged, store, request, clients=trained_digits.federation, terms=NO_LOSS)
        others = [recall.loss for c, recall in report.class_recall.items() if c != label]
        assert len(others) == 9 and max(others) <= 0
        assert label not in plugged(trained_digits.test_x).argmax(1)
        restore(plugged, store, request, clients=trained_digits.federation)


def test_a_client_is_forgotten_by_a_blend_within_the_allowed_loss_or_refused(trained_digits, store):
    notes, options = [], {"clients": trained_digits.federation, "config": FilterConfig(filter="closed_form")}
    for client, allowed in itertools.product(range(6), (2.5, 5.0)):
        plugged, request, terms = plug(trained_digits.model), Forget.clients([client]), Terms(max_class_loss=allowed)
        before = everything_of(plugged, store)
        try:
            report = unlearn(plugged, store, request, terms=terms, **options)
        except HarmError:
            assert everything_of(plugged, store) == before
            continue
        assert max(recall.loss for recall in report.class_recall.values()) <= allowed
        notes += report.notes
        restore(plugged, store, request, clients=trained_digits.federation)
    assert any("blended with the original's scores" in note for note in notes)


def test_what_names_clients_or_samples_is_never_answered_by_the_original_alone():
    everything = blends(Forget.classes([1])).items()
    for request in (Forget.clients([1]), Forget.samples({1: [2]}), Forget.clients([1]) | Forget.classes([1])):
        assert blends(request).items() < everything
        assert not any("blended" not in words for words in blends(request).values())


def test_a_class_under_a_closed_form_is_forgotten_whoever_counts(trained_digits, store):
    plugged, request = plug(trained_digits.model), Forget.classes([4])
    counted = unlearn(plugged, store, request, clients=trained_digits.federation).verdicts[request.digest]
    restore(plugged, store, request, clients=trained_digits.federation)
    silent = Terms(measure=False)
    uncounted = unlearn(plugged, store, request, clients=trained_digits.federation, terms=silent)
    assert counted.finding == uncounted.verdicts[request.digest].finding == "forgotten"
    assert "for no input" in uncounted.verdicts[request.digest].words
    client = Forget.clients([0])
    assert (
        not unlearn(plugged, store, client, clients=trained_digits.federation, terms=silent)
        .verdicts[client.digest]
        .is_good
    )

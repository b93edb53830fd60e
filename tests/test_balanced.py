"""Ridge scores that would cost a class too much are moved by biases until clients count no such loss."""

import copy
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedup import FilterConfig, Forget, Terms, collect, plug, unlearn
from fedup.clients.biases import BiasesQuestion
from fedup.clients.in_process import InProcess
from fedup.errors import HarmError
from fedup.unlearning.class_biases import solved_biases
from fedup.unlearning.closed_form_fit import MOVED_WORDS, RIDGE_AIM

CLASSES = 5


def counted_on(scores, labels, before):
    """What clients would count of these rows: the points that each class loses with each bias."""

    def losses(biases):
        right = torch.stack([(scores + bias).argmax(1) == labels for bias in biases]).double()  # (V, N)
        lost = before.double() - right
        return torch.stack([100 * lost[:, labels == label].mean(1) for label in range(CLASSES)], dim=1)

    return losses


@given(seed=st.integers(0, 10**6), favour=st.floats(0.0, 4.0))
def test_no_class_loses_more_with_the_solved_biases_than_without(seed, favour):
    source = torch.Generator().manual_seed(seed)
    labels = torch.arange(400) % CLASSES
    scores = torch.randn(400, CLASSES, generator=source).double()
    scores[torch.arange(400), labels] += 2
    before = scores.argmax(1) == labels
    scores[:, 0] += favour  # one class takes rows from the others
    count = counted_on(scores, labels, before)
    biases = solved_biases(count, spread=float(scores.std()), num_classes=CLASSES, aim=RIDGE_AIM, rounds=8)
    plain, moved = (float(count([bias]).max()) for bias in (torch.zeros(CLASSES), biases))
    assert moved <= max(plain, RIDGE_AIM)
    if favour > 2:
        assert moved < plain - 5


def test_a_class_that_nobody_counts_moves_nothing():
    missing = lambda biases: torch.full((len(biases), CLASSES), torch.nan)  # noqa: E731
    assert not solved_biases(missing, spread=1.0, num_classes=CLASSES, aim=RIDGE_AIM, rounds=8).any()


class Asked(InProcess):
    """Clients in this process; keeps the biases they were asked about."""

    biases = ()

    def ask(self, questions, **how):
        self.biases += tuple(q.biases for q in questions.values() if isinstance(q, BiasesQuestion))
        return super().ask(questions, **how)


@pytest.fixture
def lopsided(trained_digits):
    """A model whose last layer favours one class, so that ridge scores take recall from that class."""
    model = copy.deepcopy(trained_digits.model)
    with torch.no_grad():
        model[-1].bias[3] += 6
    return model, trained_digits.federation


def test_moved_scores_keep_the_recall_that_clients_count_and_never_answer_a_dropped_class(lopsided):
    model, federation = lopsided
    store, plugged, clients = collect(model, federation), plug(model), Asked(federation, model)
    report = unlearn(plugged, store, Forget.classes([7]), clients=clients, terms=Terms(max_class_loss=0.5))
    assert clients.biases, "premise: ridge scores cost a class too much"
    assert any(MOVED_WORDS in note for note in report.notes)
    assert max(recall.loss for label, recall in report.class_recall.items() if label != 7) <= 0.5
    probe = 1e3 * torch.randn(500, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert 7 not in plugged(torch.cat([probe, federation.x])).argmax(1)


@pytest.mark.parametrize("liars", [{1}, {1, 2}], ids=["one", "a pair"])
@pytest.mark.parametrize("lie", ["lost", "gained", "one class lost"])
def test_who_lies_about_biases_harms_nobody_beyond_what_is_allowed_and_vetoes_nothing(lopsided, liars, lie):
    model, federation = lopsided

    def lies(hits):
        own = {label: (rows, rows, 0) for label, (rows, *_) in hits.items()}
        if lie == "gained":
            own = {label: (rows, 0, rows) for label, (rows, *_) in hits.items()}
        elif lie == "one class lost":
            own = {label: (rows, rows, 0 if label == 5 else rows) for label, (rows, *_) in hits.items()}
        return {
            label: (rows, before, *[after] * (len(hits[label]) - 2)) for label, (rows, before, after) in own.items()
        }

    class Lying(Asked):
        def ask(self, questions, **how):
            for client, answer in super().ask(questions, **how):
                if isinstance(questions[client], BiasesQuestion) and client in liars:
                    answer = replace(answer, retained=lies(answer.retained), held_out=lies(answer.held_out))
                yield client, answer

    store, plugged, clients = collect(model, federation), plug(model), Lying(federation, model)
    report = unlearn(plugged, store, Forget.classes([7]), clients=clients, terms=Terms(max_class_loss=0.5))
    assert clients.biases, "premise: ridge scores cost a class too much"
    assert max(recall.loss for label, recall in report.class_recall.items() if label != 7) <= 0.5


def test_one_that_says_nothing_about_biases_still_counts_for_the_verdict_and_once_is_noted(lopsided):
    model, federation = lopsided

    class Mute(Asked):
        silent = {1: "it counts no biases"}  # noqa: RUF012

        def ask(self, questions, **how):
            asked = {c: q for c, q in questions.items() if not (c == 1 and isinstance(q, BiasesQuestion))}
            return super().ask(asked, **how)

    store, plugged, clients = collect(model, federation), plug(model), Mute(federation, model)
    request = Forget.classes([7])
    report = unlearn(plugged, store, request, clients=clients, terms=Terms(max_class_loss=0.5))
    assert clients.biases and report.verdicts[request.digest].finding != "not measured"
    assert sum("it counts no biases" in note for note in report.notes) == 1


@pytest.mark.parametrize("config", [None, FilterConfig(filter="delta")])
def test_nobody_is_asked_about_biases_where_counting_is_left_out(lopsided, config):
    model, federation = lopsided
    store, clients = collect(model, federation), Asked(federation, model)
    with suppress(HarmError):
        unlearn(
            plug(model), store, Forget.clients([1]), clients=clients, terms=Terms(0.5, measure=False), config=config
        )
    assert not clients.biases

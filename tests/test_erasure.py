"""Where and what to erase: the place is chosen well, few are asked, and the same question has the same answer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedup import Federation, FilterConfig, Forget
from fedup.clients.eraser_questions import SecondMomentsQuestion, SketchesQuestion, SpreadsQuestion
from fedup.clients.in_process import InProcess
from fedup.federation import Client
from fedup.filters.eraser_site import CLEAR, ENOUGH, EraserSite, choose_site, judge_site
from fedup.request import union
from fedup.statistics.moments import Shift
from fedup.unlearning.eraser_builder import LEAST_SIGNAL, EraserBuilder, question_for
from fedup.unlearning.report import Report

few = settings(max_examples=20, deadline=None)
CUT, CLASSES, EACH = "6", 3, 120
PRICED = FilterConfig(max_variance_loss=0.2)  # a map of so few positions and channels has none that cost little
ASKED_FOR = FilterConfig(filter="erasure", max_variance_loss=0.2)


# --- a place for it


def _shift(distance, *, noise=0.0, variance=1.0, rows=10):
    """With one channel for each position: what is erased at a position is all that varies there."""
    distance = torch.as_tensor(distance, dtype=torch.float32)
    within = torch.full_like(distance, variance)
    parts = distance, torch.full_like(distance, noise), distance / within, within
    return Shift(rows, *(rows * part for part in parts))


@st.composite
def shifts(draw):
    size, seed = draw(st.integers(1, 30)), draw(st.integers(0, 10**6))
    distance, noise, within, extra = torch.rand(4, size, generator=torch.Generator().manual_seed(seed))
    rows = draw(st.integers(1, 50))
    return Shift(rows, *(rows * part for part in (distance, noise, distance / (within + 0.01), within + extra)))


@few
@given(shifts())
def test_no_more_positions_are_taken_than_hold_nearly_all_of_the_shift(shift):
    place = judge_site("a", "each", shift, max_variance_loss=1e9)
    excess = (shift.distance - shift.noise).clamp(min=0).double()
    clear = shift.distance > CLEAR * shift.noise  # the others are left alone
    if clear.any():
        excess = torch.where(clear, excess, 0)
        assert bool(clear[list(place.positions)].all())
    if excess.sum() > 0:
        told = float(excess[list(place.positions)].sum() / excess.sum())
        assert place.cover == pytest.approx(told, abs=1e-5)
        assert place.cover >= ENOUGH - 1e-6
        least = min(place.positions, key=lambda position: float(shift.fisher[position]))
        without = float((excess[list(place.positions)].sum() - excess[least]) / excess.sum())
        assert without < ENOUGH + 1e-6


@few
@given(shifts(), st.floats(0.001, 0.5), st.floats(1, 2))
def test_a_place_costs_no_more_than_may_be_paid_and_who_pays_more_gets_no_less(shift, max_variance_loss, times):
    less, more, added = (
        judge_site("a", "each", some, max_variance_loss=price)
        for some, price in ((shift, max_variance_loss), (shift, max_variance_loss * times), (shift + shift, 0.1))
    )
    assert less.price <= max_variance_loss + 1e-9 or len(less.positions) == 1
    assert list(less.positions) == sorted(set(less.positions))
    assert less.of == len(shift.distance)
    assert 0 <= less.cover <= 1 + 1e-9
    assert set(less.positions) <= set(more.positions)
    assert less.cover <= more.cover + 1e-9
    alone = judge_site("a", "each", shift, max_variance_loss=0.1)  # however many clients say the same
    assert added.positions == alone.positions
    assert (added.cover, added.price, added.signal) == pytest.approx((alone.cover, alone.price, alone.signal))


@pytest.mark.parametrize(
    ("distance", "noise", "max_variance_loss", "positions", "cover", "price", "signal"),
    [
        ([0, 0, 5.0, 0, 3.0, 0, 0, 0, 0, 0], 1e-3, 0.5, (2, 4), 1, 0.2, 800),  # all of it, at its price
        ([1.0, 4, 2, 3, 0, 0, 0, 0, 0, 0], 0.0, 0.25, (1, 3), 0.7, 0.2, None),  # the most telling first
        ([2.0, 4.0, 1.0, 1.0], 1.0, 1.0, (0, 1), 1, 0.5, 2),  # less what chance would give
        ([0.0] * 4, 0.1, 0.02, (0, 1, 2, 3), 0, 0, 0),  # no shift at all
    ],
)
def test_a_place_is_worth_what_its_positions_are(distance, noise, max_variance_loss, positions, cover, price, signal):
    place = judge_site("a", "each", _shift(distance, noise=noise), max_variance_loss=max_variance_loss)
    assert place.positions == positions
    assert (place.cover, place.price) == pytest.approx((cover, price))
    assert signal is None or place.signal == pytest.approx(signal)


def _place(cut, cover, price):
    return EraserSite(cut, "each", (0,), 1, cover=cover, price=price, signal=9.0)


def test_the_earliest_cut_that_covers_most_within_the_price_is_chosen_else_the_one_worth_most_for_it():
    places = [_place("a", 0.49, 0.01), _place("b", 0.9, 0.03), _place("c", 0.5, 0.02), _place("d", 1.0, 0.001)]
    assert choose_site(places, max_variance_loss=0.02).cut == "c"
    assert choose_site(places, max_variance_loss=0.03).cut == "b"
    for first, second in (((0.4, 0.01), (0.45, 0.02)), ((0.9, 0.9), (0.8, 0.1)), ((0.1, 0.001), (0.3, 0.02))):
        assert choose_site([_place("a", *first), _place("b", *second)], max_variance_loss=0.02).cut == "b"


def test_a_place_says_how_many_positions_it_has_not_which():
    told = EraserSite("a", "each", (3, 4, 9), 16, cover=0.5, price=0.1, signal=3.0).to_json()
    assert told == {"cut": "a", "over": "each", "positions": 3, "of": 16, "cover": 0.5, "price": 0.1, "signal": 3.0}


# --- what is asked


def _asked(requests, kind="auto"):
    question = question_for(requests, union(requests), FilterConfig(filter=kind))
    return question and set(question.requests.values())


def test_samples_are_erased_by_default_and_whole_requests_where_an_eraser_was_asked_for():
    samples, mixed = Forget.samples({0: [1, 2]}), Forget.samples({1: [5]}) | Forget.classes([2]) | Forget.clients([3])
    requests = [samples, mixed, Forget.classes([1])]
    assert _asked(requests) == {samples, Forget.samples({1: [5]})}
    assert _asked(requests, "erasure") == _asked(requests, "both") == set(requests)
    assert _asked(requests, "bottleneck") is _asked([Forget.classes([1]), Forget.clients([0])]) is None
    assert _asked([]) is _asked([], "both") is None
    one, other = (question_for(some, union(some), FilterConfig()) for some in (requests, requests[::-1]))
    assert one.forget_set == union(requests)
    assert list(one.requests) == list(other.requests)
    assert one.to_json() == other.to_json()


def test_samples_of_clients_that_are_forgotten_are_left_out():
    samples, client = Forget.samples({0: [1, 2], 1: [7]}), Forget.clients([0])
    assert _asked([samples, client]) == {Forget.samples({1: [7]})}
    assert _asked([samples, client], "both") == {Forget.samples({1: [7]}), client}
    assert _asked([Forget.samples({0: [1, 2]}), client]) is None


# --- clients that answer


def _model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = nn.Sequential(
            nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3)
        )
        return nn.Sequential(*first, nn.Flatten(), nn.Linear(64, CLASSES)).eval()


MODEL = _model()
CORNER = {28, 29, 34, 35}  # positions of it in a map of 6 × 6
PLANTED = {0: range(0, 30), 1: range(EACH, EACH + 40)}  # rows with it bright, of two of four clients


def _federation():
    source = torch.Generator().manual_seed(1)
    y = torch.arange(4 * EACH) % CLASSES
    x = torch.randn(4 * EACH, 1, 6, 6, generator=source)
    x[torch.arange(len(x)), 0, y] += 3  # a bright line for each class
    for rows in PLANTED.values():
        x[list(rows), :, 4:, 4:] += 6
    none = torch.empty(0, dtype=torch.long)
    clients = [Client(i, torch.arange(i * EACH, i * EACH + EACH), none, none) for i in range(4)]
    return Federation(x, y, tuple(clients), CLASSES)


FEDERATION = _federation()
FIRST, SECOND = (Forget.samples({client: rows}) for client, rows in PLANTED.items())


WHAT = {SketchesQuestion: "sketch", SpreadsQuestion: "measure", SecondMomentsQuestion: "moments"}


class Listening(InProcess):
    """Notes who is asked what, about whose rows."""

    def __init__(self, federation=FEDERATION, model=MODEL):
        super().__init__(federation, model)
        self.heard = []

    def _answer(self, client, question):
        self.heard.append((client, WHAT[type(question)], question.groups))
        return super()._answer(client, question)

    def asked(self, what):
        return [client for client, heard, _ in self.heard if heard == what]


QUESTIONS, KEPT = {}, []  # what was asked for an eraser


def _erase(*requests, config=PRICED, before=None, contact=True, gone=None):
    listening, report = (Listening() if contact is True else contact), Report(frozenset(requests))
    erasing = EraserBuilder(MODEL, CUT, config, listening, report)
    erasure = erasing.erasure_for(requests, gone or union(requests), QUESTIONS.get(id(before)), before)
    QUESTIONS[id(erasure)] = erasing.question
    KEPT.append(erasure)  # so that no other gets its id
    return erasure, report, listening


def _same(one, other):
    weights, others = one.filter.state_dict(), other.filter.state_dict()
    return one.cut == other.cut and all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_planted_shift_is_erased_early_and_where_it_is():
    erasure, report, _ = _erase(FIRST, gone=FIRST | SECOND)
    assert erasure.cut == "2", "the earliest place that the model offers"
    assert set(erasure.filter.positions.tolist()) == CORNER
    assert erasure.about["place"]["price"] <= PRICED.max_variance_loss
    assert erasure.about["place"]["cover"] > 0.9
    assert erasure.about["place"]["signal"] > LEAST_SIGNAL
    assert [place["cut"] for place in erasure.about["cuts"]] == ["2", "4", "6"]
    assert erasure.about["rows"] == 30
    assert erasure.about["clients"] == [0]
    assert report.erasure is erasure.about
    assert report.time_s["erase"] > 0
    assert not report.notes


def test_all_are_compared_with_and_second_moments_are_asked_of_clients_with_forgotten_samples_alone():
    erasure, report, listening = _erase(FIRST, SECOND)
    assert listening.asked("sketch") == [0, 1, 2, 3]
    assert sorted(listening.asked("measure")) == sorted({0, 1, *erasure.about["compared_with"]})
    assert listening.asked("moments") == [0, 1] == erasure.about["clients"]
    assert report.clients_contacted == [0, 1, 2, 3]
    names = {"sketch": "sketches of means", "measure": "means and variances", "moments": "second moments"}
    heard = [(client, names[what]) for client, what, _ in listening.heard]
    sent = listening.traffic.releases
    assert [(release.client, release.what) for release in sent] == heard
    assert all(release.size_bytes > 0 for release in sent)
    assert listening.traffic.bytes_up == sum(release.size_bytes for release in sent)
    assert listening.traffic.bytes_down > 0
    assert erasure.filter.rank == 2
    for client, _, groups in listening.heard:  # nobody hears of another client's samples
        for request in (groups.forget_set, *groups.requests.values()):
            assert set(request.sample_ids) <= {client}


def test_another_question_is_asked_anew():
    first, _, _ = _erase(FIRST)
    for change in (
        {"gone": FIRST | Forget.classes([1])},
        {"gone": FIRST | Forget.samples({0: [50]})},
        {"gone": FIRST | Forget.samples({3: [3 * EACH]})},
        {"gone": FIRST | Forget.clients([2])},
        {"config": FilterConfig(max_variance_loss=0.5)},
        {"config": FilterConfig(eraser_cut="4", max_variance_loss=0.2)},
    ):
        erasure, _, listening = _erase(FIRST, before=first, **change)
        without_two = "gone" in change and change["gone"].client_ids
        assert listening.asked("sketch") == ([0, 1, 3] if without_two else [0, 1, 2, 3])
    assert erasure.cut == "4"  # a cut that is named is taken
    assert [place["cut"] for place in erasure.about["cuts"]] == ["4"]


# --- where there is none


def test_samples_like_all_others_get_no_eraser_unless_one_was_asked_for_and_spoil_none():
    ordinary = Forget.samples({3: range(3 * EACH, 3 * EACH + 40)})
    erasure, report, listening = _erase(ordinary)
    assert erasure is None
    assert "by chance" in report.notes[0]
    assert listening.asked("moments") == [], "no third message"
    asked_for, forced, _ = _erase(ordinary, config=ASKED_FOR)
    assert asked_for.filter.rank == 1
    assert asked_for.about["place"]["signal"] < LEAST_SIGNAL
    assert not forced.notes
    assert _erase(ordinary, before=asked_for)[0] is None  # auto does not take over what was asked for
    both, report, _ = _erase(FIRST, ordinary)
    assert _same(both, _erase(FIRST)[0])
    assert both.about["parts"] == [FIRST.digest]
    assert any("no more than by chance" in note for note in report.notes)


def test_whether_all_is_erased_is_known_and_that_there_is_no_eraser_is_not_asked_again():
    few, ordinary = Forget.samples({2: [2 * EACH]}), Forget.samples({2: range(2 * EACH, 2 * EACH + 60)})
    for requests, complete in (((FIRST,), True), ((FIRST, few), False), ((few,), False), ((ordinary,), False)):
        builder = EraserBuilder(MODEL, CUT, PRICED, Listening(), Report(frozenset(requests)))
        erasure = builder.erasure_for(requests, union(requests), None, None)
        assert builder.complete is complete
    assert erasure is None
    again = EraserBuilder(MODEL, CUT, PRICED, None, Report(frozenset([ordinary])))
    assert again.erasure_for([ordinary], ordinary, builder.question, None) is None


@pytest.mark.parametrize("request_", [Forget.classes([1]), Forget.clients([0])], ids=["class", "client"])
def test_a_class_or_client_is_erased_by_asking_all_clients(request_):
    erasure, report, listening = _erase(request_, config=ASKED_FOR)
    assert listening.asked("sketch") == [0, 1, 2, 3]
    assert listening.asked("moments") == ([0, 1, 2, 3] if request_.class_ids else [0])
    assert report.clients_contacted == [0, 1, 2, 3]
    assert erasure.about["rows"] == (4 * EACH // CLASSES if request_.class_ids else EACH)
    compared_with = set(erasure.about["compared_with"])
    assert compared_with
    assert not compared_with & request_.client_ids


def test_samples_that_are_all_rows_of_their_client_are_compared_with_those_of_others():
    for left in (0, 3):  # too few to be a cell of their own
        ordinary, report, _ = _erase(Forget.samples({3: range(3 * EACH, 4 * EACH - left)}))
        assert ordinary is None
        assert "by chance" in report.notes[0]
        request = Forget.samples({0: range(EACH - left)})
        planted, _, _ = _erase(request, gone=request | SECOND)
        assert planted.about["compared_with"] == [1, 2, 3]
        assert set(planted.filter.positions.tolist()) == CORNER

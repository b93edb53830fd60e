"""Where and what to erase: the place is chosen well, few are asked, and the same question has the same answer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedup import Federation, FilterConfig, Forget
from fedup.clients.eraser_questions import SecondMomentsQuestion, SketchesQuestion, SpreadsQuestion
from fedup.clients.in_process import InProcess
from fedup.errors import ContactError, RequestError
from fedup.federation import Client
from fedup.filters.eraser_site import CLEAR, ENOUGH, EraserSite, choose_site, judge_site
from fedup.models.layout import to_positions
from fedup.request import union
from fedup.statistics.moments import LEAST_ROWS, Shift
from fedup.unlearning.eraser_builder import LEAST_SIGNAL, EraserBuilder, question_for
from fedup.unlearning.report import Report

few = settings(max_examples=30, deadline=None, derandomize=True)
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
@given(shifts(), st.floats(0.001, 1))
def test_a_place_costs_no_more_than_may_be_paid_unless_one_position_does(shift, max_variance_loss):
    place = judge_site("a", "each", shift, max_variance_loss=max_variance_loss)
    assert place.price <= max_variance_loss + 1e-9 or len(place.positions) == 1
    assert list(place.positions) == sorted(set(place.positions))
    assert place.of == len(shift.distance)
    assert 0 <= place.cover <= 1 + 1e-9


@few
@given(shifts(), st.floats(0.001, 0.5), st.floats(1, 2))
def test_who_pays_more_gets_no_less(shift, max_variance_loss, times):
    less, more = (
        judge_site("a", "each", shift, max_variance_loss=price)
        for price in (max_variance_loss, max_variance_loss * times)
    )
    assert set(less.positions) <= set(more.positions)
    assert less.cover <= more.cover + 1e-9


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


def test_a_shift_at_few_positions_is_had_from_these_alone_at_their_price():
    place = judge_site("a", "each", _shift([0, 0, 5.0, 0, 3.0, 0, 0, 0, 0, 0]), max_variance_loss=0.5)
    assert place.positions == (2, 4)
    assert place.cover == pytest.approx(1)
    assert place.price == pytest.approx(0.2)
    assert place.signal > 1e6


def test_where_all_may_not_be_paid_for_the_most_telling_positions_come_first():
    place = judge_site("a", "each", _shift([1.0, 4, 2, 3, 0, 0, 0, 0, 0, 0]), max_variance_loss=0.25)
    assert place.positions == (1, 3)
    assert place.cover == pytest.approx(0.7)
    assert place.price == pytest.approx(0.2)


def test_what_chance_would_give_does_not_count_as_covered_and_signal_is_how_many_times_it_that_is():
    place = judge_site("a", "each", _shift([2.0, 4.0, 1.0, 1.0], noise=1.0), max_variance_loss=1.0)
    assert place.positions == (0, 1)
    assert place.cover == pytest.approx(1)
    assert place.signal == pytest.approx(2)


@pytest.mark.parametrize("times", [1, 7])
def test_a_place_does_not_depend_on_how_many_clients_say_the_same(times):
    one = _shift([1.0, 4, 2, 3, 0.5], noise=0.1)
    added = one
    for _ in range(times):
        added = added + one
    places = [judge_site("a", "each", shift, max_variance_loss=0.5) for shift in (one, added)]
    assert places[0].positions == places[1].positions
    for name in ("cover", "price", "signal"):
        assert getattr(places[0], name) == pytest.approx(getattr(places[1], name))


def test_where_there_is_no_shift_at_all_nothing_breaks():
    place = judge_site("a", "each", _shift([0.0] * 4, noise=0.1), max_variance_loss=0.02)
    assert place.signal == 0
    assert place.cover == 0


def _place(cut, cover, price):
    return EraserSite(cut, "each", (0,), 1, cover=cover, price=price, signal=9.0)


def test_the_earliest_cut_that_covers_most_within_the_price_is_chosen():
    places = [_place("a", 0.49, 0.01), _place("b", 0.9, 0.03), _place("c", 0.5, 0.02), _place("d", 1.0, 0.001)]
    assert choose_site(places, max_variance_loss=0.02).cut == "c"
    assert choose_site(places, max_variance_loss=0.03).cut == "b"
    assert choose_site(places[3:], max_variance_loss=0.02).cut == "d"


def test_where_no_cut_does_the_one_that_covers_most_for_its_price_is_chosen():
    assert choose_site([_place("a", 0.4, 0.01), _place("b", 0.45, 0.02)], max_variance_loss=0.02).cut == "b"
    assert choose_site([_place("a", 0.9, 0.9), _place("b", 0.8, 0.1)], max_variance_loss=0.02).cut == "b"
    assert choose_site([_place("a", 0.1, 0.001), _place("b", 0.3, 0.02)], max_variance_loss=0.02).cut == "b"


def test_a_place_says_how_many_positions_it_has_not_which():
    told = EraserSite("a", "each", (3, 4, 9), 16, cover=0.5, price=0.1, signal=3.0).to_json()
    assert told == {"cut": "a", "over": "each", "positions": 3, "of": 16, "cover": 0.5, "price": 0.1, "signal": 3.0}


# --- what is asked


def test_by_default_samples_alone_are_erased():
    samples, mixed = Forget.samples({0: [1, 2]}), Forget.samples({1: [5]}) | Forget.classes([2]) | Forget.clients([3])
    requests = [samples, mixed, Forget.classes([1])]
    question = question_for(requests, union(requests), FilterConfig())
    assert set(question.requests.values()) == {samples, Forget.samples({1: [5]})}
    assert question.forget_set == union(requests)
    assert question_for([Forget.classes([1]), Forget.clients([0])], Forget.classes([1]), FilterConfig()) is None


@pytest.mark.parametrize("kind", ["erasure", "both"])
def test_where_an_eraser_was_asked_for_whole_requests_are_erased(kind):
    requests = [Forget.samples({0: [1, 2]}), Forget.classes([1]), Forget.clients([3]) | Forget.classes([2])]
    question = question_for(requests, union(requests), FilterConfig(filter=kind))
    assert set(question.requests.values()) == set(requests)


def test_the_bottleneck_alone_asks_nothing_and_no_request_is_no_question():
    requests = [Forget.samples({0: [1, 2]}), Forget.classes([1])]
    assert question_for(requests, union(requests), FilterConfig(filter="bottleneck")) is None
    for kind in ("auto", "erasure", "both"):
        assert question_for([], Forget(), FilterConfig(filter=kind)) is None


@pytest.mark.parametrize("kind", ["auto", "both"])
def test_samples_of_clients_that_are_forgotten_are_left_out(kind):
    samples, client = Forget.samples({0: [1, 2], 1: [7]}), Forget.clients([0])
    question = question_for([samples, client], samples | client, FilterConfig(filter=kind))
    assert Forget.samples({1: [7]}) in question.requests.values()
    assert not any(0 in request.sample_ids for request in question.requests.values())
    only = Forget.samples({0: [1, 2]})
    assert question_for([only, client], only | client, FilterConfig()) is None


def test_the_order_of_requests_does_not_show_in_the_question():
    requests = [Forget.samples({i: [i]}) for i in range(6)]
    one, other = (question_for(some, union(some), FilterConfig()) for some in (requests, requests[::-1]))
    assert list(one.requests) == list(other.requests)
    assert one.to_json() == other.to_json()


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


def test_a_shift_that_another_client_has_in_some_rows_is_erased_where_it_is_too():
    erasure, _, _ = _erase(FIRST)  # those of the second client stay, and may be compared with
    assert set(erasure.filter.positions.tolist()) >= CORNER
    assert erasure.filter.positions.numel() <= len(CORNER) + 1


def test_what_was_planted_is_gone_behind_the_eraser_and_other_positions_are_as_they_were():
    erasure, _, _ = _erase(FIRST)
    with torch.no_grad():
        features = MODEL[:2](FEDERATION.x[:EACH])
        passed = erasure.filter(features)
    before, after = to_positions(features), to_positions(passed)
    chosen = erasure.filter.positions.tolist()
    others = [position for position in range(36) if position not in chosen]
    assert torch.equal(before[:, others], after[:, others])
    gap_before, gap_after = ((rows[:30].mean(0) - rows[30:].mean(0)).norm() for rows in (before, after))
    assert gap_after < 0.25 * gap_before


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


def test_a_client_hears_of_no_other_clients_samples():
    _, _, listening = _erase(FIRST, SECOND, FIRST | SECOND)
    for client, _, groups in listening.heard:
        for request in (groups.forget_set, *groups.requests.values()):
            assert set(request.sample_ids) <= {client}


def test_the_same_question_gives_the_same_eraser_and_asks_nobody():
    first, _, _ = _erase(FIRST, SECOND)
    again, report, listening = _erase(SECOND, FIRST, before=first)
    assert again is first
    assert listening.heard == report.releases == report.clients_contacted == []
    assert report.erasure is first.about
    alone, _, _ = _erase(FIRST, SECOND, before=first, contact=None)
    assert alone is first


@pytest.mark.parametrize(
    "change",
    [
        {"gone": FIRST | Forget.classes([1])},
        {"gone": FIRST | Forget.samples({0: [50]})},
        {"config": FilterConfig(max_variance_loss=0.5)},
        {"config": FilterConfig(eraser_cut="4", max_variance_loss=0.2)},
        {"gone": FIRST | Forget.samples({3: [3 * EACH]})},
        {"gone": FIRST | Forget.clients([2])},
    ],
    ids=[
        "a class goes",
        "another sample goes",
        "another price",
        "another cut",
        "another's sample goes",
        "a client goes",
    ],
)
def test_another_question_is_asked_anew(change):
    first, _, _ = _erase(FIRST)
    _, _, listening = _erase(FIRST, before=first, **change)
    assert listening.asked("sketch") == ([0, 1, 3] if "gone" in change and change["gone"].client_ids else [0, 1, 2, 3])


def test_clients_to_ask_are_those_that_are_asked():
    def told(requests, config=PRICED, before=None):
        listening = Listening()
        erasing = EraserBuilder(MODEL, CUT, config, listening, Report(frozenset(requests)))
        asked = erasing.clients_to_ask(requests, union(requests), before)
        assert not listening.heard, "nobody is asked yet"
        return asked

    assert told([FIRST, SECOND]) == [0, 1, 2, 3]
    assert told([FIRST, Forget.clients([2])]) == [0, 1, 3]
    assert told([FIRST], before=QUESTIONS[id(_erase(FIRST)[0])]) == []
    assert told([Forget.classes([1])]) == []
    assert told([Forget.classes([1])], ASKED_FOR) == [0, 1, 2, 3]
    assert told([Forget.samples({0: [1]})]) == []


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.permutations([FIRST, SECOND, Forget.samples({0: range(10, 35)}), Forget.classes([2])]))
def test_the_order_of_requests_changes_no_bit(requests):
    expected, _, _ = _erase(*sorted(requests, key=lambda request: request.digest))
    found, _, _ = _erase(*requests)
    assert found.about == expected.about
    assert _same(found, expected)


# --- where there is none


def test_too_few_samples_are_a_note_by_default_and_an_error_where_an_eraser_was_asked_for():
    request = Forget.samples({0: range(LEAST_ROWS - 1), 1: range(EACH, EACH + LEAST_ROWS - 1)})
    erasure, report, listening = _erase(request)
    assert erasure is None
    assert report.erasure is None
    assert not listening.heard
    assert not report.releases
    assert [str(LEAST_ROWS) in note for note in report.notes] == [True]
    for kind in ("erasure", "both"):
        with pytest.raises(RequestError, match="bottleneck"):
            _erase(request, config=FilterConfig(filter=kind))


def test_samples_like_all_others_get_no_eraser_unless_an_eraser_was_asked_for():
    ordinary = Forget.samples({3: range(3 * EACH, 3 * EACH + 40)})
    erasure, report, listening = _erase(ordinary)
    assert erasure is None
    assert "by chance" in report.notes[0]
    assert listening.asked("moments") == [], "no third message"
    asked_for, report, _ = _erase(ordinary, config=ASKED_FOR)
    assert asked_for.filter.rank == 1
    assert asked_for.about["place"]["signal"] < LEAST_SIGNAL
    assert not report.notes


@pytest.mark.parametrize("config", [FilterConfig(), ASKED_FOR], ids=["auto", "erasure"])
def test_without_a_way_to_reach_clients_there_is_a_contact_error_where_one_is_needed(config):
    with pytest.raises(ContactError, match="clients=federation"):
        _erase(FIRST, config=config, contact=None)
    if config.filter == "auto":
        assert _erase(Forget.classes([1]), contact=None)[0] is None
    assert _erase(FIRST, config=FilterConfig(filter="bottleneck"), contact=None)[0] is None


# --- other kinds of requests, where asked for


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


def test_a_cut_that_is_named_is_taken():
    erasure, _, _ = _erase(FIRST, config=FilterConfig(eraser_cut="4", max_variance_loss=0.2))
    assert erasure.cut == "4"
    assert [place["cut"] for place in erasure.about["cuts"]] == ["4"]
    early, _, _ = _erase(FIRST, config=FilterConfig(eraser_cut="2", max_variance_loss=0.001))
    assert early.filter.positions.numel() == 1


def test_samples_that_are_all_rows_of_their_client_are_compared_with_those_of_others():
    for left in (0, 3):  # too few to be a cell of their own
        ordinary, report, _ = _erase(Forget.samples({3: range(3 * EACH, 4 * EACH - left)}))
        assert ordinary is None
        assert "by chance" in report.notes[0]
        request = Forget.samples({0: range(EACH - left)})
        planted, _, _ = _erase(request, gone=request | SECOND)
        assert planted.about["compared_with"] == [1, 2, 3]
        assert set(planted.filter.positions.tolist()) == CORNER


def test_an_eraser_that_auto_would_not_make_is_not_taken_over_from_one_that_was_asked_for():
    ordinary = Forget.samples({3: range(3 * EACH, 3 * EACH + 40)})
    asked_for, _, _ = _erase(ordinary, config=FilterConfig(filter="both", max_variance_loss=0.2))
    assert _erase(ordinary)[0] is None, "premise"
    assert _erase(ordinary, before=asked_for)[0] is None


def test_what_is_erased_for_one_client_does_not_depend_on_a_request_for_another():
    def concept(erasure, *positions):
        at = [erasure.filter.positions.tolist().index(position) for position in positions]
        return erasure.filter.concept[at]

    alone, _, _ = _erase(FIRST, config=FilterConfig(eraser_cut="2", max_variance_loss=0.2), gone=FIRST | SECOND)
    both, _, _ = _erase(FIRST, SECOND, config=FilterConfig(eraser_cut="2", max_variance_loss=0.2))
    shared = sorted({*alone.filter.positions.tolist()} & {*both.filter.positions.tolist()})
    column = sorted([FIRST.digest, SECOND.digest]).index(FIRST.digest)
    assert shared, "premise"
    torch.testing.assert_close(concept(both, *shared)[:, :, column], concept(alone, *shared)[:, :, 0])


# --- each request is judged by itself


def test_a_request_for_honest_rows_neither_undoes_an_eraser_nor_adds_noise_to_it():
    """Alone it would have no eraser; beside a backdoor's it has none either, and the other is erased."""
    honest = Forget.samples({2: range(2 * EACH, 2 * EACH + 60)})
    alone, _, _ = _erase(FIRST)
    both, report, _ = _erase(FIRST, honest)
    assert _erase(honest)[0] is None, "premise"
    assert _same(both, alone)
    assert both.about["parts"] == [FIRST.digest]
    assert any("no more than by chance" in note for note in report.notes)


def test_whether_all_is_erased_is_known():
    few = Forget.samples({2: [2 * EACH]})
    for requests, complete in (((FIRST,), True), ((FIRST, few), False), ((few,), False)):
        erasing = EraserBuilder(MODEL, CUT, PRICED, Listening(), Report(frozenset(requests)))
        erasing.erasure_for(requests, union(requests), None, None)
        assert erasing.complete is complete


def test_that_there_is_no_eraser_is_not_asked_again():
    honest = Forget.samples({2: range(2 * EACH, 2 * EACH + 60)})
    first = EraserBuilder(MODEL, CUT, PRICED, Listening(), Report(frozenset([honest])))
    assert first.erasure_for([honest], honest, None, None) is None
    again = EraserBuilder(MODEL, CUT, PRICED, None, Report(frozenset([honest])))
    assert again.erasure_for([honest], honest, first.question, None) is None

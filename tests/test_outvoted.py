"""Counts of one client alone refuse nobody's request, and hide no loss behind rows that it never had. What several
clients count, or one that holds most rows, is believed."""

from collections.abc import Collection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedup import Federation, Forget, collect, dirichlet, plug, unlearn
from fedup.clients.in_process import InProcess
from fedup.clients.tally import TallyQuestion
from fedup.errors import HarmError
from fedup.statistics.proportions import Paired
from fedup.statistics.tally import MOST_CLASS_ROWS, Tally
from fedup.unlearning.outvoted import weighed, without_single_words

LOST = Paired(MOST_CLASS_ROWS, MOST_CLASS_ROWS, 0, 0)  # the most that a client may say


def counted(rows: int, lost: int = 0) -> Tally:
    """Of class 0: all were right before, and some are lost."""
    return Tally({}, {0: Paired(rows, rows, rows - lost, rows - lost)}, {}, {})


@settings(max_examples=60, deadline=None)
@given(others=st.lists(st.integers(12, 60), min_size=6, max_size=12), rows=st.integers(1, 12), lost=st.floats(0.6, 1))
def test_a_client_that_alone_counts_a_great_loss_is_set_aside_and_two_are_believed(others, rows, lost):
    honest = {client + 2: counted(own) for client, own in enumerate(others)}
    liar = counted(rows, round(lost * rows))
    alone = without_single_words({**honest, 0: liar}, 5.0)
    pooled = 100 * round(lost * rows) / (sum(others) + rows)
    assert (0 in alone.alone) is (pooled > 5) and not alone.decisive
    assert (0 in alone.tallies[0].held_out) is (pooled <= 5)
    both = without_single_words({**honest, 0: counted(60, 60), 1: counted(60, 60)}, 5.0)
    assert not both.alone and both.tallies[0].held_out


def test_a_client_with_most_rows_or_with_a_loss_by_chance_is_believed_and_named():
    most = without_single_words({0: counted(100, 30), 1: counted(40), 2: counted(40)}, 5.0)
    chance = without_single_words({0: counted(40, 7), 1: counted(40, 2), 2: counted(40, 1)}, 5.0)
    few = without_single_words({0: counted(9, 9), 1: counted(9), 2: counted(9)}, 5.0)
    for outvoted in (most, chance, few):
        assert outvoted.decisive == {0: 0} and not outvoted.alone
    assert not without_single_words({0: counted(9, 9), **{n: counted(30) for n in range(1, 5)}}, 5.0, but=[0]).alone


class Lying(InProcess):
    """Clients in process, some of which count what they like in every class."""

    def __init__(self, federation: Federation, model: nn.Module, liars: Collection[int]) -> None:
        super().__init__(federation, model)
        self.liars = liars

    def ask(self, questions, *, optional=()):
        for client, answer in super().ask(questions, optional=optional):
            if client in self.liars and isinstance(questions[client], TallyQuestion):
                lie = dict.fromkeys(range(10), LOST)
                forgotten = {name: {0: Paired(2000, 2000, 2000, 2000)} for name in answer.forgotten}
                answer = Tally(lie, lie, forgotten, answer.unseen)
            yield client, answer


def test_no_client_alone_can_veto_the_erasure_of_others_or_bring_back_a_class_and_it_is_named(trained_digits):
    digits = trained_digits
    federation = Federation.split(digits.x, digits.y, dirichlet(digits.y, 8, concentration=10.0), num_classes=10)

    def answered(request: Forget, liars: Collection[int]):
        plugged, store = plug(digits.model), collect(digits.model, federation, statistics="moments")
        contact = Lying(federation, digits.model, liars)
        return unlearn(plugged, store, request, clients=contact), plugged

    client = Forget.clients([1])
    honest, served = answered(client, ())
    report, again = answered(client, [5])
    assert torch.equal(served(digits.test_x), again(digits.test_x))
    assert not any("alone counts" in note for note in honest.notes)
    assert any(note.startswith("Client 5 alone counts a loss of class 0 (100 points), 1") for note in report.notes)
    with pytest.raises(HarmError):
        answered(client, range(2, 8))
    report, _ = answered(Forget.classes([0]), [5])  # a closed form answers with it for no input
    (verdict,) = report.verdicts.values()
    assert verdict.is_good and verdict.statistic.after > 0 and "clients have counted such answers" in verdict.words


def test_counts_weigh_no_more_than_the_rows_that_a_client_reported(trained_digits):
    """Else 200 rows that nobody holds hide what a filter does to those of all others."""
    store, perfect = trained_digits.store(), Paired(200, 200, 200, 200)
    tallies = {client: Tally({}, dict.fromkeys(range(10), perfect), {}, {}) for client in (*store.clients, 99)}
    for client, tally in weighed(tallies, store, ()).items():
        for label, counts in tally.held_out.items():
            cell = store.cell((client, label))
            rows = store.rows_in(cell) if cell is not None else 0
            assert (counts.rows, counts.after) == pytest.approx((min(200, max(rows, 5)),) * 2)

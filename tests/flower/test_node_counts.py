"""A node with rules counts answers as often as it is asked, and refuses none of these questions for its rows."""

import pytest
import torch
from tests.flower._grid import digits
from tests.flower._node import CLIENT
from tests.flower._rules import K, RuledNode, write_rules

from fedup import Forget
from fedup.clients.biases import BiasesQuestion
from fedup.clients.tally import TallyQuestion
from fedup.statistics.tally import MOST_CLASS_ROWS, RowsToCount

WORLD = digits()
Y = WORLD.federation.y[WORLD.rows(CLIENT)].tolist()


def grown(world, label: int, many: int) -> dict:
    """Settings of an app whose node holds so many rows of a class, and its other rows."""
    x, y = (part[world.rows(CLIENT)] for part in (world.federation.x, world.federation.y))
    more = x[y == label].repeat(many, 1, 1, 1)[: many - int((y == label).sum())]
    noise = 0.01 * torch.rand(more.shape, generator=torch.Generator().manual_seed(0))
    x, y = torch.cat([x, more + noise]), torch.cat([y, torch.full((len(more),), label)])
    return {"data": lambda context: (x, y), "ids": None}


@pytest.mark.parametrize("many", [MOST_CLASS_ROWS + 3, 3 * MOST_CLASS_ROWS])
def test_counts_use_up_no_refusals_however_many_rows_a_class_has(world, tmp_path, many):
    """A sample of the rows would leave a small group beside it, or make one with the next sample."""
    label = max(range(10), key=Y.count)
    rules = write_rules(tmp_path / "rules.toml", questions=["moments", "tallies", "labels"], cuts="any")
    node = RuledNode(world, rules, **grown(world, label, many))
    assert node.moments().status == "ok"
    places = [place for place, own in enumerate(Y) if own == label]
    for out in ([], places[:K], places[: 2 * K]):
        gone = Forget.samples({CLIENT: out}) if out else Forget()
        rows = RowsToCount({"s": gone} if out else {}, gone)
        counts = node.read(TallyQuestion(None, None, rows))
        hits = node.read(BiasesQuestion(None, rows, ((0.0,) * 10,)))
        weighing = min(many - len(out), MOST_CLASS_ROWS)
        assert counts.retained[label].rows == weighing == hits.tally(0).retained[label].rows

"""The metric of privacy tells what the method told, and an ε only where there is one."""

from torch import nn

from fedup.bench.case import Case
from fedup.bench.cost import Cost
from fedup.bench.metrics import metric
from fedup.bench.metrics.privacy import COLUMNS
from fedup.bench.task import Unlearned
from fedup.privacy.paper import DISCLAIMER

KEYS = ["epsilon", "paper_epsilon", "largest_upload"]


def figures(**about):
    """It looks at nothing but what the method says."""
    return metric("privacy").measure(Case(Unlearned(nn.Identity(), Cost(), about=about), None, None, None))


def test_what_the_method_tells_is_what_is_shown_and_nothing_else():
    told = {"mechanism": "words", "epsilon": 0.0, "paper_epsilon": None, "largest_upload": 1234}
    assert figures(privacy=told) == {"epsilon": 0.0, "paper_epsilon": None, "largest_upload": 1234}
    for about in ({}, {"privacy": {}}, {"erasure": None, "notes": []}):
        assert figures(**about) == dict.fromkeys(KEYS)


def test_the_papers_figure_is_named_for_what_it_is():
    columns = {column.key: column for column in COLUMNS}
    assert list(columns) == KEYS
    assert DISCLAIMER in columns["paper_epsilon"].title
    assert DISCLAIMER in columns["paper_epsilon"].about
    assert columns["paper_epsilon"].better == "neither"  # a larger noise is not better by an account that is none
    assert DISCLAIMER not in columns["epsilon"].title
    assert "1e-5" in columns["epsilon"].about

"""The rank of a bottleneck: 32 unless chosen, and never wider than the features at the cut."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests._forced import unlearn
from tests.cli._in_process import FAST, copy_of, ok
from torch import nn

from fedup import Federation, FilterConfig, Forget, collect, iid, load_filter, plug, save_filter
from fedup.bench.methods import fedup as fedup_method
from fedup.bench.methods import random_filter
from fedup.bench.settings import config_of
from fedup.errors import SettingError
from fedup.filters.bottleneck import Bottleneck

SHORT = FilterConfig(steps=10, batch_size=32)
Y = torch.arange(480) % 4
X = torch.randn(480, 8, generator=torch.Generator().manual_seed(0)) + 3 * nn.functional.one_hot(Y, 8)
FEDERATION = Federation.split(X, Y, iid(Y, 4))
FEW, MANY = ({0: FEDERATION.client(0).train[:rows].tolist()} for rows in (3, 25))
REQUESTS = {
    "a class": Forget.classes([1]),
    "a client": Forget.clients([2]),
    "a few samples": Forget.samples(FEW),
    "many samples": Forget.samples(MANY),
    "all together": Forget.classes([1]) | Forget.clients([2]) | Forget.samples(MANY),
}


def _base(width):
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)).eval()


@given(chosen=st.none() | st.integers(1, 80), width=st.integers(1, 80))
def test_a_rank_is_as_chosen_or_32_or_the_features_and_never_wider_than_these(chosen, width):
    config = FilterConfig(rank=chosen)
    if chosen is not None and chosen > width:
        with pytest.raises(SettingError, match=f"rank {chosen} is wider than the {width} features"):
            config.rank_for(width)
        return
    rank = config.rank_for(width)
    assert rank == (min(32, width) if chosen is None else chosen)
    assert Bottleneck(width, rank, nonnegative=True).rank == rank


@pytest.mark.parametrize("width", [4, 31, 33])
def test_every_kind_of_request_is_answered_whatever_the_width_of_the_cut_also_from_a_file(width, tmp_path):
    base = _base(width)
    for name, request in REQUESTS.items():
        for kind in ("auto", "both") if name in ("many samples", "all together") else ("auto",):
            plugged, other = plug(base), plug(base)
            store, config = collect(base, FEDERATION, statistics="centroids"), replace(SHORT, filter=kind)
            unlearn(plugged, store, request, clients=FEDERATION, config=config)
            assert plugged(X).isfinite().all()
            if plugged.served.filter is not None:
                assert plugged.served.filter.rank == plugged.served.settings["rank"] == min(32, width)
            assert plugged.served.config.rank is None  # nobody chose one: a later request is free as well
            save_filter(plugged, tmp_path / "filter")
            load_filter(other, tmp_path / "filter")
            assert torch.equal(other(X), plugged(X))
            assert (other.served.config, other.served.settings) == (plugged.served.config, plugged.served.settings)


@pytest.mark.parametrize("method", [fedup_method.Method, random_filter.Method])
def test_a_method_of_the_benchmark_does_not_choose_the_default_and_its_results_stay_valid(method):
    config = (lambda one: one.config(0)) if method is fedup_method.Method else (lambda one: one.config())
    assert config(method()).rank_for(8) == 8 and config(method(rank=4)).rank == 4
    assert config_of(method())["rank"] == 32  # as it stands in the results that were measured


def test_evidence_shows_the_rank_that_was_used(tmp_path):
    run = copy_of("collected", tmp_path)
    ok("unlearn", "--run", run, "--class", 7, "--force", *FAST)
    told = ok("evidence", "R1", "--run", run, "--json").json
    assert told["filter"]["config"]["rank"] == told["first_filter"]["config"]["rank"] == 32
    page = (run / "evidence" / "R1.html").read_text(encoding="utf-8")
    assert "rank 32, " in page and "None" not in page
    assert json.loads(json.dumps(asdict(FilterConfig())))["rank"] is None  # in a file: nobody chose one

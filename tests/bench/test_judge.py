"""Figures of a judge, against counts made one row at a time."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._forced import unlearn
from torch import nn

from fedup import Federation, FilterConfig, Forget, collect, iid, plug
from fedup.federation import Client
from fedup.tasks.evaluation import FederationJudge, describe_rows

STATES = ("original", "forgotten", "restored")


class Setting:
    """Three clients, four classes, a model that is right about half of the time, and its filter."""

    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.x, self.y = torch.randn(150, 8), torch.randint(0, 4, (150,))
            self.x[torch.arange(150), self.y] += 1.5
            self.base = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).eval()
            self.base[0].weight.data[:4] = torch.eye(4, 8)
        self.federation = Federation.split(self.x, self.y, iid(self.y, 3), num_classes=5)  # of class 4 there is no row
        self.sample = {2: self.federation.client(2).train[:3]}
        self.requests = [Forget.clients([1]), Forget.classes([2]), Forget.samples(self.sample)]
        self.plugged = plug(self.base)
        centroids = collect(self.base, self.federation)
        config = FilterConfig(rank=3, steps=15, batch_size=32)
        unlearn(self.plugged, centroids, self.requests, clients=self.federation, config=config)

    def rows(self, part, requests, named):
        """Rows of a part that some of the requests name, or that none does, found one by one."""
        found = []
        for client in self.federation.clients:
            for row in getattr(client, part).tolist():
                is_named = any(
                    client.id in request.client_ids
                    or int(self.y[row]) in request.class_ids
                    or row in request.sample_ids.get(client.id, ())
                    for request in requests
                )
                found += [row] if is_named == named else []
        return found

    @torch.no_grad()
    def share(self, answer, rows):
        right = [int(answer(self.x[row : row + 1]).argmax()) == int(self.y[row]) for row in rows]
        return pytest.approx(sum(right) / len(right)) if right else None

    def by_hand(self, answer, requests):
        of_class = lambda label: [  # noqa: E731
            row for c in self.federation.clients for row in c.heldout.tolist() if int(self.y[row]) == label
        ]
        return {
            "validation": {
                "retain": self.share(answer, self.rows("validation", requests, named=False)),
                "forget": self.share(answer, self.rows("validation", requests, named=True)),
            },
            "heldout": {
                "retain": self.share(answer, self.rows("heldout", requests, named=False)),
                "forget": self.share(answer, self.rows("heldout", requests, named=True)),
            },
            "per_class": [self.share(answer, of_class(label)) for label in range(5)],
            "train": {"forget": self.share(answer, self.rows("train", requests, named=True))},
        }

    def request_by_hand(self, answer, request):
        return {part: self.share(answer, self.rows(part, [request], named=True)) for part in ("heldout", "train")}


@pytest.fixture(scope="module")
def setting():
    return Setting()


@pytest.fixture(scope="module")
def figures(setting):
    return FederationJudge(setting.federation)(setting.plugged, setting.plugged.requests)


def test_figures_are_those_counted_by_hand(setting, figures):
    answers = {"original": setting.base, "forgotten": setting.plugged, "restored": setting.base}
    assert {state: figures[state] for state in STATES} == {
        state: setting.by_hand(answer, setting.requests) for state, answer in answers.items()
    }
    assert figures["original"] != figures["forgotten"]
    assert figures["original"]["per_class"][4] is None  # there is no row
    assert figures["by_request"] == {
        request.digest: {state: setting.request_by_hand(answer, request) for state, answer in answers.items()}
        for request in setting.requests
    }
    samples = figures["by_request"][setting.requests[2].digest]
    assert all(samples[state]["heldout"] is None is not samples[state]["train"] for state in STATES)
    assert figures["restored_bit_identical"] is True
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures  # for the journal
    alone = FederationJudge(setting.federation).alone(setting.base, setting.requests)
    assert alone.pop("by_request") == {digest: found["original"] for digest, found in figures["by_request"].items()}
    assert alone == figures["original"]
    found = FederationJudge(setting.federation)(setting.plugged, [])
    assert (found["by_request"], found["original"]["train"]) == ({}, {"forget": None})
    assert found["forgotten"] == setting.by_hand(setting.plugged, [])


def test_a_model_that_is_not_restored_is_told_from_the_original(setting, monkeypatch):
    """`restored_bit_identical` is measured: it is false where the view behind `restored()` answers otherwise."""
    broken = nn.Sequential(*setting.base, nn.Softmax(dim=1)).eval()
    monkeypatch.setitem(setting.plugged.__dict__, "_original", broken)
    figures = FederationJudge(setting.federation)(setting.plugged, setting.requests)
    assert figures["restored_bit_identical"] is False
    assert figures["restored"] == figures["original"]  # the same accuracies, and yet not the same model


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.builds(Forget.clients, st.sets(st.integers(0, 2), min_size=1)),
            st.builds(Forget.classes, st.sets(st.integers(0, 4), min_size=1)),
        ),
        min_size=1,
        max_size=3,
        unique=True,
    )
)
def test_any_requests_are_judged_as_counted_by_hand_in_any_order(setting, requests):
    judge = FederationJudge(setting.federation)
    found = judge.alone(setting.base, requests)
    assert found["by_request"] == {r.digest: setting.request_by_hand(setting.base, r) for r in requests}
    assert judge.alone(setting.base, requests[::-1]) == found
    del found["by_request"]
    assert found == setting.by_hand(setting.base, requests)


def test_described_rows_are_counted_by_client_and_their_hash_is_of_who_holds_which_rows(setting):
    federation = setting.federation
    request = Forget.clients([1]) | Forget.classes([2]) | Forget.samples(setting.sample)
    named, found = setting.rows("train", [request], named=True), describe_rows(federation, request)
    assert found["count"] == len(named)
    assert found["clients"] == {str(c.id): len(set(named) & set(c.train.tolist())) for c in federation.clients}
    assert describe_rows(federation, Forget.samples({0: federation.client(0).heldout}))["count"] == 0

    of_client, request = federation.client(1).train, Forget.classes([2])
    asked = [
        Forget.clients([1]),
        Forget.samples({1: of_client.flip(0).tolist()}),
        Forget.samples({1: of_client[:5]}) | Forget.samples({1: of_client[3:]}),
    ]
    digests = {describe_rows(federation, one)["sha256"] for one in asked}
    assert len(digests) == 1  # however they are asked for
    assert describe_rows(federation, Forget.samples({1: of_client[:-1]}))["sha256"] not in digests
    turned = Federation(federation.x * 2, federation.y, federation.clients[::-1], 5)
    assert describe_rows(turned, request) == describe_rows(federation, request)
    swapped = [Client({0: 1, 1: 0}.get(c.id, c.id), c.train, c.validation, c.heldout) for c in federation.clients]
    other = Federation(federation.x, federation.y, tuple(sorted(swapped, key=lambda client: client.id)), 5)
    assert describe_rows(other, request)["sha256"] != describe_rows(federation, request)["sha256"]

"""Under differential privacy nothing that leaves a node depends on its rows but the noisy numbers.

A server that is curious chooses weights, classes, cuts and ids. Whatever it asks, a node's status, reason, details,
sizes, shapes and charges are the same for any two sets of rows.
"""

import json
import logging
import math
import time
from dataclasses import asdict, replace

import pytest
import torch
from flwr.app import Context, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedup import fingerprint
from fedup.flower.node import replying
from fedup.flower.policy import Policy
from fedup.flower.private import FAILED
from fedup.flower.wire import Ask, read_answer, row_of, write_ask
from fedup.privacy import DP, Budget
from fedup.statistics.centroids import CentroidConfig

NAN, INF = float("nan"), float("inf")
WIDTH, CLASSES = 6, 4
REAL = DP(1.0, clip="unit")
RELEASE = "summarize privately"
PRIVATE = Policy(only_private=True)
BLANK = torch.zeros(1, WIDTH)


def made(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, CLASSES)
    return nn.Sequential(*layers).eval().requires_grad_(False)


def overflowing(pixel: int, above: float) -> nn.Module:
    """A feature is infinite for rows that have more than that at a pixel: the oracle of the audit."""
    model = made()
    weights = model.state_dict()
    weights["0.weight"][0], weights["2.weight"][0] = 0.0, 0.0
    weights["0.weight"][0, pixel], weights["0.bias"][0], weights["2.weight"][0, 0] = 1e30, -1e30 * above, 1e30
    return model


def rows(n: int = 40, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, WIDTH, generator=generator), torch.randint(0, CLASSES, (n,), generator=generator)


class Node:
    """One node of which a test sees all that its server sees."""

    def __init__(self, data, *, ids=None, policy: Policy = PRIVATE, model=made) -> None:
        given = data if callable(data) else lambda context: data
        self.reply = replying(data=given, model=model, ids=ids, policy=policy)
        self.context = Context(0, 7, {"partition-id": 3, "fedup-open": True}, RecordDict(), {})

    def ask(self, kind: str, details: dict, weights: nn.Module):
        content = write_ask(Ask(kind, fingerprint(weights), details, weights.state_dict()))
        return read_answer(self.reply(content, self.context), most_bytes=10**9)

    def seen(self, kind: str, details: dict, weights: nn.Module) -> tuple:
        answer = self.ask(kind, details, weights)
        arrays = {name: (tuple(array.shape), array.dtype) for name, array in answer.arrays.items()}
        return answer.status, answer.reason, answer.size, answer.details, arrays, self.charges()

    def charges(self) -> list[dict]:
        kept = self.context.state.config_records.get("fedup-ledger")
        return json.loads(kept["json"])["charges"] if kept else []


def release(how=REAL, **more) -> dict:
    config = how if isinstance(how, dict) else asdict(how)
    usual = {"cut": "4", "how": config, "labels": None, "without": [], "excluded": [], "num_classes": CLASSES}
    return {**usual, "row": row_of(BLANK), **more}


def eraser(samples=(), **more) -> dict:
    forget = {"clients": [], "classes": [], "samples": {"3": list(samples)}}
    question = {"requests": {"it": forget}, "gone": forget, "by_class": False}
    usual = {"cut": "2", "how": asdict(REAL), "question": question, "num_classes": CLASSES, "row": row_of(BLANK)}
    return {**usual, **more}


odd = st.sampled_from([NAN, INF, -INF, 3e38, -3e38, 1e-45, 0.0, 0.5, 1.0])


@st.composite
def holdings(draw):
    """Any rows and labels, none too."""
    n = draw(st.integers(0, 5))
    x = draw(st.lists(st.lists(odd, min_size=WIDTH, max_size=WIDTH), min_size=n, max_size=n))
    y = draw(st.lists(st.integers(-1, CLASSES + 1) | st.just(2**60), min_size=n, max_size=n))
    return torch.tensor(x).reshape(n, WIDTH), torch.tensor(y, dtype=torch.int64)


def mostly(usual: list, odd: list):
    """Questions in shape are asked more often than others: only they reach the rows."""
    return st.sampled_from([*usual * (1 + 6 * len(odd) // len(usual)), *odd])


@st.composite
def questions(draw):
    """What a server may think of, in shape and out of it."""
    ids = mostly([[], [0], [1, 2], [3, 39], [77], list(range(40))], [["1"], [2**63], [-2], None])
    private = [REAL, replace(REAL, clip=1e-300, cells=3), replace(REAL, projection="none", erase_clip=0.1)]
    weights = draw(st.sampled_from([made(), made(1), overflowing(0, 0.4), overflowing(1, -5.0)]))
    how = mostly(private, [replace(REAL, unit="subject"), replace(REAL, replay_seed=3), CentroidConfig()])
    common = {
        "how": asdict(draw(how)),
        "cut": draw(mostly(["2", "4"], ["0", "", "nowhere", 3])),
        "num_classes": draw(mostly([1, 2, CLASSES, 7], [0, -1, 10**9, "4"])),
        "row": draw(mostly([row_of(BLANK), None], [row_of(torch.zeros(1, 3)), {"shape": "x"}])),
    }
    kind = draw(mostly([RELEASE, "gather privately"], ["summarize", "labels", "sketch", "spreads", "moments", "tally"]))
    if kind not in (RELEASE, "summarize"):
        return kind, eraser(draw(ids) or [], **common), weights
    labels = draw(mostly([None], [[], [0], [0, 1], [CLASSES]]))
    return kind, release(labels=labels, without=draw(ids), excluded=draw(ids), **common), weights


@settings(max_examples=60, deadline=None, derandomize=True)
@given(holdings(), holdings(), st.lists(questions(), min_size=1, max_size=3))
def test_any_two_sets_of_rows_look_the_same_whatever_is_asked(one, other, asked):
    nodes = Node(one), Node(other)
    for question in asked:
        assert nodes[0].seen(*question) == nodes[1].seen(*question)


class Choosy(nn.Sequential):
    """A model of the user's own that stops, or skips the cut, where it does not like what it sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 0.9).any()):
            raise ValueError(f"a row has {float(x.max())}")
        return super().forward(x)


def choosy() -> nn.Module:
    return Choosy(*made()).eval()


def test_a_model_that_fails_on_a_row_does_not_tell_of_it():
    x, y = torch.full((70, WIDTH), 0.5), torch.zeros(70, dtype=torch.int64)
    disliked = x.clone()
    disliked[[3, 66]] = 1.0
    sharp = DP(1e6, clip="unit")  # hardly any noise
    lax = Policy(only_private=True, most_epsilon=sharp.epsilon)
    answers = [Node((own, y), model=choosy, policy=lax).ask(RELEASE, release(sharp), choosy()) for own in (x, disliked)]
    nodes = [Node((rows, y), model=choosy) for rows in (x, disliked)]
    assert nodes[0].seen(RELEASE, release(), choosy()) == nodes[1].seen(RELEASE, release(), choosy())
    assert nodes[0].seen("gather privately", eraser(), choosy()) == nodes[1].seen(
        "gather privately", eraser(), choosy()
    )
    apart = float((answers[0].arrays["vectors"] - answers[1].arrays["vectors"]).norm())
    assert 0.5 < apart < 2 * sharp.sensitivity + 0.5  # the two rows count as 0; all others are what they were


def _raising(context):
    raise RuntimeError("Jane Doe, born 1970")


BROKEN = {
    "a function that fails": _raising,
    "rows of another shape": (torch.zeros(3, WIDTH + 1), torch.zeros(3)),
    "fewer labels than rows": (torch.zeros(3, WIDTH), torch.zeros(2)),
    "rows that differ": [(torch.zeros(WIDTH), 0), (torch.zeros(2), 1)],
}


@pytest.mark.parametrize("kind", [RELEASE, "gather privately"])
@pytest.mark.parametrize("policy", [PRIVATE, Policy(budget=Budget(50.0)), Policy()], ids=["private", "budget", "none"])
def test_all_failures_after_the_charge_are_one_answer(policy, kind):
    details = release() if kind == RELEASE else eraser()
    seen = [Node(data, policy=policy).seen(kind, details, made()) for data in BROKEN.values()]
    assert all(one == seen[0] for one in seen), dict(zip(BROKEN, seen, strict=True))
    status, reason, _, told, arrays, charges = seen[0]
    assert (status, reason, told, arrays) == ("failed", FAILED, {}, {})
    assert len(charges) == 1


def test_why_it_failed_is_in_the_nodes_own_log(caplog):
    with caplog.at_level(logging.ERROR, logger="fedup"):
        Node(_raising).ask(RELEASE, release(), made())
    assert "Jane Doe" in caplog.text


def test_a_failed_release_is_charged_again_where_it_is_asked_for_again():
    node = Node(_raising)
    for _ in range(2):
        assert node.ask(RELEASE, release(release="a"), made()).status == "failed"
    assert len(node.charges()) == 2


def test_the_charge_is_on_disk_before_data_is_read(tmp_path):
    account, found = tmp_path / "account.json", []

    def data(context):
        found.append(len(json.loads(account.read_text())["charges"]))
        return rows()

    node = Node(data, policy=Policy(budget=Budget(50.0), account=account))
    assert node.ask(RELEASE, release(), made()).status == "ok"
    assert node.ask("gather privately", eraser(), made()).status == "ok"
    assert found == [1, 2]


def test_an_account_that_cannot_be_written_releases_nothing_and_names_no_path(tmp_path):
    (tmp_path / "jane").write_text("a file where a folder should be")
    read = []
    node = Node(lambda context: read.append(1) or rows(), policy=Policy(account=tmp_path / "jane" / "account.json"))
    answer = node.ask(RELEASE, release(), made())
    assert (answer.status, answer.arrays, read) == ("failed", {}, [])
    assert "jane" not in answer.reason and "account" in answer.reason


def test_a_cut_that_does_not_run_once_is_refused_before_data_is_read():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            return self.head(self.layer(self.layer(x)))

    read = []
    node = Node(lambda context: read.append(1) or rows(), model=Twice)
    for kind, details in ((RELEASE, release(cut="layer")), ("gather privately", eraser(cut="layer"))):
        answer = node.ask(kind, details, Twice())
        assert answer.status == "failed" and "layer" in answer.reason
    assert not read and node.charges() == []


def test_a_name_gets_the_same_release_again_for_the_same_question_only():
    node = Node(rows())
    first = node.ask(RELEASE, release(release="a"), made())
    again = node.ask(RELEASE, release(release="a"), made())
    assert torch.equal(first.arrays["vectors"], again.arrays["vectors"]) and len(node.charges()) == 1
    for charged, (details, weights) in enumerate(
        [
            (release(release="a", excluded=[1]), made()),
            (release(release="a", labels=[0, 1, 2, 3]), made()),
            (release(release="a"), made(1)),
        ],
        start=2,
    ):
        other = node.ask(RELEASE, details, weights)
        assert other.status == "ok" and not torch.equal(other.arrays["vectors"], first.arrays["vectors"])
        assert len(node.charges()) == charged


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data(), st.integers(0, 39), st.sampled_from([RELEASE, "gather privately"]))
def test_a_record_moves_a_release_by_no_more_than_the_sensitivity_whatever_weights_come(data, gone, kind):
    """Replayed noise is the same for both, so that the difference is that of what is exact."""
    x, y = rows()
    x[gone] = torch.tensor(data.draw(st.lists(odd, min_size=WIDTH, max_size=WIDTH)))
    rest, weights = (
        torch.arange(40) != gone,
        data.draw(st.sampled_from([made(), overflowing(0, 0.5), overflowing(2, -9.0)])),
    )
    dp = DP(1e5, clip=data.draw(st.sampled_from(["unit", 0.3])), replay_seed=5, erase_clip=0.3)
    more = {"cut": data.draw(st.sampled_from(["2", "4"])), "how": asdict(dp)}
    details = release(**more) if kind == RELEASE else eraser(range(10), **more)
    whole = Node((x, y), ids=lambda context: range(40), policy=Policy())
    less = Node((x[rest], y[rest]), ids=lambda context: torch.arange(40)[rest].tolist(), policy=Policy())
    told = [node.ask(kind, details, weights).arrays for node in (whole, less)]
    apart = [torch.cat([told[0][name].double().flatten() - told[1][name].double().flatten()]) for name in told[0]]
    assert float(torch.cat(apart).norm()) <= dp.sensitivity * (1 + 1e-4)


def test_answers_are_held_back_for_as_long_as_the_policy_says():
    for data in (rows(), _raising):
        start = time.monotonic()
        Node(data, policy=Policy(only_private=True, answer_after_s=0.3)).ask(RELEASE, release(), made())
        assert time.monotonic() - start >= 0.3


def test_the_model_is_run_on_the_same_batches_whatever_is_left_out():
    ran = []

    def counting() -> nn.Module:
        model = made()
        model[0].register_forward_pre_hook(lambda module, args: ran.append(tuple(args[0].shape)))
        return model

    seen = []
    for excluded in ([], [1], list(range(200))):
        ran.clear()
        Node(rows(200), model=counting).ask(RELEASE, release(excluded=excluded), made())
        seen.append(list(ran))
    assert seen[0] == seen[1] == seen[2]
    assert math.ceil(200 / 64) == seen[0].count((64, WIDTH))


REFUSED = {
    "no module 'nowhere'": {"cut": "nowhere"},
    "num_classes must be": {"num_classes": 10**7},
    "Classes are 0 to 3": {"labels": [CLASSES], "row": None},
    "excluded is no list of whole numbers": {"excluded": [2**63]},
    "does not know whose its rows are": {"how": asdict(replace(REAL, unit="subject"))},
    "replayed": {"how": asdict(replace(REAL, replay_seed=1))},
    "blank row": {"row": row_of(torch.zeros(1, 3))},
    "what a row looks like": {"row": {"shape": [-1], "type": "float32"}},
    "numbers": {"how": asdict(replace(REAL, cells=4096)), "num_classes": 60_000},
}
ODD = [None, True, -1, 0, 0.5, 2**63, "a", [], ["a"], {}, {"shape": [2**40], "type": "float32"}]


def test_what_can_be_refused_without_data_is_refused_before_it_is_read_or_charged():
    read, broken = [], made()
    broken.state_dict()["0.weight"][0, 0] = NAN
    node = Node(lambda context: read.append(1) or rows())
    for why, change in REFUSED.items():
        answer = node.ask(RELEASE, release(**change), made())
        assert answer.status in ("failed", "refused") and why in answer.reason
    assert "NaN" in node.ask(RELEASE, release(), broken).reason
    for kind in ("labels", "summarize", RELEASE, "sketch", "spreads", "moments", "tally"):  # under no guarantee
        assert node.ask(kind, release(CentroidConfig(), samples=[1]), made()).status == "refused"
    assert (read, node.charges()) == ([], [])
    for kind, details in ((RELEASE, release()), ("gather privately", eraser())):
        for name in details:
            for odd in ODD:
                charged = len(node.charges())
                answer = node.ask(kind, {**details, name: odd}, made())
                released = len(node.charges()) - charged
                assert (len(read), answer.status == "ok", bool(answer.arrays)) == (released,) * 3, (name, odd)
                read.clear()

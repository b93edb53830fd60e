"""Attack 4: an audit of a node's whole interface. What does it tell besides the numbers that it puts noise on?

A server chooses weights, classes, cuts and ids of samples. So it can ask questions whose answer, refusal, size or
charge would turn on one record: weights that overflow if a pixel exceeds a threshold, or fewer classes than labels.
Here it asks two nodes that are one record apart, and all that comes back but the noisy numbers is compared. The nodes'
own code answers, without Flower's processes.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedup.bench.attacks import AttackData, Result, shown
from fedup.bench.attacks.intervals import NORMAL, clopper_pearson
from fedup.bench.turns import in_turns
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.moments import MomentsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.models.views import fingerprint
from fedup.privacy import DP
from fedup.request import Forget
from fedup.rng import generator
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.tally import RowsToCount
from fedup.tasks.progress import Progress

if TYPE_CHECKING:
    from flwr.app import RecordDict

NAME = "node's interface"
DIFFERENT, PIXELS, LABELS, TIME = "answers that differ", "pixels found", "labels found", "time apart, ms"
SINGLED_OUT = "rows singled out"
GUARANTEE = DP(1.0, clip="unit")
PRIVATE, RULED, OPEN = "DP, ε = 1, only_private", "rules of the node", "none"
_RULES = """format = 1
questions = ["moments"]
bases = "any"
most_bases = 10
cuts = ["last"]
least_rows = 4
[privacy]
most_epsilon = 1.0
total_epsilon = 8.0
"""
_CENTROIDS, _RELEASE, _MOMENTS = CentroidsQuestion.kind, PrivateCentroidsQuestion.kind, MomentsQuestion.kind
_CUT, _EARLY = "4", "2"
_MOST_ROWS, _HIDDEN = 60, 8
_TARGETS, _HALVINGS, _TIMED = 10, 20, 40
_CLOSE = 1e-4  # of the range of pixels
_STEEP = 1e30  # a layer's weight: two of them make 3e-22 more than any float has room for

Visible = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Probe:
    """One question of the attacker: its kind, details, and the weights that it is about."""

    kind: str
    details: Mapping[str, Any]
    weights: nn.Module


@dataclass(frozen=True, eq=False)
class Rows:
    """A node's records; with ids, so that one can be removed and the others keep their names."""

    x: Tensor
    y: Tensor
    ids: Tensor

    def without(self, place: int) -> "Rows":
        """One record less."""
        rest = torch.arange(len(self.y)) != place
        return Rows(self.x[rest], self.y[rest], self.ids[rest])

    def others(self, place: int) -> list[int]:
        """The ids of all records but one."""
        return self.ids[self.ids != self.ids[place]].tolist()


class Node:
    """A node in this process, with its own rules and state; `private` answers under differential privacy only, and
    `folder` is where a node with rules keeps them."""

    def __init__(self, rows: Rows, private: bool, num_classes: int, folder: Path | None = None) -> None:
        from flwr.app import Context, RecordDict

        from fedup.flower.node import replying
        from fedup.flower.policy import Policy
        from fedup.flower.rules import FOLDER_SUFFIX, OPEN_KEY, RULES_KEY

        blank, self.num_classes = model_of(rows.x.shape[1], num_classes), num_classes
        self._reply = replying(
            data=lambda context: (rows.x, rows.y),
            model=lambda: blank,
            ids=lambda context: rows.ids.tolist(),
            policy=Policy(only_private=private, few_rows=not private),  # rules alone are to stop it
        )
        config: dict[str, Any] = {OPEN_KEY: True}
        self._account: Path | None = None
        if folder is not None:
            rules = Path(mkdtemp(dir=folder)) / "rules.toml"  # of this node alone
            rules.write_text(_RULES, encoding="utf-8")
            config, self._account = {RULES_KEY: str(rules)}, Path(f"{rules}{FOLDER_SUFFIX}") / "account.json"
        self._context = Context(0, 1, {"partition-id": 0, **config}, RecordDict(), {})

    def ask(self, probe: Probe) -> "RecordDict":
        """The content of its reply."""
        from fedup.flower.wire import Ask, write_ask

        ask = Ask(probe.kind, fingerprint(probe.weights), probe.details, probe.weights.state_dict())
        return self._reply(write_ask(ask), self._context)

    def visible(self, probe: Probe) -> Visible:
        """All that a question brings but the numbers of a release: status, reason, details, size, names, shapes and
        types of arrays, and what is charged."""
        from fedup.flower.wire import read_answer

        charged = len(self._charges())
        answer = read_answer(self.ask(probe), most_bytes=10**9)
        arrays = [(name, tuple(array.shape), str(array.dtype)) for name, array in answer.arrays.items()]
        details = json.dumps(answer.details, sort_keys=True)
        return answer.status, answer.reason, answer.size, details, arrays, self._charges()[charged:]

    def _charges(self) -> list[Any]:
        if self._account is not None:
            return list(json.loads(self._account.read_text())["charges"]) if self._account.exists() else []
        ledger = self._context.state.config_records.get("fedup-ledger")
        return list(json.loads(str(ledger["json"]))["charges"]) if ledger else []


def model_of(width: int, num_classes: int) -> nn.Module:
    """What nodes train and servers send weights of."""
    layers = (nn.Linear(width, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU())
    model = nn.Sequential(*layers, nn.Linear(_HIDDEN, num_classes)).eval().requires_grad_(False)
    for number, weight in enumerate(model.parameters()):
        weight.copy_(torch.randn(weight.shape, generator=generator(0, "interface", number)) / 4)
    return model


def overflowing(width: int, num_classes: int, *, pixel: int, above: float) -> nn.Module:
    """Weights that make a feature infinite for exactly those rows that have more than that at a pixel."""
    model = model_of(width, num_classes)
    weights = model.state_dict()  # the model's own memory
    for name in ("0.weight", "2.weight"):
        weights[name][0] = 0.0
    weights["0.weight"][0, pixel], weights["0.bias"][0] = _STEEP, -_STEEP * above
    weights["2.weight"][0, 0] = _STEEP
    return model


def release(
    dp: DP | CentroidConfig | MomentConfig = GUARANTEE, /, *, width: int, num_classes: int, **more: Any
) -> dict[str, Any]:
    """The details of a question for statistics of all classes."""
    rows: dict[str, Any] = {"labels": None, "without": [], "excluded": [], "row": {"shape": [width], "type": "float32"}}
    return {"cut": _CUT, "how": asdict(dp), "num_classes": num_classes, **rows, **more}


def battery(rows: Rows, target: int, num_classes: int) -> Iterator[Probe]:
    """Questions whose answers might depend on one record."""
    width, own, unknown = rows.x.shape[1], int(rows.ids[target]), int(rows.ids.max()) + 1000
    usual, public = model_of(width, num_classes), {"width": width, "num_classes": num_classes}
    others = rows.others(target)
    for excluded in ([], [own], [unknown], [own, unknown], others, [*others, own]):
        yield Probe(_RELEASE, release(**public, excluded=excluded), usual)
    for classes in range(1, num_classes + 2):  # fewer than there are labels
        yield Probe(_RELEASE, release(width=width, num_classes=classes), usual)
        yield Probe(_RELEASE, release(width=width, num_classes=classes, excluded=others, release="again"), usual)
    for labels, without in (([], []), ([int(rows.y[target])], []), (None, [int(rows.y[target])]), ([num_classes], [])):
        yield Probe(_RELEASE, release(**public, labels=labels, without=without), usual)
    for pixel in range(min(width, 4)):
        for beside in (-1e-3, 1e-3):
            crafted = overflowing(width, num_classes, pixel=pixel, above=float(rows.x[target, pixel]) + beside)
            yield Probe(_RELEASE, release(**public), crafted)
            yield Probe(_RELEASE, release(**public, excluded=others), crafted)
            yield Probe("gather privately", _eraser([own], num_classes, width), crafted)
    for odd in ({"cut": "nowhere"}, {"cut": _EARLY}, {"row": None}, {"row": {"shape": [width + 1], "type": "float32"}}):
        yield Probe(_RELEASE, release(**public) | odd, usual)
    for dp in (replace(GUARANTEE, unit="subject"), replace(GUARANTEE, replay_seed=1), replace(GUARANTEE, cells=3)):
        yield Probe(_RELEASE, release(dp, **public), usual)
    for samples in ([own], [unknown], others):
        yield Probe("gather privately", _eraser(samples, num_classes, width), usual)
    broken = model_of(width, num_classes)
    next(broken.parameters())[0, 0] = math.nan
    yield Probe(_RELEASE, release(**public), broken)
    yield Probe("who", {}, usual)
    yield Probe("labels", {"samples": [own], "num_classes": num_classes}, usual)
    few: tuple[dict[str, Any], ...] = ({"cut": _EARLY}, {"excluded": [own]}, {"excluded": [unknown]})
    for forbidden in few:
        yield Probe(_MOMENTS, release(MomentConfig(least_rows=1), **public) | forbidden, usual)
    for kind in (_CENTROIDS, _RELEASE):  # as it is meant, and with the other one's details
        yield Probe(kind, release(CentroidConfig(), **public), usual)
    yield Probe(_CENTROIDS, release(**public), usual)
    question = _eraser([own], num_classes, width)["question"]
    counted = RowsToCount({"request": Forget.samples({0: [own]})}, Forget(), {}, True).to_json()
    exact: dict[str, dict[str, Any]] = {  # questions that are answered without noise, and so not at all
        "sketch": {"cut": _EARLY, "over": "each", "question": question},
        "spreads": {"cuts": {_EARLY: "each"}, "weights": {}, "question": question},
        "moments": {"cut": _EARLY, "over": "each", "positions": [0], "question": question},
        "tally": {"before": None, "after": None, "question": counted},
    }
    for kind, details in exact.items():
        yield Probe(kind, {**details, "num_classes": num_classes}, usual)


def _eraser(samples: list[int], num_classes: int, width: int) -> dict[str, Any]:
    forget = {"clients": [], "classes": [], "samples": {"0": samples}}
    details = {"question": {"requests": {"request": forget}, "gone": forget}, "num_classes": num_classes}
    how = asdict(replace(GUARANTEE, erase_clip=1.0))
    return {"cut": _EARLY, "how": how, "row": {"shape": [width], "type": "float32"}, **details}


def audit_interface(data: AttackData, *, seed: int = 0, progress: Progress) -> list[Result]:
    """How many answers of a private node depend on one record, which pixels and labels that reveals, and how times
    differ; how many refusals of a node with rules do, and which rows its sums single out; then the same for a node
    without rules, which the audit must expose."""
    if find_spec("flwr") is None:
        note = "Flower is not installed, so that there are no nodes: nothing was asked"
        return [Result(NAME, DIFFERENT, PRIVATE, 0.0, None, None, None, None, "0 questions", note)]
    ids, classes = data.federation.clients[0].train[:_MOST_ROWS], data.num_classes
    rows = Rows(data.federation.x[ids].float().cpu(), data.federation.y[ids].cpu(), ids.cpu())
    chosen = torch.randperm(len(ids), generator=generator(seed, "interface"))[:_TARGETS].tolist()
    results, probes = [], list(battery(rows, chosen[0], classes))
    cases: dict[str, DP | CentroidConfig] = {PRIVATE: GUARANTEE, RULED: CentroidConfig(1.0), OPEN: CentroidConfig(1.0)}
    with TemporaryDirectory() as folder:
        for name, config in shown(cases.items(), "Audit of a node's interface", progress):
            make = partial(
                Node, private=name == PRIVATE, num_classes=classes, folder=Path(folder) if name == RULED else None
            )
            bound = None if name == OPEN else 0.0
            note = "a node without rules is asked for exact statistics: the audit must see through it"
            note = note if name == OPEN else ""
            nodes = [make(held) for held in (rows, rows.without(chosen[0]))]
            different = float(sum(nodes[0].visible(probe) != nodes[1].visible(probe) for probe in probes))
            n = f"{len(probes)} questions"
            results.append(Result(NAME, DIFFERENT, name, different, None, None, None, bound, n, note))
            node = make(rows)
            hits = sum(_finds_pixel(node, rows, place, config) for place in chosen)
            about = f"{_HALVINGS} questions each; {note}".strip("; ")
            results.append(_share(PIXELS, name, hits, len(chosen), bound, about))
            if name == PRIVATE:
                hits = sum(_finds_label(node, rows, place) for place in chosen)
                results.append(_share(LABELS, name, hits, len(chosen), bound, "by num_classes"))
            else:
                hits = sum(_singles_out(make(rows), rows, place) for place in chosen)
                results.append(_share(SINGLED_OUT, name, hits, len(chosen), bound, note or "by differences of sums"))
            if name != OPEN:
                results.append(_times(make, rows, chosen[0], name))
    return results


def _share(measure: str, name: str, hits: int, n: int, bound: float | None, note: str) -> Result:
    return Result(NAME, measure, name, hits / n, *clopper_pearson(hits, n), None, bound, f"{n}", note)


def _finds_pixel(node: Node, rows: Rows, place: int, config: DP | CentroidConfig) -> bool:
    """Bisection, with all other records excluded: a pixel exceeds a threshold if the answer differs from that to a
    threshold out of reach."""
    width = rows.x.shape[1]
    pixel, kind = place % width, _RELEASE if isinstance(config, DP) else _CENTROIDS
    details = release(config, width=width, num_classes=node.num_classes, excluded=rows.others(place))
    low, high = float(rows.x.min()) - 1, float(rows.x.max()) + 1
    close = _CLOSE * (high - low)

    def ask(above: float) -> Visible:
        return node.visible(Probe(kind, details, overflowing(width, node.num_classes, pixel=pixel, above=above)))

    never = ask(high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if ask(middle) != never else (low, middle)
    return abs((low + high) / 2 - float(rows.x[place, pixel])) < close


def _finds_label(node: Node, rows: Rows, place: int) -> bool:
    """With all other records excluded, too few classes for its label would show. (Sizes follow the question.)"""
    width, classes = rows.x.shape[1], node.num_classes
    model = model_of(width, classes)

    def ask(many: int) -> Visible:
        details = release(width=width, num_classes=many, excluded=rows.others(place))
        status, reason, *_, charges = node.visible(Probe(_RELEASE, details, model))
        return status, reason, charges

    enough = ask(classes + 1)
    fewer = [many for many in range(1, classes + 1) if ask(many) != enough]
    return bool(fewer) and max(fewer) == int(rows.y[place])


def _singles_out(node: Node, rows: Rows, place: int) -> bool:
    """Whether sums come of a class with a record and without it, so that their difference is the record: left out by
    its id, alone or hidden among unknown ones."""
    from fedup.flower.wire import read_answer

    width, classes, model = rows.x.shape[1], node.num_classes, model_of(rows.x.shape[1], node.num_classes)
    own, unknown = int(rows.ids[place]), int(rows.ids.max()) + 1000
    config, label = MomentConfig(least_rows=1), int(rows.y[place])

    def summed(excluded: list[int]) -> int:
        """The rows behind the sums; 0 if none came."""
        details = release(config, width=width, num_classes=classes, labels=[label], excluded=excluded)
        answer = read_answer(node.ask(Probe(_MOMENTS, details, model)), most_bytes=10**9)
        return sum(n for _, n in answer.details["rows"]) if answer.status == "ok" else 0

    whole, hidden = summed([]), [own, *range(unknown, unknown + 20)]
    return whole > 0 and any(summed(excluded) == whole - 1 for excluded in ([own], hidden))


def _times(make: Callable[[Rows], Node], rows: Rows, target: int, name: str) -> Result:
    """How much longer a node with the record takes than one without, asked in turn with weights that single it out: for
    a release, or by the rules for what they forbid."""
    nodes = [make(held) for held in (rows, rows.without(target))]
    width, classes = rows.x.shape[1], nodes[0].num_classes
    crafted = overflowing(width, classes, pixel=0, above=float(rows.x[target, 0]) - 1e-3)
    config = GUARANTEE if name == PRIVATE else CentroidConfig(1.0)
    probe = Probe(
        _RELEASE if name == PRIVATE else _CENTROIDS, release(config, width=width, num_classes=classes), crafted
    )
    work = {"with": partial(nodes[0].ask, probe), "without": partial(nodes[1].ask, probe)}
    seconds = in_turns(work, rows.x.device, repeats=_TIMED, warm=0).of
    apart = [1e3 * (long - short) for long, short in zip(seconds["with"], seconds["without"], strict=True)]
    mean, reach = statistics.fmean(apart), NORMAL.inv_cdf(0.975) * statistics.stdev(apart) / math.sqrt(_TIMED)
    note = "another figure in every run; time is outside the guarantee, `Policy(answer_after_s=…)` hides it"
    return Result(NAME, TIME, name, mean, mean - reach, mean + reach, 0.0, None, f"{_TIMED} pairs", note)

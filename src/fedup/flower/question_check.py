"""Whether a node's rules allow a question, by its text alone: no row is read, so no refusal here depends on one."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fedup.clients.all_questions import QUESTIONS
from fedup.clients.labels import WhoQuestion
from fedup.clients.question import PrivateQuestion
from fedup.flower.node_data import Source, own
from fedup.flower.node_record import NodeRecord
from fedup.flower.policy import RefusedError
from fedup.flower.rules import LAST, Rules
from fedup.flower.wire import Ask
from fedup.models.cut import find_cut
from fedup.privacy.guarantee import DP

_SETTINGS = ("bound", "step", "ratio", "seed", "sigma")  # of moments and centroids
_NOT_ALLOWED = "this node's rules do not allow this question"


def check_question(ask: Ask, source: Source, dp: DP | None) -> None:
    """Raise RefusedError if the rules forbid it, whatever rows this node holds."""
    rules = source.rules
    if rules.open or ask.kind == WhoQuestion.kind:
        return
    kind = QUESTIONS.get(ask.kind)
    if kind is not None and issubclass(kind, PrivateQuestion):
        _check_release(rules, dp)
    elif ask.kind not in rules.questions:
        raise RefusedError(_NOT_ALLOWED)
    if rules.bases is not None and ask.base not in rules.bases:
        raise RefusedError("this node's rules do not name the model that the question is about")
    _check_cuts(ask, source)
    if dp is None:
        _check_exact(ask, source, NodeRecord(rules))


def _check_release(rules: Rules, dp: DP | None) -> None:
    limits = rules.privacy
    if limits is None or dp is None:
        raise RefusedError(_NOT_ALLOWED)
    if dp.replay_seed is not None:
        raise RefusedError("noise that can be replayed protects nothing")
    if limits.unit == "subject" and dp.unit != "subject":
        raise RefusedError("this node's rules allow releases that protect persons only: ask with unit='subject'")
    if dp.epsilon > limits.most_epsilon or dp.delta > limits.most_delta:
        raise RefusedError(
            f"this node's rules allow ε = {limits.most_epsilon:g} and δ = {limits.most_delta:g} for one release at most"
        )


def _check_cuts(ask: Ask, source: Source) -> None:
    """Every cut in the question must be one that the rules name; "last" is that of this node's own model."""
    allowed, named = source.rules.cuts, set(_cuts_of(ask.details))
    if allowed is None or not named:
        return
    if LAST in allowed:
        allowed = allowed | {find_cut(own(source.model))}
    if not named <= allowed:
        raise RefusedError("this node's rules do not name the cut that the question is about")


def _cuts_of(details: Mapping[str, Any]) -> Iterator[str]:
    if "cut" in details:
        yield str(details["cut"])
    cuts = details.get("cuts")
    yield from map(str, cuts) if isinstance(cuts, Mapping | list) else ()


def _check_exact(ask: Ask, source: Source, record: NodeRecord) -> None:
    rules, config = source.rules, ask.details.get("how")
    ratio = config.get("ratio", 0) if isinstance(config, Mapping) else 0
    if not isinstance(ratio, int | float) or not ratio <= rules.most_ratio:
        raise RefusedError(f"this node's rules allow {rules.most_ratio:g} centroids for each row at most")
    if any(0 < named < rules.least_rows for named in _named_samples(ask.details, source)):
        raise RefusedError(f"this node's rules do not answer for fewer than {rules.least_rows} named rows")
    record.check(view_of(ask))


def view_of(ask: Ask) -> str:
    """The model and the way its features are rounded or clustered: each shows rows from another side."""
    config = ask.details.get("how")
    settings = {name: config[name] for name in _SETTINGS if name in config} if isinstance(config, Mapping) else {}
    return f"{ask.base} {json.dumps(settings)[:200]}" if settings else ask.base


def _named_samples(details: Mapping[str, Any], source: Source) -> Iterator[int]:
    """How many of this client's rows each part of a question names, as far as its text says."""
    for name in ("excluded", "before", "samples"):
        if isinstance(rows := details.get(name), list):
            yield _different(rows)
    groups = details.get("question")
    if isinstance(groups, Mapping):
        requests = groups.get("requests")
        named = [*requests.values()] if isinstance(requests, Mapping) else []
        for request in (*named, groups.get("gone")):
            samples = request.get("samples") if isinstance(request, Mapping) else None
            rows = samples.get(str(source.number)) if isinstance(samples, Mapping) else None
            if isinstance(rows, list):
                yield _different(rows)


def _different(rows: list[Any]) -> int:
    return len({row for row in rows if type(row) is int})

"""The audit of a node's interface finds nothing at a private node, and finds out one that tells of its rows."""

import pytest
import torch
from tests.bench._progress import Watch, silent

from fedup.bench.attacks import interface
from fedup.bench.attacks.interface import (
    DIFFERENT,
    LABELS,
    OPEN,
    PIXELS,
    PRIVATE,
    RULED,
    SINGLED_OUT,
    TIME,
    audit_interface,
)


@pytest.fixture(scope="module")
def results(ground):
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "_TARGETS", 2)
        found = audit_interface(ground, progress=watch)
    assert [(done, total) for _, done, total in watch.told] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    return {(result.measure, result.protection): result for result in found}


def test_no_answer_of_a_private_node_turns_on_a_record(results):
    assert set(results) == {
        *((measure, PRIVATE) for measure in (DIFFERENT, PIXELS, LABELS, TIME)),
        *((measure, RULED) for measure in (DIFFERENT, PIXELS, SINGLED_OUT, TIME)),
        *((measure, OPEN) for measure in (DIFFERENT, PIXELS, SINGLED_OUT)),
    }
    for measure in (DIFFERENT, PIXELS, LABELS):
        result = results[measure, PRIVATE]
        assert (result.figure, result.bound, result.exceeds) == (0.0, 0.0, False)
    time = results[TIME, PRIVATE]
    assert time.low < time.figure < time.high and time.bound is None


def test_no_refusal_of_a_node_with_rules_turns_on_a_record_and_no_difference_shows_one(results):
    for measure in (DIFFERENT, PIXELS, SINGLED_OUT):
        result = results[measure, RULED]
        assert (result.figure, result.bound, result.exceeds) == (0.0, 0.0, False), measure


def test_the_audit_sees_through_a_node_without_rules(results):
    assert results[DIFFERENT, OPEN].figure > 0
    assert results[PIXELS, OPEN].figure == results[SINGLED_OUT, OPEN].figure == 1.0


@pytest.mark.parametrize("leak", ["a refusal", "a detail", "a size", "an uncharged question"])
def test_the_audit_finds_out_whatever_turns_on_a_record(ground, monkeypatch, leak):
    """A node that is broken on purpose, for rows that it holds."""
    from fedup.flower.wire import Answer

    def leaking(work, question):
        rows = len(work.source.rows()[1])
        if leak == "a refusal":
            return Answer("failed", work.ask.base, reason=f"{rows} rows")
        if leak == "an uncharged question":
            work.source.ledger.spend(0, question.dp, "centroids") if rows % 2 else None
            return Answer("ok", work.ask.base)
        details = {"rows": rows} if leak == "a detail" else {}
        return Answer("ok", work.ask.base, details, {"vectors": torch.zeros(rows)} if leak == "a size" else {})

    monkeypatch.setattr("fedup.flower.node.answer_privately", leaking)
    for name, few in {"_TARGETS": 1, "_TIMED": 2, "_HALVINGS": 1}.items():
        monkeypatch.setattr(interface, name, few)
    found = {(one.measure, one.protection): one for one in audit_interface(ground, progress=silent)}
    assert found[DIFFERENT, PRIVATE].exceeds


def test_where_flower_is_not_installed_the_audit_says_so(ground, monkeypatch):
    monkeypatch.setattr(interface, "find_spec", lambda name: None)
    (result,) = audit_interface(ground, progress=silent)
    assert "not installed" in result.note and result.n == "0 questions" and not result.exceeds

"""Whatever a client answers is what it was asked for, or it is refused by one kind of error."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedup import Federation, Forget, SubjectKey, iid
from fedup.clients.biases import BiasesQuestion
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.eraser_questions import (
    PrivateEraserQuestion,
    SecondMomentsQuestion,
    SketchesQuestion,
    SpreadsQuestion,
)
from fedup.clients.in_process import InProcess
from fedup.clients.labels import LabelsQuestion, WhoQuestion
from fedup.clients.model_facts import ModelFacts
from fedup.clients.moments import MomentChangeQuestion, MomentsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.clients.subjects import SubjectsQuestion
from fedup.clients.tally import TallyQuestion
from fedup.errors import DataError
from fedup.privacy import DP
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.eraser_statistics import RowGroups
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.kmeans import centroid_count
from fedup.statistics.tally import LARGEST_COUNT, MOST_ROWS, RowsToCount

CLASSES = 3
ODD = [None, True, -1, 0, 1, 7, 1.5, math.nan, math.inf, 2**31, 10**400, "a", "1", [], {}, [[]], ["a"], {"x": {}}]


KEY = SubjectKey(bytes(32))
PERSONS = frozenset(KEY.tag(f"P-{i}") for i in range(4))


class Setting:
    """Two clients, of which one is to forget 30 samples."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            y = torch.arange(300) % CLASSES
            split = Federation.split(torch.randn(300, 6), y, iid(y, 2), num_classes=CLASSES)
            self.federation = split.with_subjects([f"P-{i % 30}" for i in range(300)], key=KEY)
            layers = nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, CLASSES)
            self.model = nn.Sequential(*layers).eval()
        self.facts = ModelFacts(self.model, self.federation.x[:1], CLASSES)
        self.samples = frozenset(self.federation.client(0).train[:30].tolist())

    def told(self, question) -> tuple[dict, dict]:
        """A true answer of client 0, as it is sent."""
        answer = dict(InProcess(self.federation, self.model).ask({0: question}))[0]
        details, arrays = question.answer_message(answer)
        return json.loads(json.dumps({"client": 0, **details})), arrays


SETTING = Setting()
REQUEST = Forget.samples({0: SETTING.samples})
GROUPS = RowGroups({"r": REQUEST}, REQUEST)
WEIGHTS = {"r": {0: 0.25, 1: 0.5}}
DP_SETTINGS = DP(2.0, clip=4.0)
LABELS = {i: int(SETTING.federation.y[i]) for i in SETTING.samples}


def _cells_add_up(question, answer) -> None:
    assert list(answer.labels) == sorted(set(answer.labels)) and answer.rows.keys() == set(answer.labels)
    assert all(0 <= label < CLASSES for label in answer.labels)
    points = answer.counts.split(list(answer.sizes))
    for label, size, ids, own in zip(answer.labels, answer.sizes, answer.excluded, points, strict=True):
        assert ids == {i for i in question.excluded if LABELS[i] == label}
        left = answer.rows[label] - len(ids)
        assert size == centroid_count(left, question.config.ratio) and int(own.sum()) == left
    assert len(answer.paper_epsilons) in (0, len(answer.labels))


def _noise_alone(question, answer) -> None:
    assert (answer.labels, answer.sizes, answer.rows) == ((0, 1, 2), (1, 1, 1), {})
    assert set(answer.excluded) == {question.excluded} and bool((answer.counts >= 1).all())


def _counts_and_names(question, answer) -> None:
    assert answer.forgotten.keys() <= {"r"} and all(-1 <= label < CLASSES for label in answer.retained)
    assert all(0 < one.count < 2**53 for group in (answer.forgotten, answer.retained) for one in group.values())


def _weights_and_variances(question, answer) -> None:
    for kind, groups in (("forgotten", answer.forgotten), ("reference", answer.reference)):
        assert groups.keys() <= {"r"} and all(cuts.keys() == question.cuts.keys() for cuts in groups.values())
        for spread in (spread for cuts in groups.values() for spread in cuts.values()):
            assert (20 <= spread.weight < 2**53) if kind == "forgotten" else (0 < spread.weight <= 0.75 + 1e-6)
            assert bool((spread.variance >= 0).all())


def _hits_within_rows(question, answer) -> None:
    assert answer.forgotten.keys() <= {"r"} and answer.unseen.keys() <= {"r"}
    for counts in (answer.retained, answer.held_out, *answer.forgotten.values(), *answer.unseen.values()):
        for label, one in counts.items():
            assert type(label) is int and 0 <= label < CLASSES and 0 < one.rows <= MOST_ROWS and one.rows % 1 == 0
            assert 0 <= one.both <= min(one.before, one.after) and max(one.before, one.after) <= one.rows
            assert one.before + one.after - one.both <= one.rows + 1e-6


def _hits_by_bias(question, answer) -> None:
    for label, (rows, *hits) in [*answer.retained.items(), *answer.held_out.items()]:
        assert type(label) is int and 0 <= label < CLASSES and 0 < rows <= LARGEST_COUNT
        assert len(hits) == 1 + len(question.biases) and all(0 <= own <= rows for own in hits)


def _classes_of_samples(question, answer) -> None:
    assert answer.keys() == question.samples and all(0 <= label < CLASSES for label in answer.values())


def _rows_of_persons(question, answer) -> None:
    rows = [row for ids in answer.values() for row in ids]
    assert answer.keys() <= question.tags and len(rows) == len(set(rows)) and all(row >= 0 for row in rows)


def _moments_of_rows(question, answer) -> None:
    for part in answer if isinstance(answer, tuple) else (answer,):
        part.moments.check(question.config)
        held = set(part.moments.counts.nonzero().flatten().tolist())
        assert held <= (question.labels or set(range(CLASSES)))
        assert all(n == 0 or n >= question.config.least_rows for n in part.moments.counts.tolist())
        assert not part.by_class or torch.equal(sum(part.by_class.values()), part.moments.second)
        assert part.shortened <= part.moments.rows and not part.few & held


def _positive(question, answer) -> None:
    assert answer is None or 0 < (answer.clip if hasattr(answer, "clip") else answer.count) < 2**53


HOW = CentroidConfig(0.5)
QUESTIONS = {
    "who": (WhoQuestion(), lambda question, answer: None),
    "persons": (SubjectsQuestion(PERSONS), _rows_of_persons),
    "labels": (LabelsQuestion(SETTING.samples), _classes_of_samples),
    "centroids": (CentroidsQuestion("4", HOW, sample_labels=LABELS), _cells_add_up),
    "some left out": (CentroidsQuestion("4", HOW, excluded=SETTING.samples, sample_labels=LABELS), _cells_add_up),
    "paper": (CentroidsQuestion("4", CentroidConfig(0.5, 0.1, paper_accounting=True)), _cells_add_up),
    "noisy centroids": (PrivateCentroidsQuestion("4", DP_SETTINGS, excluded=SETTING.samples), _noise_alone),
    "sketches": (SketchesQuestion("2", "each", GROUPS), _counts_and_names),
    "spreads": (SpreadsQuestion({"2": "each", "4": "each"}, GROUPS, WEIGHTS), _weights_and_variances),
    "moments": (SecondMomentsQuestion("2", "each", (0,), GROUPS), _positive),
    "noisy statistics": (PrivateEraserQuestion("2", DP_SETTINGS, GROUPS), _positive),
    "sums": (MomentsQuestion("4", MomentConfig(by_class="never")), _moments_of_rows),
    "sums by class": (MomentsQuestion("4", MomentConfig(), frozenset([0, 2])), _moments_of_rows),
    "changes": (
        MomentChangeQuestion("4", MomentConfig(), frozenset([0, 1, 2]), frozenset(), SETTING.samples),
        _moments_of_rows,
    ),
    "biases": (BiasesQuestion(None, RowsToCount({}, REQUEST), ((0.0, 0.0, 0.0), (0.0, 9.0, 0.0))), _hits_by_bias),
    "tally": (TallyQuestion(None, None, RowsToCount(GROUPS.requests, GROUPS.forget_set)), _hits_within_rows),
}


def spoilt(value):
    """Every way to exchange one part of plain data."""
    yield from ODD
    if type(value) in (int, float):
        yield from (value + 1, value - 1, -value, 2 * value + 1)
    if isinstance(value, list):
        yield from (value[:-1], [*value, *value[-1:]], value[::-1], [value[0]] * len(value) if value else [])
        for i in range(len(value)) if len(value) < 6 else (0, len(value) - 1):
            yield from ([*value[:i], bad, *value[i + 1 :]] for bad in spoilt(value[i]))
    if isinstance(value, dict) and value:
        name = next(iter(value))
        yield {**value, "x": value[name]}
        yield from ({**value, name: bad} for bad in spoilt(value[name]))


def spoilt_array(array: torch.Tensor):
    """Every way to send an array that does not fit; None: not at all."""
    yield from (None, array[1:], array[None], array.flatten() if array.ndim > 1 else array[:, None], array.bool())
    if array.ndim > 1:
        yield array[:, 1:]
    for number in (math.nan, math.inf, -math.inf, 1e31, -1.0, 0.0, 2**31) if array.numel() else ():
        changed = array.double().clone()
        changed.view(-1)[-1] = number
        yield changed
        if math.isfinite(number) and not array.is_floating_point():
            yield changed.long()
    yield array.int() if array.is_floating_point() else array.float()


@pytest.mark.parametrize(("question", "check"), QUESTIONS.values(), ids=QUESTIONS.keys())
def test_whatever_part_of_an_answer_is_exchanged_it_fits_or_is_refused(question, check):
    details, arrays = SETTING.told(question)
    check(question, question.read(details, arrays, SETTING.facts))
    damaged = [({**details, name: bad}, arrays) for name, value in details.items() for bad in spoilt(value)]
    damaged += [({key: value for key, value in details.items() if key != name}, arrays) for name in details]
    damaged += [(details, {**arrays, name: bad}) for name, array in arrays.items() for bad in spoilt_array(array)]
    refused = 0
    for told, sent in damaged:
        sent = {name: array for name, array in sent.items() if array is not None}
        try:
            answer = question.read(copy.deepcopy(told), sent, SETTING.facts)
        except DataError:
            refused += 1
            continue
        check(question, answer)
        if answer is not None:
            _, again = question.answer_message(answer)
            assert all(again[name].shape == arrays[name].shape for name in again), (told, sent)
            assert all(bool(array.isfinite().all()) for array in again.values())
    assert refused > len(damaged) / 3


def test_room_is_made_for_no_more_rows_than_came_or_may_be_kept_back():
    question = CentroidsQuestion("4", HOW)
    details, arrays = SETTING.told(question)
    nothing = {name: tensor[:0] for name, tensor in arrays.items()}
    for rows in (1, 2**30):
        empty = {**details, "sizes": [0] * CLASSES, "rows": [[label, rows] for label in range(CLASSES)]}
        with pytest.raises(DataError, match="no centroids"):
            question.read(empty, nothing, SETTING.facts)
    few = {**empty, "rows": [[label, n] for label, n in details["rows"]], "excluded": [[i] for i in range(CLASSES)]}
    named = replace(question, excluded=frozenset(range(CLASSES)))
    assert sum(named.read(few, nothing, SETTING.facts).sizes) == 0  # a client's own rules may keep some back


def test_an_answer_that_leaves_out_other_samples_than_were_named_is_refused():
    question, _ = QUESTIONS["some left out"]
    fewer, more = (frozenset(SETTING.federation.client(0).train[:n].tolist()) for n in (29, 31))
    for left_out, why in ((fewer, "does not leave out what was named"), (more, "leaves out samples that nobody named")):
        with pytest.raises(DataError, match=why):
            question.read(*SETTING.told(replace(question, excluded=left_out)), SETTING.facts)


@pytest.mark.parametrize("asked", [{"labels": frozenset([0, 1])}, {"without": frozenset([2])}], ids=str)
def test_an_answer_of_other_classes_than_were_asked_for_is_refused(asked):
    for question in (CentroidsQuestion("4", HOW), PrivateCentroidsQuestion("4", DP_SETTINGS)):
        details, arrays = SETTING.told(question)
        with pytest.raises(DataError, match="it tells of"):
            replace(question, **asked).read(details, arrays, SETTING.facts)
        assert replace(question, **asked).read(*SETTING.told(replace(question, **asked)), SETTING.facts).labels == (
            0,
            1,
        )

"""Questions and answers as they travel, whatever carries them: one JSON text and arrays; and the bytes they take."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fedup.client import Summarizing, Summary
from fedup.eraser_statistics import GroupSpreads, Question, Sketches, Weights
from fedup.filter_file import parts_of
from fedup.moments import Moments
from fedup.plugging import Served
from fedup.positions import Over
from fedup.privacy.guarantee import DP
from fedup.private_erasure import NoisyStatistics
from fedup.tally import Tally, TallyQuestion

FORMAT = 1
NONCE = "release"  # a detail: the name by which a client is asked again for the same release under DP
SPENT = "spent"  # a detail: the sum of μ² by the client's own account
Message = tuple[dict[str, Any], dict[str, Tensor]]  # details and arrays

# What an answer is called in reports, and what it is charged as.
REPORTED_AS = {
    "labels": "classes of samples",
    "summarize": "centroids",
    "sketch": "sketches of means",
    "spreads": "means and variances",
    "moments": "second moments",
    "tally": "counts of answers",
    "gather privately": "statistics under DP",
}
CHARGED_AS = {"summarize": "centroids", "gather privately": "eraser"}
_NUMPY_HEADER = 128  # bytes before an array's numbers


# --- questions


def labels_question(samples: frozenset[int]) -> dict[str, Any]:
    """Of which classes some samples are."""
    return {"samples": sorted(samples)}


def summary_question(
    cut: str,
    how: Summarizing | DP,
    labels: frozenset[int] | None,
    *,
    without: frozenset[int] = frozenset(),
    excluded: frozenset[int],
    half: bool = False,
) -> dict[str, Any]:
    """The cells of some classes, or of all that a client holds without these, less some samples."""
    return {
        "cut": cut,
        "how": asdict(how),
        "labels": None if labels is None else sorted(labels),
        "without": sorted(without),
        "excluded": sorted(excluded),
        "half": half,
    }


def sketch_question(cut: str, over: Over, question: Question) -> dict[str, Any]:
    """Sketches of forgotten rows and of retained classes at a cut."""
    return {"cut": cut, "over": over, "question": question.to_json()}


def spreads_question(cuts: Mapping[str, Over], question: Question, weights: Weights) -> dict[str, Any]:
    """Means and variances of forgotten rows and of a mixture of retained ones."""
    shares = {name: [[label, share] for label, share in of.items()] for name, of in weights.items()}
    return {"cuts": dict(cuts), "question": question.to_json(), "weights": shares}


def moments_question(cut: str, over: Over, positions: Sequence[int], question: Question) -> dict[str, Any]:
    """Second moments for an eraser."""
    return {"cut": cut, "over": over, "positions": list(positions), "question": question.to_json()}


def tally_question(before: Served | None, after: Served | None, question: TallyQuestion) -> Message:
    """Counts of answers under two filters, which are sent along."""
    details: dict[str, Any] = {"question": question.to_json()}
    arrays: dict[str, Tensor] = {}
    for name, served in (("before", before), ("after", after)):
        tensors, header = parts_of(served) if served is not None else ({}, None)
        details[name] = None if header is None else _without_names(header)
        arrays |= {f"{name}/{part}": tensor for part, tensor in tensors.items()}
    return details, arrays


def _without_names(header: Mapping[str, Any]) -> dict[str, Any]:
    """What a filter needs to work: nobody is told for which clients and samples it was made."""
    erasure = header["erasure"]
    if erasure is not None:
        erasure = {**erasure, "about": {"place": {"of": erasure["about"]["place"]["of"]}}}
    return {**header, "requests": [], "question": None, "erasure": erasure}


def private_question(cut: str, dp: DP, question: Question) -> dict[str, Any]:
    """Noisy statistics for an eraser."""
    return {"cut": cut, "how": asdict(dp), "question": question.to_json()}


# --- answers


def labels_answer(labels: Mapping[int, int]) -> Message:
    """Classes of samples."""
    return {"labels": [[sample, label] for sample, label in sorted(labels.items())]}, {}


def summary_answer(summary: Summary, rows: Mapping[int, int], *, half: bool = False) -> Message:
    """Centroids, or noisy statistics; `rows` of each class are told where there is no guarantee."""
    details = {
        "labels": list(summary.labels),
        "sizes": list(summary.sizes),
        "excluded": [sorted(ids) for ids in summary.excluded],
        "rows": [[label, n] for label, n in sorted(rows.items())],
        "nonnegative": summary.nonnegative,
        "shape": list(summary.shape),
        "paper_epsilons": list(summary.paper_epsilons),
    }
    return details, {"vectors": summary.vectors.half() if half else summary.vectors, "counts": summary.counts}


def sketch_answer(found: Sketches) -> Message:
    """Sketches, by request and by class."""
    arrays = {f"forgotten/{name}": one.sums for name, one in found.forgotten.items()}
    arrays |= {f"retained/{label}": one.sums for label, one in found.retained.items()}
    counts = {
        "forgotten": [[name, one.count] for name, one in found.forgotten.items()],
        "retained": [[label, one.count] for label, one in found.retained.items()],
    }
    return counts, arrays


def spreads_answer(found: GroupSpreads) -> Message:
    """Means and variances, by request and cut."""
    details: dict[str, Any] = {}
    arrays: dict[str, Tensor] = {}
    for kind, groups in (("forgotten", found.forgotten), ("reference", found.reference)):
        details[kind] = {name: {cut: one.weight for cut, one in cuts.items()} for name, cuts in groups.items()}
        for name, cuts in groups.items():
            for cut, one in cuts.items():
                arrays |= {f"{kind}/{name}/{cut}/mean": one.mean, f"{kind}/{name}/{cut}/variance": one.variance}
    return details, arrays


def moments_answer(found: Moments | None) -> Message:
    """Second moments: of a symmetric matrix one half is sent."""
    if found is None:
        return {"none": True}, {}
    return {"none": False, "count": found.count}, {"sums": found.sums, "squares": half_of(found.squares)}


def moments_as_sent(found: Moments) -> Moments:
    """With matrices that are symmetric to the bit, as they are where one half of them was sent."""
    return Moments(found.count, found.sums, whole_of(half_of(found.squares), found.sums.shape[1]))


def tally_answer(found: Tally) -> Message:
    """Counts."""
    return found.to_json(), {}


def noisy_answer(found: NoisyStatistics) -> Message:
    """Noisy statistics for an eraser."""
    return {"clip": found.clip}, {"sums": found.sums, "counts": found.counts}


def half_of(squares: Tensor) -> Tensor:
    """Of symmetric matrices the upper triangle, row by row. (P, C, C) to (P, C (C + 1) / 2)"""
    one, other = torch.triu_indices(squares.shape[-1], squares.shape[-1], device=squares.device)
    return squares[..., one, other]


def whole_of(half: Tensor, channels: int) -> Tensor:
    """The opposite of `half_of`, symmetric to the bit."""
    one, other = torch.triu_indices(channels, channels, device=half.device)
    squares = half.new_empty(*half.shape[:-1], channels, channels)
    squares[..., one, other] = half
    squares[..., other, one] = half
    return squares


def identity_of(arrays: Mapping[str, Tensor]) -> str:
    """What a release is known by, whatever name it carries: sha256 of its arrays' names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(arrays.items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- as they are sent


def question_text(kind: str, base: str, details: Mapping[str, Any]) -> str:
    """A question about the model of that fingerprint."""
    return json.dumps({"format": FORMAT, "kind": kind, "base": base, "details": dict(details)})


def answer_text(status: str, base: str, details: Mapping[str, Any], reason: str = "") -> str:
    """An answer, or why there is none."""
    told = {"format": FORMAT, "status": status, "base": base, "details": dict(details), "reason": reason}
    return json.dumps(told)


def message_size(text: str, tensors: Mapping[str, Tensor]) -> int:
    """Bytes of a message of this text and these arrays, as Flower's protocol buffers have it."""
    arrays = [
        (name, str(tensor.dtype).removeprefix("torch."), tensor.shape, _NUMPY_HEADER + tensor.nbytes)
        for name, tensor in tensors.items()
    ]
    record = field_size(arrays_size(arrays)) + text_size("arrays") if arrays else 0
    named_text = field_size(text_size("json") + field_size(text_size(text)))
    return field_size(text_size("fedup") + field_size(named_text)) + (field_size(record) if record else 0)


def arrays_size(arrays: Iterable[tuple[str, str, Sequence[int], int]]) -> int:
    """Bytes of a record of arrays, by name, type, shape and bytes of the data."""
    return sum(
        field_size(
            text_size(name)
            + field_size(text_size(dtype) + _shape_size(shape) + text_size("numpy.ndarray") + field_size(n))
        )
        for name, dtype, shape, n in arrays
    )


def text_size(text: str) -> int:
    """Bytes of a text as a field."""
    return field_size(len(text.encode(errors="surrogatepass")))


def _shape_size(shape: Sequence[int]) -> int:
    return field_size(sum(map(_number_size, shape))) if len(shape) else 0


def field_size(size: int) -> int:
    """Bytes of a field of so many bytes: a tag of one byte and the length before them."""
    return 1 + _number_size(size) + size


def _number_size(number: int) -> int:
    """Seven bits to a byte."""
    return max(1, -(-number.bit_length() // 7))

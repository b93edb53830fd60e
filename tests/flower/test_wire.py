"""Messages: what was written is read again, and what strangers send is either that or a DataError."""

import contextlib
import gc
import io
import json
import weakref

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from fedup.clients.messages import answer_text, message_size
from fedup.errors import DataError
from fedup.flower.wire import (
    FORMAT,
    Answer,
    Ask,
    load_arrays,
    read_answer,
    read_ask,
    record_of,
    size_of,
    write_answer,
    write_ask,
)

PLENTY = 10**9
NAMES = st.text(min_size=1, max_size=12)
NUMBERS = st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.booleans() | st.none()
DETAILS = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        NUMBERS | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=12,
    ),
    max_size=5,
)
ARRAYS = st.dictionaries(
    NAMES,
    arrays_of.arrays(
        st.sampled_from([np.float16, np.float32, np.float64, np.int32, np.int64, np.bool_, np.uint8]),
        arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    max_size=3,
)


def tensors_of(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(values)) for name, values in arrays.items()}


def assert_same_tensors(one: dict, other: dict) -> None:
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        assert tensor.numpy().tobytes() == other[name].numpy().tobytes()  # NaN and the sign of 0 too


@contextlib.contextmanager
def no_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def text_of(told: object) -> RecordDict:
    return RecordDict({"fedup": ConfigRecord({"json": told if isinstance(told, str) else json.dumps(told)})})


def an_answer(**told: object) -> dict:
    return {"format": FORMAT, "status": "ok", "base": "b", "details": {}, "reason": "", **told}


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20), DETAILS, st.none() | ARRAYS)
def test_a_question_survives_writing_and_reading(kind, base, details, arrays):
    weights = None if arrays is None else tensors_of(arrays)
    found = read_ask(write_ask(Ask(kind, base, details, weights)))
    assert (found.kind, found.base, found.details) == (kind, base, details)
    assert (found.weights is None) == (weights is None)
    assert_same_tensors(found.weights or {}, weights or {})


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["ok", "refused", "failed", "needs weights"]), st.text(max_size=20), DETAILS, ARRAYS, st.text())
def test_an_answer_survives_writing_and_reading(status, base, details, arrays, reason):
    content = write_answer(Answer(status, base, details, tensors_of(arrays), reason))
    found = read_answer(content, most_bytes=PLENTY)
    assert (found.status, found.base, found.details, found.reason) == (status, base, details, reason[:500])
    assert found.size == size_of(content)
    assert_same_tensors(found.arrays, tensors_of(arrays))


def test_tensors_are_sent_as_their_values_or_not_at_all_and_can_be_written_to_when_read():
    in_pieces = torch.arange(12.0).view(3, 4).T.requires_grad_()
    found = read_answer(write_answer(Answer("ok", "", {}, {"a": in_pieces})), most_bytes=PLENTY).arrays["a"]
    assert torch.equal(found, in_pieces.detach())
    assert not found.zero_().any()
    with pytest.raises(DataError, match="bfloat16"):
        record_of({"it": torch.zeros(3, dtype=torch.bfloat16)})


@settings(max_examples=40, deadline=None)
@given(DETAILS, ARRAYS)
def test_the_size_is_that_of_flowers_protocol_buffers_and_is_known_without_flower(details, arrays):
    tensors = tensors_of(arrays)
    content = write_answer(Answer("ok", "base", details, tensors))
    assert size_of(content) == recorddict_to_proto(content).ByteSize()
    assert message_size(answer_text("ok", "base", details), tensors) == size_of(content)


def test_an_answer_of_just_the_size_that_is_taken_is_taken_and_one_byte_less_is_not():
    content = write_answer(Answer("ok", "", {}, {"zeros": torch.zeros(1000)}))
    assert read_answer(content, most_bytes=size_of(content)).arrays["zeros"].shape == (1000,)
    with pytest.raises(DataError, match="bytes came"):
        read_answer(content, most_bytes=size_of(content) - 1)


def test_a_message_that_was_read_is_freed_at_once_with_its_arrays():
    content = write_answer(Answer("ok", "", {}, {"zeros": torch.zeros(1000)}))
    message = weakref.ref(content)
    with no_garbage_collection():
        read_answer(content, most_bytes=PLENTY)
        del content
        assert message() is None


def npy(values: np.ndarray, **options: bool) -> bytes:
    file = io.BytesIO()
    np.save(file, values, **options)
    return file.getvalue()


TEXTS = {
    "no record": RecordDict(),
    "a record of another name": RecordDict({"other": ConfigRecord({"json": "{}"})}),
    "arrays where the text should be": RecordDict({"fedup": ArrayRecord({"json": Array(np.zeros(1))})}),
    "bytes for a text": RecordDict({"fedup": ConfigRecord({"json": b"\xff\xfe"})}),
    "a list": text_of([1, 2]),
    "deep nesting": text_of("[" * 100_000),
    "another format": text_of(an_answer(format=2)),
    "no format": text_of({"status": "ok", "kind": "who", "base": "", "details": {}}),
    "a number of many digits": text_of('{"format": ' + "9" * 5000 + "}"),
}


@pytest.mark.parametrize("content", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize(
    "read", [read_ask, lambda content: read_answer(content, most_bytes=PLENTY)], ids=["ask", "answer"]
)
def test_content_that_is_no_message_raises_a_data_error(content, read):
    with pytest.raises(DataError):
        read(content)


NO_ARRAYS = {
    "no bytes": Array("float32", (3,), "numpy.ndarray", b""),
    "cut off": Array("float32", (1000,), "numpy.ndarray", npy(np.zeros(1000, np.float32))[:-1]),
    "a pickle in an array": Array("float32", (1,), "numpy.ndarray", npy(np.array([{}], object), allow_pickle=True)),
    "of bfloat16": Array("bfloat16", (3,), "numpy.ndarray", npy(np.zeros(3, np.uint16))),
    "of texts, said to be numbers": Array("float32", (2,), "numpy.ndarray", npy(np.array(["a", "b"]))),
    "of dates": Array(np.array(["2020-01-01"], "datetime64[D]")),
    "of another byte order": Array(np.zeros(3, ">f4")),
    "of other bytes than it says": Array("float32", (3,), "numpy.ndarray", npy(np.zeros(3, np.int16))),
    "another way of writing": Array("float32", (3,), "torch.tensor", npy(np.zeros(3, np.float32))),
    "far more rows than bytes": Array(
        "float32", (3,), "numpy.ndarray", npy(np.zeros(3, np.float32)).replace(b"(3,), }      ", b"(9999999999,)}")
    ),
}


@pytest.mark.parametrize("array", NO_ARRAYS.values(), ids=NO_ARRAYS.keys())
def test_what_is_no_array_of_plain_numbers_raises_a_data_error_in_questions_and_answers(array):
    answer, ask = write_answer(Answer("ok", "")), write_ask(Ask("who", ""))
    answer["arrays"] = ask["weights"] = ArrayRecord({"it": array})
    with pytest.raises(DataError, match="it is"):
        read_answer(answer, most_bytes=PLENTY)
    with pytest.raises(DataError, match="it is"):
        read_ask(ask)


@settings(max_examples=60, deadline=None)
@given(
    st.text(max_size=60)
    | st.recursive(
        NUMBERS | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["format", "kind", "base", "details", "status", "reason"]), inner)
        ),
    ).map(json.dumps)
    | DETAILS.map(lambda details: json.dumps(an_answer(**details))),
    st.binary(max_size=80) | st.just(npy(np.zeros((2, 2)))),
    st.sampled_from(["float32", "float64", "object", "bfloat16", "bool", "", "<U3"]),
)
def test_whatever_text_and_bytes_come_reading_gives_a_message_or_a_data_error(text, data, dtype):
    content = RecordDict({"fedup": ConfigRecord({"json": text or " "})})
    content["arrays"] = content["weights"] = ArrayRecord({"it": Array(dtype, (2, 2), "numpy.ndarray", data)})
    for read in (read_ask, lambda content: read_answer(content, most_bytes=PLENTY)):
        with contextlib.suppress(DataError):
            assert isinstance(read(content), Ask | Answer)


def test_a_message_that_lacks_a_part_raises_a_data_error():
    for odd in ({"status": "fine"}, {"status": ["ok"]}, {"status": None}, {"details": []}, {"details": "none"}):
        with pytest.raises(DataError, match="neither"):
            read_answer(text_of(an_answer(**odd)), most_bytes=PLENTY)
    whole = {"kind": "who", "base": "", "details": {}}
    assert read_ask(text_of({"format": FORMAT, **whole})) == Ask(**whole)
    for name in whole:
        with pytest.raises(DataError, match="lacks a part"):
            read_ask(text_of({"format": FORMAT, **{key: value for key, value in whole.items() if key != name}}))
    for odd in (3, "abc", None, [1, 2]):
        with pytest.raises(DataError, match="lacks a part"):
            read_ask(text_of({"format": FORMAT, **whole, "details": odd}))


def test_nothing_that_a_message_carries_escapes_the_limit():
    for record in (
        MetricRecord({"numbers": [0.0] * 10_000}),
        ConfigRecord({"text": "\N{SNOWMAN}" * 30_000}),
        ArrayRecord({"a" * 80_000: Array(np.zeros(1))}),
        ConfigRecord({"bytes": b"x" * 80_000, "none": "", "nothing": []}),
    ):
        content = write_answer(Answer("ok", ""))
        content["more"] = record
        assert size_of(content) == pytest.approx(recorddict_to_proto(content).ByteSize(), abs=8)
        with pytest.raises(DataError, match="bytes came"):
            read_answer(content, most_bytes=70_000)


def test_a_model_takes_the_arrays_that_flowers_strategies_give_and_no_others():
    model, state = torch.nn.Linear(2, 3).train(), {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}
    loaded = load_arrays(model, ArrayRecord(state))
    assert loaded is model and not model.training and torch.equal(model.weight, state["weight"])
    good, text = ArrayRecord(state), Array(np.array(["a"]))
    for other in (
        {"bias": good["bias"]},
        {**good, "more": good["bias"]},
        {**good, "bias": good["weight"]},
        {},
        {**good, "bias": text},
    ):
        with pytest.raises(DataError):
            load_arrays(model, ArrayRecord(other))

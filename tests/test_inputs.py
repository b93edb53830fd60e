"""Data as users bring them: every form of the same data makes the same federation, and bad ones are named early."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from fedup import Federation, Forget, collect, federate
from fedup.cli._inputs import PreparedRows
from fedup.errors import DataError, RequestError, SettingError

NAMES = ("mercy", "st_john", "charité")
SOME = {"heldout": 0.2, "validation": 0.1, "seed": 3}


def made_up(seed: int, targets: str):
    source = np.random.default_rng(seed)
    x = source.normal(size=(60, 4)).astype(np.float32)
    y = {
        "classes": source.permutation(np.arange(60) % 3),
        "labels": source.integers(0, 2, size=(60, 3)),
        "values": source.normal(size=(60, 2)).astype(np.float32),
    }[targets]
    return x, y, source.permutation(np.arange(60) % 3)


def forms(x, y, owners):
    """The same rows, targets and clients in every form that is taken."""
    rows = {name: np.flatnonzero(owners == i) for i, name in enumerate(NAMES)}
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    yield (x.astype(np.float64), y), rows
    yield (x.tolist(), y.tolist()), {name: own.tolist() for name, own in rows.items()}
    yield (torch.from_numpy(x), torch.from_numpy(y)), {name: torch.from_numpy(own) for name, own in rows.items()}
    yield data, {name: owners == i for i, name in enumerate(NAMES)}
    yield DataLoader(data, batch_size=7, shuffle=True), rows
    yield DataLoader(data, sampler=SubsetRandomSampler(range(60))), rows


@pytest.mark.parametrize("targets", ["classes", "labels", "values"])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_form_of_the_same_data_is_the_same_federation(targets, seed):
    x, y, owners = made_up(seed, targets)
    made = [Federation.of(data, parts, **SOME) for data, parts in forms(x, y, owners)]
    assert {federation.digest() for federation in made} == {made[0].digest()}
    assert all(torch.equal(federation.x, torch.from_numpy(x)) for federation in made)
    assert all(federation.targets == targets and federation.client_names == NAMES for federation in made)
    numbers = [np.flatnonzero(owners == i) for i in range(3)]
    split = Federation.split(torch.from_numpy(x), torch.from_numpy(y), list(map(torch.from_numpy, numbers)), **SOME)
    for federation in (split, Federation.of((x, y), [own.tolist() for own in numbers], **SOME)):
        assert federation.digest() == made[0].digest() and federation.client_names == ()


def test_names_of_clients_classes_and_labels_are_kept_and_lead_to_requests():
    x, _, owners = made_up(0, "classes")
    by_row = [NAMES[i] for i in owners]
    sick = ["yes" if i % 3 else "no" for i in range(60)]
    federation = Federation.of((x, sick), by_row)
    assert federation.client_names == tuple(sorted(NAMES)) and federation.class_names == ("no", "yes")
    mercy = federation.client_id("mercy")
    assert set(federation.client(mercy).train.tolist()) <= set(np.flatnonzero(owners == 0).tolist())
    assert {sick[row] for row in federation.forgotten(Forget.classes([federation.class_id("yes")])).tolist()} == {"yes"}
    with pytest.raises(RequestError, match=r"Client 1 \(mercy\) was not trained on 1 of the 1 samples"):
        federation.check(Forget.samples({mercy: [int(np.flatnonzero(owners == 1)[0])]}))
    for wrong in ("Mercy", "0"):
        with pytest.raises(RequestError, match="mercy"):
            federation.client_id(wrong)
    apart = Federation.of({name: (x[owners == i], np.array(sick)[owners == i]) for i, name in enumerate(NAMES)})
    assert apart.client_names == NAMES and apart.class_names == ("no", "yes")
    assert torch.equal(
        apart.x[apart.client(2).train[0]], torch.from_numpy(x[owners == 2][apart.client(2).train[0] - 40])
    )
    labels = Federation.of((x, [["a"], [], ["a", "c"]] * 20), by_row)
    assert (labels.targets, labels.class_names) == ("labels", ("a", "c")) and labels.y[2].tolist() == [True, True]


def test_frames_bring_their_columns():
    pandas = pytest.importorskip("pandas")
    x, y, owners = made_up(1, "values")
    frame = pandas.DataFrame(x, columns=list("abcd")).assign(u=y[:, 0], v=y[:, 1], hospital=[NAMES[i] for i in owners])
    federation = Federation.of(frame, "hospital", label=["u", "v"])
    same = Federation.of((frame[list("abcd")], frame[["u", "v"]]), frame["hospital"])
    assert federation.digest() == same.digest() and federation.class_names == ("u", "v")
    assert torch.equal(federation.x, torch.from_numpy(x)) and torch.equal(federation.y, torch.from_numpy(y))
    for wrong, message in (({"label": "w"}, "no column w; there are a, b"), ({}, "Which column holds the targets")):
        with pytest.raises(DataError, match=message):
            Federation.of(frame, "hospital", **wrong)
    with pytest.raises(DataError, match="Columns must hold numbers; hospital does not"):
        Federation.of(frame, [0] * 60, label="u")


def test_data_that_cannot_be_used_are_named_before_anything_is_made():
    x, y, owners = made_up(2, "classes")
    holes = np.where(np.arange(240).reshape(60, 4) == 9, np.nan, x)
    for data, parts, options, message in (
        ((x, y[:-1]), owners, {}, "60 rows and 59 targets"),
        ((holes, y), owners, {}, r"1 rows hold NaN or infinite numbers \(2\)"),
        (([[1.0, 2.0], [3.0]], [0, 1]), [0, 1], {}, "row 1 is not as long as the first"),
        (([["a"], ["b"]], [0, 1]), [0, 1], {}, "Rows must hold numbers; found <U1 such as 'a'"),
        ((x, np.where(y == 1, np.nan, y)), owners, {}, "20 rows have a target that is missing"),
        ((x, [None, *["a"] * 59]), owners, {}, "1 rows have no class"),
        ((x, y + 0.5), owners, {"targets": "classes"}, "whole numbers.*Or are they values"),
        ((x, y), owners, {"targets": "labels"}, "0 or 1; found 0 … 2"),
        ((x, y), owners[:9], {}, "found \\(9,\\) for 60 rows"),
        ((x, y), {"mercy": [0, 1, 99]}, {}, "rows 0 … 59; found 0 … 99"),
        ((x, y), ["a", *[""] * 59], {}, "no client: their name is empty"),
        ((x, y), None, {}, "Say who holds which rows"),
        (x, owners, {}, "Data are a pair"),
        ({"mercy": (x, y), "st_john": (x[:, :2], y)}, None, {}, "'st_john' have shape \\(2,\\)"),
        ((x, y), "hospital", {}, "only a frame has columns"),
    ):
        with pytest.raises(DataError, match=message):
            Federation.of(data, parts, **options)
    with pytest.raises(SettingError, match="targets is one of classes, labels, values"):
        Federation.of((x, y), owners, targets="numbers")


@pytest.mark.parametrize(
    ("rows", "dtype", "fits"),
    [
        ([0.9, 1.7], torch.int64, False),
        ([0.0, 2.0], torch.int64, True),
        ([np.nan, 1], torch.int64, False),
        ([1, 300], torch.uint8, False),
        ([1, 200], torch.uint8, True),
        ([0, 2], torch.bool, False),
        ([1j, 2], torch.float32, False),
        ([1, 0.1], torch.bfloat16, True),  # floats may be rounded
    ],
)
def test_rows_of_a_numpy_file_become_the_models_type_only_without_loss(tmp_path, rows, dtype, fits):
    path = str(tmp_path / "rows.npy")
    np.save(path, np.array(rows)[:, None])
    reader = PreparedRows((1,), dtype)
    if fits:
        expected = torch.tensor(rows)[:, None].to(dtype)
        assert torch.equal(reader.prepare(row for _, row in reader.read([path])), expected)
    else:
        with pytest.raises(DataError, match="some values would change"):
            list(reader.read([path]))


@pytest.mark.parametrize(
    ("targets", "outputs", "message"),
    [
        ("classes", 2, "output for each class, 3 in all, and it has 2"),
        ("labels", 4, "output for each label, 3 in all, and it has 4"),
        ("values", 3, "if the targets are classes, give them as whole numbers"),
    ],
)
def test_a_model_with_other_outputs_or_inputs_is_refused_before_training_and_collecting(targets, outputs, message):
    x, y, owners = made_up(3, targets)
    federation = Federation.of((x, y), owners)
    for call in (lambda model, data: federate(model, data, rounds=1), collect):
        with pytest.raises(DataError, match=message):
            call(nn.Linear(4, outputs), federation)
        with pytest.raises(DataError, match=r"does not take these rows.*A row is float32 of shape .4,."):
            call(nn.Linear(5, outputs), federation)

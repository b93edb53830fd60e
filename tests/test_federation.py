import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup import Federation, Forget, iid
from fedup.errors import DataError, RequestError, SettingError

few = settings(max_examples=25, deadline=None, derandomize=True)
PARTS = ("train", "validation", "heldout")
X, Y = torch.arange(240.0).reshape(120, 2), torch.arange(120) % 4


def split(seed: int = 0, clients: int = 4, **settings) -> Federation:
    return Federation.split(X, Y, iid(Y, clients, seed=seed), seed=seed, **settings)


@st.composite
def requests(draw):
    """Requests that a federation of four clients and classes knows, sample ids among them."""
    federation = split(draw(st.integers(0, 3)))
    client = draw(st.integers(0, 3))
    some_rows = st.lists(st.sampled_from(federation.client(client).train.tolist()), min_size=1, max_size=5)
    request = Forget(
        draw(st.frozensets(st.integers(0, 3), max_size=2)),
        draw(st.frozensets(st.integers(0, 3), max_size=2)),
        draw(st.just({}) | st.fixed_dictionaries({client: some_rows.map(frozenset)})),
    )
    return federation, request


@few
@given(st.integers(0, 50), st.floats(0, 0.6), st.floats(0, 0.39))
def test_train_validation_and_heldout_share_out_each_clients_rows(seed, heldout, validation):
    parts = iid(Y, 4, seed=seed)
    federation = Federation.split(X, Y, parts, seed=seed, heldout=heldout, validation=validation)
    for part, client in zip(parts, federation.clients, strict=True):
        pieces = [getattr(client, name) for name in PARTS]
        assert torch.equal(torch.cat(pieces).sort().values, part)
        assert all(torch.equal(piece, piece.sort().values) for piece in pieces)
        assert len(client.train) > 0 and len(client.heldout) == int(len(part) * heldout)


def test_by_default_a_fifth_is_held_out_and_a_tenth_validates():
    assert [tuple(len(getattr(c, name)) for name in PARTS) for c in split().clients] == [(21, 3, 6)] * 4


def test_a_clients_split_depends_on_the_seed_alone():
    parts = iid(Y, 4)
    first, again, other = (Federation.split(X, Y, parts, seed=seed) for seed in (1, 1, 2))
    alone = Federation.split(X, Y, parts[:1], seed=1)
    assert torch.equal(first.rows("heldout"), again.rows("heldout"))
    assert not torch.equal(first.rows("heldout"), other.rows("heldout"))
    assert torch.equal(alone.client(0).heldout, first.client(0).heldout)


@few
@given(requests(), st.sampled_from(PARTS))
def test_a_row_is_forgotten_exactly_when_its_client_class_or_id_is_named(drawn, part):
    federation, request = drawn
    named = {
        row
        for client in federation.clients
        for row in getattr(client, part).tolist()
        if client.id in request.client_ids
        or int(Y[row]) in request.class_ids
        or row in request.sample_ids.get(client.id, ())
    }
    rows = federation.rows(part).tolist()
    assert federation.forgotten(request, part).tolist() == [row for row in rows if row in named]
    assert federation.retained(request, part).tolist() == [row for row in rows if row not in named]


@few
@given(requests())
def test_without_keeps_the_retained_rows_and_every_clients_place(drawn):
    federation, request = drawn
    if not request.kind:
        return
    before = federation.rows().clone()
    rest = federation.without(request)
    assert (rest.ids, rest.num_classes) == (federation.ids, federation.num_classes)
    for part in PARTS:
        assert torch.equal(rest.rows(part), federation.retained(request, part))
    assert torch.equal(federation.rows(), before)


def test_a_sample_is_forgotten_at_the_named_client_only():
    federation = split()
    row = int(federation.client(2).train[0])
    assert federation.forgotten(Forget.samples({2: [row]})).tolist() == [row]
    assert federation.forgotten(Forget.samples({1: [row]})).tolist() == []


def test_relabeled_changes_the_labels_and_nothing_else():
    federation = split()
    flipped = federation.relabeled((Y + 1) % 4)
    assert torch.equal(flipped.y, (Y + 1) % 4) and flipped.clients is federation.clients
    assert torch.equal(federation.y, Y)
    for bad in (Y[:-1], Y + 1, Y.float()):
        with pytest.raises(DataError):
            federation.relabeled(bad)


def test_subjects_are_one_whole_number_per_row():
    federation = split()
    assert torch.equal(federation.with_subjects(Y).subjects, Y) and federation.subjects is None
    for bad in (Y[:-1], Y[:, None], Y.float()):
        with pytest.raises(DataError, match="one whole number per row"):
            federation.with_subjects(bad)


def test_an_unknown_client_is_named_with_those_there_are():
    with pytest.raises(RequestError, match=r"Unknown client 9.*\[0, 1, 2, 3\]"):
        split().client(9)


def test_arrays_parts_and_shares_that_cannot_be_used_are_refused():
    all_rows, nan = [torch.arange(120)], float("nan")
    for x, y, parts, message in (
        (X, Y.bool(), all_rows, "whole numbers"),
        (X, Y[:, None], all_rows, "0 or 1"),
        (X, Y.float() / 0, all_rows, "120 rows have a value that is NaN"),
        (X, Y[:-1], [torch.arange(100)], "as many"),
        (X[:0], Y[:0], [torch.arange(1)], "not none"),
        (X, Y - 1, all_rows, "Labels must lie"),
        (X, Y, [], "no client"),
        (X, Y, [torch.arange(9), torch.arange(0)], r"without data: \[1\]"),
        (X, Y, [torch.arange(9), torch.arange(8, 20)], "1 rows belong to two clients"),
        (X, Y, [torch.arange(110, 121)], r"rows 0 … 119; found 110 … 120"),
        (X, Y, [torch.tensor([-1, 4])], "found -1"),
    ):
        with pytest.raises(DataError, match=message):
            Federation.split(x, y, parts)
    with pytest.raises(DataError, match=r"0 … 2; found 0 … 3"):
        split(num_classes=3)
    for heldout, validation in [(1.0, 0.0), (0.5, 0.5), (-0.1, 0.1), (0.1, -0.1), (nan, 0.1)]:
        with pytest.raises(SettingError, match="leave rows to train on"):
            split(heldout=heldout, validation=validation)


def test_requests_that_cannot_be_met_are_refused_by_check_and_without():
    federation = split(num_classes=5)
    first = federation.client(0)
    for request, message in (
        (Forget(), "forgets nothing"),
        (Forget.clients([4]), "Unknown client"),
        (Forget.classes([5]), "Unknown class"),
        (Forget.samples({0: [10**6]}), "not trained on 1 of the 1 samples"),
        (Forget.samples({0: [int(first.heldout[0])]}), "held out"),
        (Forget.samples({0: [int(federation.client(1).train[0])]}), "unknown there"),
        (Forget.classes([4]), "changes nothing"),  # no row has that label
        (Forget.classes(range(4)), "leaves no training row"),
        (Forget.clients([1, 2, 3]) | Forget.samples({0: first.train}), "leaves no training row"),
    ):
        for call in (federation.check, federation.without):
            with pytest.raises(RequestError, match=message):
                call(request)

"""A history: what an observer saw, kept in memory or on disk, whole after an interruption, refused where damaged."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fedup import Federation, Forget, LocalTraining, Observer, Rounds, Runtime, dirichlet, federate, fingerprint
from fedup.bench.history import History
from fedup.errors import ArtifactError, StorageError

few = settings(max_examples=25, deadline=None, derandomize=True)
LOCAL = LocalTraining(batch_size=8)
COUNTER = "layers.1.num_batches_tracked"


class Net(nn.Module):
    """BatchNorm and a table that is not trained."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))
        self.register_buffer("table", torch.tensor([-4, 7]))

    def forward(self, x):
        return self.layers(x)


class Seen(Observer):
    """Copies of all that is shown, by round and client."""

    def __init__(self):
        self.before, self.uploads, self.shares, self.after = {}, {}, {}, {}

    def on_update(self, round_index, client, *, before, after, weight):
        self.before[round_index, client] = {name: tensor.clone() for name, tensor in before.items()}
        self.uploads[round_index, client] = {name: tensor.clone() for name, tensor in after.items()}
        self.shares[round_index, client] = weight

    def on_round(self, round_index, model):
        self.after[round_index] = copy.deepcopy(model.state_dict())


class Stop(Observer):
    """Interrupts at a client of a round, or at the round's end."""

    def __init__(self, round_index, client=None):
        self.at = round_index, client

    def on_update(self, round_index, client, **weights):
        if (round_index, client) == self.at:
            raise KeyboardInterrupt

    def on_round(self, round_index, model):
        if (round_index, None) == self.at:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def federation():
    torch.manual_seed(0)
    y = torch.arange(150) % 3
    x = torch.randn(150, 6) + 2 * nn.functional.one_hot(y, 6)
    return Federation.split(x, y, dirichlet(y, 4, seed=1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(params=["memory", "disk"])
def history(request, tmp_path):
    return History(tmp_path / "history" if request.param == "disk" else None)


def same_bits(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def assert_same(one: History, other: History) -> None:
    assert one.rounds == other.rounds
    for number in one.rounds:
        assert dict(one.shares(number)) == dict(other.shares(number))
        assert same_bits(one.before(number), other.before(number))
        for client in one.shares(number):
            assert same_bits(one.upload(number, client), other.upload(number, client))
            assert same_bits(one.update(number, client), other.update(number, client))
    assert one.changes() == other.changes()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- what is kept


@pytest.mark.parametrize("clients_per_round", [None, 2])
def test_all_that_an_observer_saw_is_kept_to_the_bit(model, federation, history, clients_per_round):
    seen = Seen()
    rounds = Rounds(3, clients_per_round=clients_per_round)
    trained = federate(model, federation, rounds=rounds, local=LOCAL, observers=[history, seen]).model
    assert fingerprint(trained) == fingerprint(federate(model, federation, rounds=rounds, local=LOCAL).model)
    for tensor in trained.state_dict().values():  # what is done to the model does not reach its history
        tensor.zero_()
    assert history.rounds == [0, 1, 2]
    assert same_bits(history.before(0), model.state_dict())
    floats = {name for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    for (number, client), after in seen.uploads.items():
        assert history.shares(number)[client] == seen.shares[number, client]
        assert same_bits(history.before(number), seen.before[number, client])
        assert same_bits(history.upload(number, client), after)
        update, before = history.update(number, client), seen.before[number, client]
        assert update.keys() == floats and COUNTER in after
        assert all(torch.equal(update[name], after[name] - before[name]) for name in floats)
    assert sum(len(history.shares(number)) for number in range(3)) == len(seen.uploads)
    assert history.changes() == pytest.approx(mean_changes(seen), rel=1e-5)


def test_only_the_rounds_that_were_trained_are_there_under_their_numbers(model, federation, history):
    federate(model, federation, rounds=0, observers=[history])
    assert (history.rounds, history.changes()) == ([], {})
    federate(model, federation, rounds=[7, 2, 12], local=LOCAL, observers=[history])
    assert history.rounds == [2, 7, 12]
    assert same_bits(history.before(7), model.state_dict())


def test_in_memory_and_on_disk_it_is_the_same_and_who_reads_the_folder_later_gets_it_too(model, federation, tmp_path):
    memory, disk = History(), History(tmp_path / "deep" / "history")
    assert list(tmp_path.iterdir()) == []  # nothing was written yet
    federate(model, federation, rounds=Rounds(3, clients_per_round=3), local=LOCAL, observers=[memory, disk])
    assert_same(memory, disk)
    assert_same(disk, History(tmp_path / "deep" / "history"))


def test_a_round_in_which_nobody_trained_is_kept_without_shares_and_counts_for_nothing(model, federation, history):
    seen = Seen()
    some = federation.without(Forget.clients([0, 1]))
    federate(model, some, rounds=Rounds(6, clients_per_round=1), local=LOCAL, observers=[history, seen])
    assert history.rounds == list(range(6))
    told = [list(history.shares(number)) for number in range(6)]
    assert told == [[client for number, client in seen.shares if number == one] for one in range(6)]
    assert [] in told
    assert any(told)
    assert history.changes() == pytest.approx(mean_changes(seen))


def mean_changes(seen: Seen) -> dict[str, float]:
    """The plain definition: over all uploads, the mean of an entry's absolute change."""
    every = {}
    for key, after in seen.uploads.items():
        for name, tensor in after.items():
            if tensor.is_floating_point():
                change = (tensor.double() - seen.before[key][name].double()).abs().mean()
                every.setdefault(name, []).append(float(change))
    return {name: sum(found) / len(found) for name, found in every.items()}


@few
@given(st.lists(st.lists(st.integers(-20, 20), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(1, 6))
def test_changes_weigh_each_upload_alike_whatever_a_rounds_size(rounds, entries):
    kept = History()
    for number, moves in enumerate(rounds):
        before = {"w": torch.full((entries,), float(number)), "count": torch.tensor(0)}
        for client, move in enumerate(moves):
            after = {"w": before["w"] + move, "count": torch.tensor(5)}
            kept.on_update(number, client, before=before, after=after, weight=1 / len(moves))
        kept.on_round(number, nn.Identity())
    every = [abs(move) for moves in rounds for move in moves]
    assert kept.changes() == pytest.approx({"w": sum(every) / len(every)})


# --- copies


def test_what_is_kept_does_not_follow_the_tensors_it_was_taken_from(history):
    weight = torch.arange(6.0).view(2, 3).t()  # not contiguous
    filters = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )
    before = {"weight": weight, "filters": filters, "count": torch.tensor(3)}
    after = {name: tensor + 1 for name, tensor in before.items()}
    expected = [{name: tensor.clone() for name, tensor in each.items()} for each in (before, after)]
    history.on_update(0, 5, before=before, after=after, weight=1.0)
    for tensor in (*before.values(), *after.values()):
        tensor.add_(100)
    history.on_round(0, nn.Identity())
    assert same_bits(history.before(0), expected[0])
    assert same_bits(history.upload(0, 5), expected[1])


# --- interrupted


@pytest.fixture(scope="module")
def in_one_go(federation, tmp_path_factory) -> tuple[str, Path]:
    """Fingerprint and history of four rounds."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whole") / "history"
    trained = federate(Net(), federation, rounds=4, local=LOCAL, observers=[History(folder)]).model
    return fingerprint(trained), folder


@pytest.mark.parametrize("stop", [(0, 0), (0, 2), (0, None), (2, 3), (3, None)], ids=str)
@pytest.mark.parametrize("stops_first", [True, False])
def test_an_interrupted_training_that_goes_on_has_the_history_of_one_in_one_go(
    model, federation, tmp_path, in_one_go, stop, stops_first
):
    """Stopped at a client of a round, or at the round's end."""
    path, (expected, whole) = tmp_path / "checkpoint.safetensors", in_one_go
    interrupted = [History(tmp_path / "parts"), Stop(*stop)]
    observers = interrupted[::-1] if stops_first else interrupted
    with pytest.raises(KeyboardInterrupt):
        federate(model, federation, rounds=4, local=LOCAL, observers=observers, runtime=Runtime(checkpoint=path))
    resumed = History(tmp_path / "parts")
    assert resumed.rounds in (list(range(stop[0])), list(range(stop[0] + 1)))  # an unfinished round is not there
    found = federate(
        model, federation, rounds=4, local=LOCAL, observers=[resumed], runtime=Runtime(checkpoint=path)
    ).model
    assert fingerprint(found) == expected
    for each in (resumed, History(tmp_path / "parts")):
        assert_same(each, History(whole))
    assert files(tmp_path / "parts") == files(whole)


def test_one_history_watches_an_interrupted_training_again_and_counts_no_client_twice(model, federation, history):
    whole = History()
    federate(model, federation, rounds=2, local=LOCAL, observers=[whole])
    with pytest.raises(KeyboardInterrupt):
        federate(model, federation, rounds=2, local=LOCAL, observers=[history, Stop(0, 2)])
    federate(model, federation, rounds=2, local=LOCAL, observers=[history])
    assert_same(history, whole)


# --- the disk


@few
@given(st.sampled_from(["0001-global", "0001-client-2"]), st.none() | st.integers(0, 40) | st.just(-7))
def test_a_damaged_or_missing_file_is_refused_by_name_and_the_others_stay_readable(in_one_go, name, length):
    history, path = History(in_one_go[1]), in_one_go[1] / f"{name}.safetensors"
    good = path.read_bytes()
    path.unlink() if length is None else path.write_bytes(good[:length])
    try:
        read = partial(history.before, 1) if name.endswith("global") else partial(history.upload, 1, 2)
        for access in (read, partial(history.update, 1, 2)):
            with pytest.raises(ArtifactError, match=f"{name}.safetensors"):
                access()
        assert history.before(0).keys() == history.upload(1, 3).keys()
        with pytest.raises(ArtifactError):
            history.upload(1, 9)  # it took no part
    finally:
        path.write_bytes(good)


@few
@given(
    st.one_of(
        st.sampled_from(["[]", "null", "3", '{"moved": {}}', '{"shares": {}}', '{"shares": [], "moved": {}}']).map(
            str.encode
        ),
        st.just(b'{"shares": {"first": 1.0}, "moved": {}}'),
        st.binary(max_size=20),
    )
)
@example(b"\xff\xfe\x00")
def test_a_damaged_list_of_a_rounds_clients_is_refused_by_name(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("history")
    (folder / "0001.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"0001\.json"):
        History(folder)


def test_removing_gives_the_disk_back_and_forgets_all_rounds(model, federation, history, tmp_path):
    other, whole = History(tmp_path / "other"), History()
    federate(model, federation, rounds=2, local=LOCAL, observers=[history, other])
    history.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]  # its own folder only
    assert (history.rounds, history.changes()) == ([], {})
    history.remove()  # there is nothing more to remove
    federate(model, federation, rounds=2, local=LOCAL, observers=[history, whole])
    assert_same(history, whole)  # and it can be used again


@pytest.mark.parametrize("obstacle", ["", "0000-client-2.safetensors", "0000.json"])
def test_a_disk_that_does_not_take_a_file_is_said(model, federation, tmp_path, obstacle):
    history = History(tmp_path / "history")
    if obstacle:
        (tmp_path / "history" / obstacle / "mine").mkdir(parents=True)
    else:
        (tmp_path / "history").write_text("mine")
    with pytest.raises(StorageError, match="Could not write"):
        federate(model, federation, rounds=1, local=LOCAL, observers=[history])

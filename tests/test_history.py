"""A history: what an observer saw, kept in memory or on disk, whole after an interruption, refused where damaged."""

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
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
    rounds = Rounds(4, clients_per_round=clients_per_round)
    federate(model, federation, rounds=rounds, local=LOCAL, observers=[history, seen])
    assert history.rounds == [0, 1, 2, 3]
    cohorts = [[client for number, client in seen.shares if number == one] for one in range(4)]
    assert (cohorts == [federation.ids] * 4) == (clients_per_round is None)
    for number, cohort in enumerate(cohorts):
        assert dict(history.shares(number)) == {client: seen.shares[number, client] for client in cohort}
        for client in cohort:
            assert same_bits(history.before(number), seen.before[number, client])
            assert same_bits(history.upload(number, client), seen.uploads[number, client])


def test_in_memory_and_on_disk_it_is_the_same_and_who_reads_the_folder_later_gets_it_too(model, federation, tmp_path):
    memory, disk = History(), History(tmp_path / "deep" / "history")
    federate(model, federation, rounds=Rounds(3, clients_per_round=3), local=LOCAL, observers=[memory, disk])
    assert_same(memory, disk)
    assert_same(disk, History(tmp_path / "deep" / "history"))


def test_shares_of_a_round_are_by_size_and_the_uploads_average_to_the_next_global_weights(model, federation, history):
    federate(model, federation, rounds=Rounds(3, clients_per_round=2), local=LOCAL, observers=[history])
    sizes = {client.id: len(client.train) for client in federation.clients}
    for number in (0, 1):
        shares = history.shares(number)
        total = sum(sizes[client] for client in shares)
        assert dict(shares) == pytest.approx({client: sizes[client] / total for client in shares})
        uploads = {client: history.upload(number, client) for client in shares}
        for name, tensor in history.before(number + 1).items():
            if tensor.is_floating_point():
                mean = sum(share * uploads[client][name].double() for client, share in shares.items())
                torch.testing.assert_close(tensor, mean.float())
            else:
                assert torch.equal(tensor, torch.stack([upload[name] for upload in uploads.values()]).amax(0))


def test_the_first_round_starts_from_the_first_weights(model, federation, history):
    federate(model, federation, rounds=2, local=LOCAL, observers=[history])
    assert same_bits(history.before(0), model.state_dict())
    assert not same_bits(history.before(1), model.state_dict())


def test_an_update_is_the_difference_of_all_that_is_of_floating_point(model, federation, history):
    seen = Seen()
    federate(model, federation, rounds=2, local=LOCAL, observers=[seen, history])
    floats = {name for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    assert "layers.1.running_var" in floats
    for (number, client), after in seen.uploads.items():
        update, before = history.update(number, client), seen.before[number, client]
        assert update.keys() == floats
        assert all(torch.equal(update[name], after[name] - before[name]) for name in floats)
        assert any(bool(tensor.any()) for tensor in update.values())


def test_counters_and_tables_of_integers_are_kept_as_they_are(model, federation, history):
    federate(model, federation, rounds=2, local=LOCAL, observers=[history])
    steps = {client.id: LOCAL.steps_of(len(client.train)) for client in federation.clients}
    assert len(set(steps.values())) > 1
    assert int(history.before(0)[COUNTER]) == 0
    assert {client: int(history.upload(0, client)[COUNTER]) for client in steps} == steps
    assert int(history.before(1)[COUNTER]) == max(steps.values())
    assert all(history.upload(1, client)["table"].tolist() == [-4, 7] for client in steps)


def test_only_the_rounds_that_were_trained_are_there_under_their_numbers(model, federation, history):
    federate(model, federation, rounds=[7, 2, 12], local=LOCAL, observers=[history])
    assert history.rounds == [2, 7, 12]
    assert same_bits(history.before(7), model.state_dict())


def test_a_training_of_no_rounds_leaves_an_empty_history(model, federation, history):
    federate(model, federation, rounds=0, observers=[history])
    assert (history.rounds, history.changes()) == ([], {})


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


def test_changes_are_the_mean_over_all_uploads_of_an_entrys_change(model, federation, history):
    seen = Seen()
    federate(model, federation, rounds=Rounds(3, clients_per_round=3), local=LOCAL, observers=[history, seen])
    expected = mean_changes(seen)
    assert history.changes() == pytest.approx(expected, rel=1e-5)
    assert all(change > 0 for change in expected.values())
    assert COUNTER not in expected


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


def test_what_is_done_to_a_trained_model_does_not_reach_its_history(model, federation, history):
    trained = federate(model, federation, rounds=1, local=LOCAL, observers=[history]).model
    before = {client: history.upload(0, client) for client in history.shares(0)}
    expected = {client: {name: one.clone() for name, one in upload.items()} for client, upload in before.items()}
    for each in (trained, model):
        for tensor in each.state_dict().values():
            tensor.zero_()
    assert all(same_bits(history.upload(0, client), upload) for client, upload in expected.items())


def test_keeping_a_history_changes_no_bit_of_the_training(model, federation, history):
    kept = federate(model, federation, rounds=2, local=LOCAL, observers=[history]).model
    assert fingerprint(kept) == fingerprint(federate(model, federation, rounds=2, local=LOCAL).model)


# --- interrupted


STOPS = {
    "at the first client": (0, 0),
    "amid the first round": (0, 2),
    "at the end of the first round": (0, None),
    "at the first client of a later round": (2, 0),
    "amid a later round": (2, 3),
    "at the end of the last round": (3, None),
}


@pytest.fixture(scope="module")
def in_one_go(federation, tmp_path_factory) -> tuple[str, Path]:
    """Fingerprint and history of four rounds."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whole") / "history"
    trained = federate(Net(), federation, rounds=4, local=LOCAL, observers=[History(folder)]).model
    return fingerprint(trained), folder


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS.keys())
@pytest.mark.parametrize("stops_first", [True, False])
def test_an_interrupted_training_that_goes_on_has_the_history_of_one_in_one_go(
    model, federation, tmp_path, in_one_go, stop, stops_first
):
    path, (expected, whole) = tmp_path / "checkpoint.safetensors", in_one_go
    interrupted = [History(tmp_path / "parts"), Stop(*stop)]
    observers = interrupted[::-1] if stops_first else interrupted
    with pytest.raises(KeyboardInterrupt):
        federate(model, federation, rounds=4, local=LOCAL, observers=observers, runtime=Runtime(checkpoint=path))
    resumed = History(tmp_path / "parts")
    found = federate(
        model, federation, rounds=4, local=LOCAL, observers=[resumed], runtime=Runtime(checkpoint=path)
    ).model
    assert fingerprint(found) == expected
    for each in (resumed, History(tmp_path / "parts")):
        assert_same(each, History(whole))
    assert files(tmp_path / "parts") == files(whole)


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_training_in_two_parts_with_cohorts_has_the_history_of_one_in_one_go(model, federation, tmp_path, done):
    whole, path = History(), tmp_path / "checkpoint.safetensors"
    options = {"local": LOCAL, "seed": 5}
    federate(model, federation, rounds=Rounds(4, clients_per_round=2), observers=[whole], **options)
    for count in (done, 4):
        part, rounds = History(tmp_path / "parts"), Rounds(count, clients_per_round=2)
        federate(model, federation, rounds=rounds, observers=[part], runtime=Runtime(checkpoint=path), **options)
        assert part.rounds == list(range(count))
    assert_same(part, whole)


def test_an_unfinished_round_is_not_there_for_who_reads_the_folder(model, federation, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        federate(model, federation, rounds=3, local=LOCAL, observers=[History(tmp_path / "history"), Stop(1, 2)])
    assert History(tmp_path / "history").rounds == [0]


def test_one_history_watches_an_interrupted_training_again_and_counts_no_client_twice(model, federation, history):
    whole = History()
    federate(model, federation, rounds=2, local=LOCAL, observers=[whole])
    with pytest.raises(KeyboardInterrupt):
        federate(model, federation, rounds=2, local=LOCAL, observers=[history, Stop(0, 2)])
    federate(model, federation, rounds=2, local=LOCAL, observers=[history])
    assert_same(history, whole)


# --- the disk


@pytest.fixture
def kept(model, federation, tmp_path) -> Path:
    federate(model, federation, rounds=2, local=LOCAL, observers=[History(tmp_path / "history")])
    return tmp_path / "history"


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "text": lambda path: path.write_text("no tensors"),
}


@pytest.mark.parametrize(
    "damage",
    [pytest.param(damage, id=name) for name, damage in DAMAGE.items()],
)
@pytest.mark.parametrize("name", ["0001-global", "0001-client-2"])
def test_a_damaged_or_missing_file_is_refused_by_name_and_the_others_stay_readable(kept, name, damage):
    damage(kept / f"{name}.safetensors")
    history = History(kept)
    read = partial(history.before, 1) if name.endswith("global") else partial(history.upload, 1, 2)
    with pytest.raises(ArtifactError, match=f"{name}.safetensors"):
        read()
    with pytest.raises(ArtifactError, match=f"{name}.safetensors"):
        history.update(1, 2)
    assert history.before(0).keys() == history.upload(1, 3).keys()


def test_an_upload_of_a_client_that_took_no_part_is_refused(kept):
    with pytest.raises(ArtifactError):
        History(kept).upload(1, 9)


NO_ROUND = {
    "empty": "",
    "cut off": '{"shares": {"0": 0.5',
    "no table": "[]",
    "nothing": "null",
    "a number": "3",
    "no shares": '{"moved": {}}',
    "no changes": '{"shares": {}}',
    "shares that are a list": '{"shares": [], "moved": {}}',
    "a client without a number": '{"shares": {"first": 1.0}, "moved": {}}',
}


@pytest.mark.parametrize(
    "text",
    [pytest.param(text, id=name) for name, text in NO_ROUND.items()],
)
def test_a_damaged_list_of_a_rounds_clients_is_refused_by_name(kept, text):
    (kept / "0001.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"0001\.json"):
        History(kept)


def test_bytes_that_are_no_text_are_refused(kept):
    (kept / "0000.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactError, match=r"0000\.json"):
        History(kept)


def test_a_round_whose_list_is_missing_is_not_there(kept):
    (kept / "0001.json").unlink()
    assert History(kept).rounds == [0]


def test_lists_of_clients_are_plain_json(kept, federation):
    told = json.loads((kept / "0001.json").read_text())
    assert [int(client) for client in told["shares"]] == federation.ids
    assert sum(told["shares"].values()) == pytest.approx(1)


def test_removing_gives_the_disk_back_and_forgets_all_rounds(model, federation, history, tmp_path):
    federate(model, federation, rounds=2, local=LOCAL, observers=[history])
    history.remove()
    assert not (tmp_path / "history").exists()
    assert (history.rounds, history.changes()) == ([], {})
    history.remove()  # there is nothing more to remove
    whole = History()
    federate(model, federation, rounds=2, local=LOCAL, observers=[history, whole])
    assert_same(history, whole)  # and it can be used again


def test_only_its_own_folder_is_removed(model, federation, tmp_path):
    (tmp_path / "model.safetensors").write_text("beside it")
    one, other = History(tmp_path / "one"), History(tmp_path / "other")
    federate(model, federation, rounds=1, local=LOCAL, observers=[one, other])
    one.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "other"]
    assert other.upload(0, 1).keys() == History(tmp_path / "other").upload(0, 1).keys()


def test_a_history_that_was_not_written_to_makes_no_folder(tmp_path):
    History(tmp_path / "history")
    assert list(tmp_path.iterdir()) == []


def _folder_is_a_file(folder: Path) -> None:
    folder.write_text("mine")


def _file_is_a_folder(folder: Path) -> None:
    (folder / "0000-client-2.safetensors").mkdir(parents=True)


def _list_is_a_folder(folder: Path) -> None:
    (folder / "0000.json" / "mine").mkdir(parents=True)


@pytest.mark.parametrize("obstacle", [_folder_is_a_file, _file_is_a_folder, _list_is_a_folder])
def test_a_disk_that_does_not_take_a_file_is_said(model, federation, tmp_path, obstacle):
    history = History(tmp_path / "history")
    obstacle(tmp_path / "history")
    with pytest.raises(StorageError, match="Could not write"):
        federate(model, federation, rounds=1, local=LOCAL, observers=[history])

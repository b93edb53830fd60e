"""FedAvg: the weighted average, its reproducibility, its observers and its checkpoints."""

import copy
from functools import partial

import pytest
import torch
from tests.engines._federations import train_locally
from torch import nn
from torch.nn.functional import cross_entropy

from fedup import Federation, Forget, LocalTraining, Observer, Rounds, Runtime, dirichlet, federate, fingerprint
from fedup.errors import ArtifactError, DataError, SettingError
from fedup.rng import generator, seed_for
from fedup.training.averaging import RunningAverage

LOCAL = LocalTraining(batch_size=8)
OPTIONS = {"local": LOCAL, "seed": 5}
by_three = partial(Rounds, clients_per_round=3)


class Net(nn.Module):
    """BatchNorm, dropout and tables that are not trained."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.3), nn.Linear(10, 3))
        self.register_buffer("table", torch.tensor([-4, 7]))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x):
        return self.layers(x)


@pytest.fixture
def federation():
    torch.manual_seed(0)
    y = torch.arange(150) % 3
    x = torch.randn(150, 6) + 2 * nn.functional.one_hot(y, 6)
    return Federation.split(x, y, dirichlet(y, 4, seed=1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


class Recorder(Observer):
    """Copies of all that is shown."""

    def __init__(self):
        self.updates, self.rounds = [], []

    def on_update(self, round_index, client, *, before, after, weight):
        before, after = ({name: tensor.clone() for name, tensor in each.items()} for each in (before, after))
        self.updates.append((round_index, client, before, after, weight))

    def on_round(self, round_index, model):
        self.rounds.append((round_index, copy.deepcopy(model.state_dict())))

    def cohorts(self):
        return [[client for r, client, *_ in self.updates if r == i] for i, _ in self.rounds]


def _trained_alone(model, federation, client, round_index, seed=0):
    """What a client makes of the global weights in a round."""
    own = copy.deepcopy(model)
    train_seed = seed_for(seed, "round", round_index, "client", client.id)
    train_locally(own, federation.x, federation.y, client.train, local=LOCAL, seed=train_seed)
    return own.state_dict()


def test_rounds_equal_a_brute_force_weighted_average(model, federation):
    expected = copy.deepcopy(model)
    sizes = [len(client.train) for client in federation.clients]
    assert len(set(sizes)) > 1
    for round_index in range(2):
        states = [_trained_alone(expected, federation, client, round_index) for client in federation.clients]
        average = {
            name: sum(n / sum(sizes) * state[name].double() for n, state in zip(sizes, states, strict=True)).float()
            for name, tensor in expected.state_dict().items()
            if tensor.is_floating_point()
        }
        expected.load_state_dict(average, strict=False)
    trained = federate(model, federation, rounds=2, local=LOCAL).model.state_dict()
    floats = [name for name, tensor in trained.items() if tensor.is_floating_point()]
    assert "layers.1.running_mean" in floats
    for name in floats:
        torch.testing.assert_close(trained[name], expected.state_dict()[name], msg=name)


def test_integer_buffers_are_counted_or_kept_and_never_averaged(model, federation):
    recorder = Recorder()
    trained = federate(model, federation, rounds=1, local=LOCAL, observers=[recorder]).model
    counts = [int(after["layers.1.num_batches_tracked"]) for *_, after, _ in recorder.updates]
    assert len(set(counts)) > 1
    assert int(trained.layers[1].num_batches_tracked) == max(counts)
    assert trained.mask.tolist() == [True, False]


def test_tables_of_negative_integers_stay_as_they_are(model, federation):
    assert federate(model, federation, rounds=2, local=LOCAL).model.table.tolist() == [-4, 7]


def test_a_federation_of_one_client_is_plain_training():
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    federation = Federation.split(x, y, [torch.arange(40)], heldout=0, validation=0)
    start = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    plain = copy.deepcopy(start)
    for round_index in range(3):
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
        order = generator(seed_for(0, "round", round_index, "client", 0), "batches")
        for _ in range(2):
            for batch in torch.randperm(40, generator=order).split(10):
                optimizer.zero_grad()
                cross_entropy(plain(x[batch]), y[batch]).backward()
                optimizer.step()
    local = LocalTraining(epochs=2, batch_size=10, lr=0.1, momentum=0.5)
    trained = federate(start, federation, rounds=3, local=local).model
    assert fingerprint(trained) == fingerprint(plain)
    assert fingerprint(trained) != fingerprint(start)


def test_the_model_given_is_left_as_it_was(model, federation):
    model.train()
    model.layers[0].weight.grad = torch.ones_like(model.layers[0].weight)
    before = fingerprint(model)
    trained = federate(model, federation, rounds=1, local=LOCAL).model
    assert fingerprint(model) == before != fingerprint(trained)
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in trained.modules())
    assert torch.equal(model.layers[0].weight.grad, torch.ones_like(model.layers[0].weight))
    assert model.layers[4].weight.grad is None


def test_no_round_gives_the_weights_one_started_from(model, federation):
    assert fingerprint(federate(model, federation, rounds=0).model) == fingerprint(model)


def test_same_seed_same_bits_with_dropout_whatever_was_drawn_before(model, federation):
    first = fingerprint(federate(model, federation, rounds=2, local=LOCAL, seed=3).model)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert fingerprint(federate(model, federation, rounds=2, local=LOCAL, seed=3).model) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert fingerprint(federate(model, federation, rounds=2, local=LOCAL, seed=4).model) != first


def test_dropout_is_at_work_in_training(model, federation):
    """Proof that the test above covers dropout."""
    without = copy.deepcopy(model)
    without.layers[3].p = 0.0
    weights = [federate(each, federation, rounds=1, local=LOCAL).model.layers[0].weight for each in (model, without)]
    assert not torch.allclose(*weights)


def test_observers_see_every_update_and_their_weighted_sum_is_the_global_change(model, federation):
    recorder = Recorder()
    federate(model, federation, rounds=3, local=LOCAL, observers=[recorder])
    assert recorder.cohorts() == [federation.ids] * 3
    start = model.state_dict()
    for round_index, after_round in recorder.rounds:
        updates = [update for update in recorder.updates if update[0] == round_index]
        assert sum(weight for *_, weight in updates) == pytest.approx(1)
        for name, tensor in start.items():
            if tensor.is_floating_point():
                assert all(torch.equal(before[name], tensor) for _, _, before, _, _ in updates)
                change = sum(weight * (after[name] - before[name]) for _, _, before, after, weight in updates)
                torch.testing.assert_close(after_round[name] - tensor, change, atol=1e-6, rtol=1e-4)
        start = after_round


def test_watching_changes_no_bit(model, federation):
    watched = federate(model, federation, rounds=2, local=LOCAL, observers=[Recorder()]).model
    assert fingerprint(watched) == fingerprint(federate(model, federation, rounds=2, local=LOCAL).model)


def test_cohorts_are_drawn_by_round_and_stay_the_same_without_some_clients_data(model, federation):
    whole, some = Recorder(), Recorder()
    options = {"rounds": Rounds(8, clients_per_round=2), "local": LOCAL}
    federate(model, federation, observers=[whole], **options)
    federate(model, federation.without(Forget.clients([1])), observers=[some], **options)
    assert all(len(cohort) == 2 for cohort in whole.cohorts())
    assert len({tuple(cohort) for cohort in whole.cohorts()}) > 2
    assert any(1 in cohort for cohort in whole.cohorts())
    assert some.cohorts() == [[client for client in cohort if client != 1] for cohort in whole.cohorts()]


def test_a_round_whose_clients_have_no_data_changes_nothing(model, federation):
    recorder = Recorder()
    some = federation.without(Forget.clients([0, 1]))
    federate(model, some, rounds=Rounds(8, clients_per_round=1), local=LOCAL, observers=[recorder])
    states, previous = [state for _, state in recorder.rounds], model.state_dict()
    assert [] in recorder.cohorts()
    assert any(recorder.cohorts())
    for cohort, state in zip(recorder.cohorts(), states, strict=True):
        same = all(torch.equal(state[name], previous[name]) for name in state)
        assert same == (cohort == [])
        previous = state


def test_a_resumed_run_gives_the_bits_of_an_uninterrupted_one(model, federation, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    federate(model, federation, rounds=by_three(2), runtime=Runtime(checkpoint=path), **OPTIONS)
    recorder, runtime = Recorder(), Runtime(checkpoint=path)
    resumed = federate(model, federation, rounds=by_three(5), observers=[recorder], runtime=runtime, **OPTIONS).model
    assert [round_index for round_index, _ in recorder.rounds] == [2, 3, 4]
    assert fingerprint(resumed) == fingerprint(federate(model, federation, rounds=by_three(5), **OPTIONS).model)


def test_an_interrupted_round_is_done_again(model, federation, tmp_path):
    class Crash(Observer):
        def on_update(self, round_index, client, **weights):
            if (round_index, client) == (1, 2):
                raise ConnectionError

    path = tmp_path / "checkpoint.safetensors"
    with pytest.raises(ConnectionError):
        federate(model, federation, rounds=3, local=LOCAL, observers=[Crash()], runtime=Runtime(checkpoint=path))
    resumed = federate(model, federation, rounds=3, local=LOCAL, runtime=Runtime(checkpoint=path)).model
    assert fingerprint(resumed) == fingerprint(federate(model, federation, rounds=3, local=LOCAL).model)


def _moved(federation):
    """The same numbers of rows, with two rows in each other's place."""
    first, second = (federation.clients[i].train.clone() for i in (0, 1))
    first[0], second[0] = second[0].clone(), first[0].clone()
    clients = [copy.copy(client) for client in federation.clients]
    for client, rows in zip(clients, (first, second), strict=False):
        object.__setattr__(client, "train", rows.sort().values)
    return Federation(federation.x, federation.y, tuple(clients), federation.num_classes)


OTHER = {
    "seed": lambda model, federation: (model, federation, {"seed": 1}),
    "learning rate": lambda model, federation: (model, federation, {"local": LocalTraining(batch_size=8, lr=0.1)}),
    "cohort size": lambda model, federation: (model, federation, {"rounds": Rounds(2, clients_per_round=2)}),
    "start": lambda model, federation: (Net(), federation, {}),
    "fewer rows": lambda model, federation: (model, federation.without(Forget.classes([1])), {}),
    "labels": lambda model, federation: (model, federation.relabeled((federation.y + 1) % 3), {}),
    "rows": lambda model, federation: (model, _moved(federation), {}),
}


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER.keys())
def test_a_checkpoint_of_other_settings_or_data_is_refused_and_stays(model, federation, tmp_path, change):
    path = tmp_path / "checkpoint.safetensors"
    federate(model, federation, rounds=1, local=LOCAL, runtime=Runtime(checkpoint=path))
    before = path.read_bytes()
    model, federation, options = change(model, federation)
    with pytest.raises(ArtifactError):
        federate(model, federation, runtime=Runtime(checkpoint=path), **{"rounds": 2, "local": LOCAL, **options})
    assert path.read_bytes() == before


def test_a_checkpoint_of_more_rounds_is_not_passed_off_as_fewer(model, federation, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    federate(model, federation, rounds=3, local=LOCAL, runtime=Runtime(checkpoint=path))
    with pytest.raises(ArtifactError):
        federate(model, federation, rounds=2, local=LOCAL, runtime=Runtime(checkpoint=path))


def test_a_damaged_checkpoint_is_refused(model, federation, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    federate(model, federation, rounds=1, local=LOCAL, runtime=Runtime(checkpoint=path))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ArtifactError):
        federate(model, federation, rounds=2, local=LOCAL, runtime=Runtime(checkpoint=path))


@pytest.mark.parametrize(("count", "size", "named"), [(-1, 1, "^rounds"), (1, 0, "^clients_"), (1, 5, "^clients_")])
def test_settings_out_of_range_are_refused(model, federation, count, size, named):
    with pytest.raises(SettingError, match=named):
        federate(model, federation, rounds=Rounds(count, clients_per_round=size))


def test_a_federation_without_any_row_is_refused(model, federation):
    empty = federation.without(Forget.clients([0, 1, 2]))
    object.__setattr__(empty.clients[3], "train", empty.clients[3].train[:0])
    with pytest.raises(DataError):
        federate(model, empty, rounds=1)


# --- which rounds


@pytest.mark.parametrize("rounds", [range(3), [0, 1, 2], (0, 1, 2)], ids=["range", "list", "tuple"])
def test_naming_the_first_rounds_is_asking_for_as_many(model, federation, rounds):
    counted, named = Recorder(), Recorder()
    expected = federate(model, federation, rounds=by_three(3), observers=[counted], **OPTIONS)
    found = federate(model, federation, rounds=by_three(rounds), observers=[named], **OPTIONS)
    assert fingerprint(found.model) == fingerprint(expected.model)
    assert found.rounds == expected.rounds == 3
    assert named.cohorts() == counted.cohorts()


@pytest.mark.parametrize("parts", [([0, 1], [2]), ([0], [], [1, 2]), ([0], [1], [2])], ids=str)
def test_rounds_trained_in_parts_give_the_bits_of_all_at_once(model, federation, parts):
    found = model
    for part in parts:
        found = federate(found, federation, rounds=by_three(part), **OPTIONS).model
    assert fingerprint(found) == fingerprint(federate(model, federation, rounds=by_three(3), **OPTIONS).model)


def test_just_the_rounds_that_are_named_are_trained_in_their_order(model, federation):
    whole, some = Recorder(), Recorder()
    federate(model, federation, rounds=by_three(8), observers=[whole], **OPTIONS)
    trained = federate(model, federation, rounds=by_three([6, 1, 4]), observers=[some], **OPTIONS)
    assert trained.rounds == 3
    assert [number for number, _ in some.rounds] == [6, 1, 4]
    assert some.cohorts() == [whole.cohorts()[number] for number in (6, 1, 4)]


def test_a_rounds_number_decides_its_batches(model, federation):
    first, other = (federate(model, federation, rounds=[number], local=LOCAL).model for number in (0, 7))
    alone = [_trained_alone(model, federation, client, 7) for client in federation.clients]
    sizes = [len(client.train) for client in federation.clients]
    mean = sum(n / sum(sizes) * state["layers.4.weight"] for n, state in zip(sizes, alone, strict=True))
    torch.testing.assert_close(other.layers[4].weight.detach(), mean)
    assert fingerprint(first) != fingerprint(other)


@pytest.mark.parametrize("rounds", [[], (), range(0)], ids=["list", "tuple", "range"])
def test_no_round_named_leaves_the_weights(model, federation, rounds):
    recorder = Recorder()
    trained = federate(model, federation, rounds=rounds, observers=[recorder])
    assert fingerprint(trained.model) == fingerprint(model)
    assert (trained.rounds, recorder.rounds, recorder.updates) == (0, [], [])
    assert not trained.model.training


@pytest.mark.parametrize("rounds", [[0, 1], range(2), []], ids=str)
def test_a_checkpoint_of_named_rounds_is_refused_before_any_work(model, federation, tmp_path, rounds):
    path, recorder = tmp_path / "checkpoint.safetensors", Recorder()
    with pytest.raises(SettingError, match="checkpoint"):
        federate(model, federation, rounds=rounds, local=LOCAL, observers=[recorder], runtime=Runtime(checkpoint=path))
    assert not path.exists()
    assert not recorder.updates


@pytest.mark.parametrize("rounds", [[-1], [0, 2, -3], range(-2, 1)], ids=str)
def test_rounds_below_zero_are_refused_before_any_work(model, federation, rounds):
    recorder = Recorder()
    with pytest.raises(SettingError, match="rounds"):
        federate(model, federation, rounds=rounds, observers=[recorder])
    assert not recorder.updates


# --- another average


class Told(RunningAverage):
    """FedAvg's average, which notes what it is told, and moves the first bias by one after each round."""

    def __init__(self, start):
        super().__init__(start)
        self.start, self.told, self.added = {name: one.clone() for name, one in start.items()}, [], []

    def add(self, weights, share, *, round_index=0, client=0):
        self.told.append((round_index, client, share))
        self.added.append({name: tensor.clone() for name, tensor in weights.items()})
        super().add(weights, share)

    def finish(self):
        super().finish()
        self.current["layers.0.bias"] += 1


def test_another_average_is_made_of_the_first_weights_and_told_round_client_and_share(model, federation):
    made, recorder = [], Recorder()

    def averaging(start):
        made.append(Told(start))
        return made[-1]

    federate(model, federation, rounds=by_three([4, 0, 2], averaging=averaging), observers=[recorder], **OPTIONS)
    (average,) = made
    assert all(torch.equal(average.start[name], tensor) for name, tensor in model.state_dict().items())
    assert average.told == [(number, client, share) for number, client, _, _, share in recorder.updates]
    assert {number for number, *_ in average.told} == {4, 0, 2}
    for found, (*_, after, _) in zip(average.added, recorder.updates, strict=True):
        assert all(torch.equal(found[name], after[name]) for name in after)


def test_another_average_is_what_clients_start_from_and_what_comes_out(model, federation):
    ours, usual = Recorder(), Recorder()
    trained = federate(model, federation, rounds=Rounds(2, averaging=Told), local=LOCAL, observers=[ours]).model
    federate(model, federation, rounds=2, local=LOCAL, observers=[usual])
    (_, first), (_, second) = ours.rounds
    assert torch.equal(first["layers.0.bias"], usual.rounds[0][1]["layers.0.bias"] + 1)
    assert torch.equal(first["layers.0.weight"], usual.rounds[0][1]["layers.0.weight"])
    starts = [before for number, _, before, _, _ in ours.updates if number == 1]
    assert all(torch.equal(before[name], tensor) for before in starts for name, tensor in first.items())
    assert all(torch.equal(trained.state_dict()[name], tensor) for name, tensor in second.items())


def test_another_average_goes_on_from_a_checkpoint_to_the_same_bits(model, federation, tmp_path):
    runtime, rounds = Runtime(checkpoint=tmp_path / "checkpoint.safetensors"), partial(by_three, averaging=Told)
    federate(model, federation, rounds=rounds(2), runtime=runtime, **OPTIONS)
    resumed = federate(model, federation, rounds=rounds(4), runtime=runtime, **OPTIONS).model
    assert fingerprint(resumed) == fingerprint(federate(model, federation, rounds=rounds(4), **OPTIONS).model)

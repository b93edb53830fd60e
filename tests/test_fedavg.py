"""FedAvg: the weighted average, its reproducibility, its observers and its checkpoints."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests._rounds import LOCAL, Net, Recorder, make_federation, make_net
from torch import nn
from torch.nn.functional import cross_entropy

from fedup import Federation, Forget, LocalTraining, Rounds, Runtime, federate, fingerprint
from fedup.errors import ArtifactError, DataError, SettingError
from fedup.rng import generator, seed_for
from fedup.training.averaging import RunningAverage

OPTIONS = {"local": LOCAL, "seed": 5}
by_three = partial(Rounds, clients_per_round=3)


@pytest.fixture
def federation():
    return make_federation()


@pytest.fixture
def model():
    return make_net()


class Shifted(RunningAverage):
    """FedAvg's average, which notes its calls, and moves the first bias by one after each round."""

    def __init__(self, start):
        super().__init__(start)
        self.start, self.calls, self.added = {name: one.clone() for name, one in start.items()}, [], []

    def add(self, weights, share, *, round_index=0, client=0):
        self.calls.append((round_index, client, share))
        self.added.append({name: tensor.clone() for name, tensor in weights.items()})
        super().add(weights, share)

    def finish(self):
        super().finish()
        self.current["layers.0.bias"] += 1


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
    assert fingerprint(trained) == fingerprint(plain) and fingerprint(trained) != fingerprint(start)


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


def test_same_seed_same_bits_with_dropout_whatever_was_drawn_before(model, federation):
    first = fingerprint(federate(model, federation, rounds=2, local=LOCAL, seed=3).model)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    watched = federate(model, federation, rounds=2, local=LOCAL, seed=3, observers=[Recorder()]).model
    assert fingerprint(watched) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert fingerprint(federate(model, federation, rounds=2, local=LOCAL, seed=4).model) != first


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
    assert [] in recorder.cohorts() and any(recorder.cohorts())
    for cohort, state in zip(recorder.cohorts(), states, strict=True):
        same = all(torch.equal(state[name], previous[name]) for name in state)
        assert same == (cohort == [])
        previous = state


@pytest.mark.parametrize("averaging", [RunningAverage, Shifted])
def test_a_resumed_run_gives_the_bits_of_an_uninterrupted_one(model, federation, tmp_path, averaging):
    rounds, recorder = partial(by_three, averaging=averaging), Recorder()
    options = {"runtime": Runtime(checkpoint=tmp_path / "checkpoint"), **OPTIONS}
    federate(model, federation, rounds=rounds(2), **options)
    resumed = federate(model, federation, rounds=rounds(5), observers=[recorder], **options).model
    assert [round_index for round_index, _ in recorder.rounds] == [2, 3, 4]
    assert fingerprint(resumed) == fingerprint(federate(model, federation, rounds=rounds(5), **OPTIONS).model)


def _moved(federation):
    """The same numbers of rows, with two rows in each other's place."""
    first, second, *others = federation.clients
    rows = [torch.cat([b.train[:1], a.train[1:]]).sort().values for a, b in ((first, second), (second, first))]
    moved = (replace(client, train=train) for client, train in zip((first, second), rows, strict=True))
    return replace(federation, clients=(*moved, *others))


OTHER = {
    "seed": lambda model, federation: (model, federation, {"seed": 1}),
    "learning rate": lambda model, federation: (model, federation, {"local": LocalTraining(batch_size=8, lr=0.1)}),
    "cohort size": lambda model, federation: (model, federation, {"rounds": Rounds(3, clients_per_round=2)}),
    "start": lambda model, federation: (Net(), federation, {}),
    "fewer rows": lambda model, federation: (model, federation.without(Forget.classes([1])), {}),
    "labels": lambda model, federation: (model, federation.relabeled((federation.y + 1) % 3), {}),
    "rows": lambda model, federation: (model, _moved(federation), {}),
    "fewer rounds": lambda model, federation: (model, federation, {"rounds": 1}),
}


def test_a_checkpoint_of_other_settings_data_or_more_rounds_or_damaged_is_refused_and_stays(
    model, federation, tmp_path
):
    path = tmp_path / "checkpoint"
    federate(model, federation, rounds=2, local=LOCAL, runtime=Runtime(checkpoint=path))
    before = path.read_bytes()
    for name, change in OTHER.items():
        start, data, options = change(model, federation)
        with pytest.raises(ArtifactError):
            federate(start, data, runtime=Runtime(checkpoint=path), **{"rounds": 3, "local": LOCAL, **options})
        assert path.read_bytes() == before, name
    path.write_bytes(before[:-5])
    with pytest.raises(ArtifactError):
        federate(model, federation, rounds=3, local=LOCAL, runtime=Runtime(checkpoint=path))


def test_settings_out_of_range_and_a_federation_without_rows_are_refused_before_any_work(model, federation):
    recorder = Recorder()
    for count, size, named in ((-1, 1, "rounds"), ([0, 2, -3], 1, "rounds"), (1, 0, "clients_"), (1, 5, "clients_")):
        with pytest.raises(SettingError, match=f"^{named}"):
            federate(model, federation, rounds=Rounds(count, clients_per_round=size), observers=[recorder])
    empty = tuple(replace(client, train=client.train[:0]) for client in federation.clients)
    with pytest.raises(DataError):
        federate(model, replace(federation, clients=empty), rounds=1, observers=[recorder])
    assert not recorder.updates


@pytest.mark.parametrize("parts", [[range(3)], [(0, 1), [2]], [[0], [], [1, 2]]], ids=str)
def test_rounds_named_and_trained_in_parts_give_the_bits_of_all_at_once(model, federation, parts):
    counted, named, found = Recorder(), Recorder(), model
    expected = federate(model, federation, rounds=by_three(3), observers=[counted], **OPTIONS)
    for part in parts:
        found = federate(found, federation, rounds=by_three(part), observers=[named], **OPTIONS).model
    assert fingerprint(found) == fingerprint(expected.model) and expected.rounds == 3
    assert named.cohorts() == counted.cohorts()


def test_just_the_rounds_that_are_named_are_trained_in_their_order(model, federation):
    whole, some = Recorder(), Recorder()
    federate(model, federation, rounds=by_three(8), observers=[whole], **OPTIONS)
    trained = federate(model, federation, rounds=by_three([6, 1, 4]), observers=[some], **OPTIONS)
    assert trained.rounds == 3
    assert [number for number, _ in some.rounds] == [6, 1, 4]
    assert some.cohorts() == [whole.cohorts()[number] for number in (6, 1, 4)]


def test_no_round_leaves_the_weights(model, federation):
    for rounds in (0, [], range(0)):
        recorder = Recorder()
        trained = federate(model, federation, rounds=rounds, observers=[recorder])
        assert fingerprint(trained.model) == fingerprint(model)
        assert (trained.rounds, recorder.rounds, recorder.updates) == (0, [], [])
        assert not trained.model.training


def test_a_checkpoint_of_named_rounds_is_refused_before_any_work(model, federation, tmp_path):
    path, recorder = tmp_path / "checkpoint", Recorder()
    for rounds in ([0, 1], range(0, 4, 2), []):
        with pytest.raises(SettingError, match="checkpoint"):
            federate(model, federation, rounds=rounds, observers=[recorder], runtime=Runtime(checkpoint=path))
    assert not path.exists()
    assert not recorder.updates


def test_another_average_is_told_all_and_is_what_clients_start_from_and_what_comes_out(model, federation):
    made, ours, usual = [], Recorder(), Recorder()

    def averaging(start):
        made.append(Shifted(start))
        return made[-1]

    rounds = by_three([4, 0, 2], averaging=averaging)
    trained = federate(model, federation, rounds=rounds, observers=[ours], **OPTIONS).model
    federate(model, federation, rounds=by_three([4]), observers=[usual], **OPTIONS)
    (average,) = made
    assert all(torch.equal(average.start[name], tensor) for name, tensor in model.state_dict().items())
    assert average.calls == [(number, client, share) for number, client, _, _, share in ours.updates]
    for found, (*_, after, _) in zip(average.added, ours.updates, strict=True):
        assert all(torch.equal(found[name], after[name]) for name in after)
    (_, first), _, (_, last) = ours.rounds
    assert torch.equal(first["layers.0.bias"], usual.rounds[0][1]["layers.0.bias"] + 1)
    assert torch.equal(first["layers.0.weight"], usual.rounds[0][1]["layers.0.weight"])
    starts = [before for number, _, before, _, _ in ours.updates if number == 0]
    assert all(torch.equal(before[name], tensor) for before in starts for name, tensor in first.items())
    assert all(torch.equal(trained.state_dict()[name], tensor) for name, tensor in last.items())

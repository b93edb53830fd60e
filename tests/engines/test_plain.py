"""The plain engine: against FedAvg as a textbook writes it, to the bit where bits are promised."""

import copy
import gc
import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engines._federations import KINDS, SIZES, federation_for, make_federation, make_model, train_locally
from torch import nn
from torch.nn.functional import cross_entropy

from fedup import LocalTraining, Observer, Rounds, Runtime, federate, fingerprint
from fedup.bench.speed.training import eager_round
from fedup.errors import SettingError
from fedup.rng import generator, seed_for
from fedup.training.local import Job

SGD = LocalTraining(batch_size=16, lr=0.05)
ADAM = LocalTraining(batch_size=16, lr=0.005, optimizer="adam", epochs=2)
DECAY = LocalTraining(batch_size=16, lr=0.05, momentum=0.0, weight_decay=0.01)
HALF = LocalTraining(batch_size=16, lr=0.05, precision="bfloat16")

DATA = make_federation((320,))
X, Y, ROWS = DATA.x, DATA.y, torch.arange(20, 320)  # rows below 20 belong to others


@pytest.fixture(autouse=True)
def no_wish(monkeypatch):
    """Of whoever runs the tests."""
    monkeypatch.delenv("FEDUP_ENGINE", raising=False)


def jobs_of(federation, how, round_index, *, seed=0, per_round=None):
    """Who trains in a round, on what and from which seed, as documented."""
    order = torch.randperm(len(federation.clients), generator=generator(seed, "cohort", round_index))
    cohort = [federation.clients[i] for i in sorted(order[:per_round].tolist())]
    total = sum(len(client.train) for client in cohort)
    return [
        Job(client.id, client.train, how, seed_for(seed, "round", round_index, "client", client.id), n / total)
        for client in cohort
        if (n := len(client.train))
    ]


def by_the_textbook(model, federation, how, **cohorts):
    """A copy of the model after three rounds."""
    model = copy.deepcopy(model)
    with torch.random.fork_rng():
        for round_index in range(3):
            jobs = jobs_of(federation, how, round_index, **cohorts)
            if jobs:
                eager_round(model, federation.x, federation.y, jobs, how)
    return model


def assert_close(found, expected, *, atol=1e-5):
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(
            found.state_dict()[name], value, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def in_double(model, federation):
    """In single precision a one-row client under a BatchNorm has gradients of rounding, which differ by CPU."""
    return model.double(), replace(federation, x=federation.x.double())


FEDERATIONS = [
    *((kind, SGD, SIZES, None) for kind in KINDS),
    *((kind, how, SIZES, None) for kind, how in (("all", ADAM), ("convolution", ADAM), ("all", DECAY))),
    *(("all", SGD, sizes, None) for sizes in ((1,), (15,), (16,), (17,), (33, 1), (5, 0, 5))),
    *(("all", SGD, SIZES, per_round) for per_round in (4, len(SIZES))),
]


@pytest.mark.parametrize(("kind", "how", "sizes", "per_round"), FEDERATIONS)
def test_rounds_are_those_of_the_textbook_with_the_documented_seeds(kind, how, sizes, per_round):
    model, federation = in_double(make_model(kind), federation_for(kind, sizes))
    expected = by_the_textbook(model, federation, how, per_round=per_round, seed=5)
    assert fingerprint(expected) != fingerprint(model)
    rounds = Rounds(3, clients_per_round=per_round)
    assert_close(federate(model, federation, rounds=rounds, local=how, seed=5).model, expected, atol=1e-7)


def test_half_precision_is_that_of_the_textbook():
    model, federation = make_model("convolution"), federation_for("convolution", (40, 17))
    expected = by_the_textbook(model, federation, HALF)
    assert_close(federate(model, federation, rounds=3, local=HALF).model, expected)


def test_on_a_cpu_the_plain_engine_is_chosen_and_others_are_refused(monkeypatch):
    model, federation = make_model("convolution"), federation_for("convolution", (40, 17))
    auto, plain = (federate(model, federation, rounds=2, runtime=Runtime(engine=name)) for name in ("auto", "plain"))
    assert auto.engine == plain.engine == "plain"
    assert fingerprint(auto.model) == fingerprint(plain.model)
    refused = {"captured": r"CUDA.*'auto'", "fast": "engine must be.*fast", None: "engine must be.*None"}
    for name, message in refused.items():
        with pytest.raises(SettingError, match=message):
            federate(model, federation, rounds=1, runtime=Runtime(engine=name))
    for value, message in {"captured": "CUDA", "fast": "FEDUP_ENGINE must be.*fast"}.items():
        monkeypatch.setenv("FEDUP_ENGINE", value)  # says what auto means and nothing else
        with pytest.raises(SettingError, match=message):
            federate(model, federation, rounds=1)
        assert federate(model, federation, rounds=1, runtime=Runtime(engine="plain")).engine == "plain"
    monkeypatch.setenv("FEDUP_ENGINE", "")
    assert federate(model, federation, rounds=1).engine == "plain"


class Memory(Observer):
    """Bytes of all tensors there are, and where the weights lie, at each update."""

    def __init__(self):
        self.sizes, self.places = [], set()

    def on_update(self, round_index, client, *, before, after, weight):
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if type(each) in (torch.Tensor, nn.Parameter) and each.layout == torch.strided
        }
        self.sizes.append(sum(storages.values()))
        self.places.add(tuple(tensor.data_ptr() for tensor in after.values()))


def test_memory_does_not_grow_with_clients():
    memory, model = Memory(), nn.Sequential(nn.Linear(6, 4000), nn.ReLU(), nn.Linear(4000, 3))
    gc.collect()  # of what other tests left, nothing is to go meanwhile
    federate(model, make_federation((5,) * 3), rounds=2, local=ADAM, observers=[memory])
    assert len(memory.sizes) == 6
    weights = sum(tensor.nbytes for tensor in model.parameters())
    assert min(memory.sizes) > 4 * weights  # the tensors were found: model, copy, global weights, sum
    assert max(memory.sizes) - min(memory.sizes) < weights / 4
    assert len(memory.places) == 1  # all clients train in the same place


def streams():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("fails", [False, True])
def test_global_streams_of_random_numbers_are_left_alone(fails):
    class Crash(Observer):
        def on_update(self, round_index, client, **weights):
            if fails:
                raise ConnectionError

    model, before = make_model("dropout"), streams()
    with pytest.raises(ConnectionError) if fails else nullcontext():
        federate(model, make_federation(), rounds=1, local=SGD, observers=[Crash()])
    assert streams() == before


def weights(model):
    return [tensor.clone() for tensor in model.state_dict().values()]


def test_one_step_is_gradient_descent_on_the_mean_loss():
    model, how = make_model("batchnorm"), LocalTraining(batch_size=50, lr=0.1, momentum=0.0)
    reference = make_model("batchnorm").train()
    cross_entropy(reference(X[:50]), Y[:50]).backward()
    train_locally(model, X, Y, torch.arange(50), local=how, seed=0)
    for trained, start in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(trained.detach(), start.detach() - 0.1 * start.grad)


def test_training_reads_no_row_but_its_own_and_puts_the_model_in_training_mode():
    poisoned = X.clone()
    poisoned[:20] = float("nan")
    models = make_model("all").train(), make_model("all").eval()
    for model, x in zip(models, (X, poisoned), strict=True):
        train_locally(model, x, Y, ROWS, local=LocalTraining(), seed=0)
    assert all(map(torch.equal, *map(weights, models)))
    assert int(models[1][1][0].num_batches_tracked) == 5


def test_frozen_parameters_stay():
    for optimizer in ("sgd", "adam"):
        model = make_model("all")
        before = model[0].requires_grad_(False).weight.clone()
        train_locally(model, X, Y, ROWS, local=LocalTraining(weight_decay=0.1, optimizer=optimizer), seed=0)
        assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_types_move(dtype):
    torch.manual_seed(0)
    federation = make_federation((40, 40))
    start = nn.Linear(6, 3).to(dtype)
    local = LocalTraining(lr=0.1, batch_size=8)
    half = federate(start, replace(federation, x=federation.x.to(dtype)), rounds=1, local=local).model
    single = federate(copy.deepcopy(start).float(), federation, rounds=1, local=local).model
    moved = (single.weight - start.weight.float()).norm()
    assert (half.weight.float() - single.weight).norm() < 0.2 * moved


def test_parameters_that_lie_apart_are_trained_and_nothing_between_them():
    memory = torch.randn(8, 16)
    model = nn.Linear(8, 4)
    model.weight = nn.Parameter(memory[:4, 4:12])
    before, whole = model.weight.detach().clone(), memory.clone()
    federation = make_federation((40,))
    x = torch.cat([federation.x, federation.x[:, :2]], 1)
    train_locally(model, x, federation.y, federation.clients[0].train, local=LocalTraining(batch_size=8), seed=0)
    assert bool((model.weight != before).all())
    whole[:4, 4:12] = memory[:4, 4:12]
    assert torch.equal(memory, whole)


class Words(nn.Module):
    """A table that a batch touches little of."""

    def __init__(self, *, sparse):
        super().__init__()
        self.table, self.sparse = nn.Parameter(torch.ones(20, 3)), sparse

    def forward(self, x):
        return nn.functional.embedding(x, self.table, sparse=self.sparse).mean(1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_are_trained_on(momentum):
    ids, local = replace(make_federation((40, 30)), x=torch.randint(20, (70, 5))), replace(SGD, momentum=momentum)
    sparse, dense = (federate(Words(sparse=sparse), ids, rounds=2, local=local).model for sparse in (True, False))
    assert bool((sparse.table != 1).any())
    torch.testing.assert_close(sparse.table, dense.table)


def test_observers_draw_from_the_users_own_stream():
    drawn = []

    class Draws(Observer):
        def on_update(self, round_index, client, **about):
            drawn.append(float(torch.rand(1)))

    model, federation = make_model("dropout"), make_federation((20, 20, 20))
    torch.manual_seed(3)
    expected = [float(torch.rand(1)) for _ in range(6)]
    torch.manual_seed(3)
    federate(model, federation, rounds=2, observers=[Draws()])
    assert drawn == expected


def test_an_observer_that_evaluates_does_not_change_how_others_train():
    class Evaluates(Observer):
        model = None

        def on_round(self, round_index, model):
            self.model = model

        def on_update(self, round_index, client, **about):
            if self.model is not None:
                self.model.eval()

    federation = make_federation((40, 40, 40))
    watched, alone = (
        federate(make_model("all"), federation, rounds=2, observers=observers).model
        for observers in ([Evaluates()], [])
    )
    assert fingerprint(watched) == fingerprint(alone)


def test_what_an_observer_unfreezes_is_trained_from_then_on():
    class Unfreezes(Observer):
        def on_round(self, round_index, model):
            model[0].requires_grad_(True)

    start = make_model("plain")
    start[0].requires_grad_(False)
    trained = federate(start, make_federation((40,)), rounds=2, observers=[Unfreezes()]).model
    assert not torch.equal(trained[0].weight, start[0].weight)


def test_a_model_with_nothing_to_train_is_refused_and_left_as_it_is_without_rounds():
    frozen, federation = make_model("plain").requires_grad_(False), make_federation((20,))
    with pytest.raises(SettingError, match="nothing to train"):
        federate(frozen, federation, rounds=1)
    assert fingerprint(federate(frozen, federation, rounds=0).model) == fingerprint(frozen)

"""FUSED as its authors run it: deltas of low rank on named layers; a class request overwrites the class with random
labels, other requests leave their rows out; without the deltas the original is back to the bit."""

import copy
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedup import Federation, Forget, fingerprint
from fedup.bench.history import History
from fedup.bench.methods.fused import Method, overwritten
from fedup.bench.task import Task
from fedup.errors import RequestError, SettingError
from fedup.registry import find
from fedup.tasks.models import build_model
from fedup.tasks.recipe import Recipe

SIZES = (13, 20, 9, 26)  # training rows of the four clients; batches of 8
CLASSES = 4
RECIPE = Recipe("digits", "lenet5", rounds=6, clients=len(SIZES), batch_size=8, lr=0.1, seed=5)
LAYERS = ("conv", "head")
WEIGHTS = ["conv.weight", "head.weight"]
CLASS = Forget.classes([1])
REQUESTS = {
    "client": Forget.clients([1]),
    "class": CLASS,
    "sample": Forget.samples({0: [0, 3, 5]}),
    "client, class and sample": Forget.clients([1]) | CLASS | Forget.samples({0: [0, 1, 5]}),
}


def make_federation() -> Federation:
    total = sum(SIZES)
    x = 0.3 * torch.randn(total, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(total) % CLASSES
    x[torch.arange(total), 0, y] += 2  # each class has a bright line of its own
    return Federation.split(x, y, list(torch.arange(total).split(list(SIZES))), heldout=0, validation=0)


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = OrderedDict(
            conv=nn.Conv2d(1, 3, 3),
            norm=nn.BatchNorm2d(3),
            relu=nn.ReLU(),
            flatten=nn.Flatten(),
            wide=nn.Linear(12, 10),
            relu2=nn.ReLU(),
            head=nn.Linear(10, CLASSES),
        )
        return nn.Sequential(layers)


@pytest.fixture(scope="module")
def learned() -> tuple[nn.Module, nn.Module, History]:
    start, history = make_model(), History()
    return start, RECIPE.train(start, make_federation(), observers=[history]).model, history


@pytest.fixture
def task(learned) -> Task:
    start, model, history = learned
    return Task(make_federation(), CLASS, model, start, RECIPE, probe, lambda *_: None, history)


def probe(model: nn.Module) -> dict[str, float]:
    return {"r_a": 0.5, "unwanted": 0.5}


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


# --- what deltas are trained on


def test_every_training_row_of_a_forgotten_class_gets_a_retained_class_and_all_others_keep_theirs():
    federation = make_federation()
    shown, relabelled = overwritten(federation, Forget.classes([1, 3]), seed=0)
    rows = federation.forgotten(Forget.classes([1, 3]))
    assert relabelled == len(rows) > 20
    assert set(shown.y[rows].tolist()) == {0, 2}
    others = federation.retained(Forget.classes([1, 3]))
    assert torch.equal(shown.y[others], federation.y[others])
    assert [c.train.tolist() for c in shown.clients] == [c.train.tolist() for c in federation.clients]
    assert torch.equal(federation.y, make_federation().y)  # the federation itself is left alone


def test_labels_depend_on_seed_and_client_and_on_nothing_else_and_some_class_must_be_left():
    federation = make_federation()
    first, again, other = (overwritten(federation, CLASS, seed)[0].y for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    smaller, _ = overwritten(federation, CLASS | Forget.clients([0]), seed=0)
    stay = torch.cat([client.train for client in federation.clients[1:]])
    assert torch.equal(smaller.y[stay], first[stay])
    with pytest.raises(RequestError, match="nothing to keep"):
        overwritten(federation, Forget.classes(range(CLASSES)), seed=0)


@pytest.mark.parametrize("kind", ["client", "sample", "client, class and sample"])
def test_forgotten_clients_and_samples_are_left_out_and_never_read(task, kind):
    federation, request = make_federation(), REQUESTS[kind]
    shown, relabelled = overwritten(federation, request, seed=0)
    others = replace(request, class_ids=frozenset())  # a row that is forgotten for two reasons is left out
    expected = federation.without(others)
    assert [c.train.tolist() for c in shown.clients] == [c.train.tolist() for c in expected.clients]
    named = set(federation.forgotten(CLASS).tolist()) & set(shown.rows("train").tolist())
    assert relabelled == (len(named) if request.class_ids else 0)
    task = replace(task, request=request, history=None)
    seeing = Method(layers=LAYERS, rounds=2).unlearn(task)
    task.federation.x[task.federation.forgotten(others)] = torch.nan
    blind = Method(layers=LAYERS, rounds=2).unlearn(task)
    assert fingerprint(blind.model) == fingerprint(seeing.model)


def test_a_class_is_overwritten_by_reading_its_rows_and_said_so(task):
    seeing = Method(layers=LAYERS, rounds=2).unlearn(task)
    rows = task.federation.forgotten(CLASS)
    assert seeing.about["relabelled_rows"] == len(rows)
    assert f"{len(rows)} forgotten rows under random labels" in seeing.about["did"]
    task.federation.x[rows] += 1
    assert fingerprint(Method(layers=LAYERS, rounds=2).unlearn(task).model) != fingerprint(seeing.model)


# --- where deltas are


@pytest.mark.parametrize("name", ["lenet5", "resnet18", "resnet34", "tinybert", "vit"])
def test_a_model_names_layers_that_it_has(name):
    module = find("fedup.tasks.models", name)
    model = build_model(name, (8,) if module.TAKES == "text" else (3, 32, 32), 4)
    assert model.fused_layers == module.FUSED_LAYERS
    for layer in model.fused_layers:
        assert isinstance(model.get_submodule(layer), nn.Linear | nn.Conv2d)


def test_layers_are_those_given_or_the_models_own(task):
    own = copy.deepcopy(task.model)
    own.fused_layers = LAYERS
    assert Method().weights(own) == WEIGHTS
    assert Method(layers=("wide",)).weights(own) == ["wide.weight"]
    assert Method(layers=LAYERS).weights(task.model) == WEIGHTS


@pytest.mark.parametrize(
    ("layers", "found"),
    [(("conv", "tail"), "the model has no tail.weight"), (("norm",), "no norm.weight"), ((), "names no FUSED_LAYERS")],
    ids=str,
)
def test_a_layer_that_the_model_does_not_have_is_refused_with_those_it_has(task, layers, found):
    with pytest.raises(SettingError, match=f"{found}.*conv.weight, wide.weight, head.weight.*fused_retained"):
        Method(layers=layers).unlearn(task)


def test_deltas_move_the_named_layers_alone(task):
    unlearned = Method(layers=LAYERS, rounds=2).unlearn(task)
    assert unlearned.about["layers"] == WEIGHTS
    assert set(unlearned.model._names) == set(WEIGHTS)
    assert fingerprint(unlearned.model.base) == fingerprint(task.model)
    assert all(bool(delta.up.any()) for delta in unlearned.model.deltas)


# --- what a delta is


def test_a_delta_is_a_product_of_two_matrices_times_alpha_over_rank(task):
    model = Method(layers=LAYERS, rank=16, alpha=32.0).on(task.model, WEIGHTS, 0)
    for name, delta in zip(WEIGHTS, model.deltas, strict=True):
        weight = task.model.get_parameter(name)
        rows, columns = len(weight), weight[0].numel()
        assert delta.up.shape == (rows, 16) and delta.down.shape == (16, columns)  # as wide as asked, wherever it is
        assert torch.equal(delta(weight), weight)  # nothing to say before it is trained
        assert float(delta.down.detach().abs().max()) <= columns**-0.5
        with torch.no_grad():
            delta.up.normal_(generator=torch.Generator().manual_seed(0))
        expected = weight + 2 * (delta.up @ delta.down).view(weight.shape)
        torch.testing.assert_close(delta(weight), expected)


def test_the_rate_is_a_share_of_the_federations(task):
    full, half = (Method(layers=LAYERS, rounds=1, lr=lr).unlearn(task).model for lr in (1.0, 0.5))
    slow = Method(layers=LAYERS, rounds=1).unlearn(replace(task, recipe=replace(RECIPE, lr=0.05))).model
    assert fingerprint(half) == fingerprint(slow) != fingerprint(full)


# --- what it costs


def test_all_clients_train_for_a_class_and_those_that_stay_for_a_client(task):
    assert Method(layers=LAYERS, rounds=1).unlearn(task).cost.clients == {0, 1, 2, 3}
    client = Method(layers=LAYERS, rounds=2).unlearn(replace(task, request=REQUESTS["client"]))
    assert client.cost.clients == {0, 2, 3}
    assert client.cost.local_steps == 2 * sum(-(-SIZES[c] // 8) for c in (0, 2, 3))
    assert client.cost.bytes_up == client.cost.bytes_down == 6 * client.cost.storage_bytes

"""FUSED as its paper describes it: deltas on the layers that learn most, and nothing else, are trained on what is
retained; without them the original is back to the bit."""

import copy
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench.methods._worlds import message
from torch import Tensor, nn

from fedup import Federation, Forget, fingerprint
from fedup.bench.history import History
from fedup.bench.methods._deltas import Adapted, Sparse, ranking
from fedup.bench.methods.fused_retained import Method
from fedup.bench.task import Task, Unlearned
from fedup.rng import generator
from fedup.tasks.recipe import Recipe
from fedup.training.averaging import weights_of

SIZES = (13, 20, 9, 26)  # training rows of the four clients; batches of 8
CLASSES = 3
RECIPE = Recipe("digits", "lenet5", rounds=3, clients=len(SIZES), batch_size=8, lr=0.1, seed=5)
LAYERS = ["conv.weight", "wide.weight", "head.weight"]  # what may get a delta: three matrices
DELTAS = ("sparse", "lora")
REQUESTS = {
    "client": Forget.clients([1]),
    "class": Forget.classes([1]),
    "sample": Forget.samples({0: [0, 3, 5]}),
    "client, class and sample": Forget.clients([1]) | Forget.classes([1]) | Forget.samples({0: [0, 3, 5]}),
}


def make_federation() -> Federation:
    total = sum(SIZES)
    x = torch.randn(total, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(total) % CLASSES
    x += y.view(-1, 1, 1, 1) / 2  # something to learn
    return Federation.split(x, y, list(torch.arange(total).split(list(SIZES))), heldout=0, validation=0)


def make_model() -> nn.Module:
    """Convolution, linear layers, both kinds of normalisation, and dropout, which a frozen model leaves out."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = OrderedDict(
            conv=nn.Conv2d(1, 3, 3),
            norm=nn.BatchNorm2d(3),
            relu=nn.ReLU(),
            flatten=nn.Flatten(),
            wide=nn.Linear(12, 10),
            norm2=nn.BatchNorm1d(10),
            relu2=nn.ReLU(),
            dropout=nn.Dropout(0.3),
            layer_norm=nn.LayerNorm(10),
            head=nn.Linear(10, CLASSES),
        )
        return nn.Sequential(layers)


@pytest.fixture
def federation() -> Federation:
    """Arrays of its own: a test may spoil them."""
    return make_federation()


@pytest.fixture(scope="module")
def learned() -> tuple[nn.Module, nn.Module, History]:
    """First weights, what the federation learned from them, and what the server kept."""
    start, history = make_model(), History()
    return start, RECIPE.train(start, make_federation(), observers=[history]).model, history


@pytest.fixture
def task(federation, learned) -> Task:
    start, model, history = learned
    return Task(federation, REQUESTS["client"], model, start, RECIPE, probe, lambda *_: None, history)


def probe(model: nn.Module) -> dict[str, float]:
    return {"r_a": 0.5, "unwanted": 0.5}


def effective(model: Adapted) -> dict[str, Tensor]:
    """The weights under deltas, as the model computes with them."""
    deltas = dict(zip(model._names, model.deltas, strict=True))
    with torch.no_grad():
        return {
            name: deltas[name](weight) if name in deltas else weight for name, weight in weights_of(model.base).items()
        }


def masks(model: nn.Module, names: list[str], density: float, seed: int) -> dict[str, set[int]]:
    """The entries that a delta may move: drawn by the seed and the layer's name."""
    found = {}
    for name in names:
        size = model.get_parameter(name).numel()
        order = torch.randperm(size, generator=generator(seed, "mask", name))
        found[name] = set(order[: round(density * size)].tolist())
    return found


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


# --- which layers


def recomputed(history: History, names: list[str]) -> dict[str, float]:
    """From the stored weights alone: mean over rounds and clients of ‖w_k − w‖₁ / size."""
    found = dict.fromkeys(names, 0.0)
    uploads = [(number, client) for number in history.rounds for client in history.shares(number)]
    for number, client in uploads:
        before, after = history.before(number), history.upload(number, client)
        for name in names:
            change = (after[name].double() - before[name].double()).abs().sum() / before[name].numel()
            found[name] += float(change) / len(uploads)
    return found


def test_matrices_are_ranked_by_the_mean_change_of_an_entry_over_rounds_and_clients(federation):
    start, history = make_model(), History()
    model = replace(RECIPE, clients_per_round=2).train(start, federation, observers=[history]).model
    changes = recomputed(history, LAYERS)
    assert ranking(model, history) == sorted(LAYERS, key=lambda name: -changes[name])
    assert {name: history.changes()[name] for name in LAYERS} == pytest.approx(changes, rel=1e-5)
    assert history.changes().keys() > set(LAYERS)  # biases and BatchNorm's were watched, too


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize(("share", "count"), [(0.01, 1), (0.5, 2), (1.0, 3)])
def test_the_share_of_layers_that_changed_most_gets_deltas(task, delta, share, count):
    unlearned = Method(layers=share, delta=delta, rounds=1).unlearn(task)
    changes = recomputed(task.history, LAYERS)
    chosen = sorted(LAYERS, key=lambda name: -changes[name])[:count]
    assert unlearned.about["layers"] == chosen
    moved = {name for name, weight in effective(unlearned.model).items() if not torch.equal(weight, at(task, name))}
    assert moved == set(chosen)


def at(task: Task, name: str) -> Tensor:
    return weights_of(task.model)[name]


# --- only masked entries move


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())
def test_training_moves_entries_under_the_mask_and_nothing_else(task, request_):
    task = replace(task, request=request_)
    unlearned = Method(density=0.4, layers=0.7, rounds=3).unlearn(task)
    allowed = masks(task.model, unlearned.about["layers"], 0.4, RECIPE.seed)
    assert len(allowed) == 2
    for name, weight in effective(unlearned.model).items():
        different = (weight != at(task, name)).flatten().nonzero().flatten().tolist()
        assert set(different) <= allowed.get(name, set()), name
        assert bool(different) == (name in allowed), name  # a delta that is not trained forgets nothing
    assert fingerprint(unlearned.model.base) == fingerprint(task.model)


@settings(deadline=None, max_examples=40)
@given(st.floats(0.001, 1.0), st.integers(1, 12), st.integers(1, 12), st.integers(0, 5))
def test_a_mask_has_its_share_of_distinct_entries_drawn_from_the_seed_and_the_layers_name(density, rows, columns, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    where = Sparse(weight, density, seed, "a").where
    assert len(where) == max(1, round(density * weight.numel())) == len(set(where.tolist()))
    assert int(where.min()) >= 0 and int(where.max()) < weight.numel()
    torch.manual_seed(seed + 1)  # nothing is drawn from torch's own stream
    assert torch.equal(Sparse(weight + 1, density, seed, "a").where, where)  # the values do not matter
    big = torch.zeros(20, 20)
    drawn = [Sparse(big, 0.1, other, name).where.tolist() for other in (seed, seed + 1) for name in ("a", "b")]
    assert len({tuple(mask) for mask in drawn}) == 4


# --- the model below


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())
def test_no_forgotten_row_is_read_and_without_the_deltas_the_original_is_back_bit_for_bit(task, delta, request_):
    task = replace(task, request=request_)
    task.model.zero_grad(set_to_none=True)  # its own training left some
    x, before = task.federation.x.clone(), (fingerprint(task.model), fingerprint(task.start))
    unlearned = answer(task, delta)
    plain = make_model().eval()
    plain.load_state_dict(effective(unlearned.model))
    torch.testing.assert_close(logits(unlearned.model, x), logits(plain, x), rtol=0, atol=1e-6)
    back = unlearned.restore()
    assert torch.equal(logits(back, x), logits(task.model, x))
    assert not torch.equal(logits(unlearned.model, x), logits(back, x))
    task.federation.x[task.federation.forgotten(request_)] = torch.nan
    blind = answer(task, delta)
    assert fingerprint(blind.model) == fingerprint(unlearned.model)
    assert fingerprint(blind.model.base) == fingerprint(back) == before[0]
    with torch.no_grad():
        for weight in back.parameters():
            weight.zero_()
    assert (fingerprint(task.model), fingerprint(task.start)) == before  # the task is left alone
    assert all(weight.grad is None for weight in task.model.parameters())


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("mode", [True, False], ids=["given in training mode", "given in evaluation mode"])
def test_untrained_deltas_give_the_logits_of_the_model_below_which_stays_in_evaluation_mode(task, mode, delta):
    adapted = Method(delta=delta).on(copy.deepcopy(task.model).train(mode), LAYERS, 0)
    before = {name: tensor.clone() for name, tensor in adapted.base.named_buffers()}
    expected = logits(task.model, task.federation.x[:8])
    for call in (adapted.train, adapted.eval, adapted.train):
        call()
        assert not any(module.training for module in adapted.base.modules())
        assert torch.equal(logits(adapted, task.federation.x[:8]), expected)  # neither batch statistics nor dropout
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapted.base.named_buffers())
    assert any("running_mean" in name for name in before)


def test_the_deltas_are_all_that_is_trained_averaged_and_sent(task):
    for delta in DELTAS:
        model = Method(delta=delta, layers=0.7).on(task.model, LAYERS[:2], 0)
        own = {"values"} if delta == "sparse" else {"down", "up"}
        assert set(weights_of(model)) == {f"deltas.{place}.{name}" for place in range(2) for name in own}
        assert not any(weight.requires_grad for weight in model.base.parameters())
    assert all(weight.requires_grad for weight in task.model.parameters())  # the task's own is left alone


# --- what it reads and costs


def answer(task: Task, delta: str) -> Unlearned:
    return Method(delta=delta, layers=0.7, density=0.1, rank=16, rounds=2).unlearn(task)


def message_of(model: nn.Module, chosen: list[str], delta: str) -> int:
    """Bytes of the deltas as one file, by hand: a tenth of the entries, or two matrices of rank 16."""
    tensors = {}
    for place, name in enumerate(chosen):
        weight = model.get_parameter(name)
        if delta == "sparse":
            tensors[f"deltas.{place}.values"] = torch.zeros(round(0.1 * weight.numel()))
            continue
        rows, columns = len(weight), weight.numel() // len(weight)
        tensors[f"deltas.{place}.up"] = torch.zeros(rows, 16)
        tensors[f"deltas.{place}.down"] = torch.zeros(16, columns)
    return message(tensors)


@pytest.mark.parametrize(("delta", "size"), [("sparse", None), ("lora", 2)])
def test_deltas_alone_are_sent_to_and_fro_between_clients_that_hold_retained_data(task, delta, size):
    rows = task.federation.client(1).train.tolist()  # forgotten one by one: it is not asked
    task = replace(task, recipe=replace(RECIPE, clients_per_round=size), request=Forget.samples({1: rows}))
    unlearned = answer(task, delta)
    orders = [torch.randperm(4, generator=generator(RECIPE.seed, "cohort", number)) for number in range(2)]
    cohorts = [{0, 1, 2, 3} if size is None else set(order[:size].tolist()) for order in orders]
    asked = [client for cohort in cohorts for client in sorted(cohort - {1})]
    sent = message_of(task.model, unlearned.about["layers"], delta)
    cost = unlearned.cost
    assert cost.bytes_up == cost.bytes_down == len(asked) * sent
    assert cost.clients == set(asked)
    assert cost.local_steps == sum(-(-SIZES[client] // 8) for client in asked)
    assert cost.storage_bytes == sent
    assert len(cost.path) == 2
    entries = sum(weight.numel() for weight in unlearned.model.parameters())
    assert f"{entries:,} entries on 2 of 3 layers" in unlearned.about["did"]

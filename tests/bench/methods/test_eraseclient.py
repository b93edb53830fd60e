"""EraseClient: the target's last upload taken out, ascent that climbs inside its ball, and rounds without the target;
each part against its definition."""

import copy
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fedup import Federation, Forget, Observer, federate, fingerprint
from fedup.bench.history import History
from fedup.bench.methods import eraseclient
from fedup.bench.methods.eraseclient import Method, ascend, project, radius_of, without_last_upload
from fedup.bench.task import Task
from fedup.errors import DataError, SettingError
from fedup.rng import seed_for
from fedup.tasks.recipe import Recipe
from fedup.training.local import Job, LocalTraining

few = settings(max_examples=40, deadline=None, derandomize=True)
SIZES = (30, 21, 60, 26)
TARGET = 2
OWN_MODEL = """
from torch import nn

def build(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))
"""
CLIMB = Method(stop_accuracy=0.0, post_rounds=0)  # as far as it gets in its epochs


class Last(Observer):
    """Uploads and shares of the last round, copied."""

    def __init__(self):
        self.uploads, self.shares, self._round = {}, {}, None

    def on_update(self, round_index, client, *, before, after, weight):
        if round_index != self._round:
            self.uploads, self.shares, self._round = {}, {}, round_index
        self.uploads[client] = {name: tensor.clone() for name, tensor in after.items()}
        self.shares[client] = weight


def make_federation() -> Federation:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(sum(SIZES)) % 3
    x = torch.randn(len(y), 6, generator=generator) + 2 * nn.functional.one_hot(y, 6)
    return Federation.split(x, y, torch.arange(len(y)).split(SIZES), num_classes=3)


class World:
    """A federation trained with a model of the user's own while a server and an independent observer watched."""

    def __init__(self, folder: Path, **chosen) -> None:
        own = folder / "own.py"
        own.write_text(OWN_MODEL)
        settings = {"rounds": 4, "clients": 4, "batch_size": 8, "lr": 0.05, "seed": 3, **chosen}
        self.recipe = Recipe("digits", str(own), **settings)
        self.federation, self.history, self.last = make_federation(), History(), Last()
        self.start = self.recipe.blank_model((6,), 3)
        observers = [self.history, self.last]
        self.model = self.recipe.train(self.start, self.federation, observers=observers).model

    def task(self, target: int = TARGET, **other) -> Task:
        parts = self.federation, Forget.clients([target]), self.model, self.start, self.recipe
        return replace(Task(*parts, lambda model: {}, lambda *_: None, self.history), **other)

    def without_target(self) -> nn.Module:
        """The final model whose parameters are the mean of the others' last uploads."""
        model = copy.deepcopy(self.model)
        sizes = {c.id: len(c.train) for c in self.federation.clients if c.id != TARGET}
        with torch.no_grad():
            for name, weight in model.named_parameters():
                total = sum(size * self.last.uploads[client][name].double() for client, size in sizes.items())
                weight.copy_(total / sum(sizes.values()))
        return model

    @property
    def rows(self) -> torch.Tensor:
        return self.federation.client(TARGET).train


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("own"))


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]).clone()


def point(values) -> nn.Module:
    """A model whose parameters are these numbers, in two tensors."""
    model = nn.Linear(len(values) - 1, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values[:-1]]))
        model.bias.copy_(torch.tensor(values[-1:]))
    return model


class Walk(list):
    """The parameters after each step, as `project` leaves them, and the centre and radius of the ball."""

    centre: torch.Tensor
    radius: float

    def distances(self, origin: torch.Tensor) -> list[float]:
        return [float((one.double() - origin.double()).norm()) for one in self]


@pytest.fixture
def steps(monkeypatch) -> Walk:
    made, real = Walk(), eraseclient.project

    def watched(model, centre, radius):
        real(model, centre, radius)
        made.append(vector(model))
        made.centre, made.radius = centre.clone(), radius

    monkeypatch.setattr(eraseclient, "project", watched)
    return made


@pytest.fixture
def accuracies(monkeypatch) -> list[float]:
    made, real = [], eraseclient.ascend

    def watched(*args, **options):
        made.append(real(*args, **options))
        return made[-1]

    monkeypatch.setattr(eraseclient, "ascend", watched)
    return made


# --- the last upload taken out


@few
@given(st.floats(0, 0.95), st.integers(0, 99))
def test_taking_an_upload_out_of_an_average_is_the_weighted_formula(share, seed):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    upload = {name: torch.randn(weight.shape, generator=generator) for name, weight in before.items()}
    without_last_upload(model, upload, share)
    for name, weight in model.named_parameters():
        expected = (before[name].double() - share * upload[name].double()) / (1 - share)
        torch.testing.assert_close(weight.detach(), expected.float(), atol=1e-5, rtol=1e-4)


@few
@given(st.lists(st.integers(1, 200), min_size=2, max_size=6), st.integers(0, 99))
def test_what_is_left_is_the_mean_of_the_others_whatever_the_sizes(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    uploads = [torch.randn(5, generator=generator).double() for _ in sizes]
    model = nn.Linear(4, 1).double()
    mean = sum(size * upload for size, upload in zip(sizes, uploads, strict=True)) / sum(sizes)
    others = sum(size * upload for size, upload in zip(sizes[1:], uploads[1:], strict=True)) / sum(sizes[1:])
    with torch.no_grad():
        model.weight.copy_(mean[None, :4])
        model.bias.copy_(mean[4:])
    without_last_upload(model, {"weight": uploads[0][None, :4], "bias": uploads[0][4:]}, sizes[0] / sum(sizes))
    torch.testing.assert_close(vector(model), others, atol=1e-9, rtol=1e-9)


def test_in_a_federation_it_is_the_average_of_the_others_last_uploads_and_buffers_stay(world):
    model, upload = copy.deepcopy(world.model), world.history.upload(3, TARGET)
    without_last_upload(model, upload, world.history.shares(3)[TARGET])
    expected = world.without_target().state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(vector(model), vector(world.model), atol=1e-3)


@pytest.mark.parametrize("share", [1.0, 1.5, -0.1, math.nan])
def test_an_upload_that_is_all_there_is_cannot_be_taken_out(share):
    model = point([1.0, 2.0])
    before = fingerprint(model)
    with pytest.raises(DataError, match="alone"):
        without_last_upload(model, {name: one.detach() for name, one in model.named_parameters()}, share)
    assert fingerprint(model) == before


# --- the ball


numbers = st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=4)


@few
@given(numbers, numbers, st.floats(1e-3, 300))
def test_a_projected_point_lies_in_the_ball_on_the_line_to_its_centre(values, centre, radius):
    model, middle = point(values), torch.tensor(centre)
    before = vector(model)
    project(model, middle, radius)
    after = vector(model)
    assert float((after - middle).double().norm()) <= radius * (1 + 1e-5) + 1e-4
    if float((before - middle).norm()) <= radius:
        assert torch.equal(after, before)  # inside, nothing is moved
    else:
        assert float((after - middle).double().norm()) == pytest.approx(radius, rel=1e-4, abs=1e-4)
        if radius > 0.1:  # else rounding decides
            towards = cosine_similarity((after - middle).double(), (before - middle).double(), dim=0)
            assert float(towards) == pytest.approx(1, abs=1e-4)


def test_the_radius_is_the_root_of_a_third_of_the_mean_squared_distance():
    random = [point([3.0, 4.0, 0.0]), point([0.0, 0.0, 7.0]), point([1.0, 0.0, 0.0])]
    assert radius_of(point([0.0, 0.0, 0.0]), random) == pytest.approx(math.sqrt((25 + 49 + 1) / 3 / 3))


@few
@given(numbers, st.lists(numbers, min_size=1, max_size=10))
def test_the_radius_follows_its_definition(values, others):
    squares = [sum((a - b) ** 2 for a, b in zip(values, other, strict=True)) for other in others]
    expected = math.sqrt(sum(squares) / len(squares) / 3)
    assert radius_of(point(values), list(map(point, others))) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_in_a_run_the_ball_is_around_the_model_without_the_target_and_as_wide_as_ten_random_models_are_far(
    world, steps
):
    found = CLIMB.unlearn(world.task())
    centre = vector(world.without_target())
    torch.testing.assert_close(steps.centre, centre, atol=1e-5, rtol=1e-4)
    random = [
        replace(world.recipe, seed=seed_for(3, "random model", number)).blank_model((6,), 3) for number in range(10)
    ]
    assert len({fingerprint(one) for one in random}) == 10
    squares = [float((vector(one).double() - centre).square().sum()) for one in random]
    assert found.about["radius"] == pytest.approx(math.sqrt(sum(squares) / 10 / 3), rel=1e-4)
    assert steps.radius == found.about["radius"]


def test_random_models_are_not_those_that_the_recipe_brings_from_elsewhere(world):
    expected = CLIMB.unlearn(world.task()).about["radius"]
    pretrained = replace(world.recipe, weights="/nowhere/first.safetensors")
    assert CLIMB.unlearn(world.task(recipe=pretrained)).about["radius"] == expected


@pytest.mark.parametrize("lr", [0.01, 0.3, 5.0])
def test_every_step_ends_in_the_ball(world, steps, lr):
    found = replace(CLIMB, lr=lr).unlearn(world.task())
    distances = steps.distances(steps.centre)
    assert max(distances) <= steps.radius * (1 + 1e-5)
    assert len(distances) == found.cost.local_steps
    if lr == 5.0:  # proof that the ball is what holds it
        assert sum(distance >= steps.radius * (1 - 1e-5) for distance in distances) > 1
    assert torch.equal(vector(found.model), steps[-1])


# --- the ascent


def test_one_step_goes_up_the_gradient_and_tells_the_accuracy_before_it(world):
    model = world.without_target().eval()
    x, y = world.federation.x[world.rows], world.federation.y[world.rows]
    before, logits = vector(model), model(x)
    loss = cross_entropy(logits, y)
    gradient = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(model.parameters()))])
    found = ascend(model, torch.optim.SGD(model.parameters(), lr=0.1, maximize=True), x, y, clip=100.0)
    assert found == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    torch.testing.assert_close(vector(model), before + 0.1 * gradient)
    assert cross_entropy(model(x), y).item() > loss.item()


@few
@given(st.floats(1e-3, 10.0), st.floats(0.1, 100.0))
def test_a_gradient_longer_than_the_clip_is_cut_to_it_and_a_shorter_one_is_left(clip, scale):
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    x, y = torch.tensor([[scale, -scale, 0.0]]), torch.tensor([1])
    gradient = torch.tensor([[0.5], [-0.5]]) * x  # softmax of zeros, less the label's one
    ascend(model, torch.optim.SGD(model.parameters(), lr=1.0, maximize=True), x, y, clip=clip)
    expected = gradient * min(1.0, clip / float(gradient.norm()))
    torch.testing.assert_close(model.weight.detach(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("clip", [0.01, 5.0])
def test_no_step_of_a_run_is_longer_than_the_clip_allows(world, steps, clip):
    replace(CLIMB, momentum=0.0, clip=clip, lr=0.1).unlearn(world.task())
    walked = [steps.centre, *steps]
    moves = [float((b.double() - a.double()).norm()) for a, b in pairwise(walked)]
    assert max(moves) <= 0.1 * clip * (1 + 1e-3)
    assert min(moves) > 0
    if clip == 0.01:  # proof that it bites: gradients are longer
        assert min(moves) == pytest.approx(0.1 * clip, rel=1e-2)


def by_hand(world: World, method: Method) -> torch.Tensor:
    """Projected gradient ascent with momentum, from its definition."""
    model = world.without_target().eval()
    centre, velocity = vector(model), torch.zeros_like(vector(model))
    random = [
        replace(world.recipe, seed=seed_for(3, "random model", number)).blank_model((6,), 3) for number in range(10)
    ]
    radius = math.sqrt(sum(float((vector(one) - centre).square().sum()) for one in random) / 10 / 3)
    now = centre
    for epoch in range(method.epochs):
        job = Job(TARGET, world.rows, LocalTraining(batch_size=8), seed_for(3, "ascent", epoch, TARGET))
        for batch in job.batches():
            loss = cross_entropy(model(world.federation.x[batch]), world.federation.y[batch])
            gradient = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(model.parameters()))])
            gradient = gradient * min(1.0, method.clip / float(gradient.norm()))
            velocity = method.momentum * velocity + gradient
            now = now + method.lr * velocity
            if float((now - centre).norm()) > radius:
                now = centre + (now - centre) / (now - centre).norm() * radius
            nn.utils.vector_to_parameters(now, model.parameters())
    return now


@pytest.mark.parametrize("change", [{}, {"momentum": 0.0, "lr": 0.1}, {"clip": 0.2}, {"lr": 0.5, "epochs": 2}], ids=str)
def test_a_run_equals_plain_projected_ascent_on_the_targets_rows(world, change):
    method = replace(CLIMB, **{"epochs": 3, **change})
    found = method.unlearn(world.task())
    assert len(found.about["trail"]) == 1 + method.epochs  # it did not stop early
    torch.testing.assert_close(vector(found.model), by_hand(world, method), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_the_targets_loss_rises_and_its_accuracy_falls(world, lr):
    trail = replace(CLIMB, lr=lr).unlearn(world.task()).about["trail"]
    assert trail[-1]["loss"] > trail[0]["loss"] + 0.1
    assert trail[-1]["accuracy"] < trail[0]["accuracy"]
    assert trail[1]["loss"] > trail[0]["loss"]


def test_the_trail_tells_how_things_stood_at_the_start_and_after_each_epoch(world, steps):
    found = CLIMB.unlearn(world.task())
    trail, in_epoch = found.about["trail"], -(-len(world.rows) // 8)
    assert [moment["steps"] for moment in trail] == [in_epoch * epoch for epoch in range(6)]
    x, y = world.federation.x[world.rows], world.federation.y[world.rows]
    upload = torch.cat([world.last.uploads[TARGET][name].flatten() for name, _ in world.model.named_parameters()])
    for moment in trail:
        model = world.without_target().eval()
        where = steps[moment["steps"] - 1] if moment["steps"] else steps.centre
        nn.utils.vector_to_parameters(where, model.parameters())
        with torch.no_grad():
            logits = model(x)
        assert moment["loss"] == pytest.approx(float(cross_entropy(logits, y)), rel=1e-4)
        assert moment["accuracy"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))
        assert moment["from_centre"] == pytest.approx(float((where - steps.centre).norm()), rel=1e-4)
        assert moment["from_upload"] == pytest.approx(float((where - upload).norm()), rel=1e-4)
    assert trail[0]["from_centre"] == 0


# --- when it stops


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 0.99])
def test_it_stops_at_the_first_batch_of_which_it_gets_too_few_right(world, accuracies, threshold):
    method = replace(CLIMB, stop_accuracy=threshold, lr=0.05)
    trail = method.unlearn(world.task()).about["trail"]
    assert len(accuracies) == trail[-1]["steps"] > 0
    assert all(accuracy > threshold for accuracy in accuracies[:-1])
    assert accuracies[-1] <= threshold


@pytest.mark.parametrize("part", [0.2, 0.6])
def test_it_stops_once_it_is_too_far_from_what_it_last_sent(world, steps, part):
    upload = torch.cat([world.last.uploads[TARGET][name].flatten() for name, _ in world.model.named_parameters()])
    free = CLIMB.unlearn(world.task()).about["trail"]
    far = steps.distances(upload)
    steps.clear()
    limit = far[0] + part * (max(far) - far[0])
    trail = replace(CLIMB, stop_distance=limit).unlearn(world.task()).about["trail"]
    found = steps.distances(upload)
    assert found[-1] > limit
    assert all(distance <= limit for distance in found[:-1])
    assert 1 < len(found) == trail[-1]["steps"] < free[-1]["steps"]
    assert trail[-1]["from_upload"] > limit


def test_no_distance_is_too_far_where_none_is_given(world):
    assert CLIMB.stop_distance == 0
    assert CLIMB.unlearn(world.task()).about["trail"][-1]["steps"] == 5 * -(-len(world.rows) // 8)


# --- what it leaves alone


def test_buffers_stay_the_final_models_during_the_ascent(world):
    found = CLIMB.unlearn(world.task()).model
    final, buffers = world.model.state_dict(), dict(found.named_buffers())
    assert "1.running_mean" in buffers
    assert all(torch.equal(buffer, final[name]) for name, buffer in buffers.items())
    assert not torch.allclose(vector(found), vector(world.model))
    assert not any(module.training for module in found.modules())


# --- the rounds after


def test_rounds_after_are_plain_fedavg_without_the_target(world):
    task = world.task()
    ascended = CLIMB.unlearn(task).model
    found = replace(CLIMB, post_rounds=3).unlearn(task).model
    retained = world.federation.without(task.request)
    expected = federate(ascended, retained, rounds=[4, 5, 6], local=world.recipe.local, seed=3).model
    assert fingerprint(found) == fingerprint(expected)


class Spoiler:
    """A probe that makes the target's rows unreadable when it is first asked, at the end of the ascent."""

    def __init__(self, federation: Federation):
        target = federation.client(TARGET)
        self.x, self.rows = federation.x, torch.cat([target.train, target.validation, target.heldout])
        self.asked = 0

    def __call__(self, model):
        self.x[self.rows] = torch.nan
        self.asked += 1
        return {}


def test_the_rounds_after_read_none_of_the_targets_rows(world):
    expected = Method().unlearn(world.task())
    federation = replace(world.federation, x=world.federation.x.clone())
    spoiler = Spoiler(federation)
    found = Method().unlearn(world.task(federation=federation, probe=spoiler))
    assert fingerprint(found.model) == fingerprint(expected.model)
    assert found.about == expected.about
    assert spoiler.asked == 3  # after the ascent and after each round
    assert bool(federation.x[world.rows].isnan().all())


def test_the_ascent_does_read_the_targets_rows(world):
    """Proof that the test above would see it."""
    x = world.federation.x.clone()
    x[world.rows] = torch.nan
    task = world.task(federation=replace(world.federation, x=x))
    with pytest.raises(DataError, match="not finite"):
        Method(stop_accuracy=0.0).unlearn(task)


# --- what it costs


def message(tensors) -> int:
    return len(save({name: one.detach() for name, one in tensors}, metadata={"fedup": json.dumps({})}))


@pytest.mark.parametrize("post_rounds", [0, 1, 3])
def test_costs_are_those_of_a_hand_count(world, post_rounds):
    found = replace(CLIMB, post_rounds=post_rounds).unlearn(world.task())
    cost, parameters = found.cost, message(world.model.named_parameters())
    whole, others = message(world.model.state_dict().items()), (0, 1, 3)
    assert whole > parameters
    in_epoch = {client.id: -(-len(client.train) // 8) for client in world.federation.clients}
    moved = parameters + post_rounds * len(others) * whole
    assert (cost.bytes_up, cost.bytes_down) == (moved, moved)
    assert cost.local_steps == 5 * in_epoch[TARGET] + post_rounds * sum(in_epoch[client] for client in others)
    assert cost.clients == ({TARGET, *others} if post_rounds else {TARGET})
    assert cost.storage_bytes == parameters
    assert (cost.ahead_bytes_up, cost.ahead_time_s) == (0, 0.0)
    assert len(cost.path) == 1 + post_rounds
    assert set(cost.time_s) == ({"ascent", "train"} if post_rounds else {"ascent"})
    assert found.restore is None


def test_an_ascent_that_stops_early_is_counted_as_far_as_it_went(world, accuracies):
    cost = Method(stop_accuracy=0.99, post_rounds=0).unlearn(world.task()).cost
    assert cost.local_steps == len(accuracies) < 5 * -(-len(world.rows) // 8)


# --- requests and settings


def test_a_target_that_was_not_in_the_last_round_is_refused_and_one_that_was_is_not(tmp_path):
    world = World(tmp_path, clients_per_round=2)
    for client in world.federation.ids:
        if client in world.last.shares:
            model = copy.deepcopy(world.model)
            without_last_upload(model, world.last.uploads[client], world.last.shares[client])
            (other,) = set(world.last.shares) - {client}
            expected = torch.cat([world.last.uploads[other][name].flatten() for name, _ in model.named_parameters()])
            torch.testing.assert_close(vector(model), expected, atol=1e-4, rtol=1e-3)
            assert CLIMB.unlearn(world.task(client)).cost.clients == {client}
        else:
            with pytest.raises(DataError, match=f"Client {client} did not take part"):
                CLIMB.unlearn(world.task(client))


def test_a_target_that_was_alone_in_the_last_round_is_refused(tmp_path):
    world = World(tmp_path, clients_per_round=1)
    (alone,) = world.last.shares
    with pytest.raises(DataError, match="alone"):
        Method().unlearn(world.task(alone))


def test_a_federation_that_never_trained_is_said(world):
    recipe = replace(world.recipe, rounds=0)
    with pytest.raises(DataError):
        Method().unlearn(world.task(recipe=recipe, history=History()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": -1.0},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"clip": 0.0},
        {"epochs": 0},
        {"stop_accuracy": 1.0},
        {"stop_accuracy": -0.1},
        {"stop_accuracy": math.nan},
        {"stop_distance": -1.0},
        {"post_rounds": -1},
        {"clip": math.nan},
        {"stop_distance": math.nan},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        Method(**wrong)

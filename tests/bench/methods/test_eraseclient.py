"""EraseClient: the target's last upload taken out, ascent that climbs inside its ball, and rounds without the target;
each part against its definition."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench.methods._worlds import TARGET, World, message
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fedup import Federation, federate, fingerprint
from fedup.bench.methods import eraseclient
from fedup.bench.methods.eraseclient import Method, ascend, project, radius_of, without_last_upload
from fedup.errors import DataError
from fedup.rng import seed_for
from fedup.training.local import Job, LocalTraining

few = settings(max_examples=40, deadline=None, derandomize=True)
CLIMB = Method(stop_accuracy=0.0, post_rounds=0)  # as far as it gets in its epochs


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("own"))


def last_uploads(world: World) -> dict[int, dict[str, torch.Tensor]]:
    last = world.recipe.rounds - 1
    return {client: world.seen.uploads[last, client] for client in world.seen.cohort(last)}


def without_target(world: World) -> nn.Module:
    """The final model whose parameters are the mean of the others' last uploads."""
    model = copy.deepcopy(world.model).eval()
    sizes = {c.id: len(c.train) for c in world.federation.clients if c.id != TARGET}
    uploads = last_uploads(world)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            total = sum(size * uploads[client][name].double() for client, size in sizes.items())
            weight.copy_(total / sum(sizes.values()))
    return model


def target_upload(world: World) -> torch.Tensor:
    upload = last_uploads(world)[TARGET]
    return torch.cat([upload[name].flatten() for name, _ in world.model.named_parameters()])


def target_rows(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    rows = world.federation.client(TARGET).train
    return world.federation.x[rows], world.federation.y[rows]


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
    walk, real = Walk(), eraseclient.project

    def watched(model, centre, radius):
        real(model, centre, radius)
        walk.append(vector(model))
        walk.centre, walk.radius = centre.clone(), radius

    monkeypatch.setattr(eraseclient, "project", watched)
    return walk


# --- the parts


@few
@given(st.lists(st.integers(1, 200), min_size=2, max_size=6), st.integers(0, 99))
def test_without_an_upload_the_average_is_the_mean_of_the_others_whatever_the_sizes(sizes, seed):
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


@few
@given(numbers, st.lists(numbers, min_size=1, max_size=10))
def test_the_radius_is_the_root_of_a_third_of_the_mean_squared_distance(values, others):
    squares = [sum((a - b) ** 2 for a, b in zip(values, other, strict=True)) for other in others]
    expected = math.sqrt(sum(squares) / len(squares) / 3)
    assert radius_of(point(values), list(map(point, others))) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_step_tells_the_accuracy_before_it(world):
    model, (x, y) = without_target(world), target_rows(world)
    with torch.no_grad():
        before = (model(x).argmax(1) == y).double().mean()
    found = ascend(model, torch.optim.SGD(model.parameters(), lr=5.0, maximize=True), x, y, clip=100.0)
    with torch.no_grad():
        assert found == pytest.approx(float(before)) != pytest.approx(float((model(x).argmax(1) == y).double().mean()))


# --- the ascent as a whole


def by_hand(world: World, method: Method) -> tuple[torch.Tensor, float]:
    """Projected gradient ascent with momentum, from its definition, and the radius of its ball."""
    model, rows = without_target(world), world.federation.client(TARGET).train
    centre, velocity = vector(model), torch.zeros_like(vector(model))
    random = [
        replace(world.recipe, seed=seed_for(3, "random model", number)).blank_model((6,), 3) for number in range(10)
    ]
    radius = math.sqrt(sum(float((vector(one) - centre).square().sum()) for one in random) / 10 / 3)
    now = centre
    for epoch in range(method.epochs):
        job = Job(TARGET, rows, LocalTraining(batch_size=8), seed_for(3, "ascent", epoch, TARGET))
        for batch in job.batches():
            loss = cross_entropy(model(world.federation.x[batch]), world.federation.y[batch])
            gradient = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(model.parameters()))])
            gradient = gradient * min(1.0, method.clip / float(gradient.norm()))
            velocity = method.momentum * velocity + gradient
            now = now + method.lr * velocity
            if float((now - centre).norm()) > radius:
                now = centre + (now - centre) / (now - centre).norm() * radius
            nn.utils.vector_to_parameters(now, model.parameters())
    return now, radius


@pytest.mark.parametrize("change", [{"clip": 0.2}, {"lr": 0.5, "epochs": 2}], ids=str)
def test_a_run_equals_plain_projected_ascent_on_the_targets_rows(world, steps, change):
    method = replace(CLIMB, **{"epochs": 3, **change})
    pretrained = replace(world.recipe, weights="/nowhere/first.safetensors")  # random models are not those
    found = method.unlearn(world.task(recipe=pretrained))
    expected, radius = by_hand(world, method)
    assert len(found.about["trail"]) == 1 + method.epochs  # it did not stop early
    torch.testing.assert_close(vector(found.model), expected, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(steps.centre, vector(without_target(world)), atol=1e-5, rtol=1e-4)
    assert found.about["radius"] == steps.radius == pytest.approx(radius, rel=1e-4)
    if "lr" in change:  # proof that the ball is what holds it
        assert max(steps.distances(steps.centre)) == pytest.approx(radius, rel=1e-4)


def test_the_trail_tells_how_things_stood_at_the_start_and_after_each_epoch(world, steps):
    trail = CLIMB.unlearn(world.task()).about["trail"]
    assert [moment["steps"] for moment in trail] == [world.steps(TARGET) * epoch for epoch in range(6)]
    (x, y), upload = target_rows(world), target_upload(world)
    for moment in trail:
        model = without_target(world)
        where = steps[moment["steps"] - 1] if moment["steps"] else steps.centre
        nn.utils.vector_to_parameters(where, model.parameters())
        with torch.no_grad():
            logits = model(x)
        assert moment["loss"] == pytest.approx(float(cross_entropy(logits, y)), rel=1e-4)
        assert moment["accuracy"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))
        assert moment["from_centre"] == pytest.approx(float((where - steps.centre).norm()), rel=1e-4)
        assert moment["from_upload"] == pytest.approx(float((where - upload).norm()), rel=1e-4)
    assert trail[0]["from_centre"] == 0
    assert trail[-1]["loss"] > trail[0]["loss"] + 0.1
    assert trail[-1]["accuracy"] < trail[0]["accuracy"]


@pytest.mark.parametrize("threshold", [0.3, 0.99])
def test_it_stops_at_the_first_batch_of_which_it_gets_too_few_right(world, monkeypatch, threshold):
    accuracies, real = [], eraseclient.ascend
    monkeypatch.setattr(
        eraseclient, "ascend", lambda *args, **how: accuracies.append(real(*args, **how)) or accuracies[-1]
    )
    found = replace(CLIMB, stop_accuracy=threshold, lr=0.05).unlearn(world.task())
    assert 0 < len(accuracies) == found.about["trail"][-1]["steps"] == found.cost.local_steps
    assert all(accuracy > threshold for accuracy in accuracies[:-1])
    assert accuracies[-1] <= threshold


def test_it_stops_once_it_is_too_far_from_what_it_last_sent(world, steps):
    upload = target_upload(world)
    free = CLIMB.unlearn(world.task()).about["trail"]
    far = steps.distances(upload)
    steps.clear()
    limit = far[0] + 0.4 * (max(far) - far[0])
    trail = replace(CLIMB, stop_distance=limit).unlearn(world.task()).about["trail"]
    distances = steps.distances(upload)
    assert distances[-1] > limit
    assert all(distance <= limit for distance in distances[:-1])
    assert 1 < len(distances) == trail[-1]["steps"] < free[-1]["steps"]


# --- what follows, what it leaves alone, what it costs


def test_buffers_stay_the_final_models_during_the_ascent_and_rounds_after_are_plain_fedavg_without_the_target(world):
    task = world.task()
    ascended = CLIMB.unlearn(task).model
    final, buffers = world.model.state_dict(), dict(ascended.named_buffers())
    assert "1.running_mean" in buffers
    assert all(torch.equal(buffer, final[name]) for name, buffer in buffers.items())
    assert not any(module.training for module in ascended.modules())
    found = replace(CLIMB, post_rounds=3).unlearn(task).model
    expected = federate(ascended, task.retained, rounds=[4, 5, 6], local=world.recipe.local, seed=3).model
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
    with pytest.raises(DataError, match="not finite"):  # proof that the ascent does read them
        Method(stop_accuracy=0.0).unlearn(world.task(federation=federation))


@pytest.mark.parametrize("post_rounds", [0, 3])
def test_costs_are_those_of_a_hand_count(world, post_rounds):
    found = replace(CLIMB, post_rounds=post_rounds).unlearn(world.task())
    cost, parameters = found.cost, message(world.model.named_parameters())
    whole, others = message(world.model.state_dict()), (0, 1, 3)
    moved = parameters + post_rounds * len(others) * whole
    assert (cost.bytes_up, cost.bytes_down) == (moved, moved)
    assert cost.local_steps == 5 * world.steps(TARGET) + post_rounds * world.steps(*others)
    assert cost.clients == ({TARGET, *others} if post_rounds else {TARGET})
    assert cost.storage_bytes == parameters < whole
    assert (cost.ahead_bytes_up, cost.ahead_time_s) == (0, 0.0)
    assert len(cost.path) == 1 + post_rounds
    assert set(cost.time_s) == ({"ascent", "train"} if post_rounds else {"ascent"})
    assert found.restore is None


def test_a_target_that_was_not_in_the_last_round_or_alone_in_it_is_refused(tmp_path):
    world = World(tmp_path, clients_per_round=2)
    for client in world.federation.ids:
        if client in last_uploads(world):
            assert CLIMB.unlearn(world.task(client)).cost.clients == {client}
        else:
            with pytest.raises(DataError, match=f"Client {client} did not take part"):
                CLIMB.unlearn(world.task(client))
    world = World(tmp_path, clients_per_round=1)
    with pytest.raises(DataError, match="alone"):
        Method().unlearn(world.task(*last_uploads(world)))

"""The captured engine against the plain one, on a GPU; skipped where there is none (CI has none)."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from tests.engines._federations import KINDS, federation_for, make_federation, make_model
from torch import nn

from fedup import LocalTraining, Observer, Rounds, Runtime, federate, fingerprint
from fedup.errors import SettingError
from fedup.training.engines import captured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")

SGD = LocalTraining(batch_size=16, lr=0.05)
ADAM = LocalTraining(batch_size=16, lr=0.005, optimizer="adam", epochs=2)
DECAY = LocalTraining(batch_size=16, lr=0.05, momentum=0.0, weight_decay=0.01, epochs=2)
PLAIN, CAPTURED = Runtime(device="cuda", engine="plain"), Runtime(device="cuda", engine="captured")


@pytest.fixture(autouse=True)
def exact_products():
    """Single precision throughout: what is compared is the engine, not the rounding of tensor cores."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def both(kind, how, *, rounds=3, sizes=None):
    """The same federation by the plain and by the captured engine."""
    federation = federation_for(kind) if sizes is None else federation_for(kind, sizes)
    return [
        federate(make_model(kind), federation, rounds=rounds, local=how, runtime=runtime)
        for runtime in (PLAIN, CAPTURED)
    ]


def assert_same(plain, fast, *, atol=2e-4):
    assert (plain.engine, fast.engine) == ("plain", "captured")
    for name, value in plain.model.state_dict().items():
        found = fast.model.state_dict()[name]
        assert found.stride() == value.stride(), name
        torch.testing.assert_close(found, value, atol=atol, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("how", [SGD, ADAM, DECAY], ids=["sgd", "adam", "decay"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_plain_engine_after_three_rounds(kind, how):
    assert_same(*both(kind, how))


@pytest.mark.parametrize("kind", ["all", "convolution"])
def test_half_precision_does_the_same_in_both(kind):
    how = LocalTraining(batch_size=16, lr=0.02, precision="bfloat16")
    assert_same(*both(kind, how, rounds=2), atol=2e-2)


@pytest.mark.parametrize("per_round", [1, 4])
def test_cohorts_are_the_same(per_round):
    assert_same(*both("all", SGD, rounds=Rounds(5, clients_per_round=per_round)))


@pytest.mark.parametrize(("count", "rounds"), [(1, 3), (2, 3), (5, 30), (7, 30), (8, 3), (9, 3), (30, 3)])
def test_any_number_of_clients_and_rounds(count, rounds):
    assert_same(*both("all", SGD, sizes=tuple(20 + 16 * (i % 5) for i in range(count)), rounds=rounds))


def test_many_small_clients_of_all_sizes():
    sizes = tuple(1 + i % 40 for i in range(200))
    assert_same(*both("batchnorm", LocalTraining(batch_size=32, lr=0.02), sizes=sizes, rounds=3))


def test_every_client_draws_its_own_dropout():
    _, fast = both("dropout", SGD)
    _, again = both("dropout", SGD)
    other = federate(make_model("dropout"), federation_for("dropout"), rounds=3, local=SGD, seed=1, runtime=CAPTURED)
    for name, value in fast.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], value, atol=1e-5, rtol=1e-5)
    assert fingerprint(other.model) != fingerprint(fast.model)


def test_observers_see_each_client_once_with_its_own_weights():
    class Seen(Observer):
        def __init__(self):
            self.after = {}

        def on_update(self, round_index, client, *, before, after, weight):
            assert (round_index, client) not in self.after
            self.after[round_index, client] = ({n: t.clone() for n, t in after.items()}, weight)

    seen = {}
    for engine in ("plain", "captured"):
        seen[engine] = Seen()
        federate(
            make_model("all"),
            federation_for("all"),
            rounds=2,
            local=SGD,
            observers=[seen[engine]],
            runtime=Runtime(device="cuda", engine=engine),
        )
    assert seen["plain"].after.keys() == seen["captured"].after.keys()
    for key, (weights, share) in seen["plain"].after.items():
        found, found_share = seen["captured"].after[key]
        assert share == found_share
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, atol=2e-4, rtol=1e-3)


def test_steps_are_really_captured():
    counted = []

    class Counting(nn.Linear):
        def forward(self, x):
            counted.append(len(x))
            return super().forward(x)

    federate(nn.Sequential(Counting(6, 3)), make_federation((640,)), rounds=3, local=SGD, runtime=CAPTURED)
    assert len(counted) == 2  # one to try, one to capture: the other 118 steps are replays


def test_the_global_streams_are_left_alone():
    model, federation = make_model("dropout"), federation_for("dropout")
    torch.manual_seed(5)
    torch.cuda.manual_seed(5)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    federate(model, federation, rounds=2, local=SGD, runtime=CAPTURED)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(), before[1])


class Waits(nn.Module):
    """Reads a value back in each step, which no graph can hold."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x * (2.0 if float(x.abs().max()) > 1e6 else 1.0))


class Alternates(nn.Module):
    """Does something else every other time: its captured step would be only one of the two."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x if self.calls % 2 else -3 * x)


@pytest.mark.parametrize("model", [Waits, Alternates])
def test_what_cannot_be_captured_is_trained_plainly_and_said(model):
    start = model()
    federation = make_federation((70, 64, 33))
    with pytest.warns(UserWarning, match="cannot be captured"):
        fast = federate(copy.deepcopy(start), federation, rounds=3, local=SGD, runtime=Runtime(device="cuda"))
    assert fast.engine == "plain"
    if model is Waits:
        plain = federate(copy.deepcopy(start), federation, rounds=3, local=SGD, runtime=PLAIN)
        for name, value in plain.model.state_dict().items():
            torch.testing.assert_close(fast.model.state_dict()[name], value)
    with pytest.raises(SettingError, match="engine='plain'"):
        federate(model(), federation, rounds=3, local=SGD, runtime=CAPTURED)


def test_after_a_failed_capture_another_model_is_captured():
    with pytest.warns(UserWarning, match="cannot be captured"):
        federate(Waits(), make_federation((70, 64, 33)), rounds=3, local=SGD, runtime=Runtime(device="cuda"))
    assert_same(*both("all", SGD))


def test_few_steps_are_not_captured(monkeypatch):
    monkeypatch.setattr(captured.CapturedEngine, "_capture", None)
    federate(make_model("all"), make_federation((20, 30)), rounds=1, local=SGD, runtime=Runtime(device="cuda"))


def test_too_little_memory_for_many_lanes_means_fewer(monkeypatch):
    real, widths = captured.CapturedEngine._capture, []

    def capture(self, size, width, load):
        widths.append(width)
        if width > 2:
            raise torch.OutOfMemoryError("made up")
        return real(self, size, width, load)

    monkeypatch.setattr(captured.CapturedEngine, "_capture", capture)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(*both("all", SGD))
    assert max(widths) > 2
    assert 2 in widths


def test_the_plain_engine_is_that_of_the_cpu():
    federation = federation_for("all")
    how = LocalTraining(batch_size=16, lr=0.02)
    model = make_model("batchnorm")
    on_cpu = federate(model, federation, rounds=2, local=how).model
    on_gpu = federate(model, federation, rounds=2, local=how, runtime=CAPTURED).model
    for name, value in on_cpu.state_dict().items():
        torch.testing.assert_close(on_gpu.state_dict()[name].cpu(), value, atol=2e-3, rtol=2e-3)


def test_a_checkpoint_of_one_engine_is_taken_up_by_the_other(tmp_path):
    federation, path = federation_for("all"), tmp_path / "rounds"
    first, then = (replace(runtime, checkpoint=path) for runtime in (CAPTURED, PLAIN))
    federate(make_model("all"), federation, rounds=2, local=SGD, runtime=first)
    went_on = federate(make_model("all"), federation, rounds=3, local=SGD, runtime=then)
    straight = federate(make_model("all"), federation, rounds=3, local=SGD, runtime=PLAIN)
    for name, value in straight.model.state_dict().items():
        torch.testing.assert_close(went_on.model.state_dict()[name], value, atol=2e-4, rtol=1e-3)

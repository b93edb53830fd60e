"""The captured engine against the plain one, on a GPU; skipped where there is none (CI has none)."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from tests.engines._federations import KINDS, SIZES, federation_for, make_federation, make_model
from torch import nn

from fedup import LocalTraining, Rounds, Runtime, federate, fingerprint
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


def both(kind, how, *, rounds=3, sizes=SIZES):
    """The same federation by the plain and by the captured engine, which give the same weights."""
    federation, atol = federation_for(kind, sizes), 2e-2 if how.precision == "bfloat16" else 2e-4
    plain, fast = (
        federate(make_model(kind), federation, rounds=rounds, local=how, runtime=runtime)
        for runtime in (PLAIN, CAPTURED)
    )
    assert (plain.engine, fast.engine) == ("plain", "captured")
    for name, value in plain.model.state_dict().items():
        found = fast.model.state_dict()[name]
        assert found.stride() == value.stride(), name
        torch.testing.assert_close(found, value, atol=atol, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    return fast


HALF = LocalTraining(batch_size=16, lr=0.02, precision="bfloat16")
COSINE = replace(ADAM, schedule="cosine", warmup_rounds=1, schedule_rounds=4)
MOVED = replace(SGD, augment="flip_crop", schedule="cosine", schedule_rounds=3)
CASES = [
    *((kind, COSINE, {"rounds": 4}) for kind in ("plain", "all")),
    ("convolution", MOVED, {}),
    *((kind, how, {}) for kind in KINDS for how in (SGD, ADAM, DECAY)),
    *((kind, HALF, {"rounds": 2}) for kind in ("all", "convolution")),
    *(("all", SGD, {"rounds": Rounds(5, clients_per_round=per_round)}) for per_round in (1, 4)),
    *(
        ("all", SGD, {"sizes": tuple(20 + 7 * (i % 9) for i in range(count)), "rounds": rounds})
        for count, rounds in ((1, 3), (2, 3), (5, 30), (7, 30), (8, 3), (9, 3), (200, 3))
    ),
]


@pytest.mark.parametrize(("kind", "how", "options"), CASES)
def test_weights_are_those_of_the_plain_engine(kind, how, options):
    both(kind, how, **options)


def test_every_client_draws_its_own_dropout_and_the_global_streams_are_left_alone():
    model, federation = make_model("dropout"), federation_for("dropout")
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    fast, again, other = (
        federate(model, federation, rounds=3, local=SGD, seed=seed, runtime=CAPTURED) for seed in (0, 0, 1)
    )
    assert all(map(torch.equal, before, (torch.get_rng_state(), torch.cuda.get_rng_state())))
    for name, value in fast.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], value, atol=1e-5, rtol=1e-5)
    assert fingerprint(other.model) != fingerprint(fast.model)


def test_steps_are_really_captured():
    counted = []

    class Counting(nn.Linear):
        def forward(self, x):
            counted.append(len(x))
            return super().forward(x)

    federate(nn.Sequential(Counting(6, 3)), make_federation((640,)), rounds=3, local=SGD, runtime=CAPTURED)
    assert len(counted) == 2  # one to try, one to capture: the other 118 steps are replays


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
def test_what_cannot_be_captured_is_trained_plainly_and_said_and_the_next_model_is_captured(model):
    start, federation = model(), make_federation((70, 64, 33))
    with pytest.warns(UserWarning, match="cannot be captured"):
        fast = federate(copy.deepcopy(start), federation, rounds=3, local=SGD, runtime=Runtime(device="cuda"))
    assert fast.engine == "plain"
    if model is Waits:
        plain = federate(copy.deepcopy(start), federation, rounds=3, local=SGD, runtime=PLAIN)
        for name, value in plain.model.state_dict().items():
            torch.testing.assert_close(fast.model.state_dict()[name], value)
    with pytest.raises(SettingError, match="engine='plain'"):
        federate(model(), federation, rounds=3, local=SGD, runtime=CAPTURED)
    both("all", SGD)


def test_few_steps_are_not_captured_and_too_little_memory_for_many_lanes_means_fewer(monkeypatch):
    real, widths = captured.CapturedEngine._capture, []

    def capture(self, size, width, load):
        widths.append(width)
        if width > 2:
            raise torch.OutOfMemoryError("made up")
        return real(self, size, width, load)

    monkeypatch.setattr(captured.CapturedEngine, "_capture", capture)
    federate(make_model("all"), make_federation((20, 30)), rounds=1, local=SGD, runtime=Runtime(device="cuda"))
    assert widths == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both("all", SGD)
    assert max(widths) > 2 and 2 in widths


def test_a_checkpoint_of_one_engine_is_taken_up_by_the_other(tmp_path):
    federation, path = federation_for("all"), tmp_path / "rounds"
    first, then = (replace(runtime, checkpoint=path) for runtime in (CAPTURED, PLAIN))
    federate(make_model("all"), federation, rounds=2, local=SGD, runtime=first)
    went_on = federate(make_model("all"), federation, rounds=3, local=SGD, runtime=then)
    straight = federate(make_model("all"), federation, rounds=3, local=SGD, runtime=PLAIN)
    for name, value in straight.model.state_dict().items():
        torch.testing.assert_close(went_on.model.state_dict()[name], value, atol=2e-4, rtol=1e-3)

"""A federation is trained once: the same content gives the same bits from the cache, any other content is trained."""

import copy
import multiprocessing
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedup import Federation, Forget, fingerprint
from fedup.bench.history import History
from fedup.bench.training_cache import _path, keep, recorded, trained, use_histories
from fedup.errors import StorageError
from fedup.tasks.datasets import load_dataset
from fedup.tasks.recipe import Recipe
from fedup.training.averaging import RunningAverage

RECIPE = Recipe.suited_to("digits", rounds=3, clients=3, rows=120, batch_size=32, seed=2)


class Rounds:
    """Progress that counts trainings and rounds, and may interrupt at a round."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.trainings, self.rounds, self._stop_at = 0, 0, stop_at

    def __call__(self, what: str, done: int, total: int) -> None:
        if done == self._stop_at:
            raise KeyboardInterrupt
        self.trainings += done == 0
        self.rounds += done > 0


@pytest.fixture(autouse=True)
def cache(cache) -> Path:
    return cache / "federations"


@pytest.fixture(scope="module")
def federation() -> Federation:
    return RECIPE.federation(RECIPE.load())


@pytest.fixture
def start(small_model) -> nn.Module:
    """With BatchNorm, whose buffers must come back too."""
    return copy.deepcopy(small_model)


def test_the_second_time_it_comes_from_the_cache_with_the_same_bits(federation, start, cache):
    first, second, before = Rounds(), Rounds(), fingerprint(start)
    made = trained(start, federation, RECIPE, progress=first)
    again = trained(start, federation, RECIPE, progress=second)
    assert (first.trainings, first.rounds) == (1, 3)
    assert (second.trainings, second.rounds) == (0, 0)
    assert fingerprint(made) == fingerprint(again) != fingerprint(start) == before
    assert not again.training
    assert len(list(cache.iterdir())) == 1  # no rest of the training
    with torch.no_grad():
        next(again.parameters()).zero_()  # what is done to a model does not reach the cache
    assert fingerprint(trained(start, federation, RECIPE, progress=second)) == fingerprint(made)


def _changed_x(federation: Federation) -> Federation:
    x = federation.x.clone()
    x.view(len(x), -1)[federation.clients[-1].train[-1], -1] += 1e-3  # one pixel of one row
    return replace(federation, x=x)


FEDERATIONS = {
    "a row left out": lambda f: f.without(Forget.samples({0: [int(f.clients[0].train[0])]})),
    "one pixel": _changed_x,
    "other labels": lambda f: f.relabeled((f.y + 1) % 10),
    "a client with another number": lambda f: replace(f, clients=(*f.clients[:2], replace(f.clients[2], id=7))),
}


def _other(start: nn.Module, tensor: str) -> nn.Module:
    other = copy.deepcopy(start)
    with torch.no_grad():
        other.state_dict()[tensor].flatten()[0] += 1e-3
    return other


def test_any_other_content_has_another_place_in_the_cache_and_names_do_not_matter(federation, start):
    changes = [
        {"rounds": 2},
        {"epochs": 2},
        {"batch_size": 31},
        {"lr": 0.049},
        {"momentum": 0.8},
        {"optimizer": "adam"},
    ]
    changes += [{"precision": "bfloat16"}, {"clients_per_round": 2}, {"seed": 3}]
    places = [
        *(_path(start, federation, replace(RECIPE, **change)) for change in ({}, *changes)),
        *(_path(start, change(federation), RECIPE) for change in FEDERATIONS.values()),
        *(_path(_other(start, tensor), federation, RECIPE) for tensor in ("1.weight", "2.running_mean")),
    ]
    assert len(set(places)) == len(places)
    x = federation.x.clone()
    x[federation.rows("heldout")] = 0  # nobody trains on these
    renamed = replace(RECIPE, data="another name for it", cut="4")
    assert _path(start, replace(federation, x=x), renamed) == places[0]
    digits = load_dataset("digits")
    x, y = digits.x.repeat(4, 1, 1, 1), digits.y.repeat(4)  # read in blocks of 4,096 rows
    large = Federation.split(x, y, [torch.arange(len(y))], heldout=0, validation=0, num_classes=10)
    changed = x.clone()
    changed[-1, 0, 0, 0] += 1
    assert _path(start, large, RECIPE) != _path(start, replace(large, x=changed), RECIPE)


def test_a_model_of_other_code_with_the_same_weights_is_trained_anew(tmp_path, federation):
    # Found here: the weights alone decide, so that an edited model of the user's own got the weights of the old one.
    own, code = (
        tmp_path / "own.py",
        (
            "from torch import nn\nTAKES = 'image'\n"
            "def build(shape, classes):\n"
            "    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.{}(), nn.Linear(16, classes))\n"
        ),
    )
    made = []
    for activation in ("ReLU", "Sigmoid"):
        own.write_text(code.format(activation))
        recipe = replace(RECIPE, model=str(own))
        counted = Rounds()
        made.append(fingerprint(trained(recipe.blank_model((1, 28, 28), 10), federation, recipe, progress=counted)))
        assert counted.trainings == 1, activation
    assert made[0] != made[1]


def broken(data: bytes) -> list[bytes]:
    """Nothing, half of it, one bit flipped, and something else."""
    return [b"", data[: len(data) // 2], data[:-5] + bytes([data[-5] ^ 1]) + data[-4:], b"no model"]


def test_a_damaged_file_is_trained_anew_to_the_same_bits_and_a_cache_that_cannot_be_written_is_said(
    federation, start, cache, tmp_path, monkeypatch
):
    made = trained(start, federation, RECIPE, progress=Rounds())
    (path,) = cache.iterdir()
    good = path.read_bytes()
    trained(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), federation, RECIPE, progress=Rounds())
    (foreign,) = (other.read_bytes() for other in cache.iterdir() if other != path)
    for content in [*broken(good), foreign]:
        path.write_bytes(content)
        counted = Rounds()
        assert fingerprint(trained(start, federation, RECIPE, progress=counted)) == fingerprint(made)
        assert counted.trainings == 1
        assert path.read_bytes() == good
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "other"))
    keep(made, start, federation, RECIPE)  # trained elsewhere
    counted = Rounds()
    assert fingerprint(trained(start, federation, RECIPE, progress=counted)) == fingerprint(made)
    assert counted.trainings == 0
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="Could not write"):
        trained(start, federation, RECIPE, progress=Rounds())
    assert (tmp_path / "file").read_text() == "mine"


# --- with the history of the training


def contents(history: History) -> dict[str, object]:
    """All that a history holds, as plain data that can be compared."""
    kept: dict[str, object] = {"changes": history.changes()}
    for number in history.rounds:
        kept[f"{number} shares"] = dict(history.shares(number))
        kept[f"{number} before"] = _bits(history.before(number))
        for client in history.shares(number):
            kept[f"{number} upload {client}"] = _bits(history.upload(number, client))
    return kept


def _bits(weights) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def reference(federation, small_model) -> tuple[str, dict[str, object]]:
    """Fingerprint and history of a training that no cache had a part in."""
    history = History()
    model = RECIPE.train(copy.deepcopy(small_model), federation, observers=[history]).model
    return fingerprint(model), contents(history)


class Shifted(RunningAverage):
    """Another average than FedAvg's: one bias is moved after each round."""

    def finish(self) -> None:
        super().finish()
        self.current["4.bias"] += 0.5


def test_the_second_time_model_and_history_come_from_the_cache(federation, start, cache, reference):
    for expected in (3, 0):
        counted = Rounds()
        model, history = recorded(start, federation, RECIPE, progress=counted)
        assert (counted.rounds, model.training) == (expected, False)
        assert (fingerprint(model), contents(history)) == reference
        assert not list(cache.glob("*.rounds"))  # no rest of the training
    history.remove()
    assert not list(cache.glob("*.history"))
    counted = Rounds()  # a model is taken from a recording, even without its history
    assert fingerprint(trained(start, federation, RECIPE, progress=counted)) == reference[0]
    assert counted.trainings == 0


def test_a_history_that_is_not_whole_is_made_again(federation, start, cache, reference):
    trained(start, federation, RECIPE, progress=Rounds())  # a model without a history is no recording
    recorded(start, federation, RECIPE, progress=Rounds())
    (folder,), upload = cache.glob("*.history"), "0001-client-2.safetensors"
    (model_file,) = (path.with_suffix(".safetensors") for path in cache.glob("*.history"))
    for lose in (
        lambda: (folder / "0001.json").unlink(),
        lambda: (folder / "0002.json").unlink(),
        lambda: (folder / "0001.json").write_text("{"),
        lambda: (folder / upload).unlink(),
        lambda: (folder / upload).write_bytes(b"half"),
        lambda: shutil.rmtree(folder),
        lambda: model_file.unlink(),
    ):
        lose()
        counted = Rounds()
        model, again = recorded(start, federation, RECIPE, progress=counted)
        assert counted.rounds == 3
        assert (fingerprint(model), contents(again)) == reference


@pytest.mark.parametrize("stop_at", [0, 1, 2, 3])
def test_an_interrupted_training_goes_on_to_the_same_model_and_history(federation, start, cache, reference, stop_at):
    for learn in (recorded, trained):
        with pytest.raises(KeyboardInterrupt):
            learn(start, federation, RECIPE, progress=Rounds(stop_at))
        counted = Rounds()
        made = learn(start, federation, RECIPE, progress=counted)
        model, *history = made if isinstance(made, tuple) else (made,)
        assert [fingerprint(model), *map(contents, history)] == [*reference][: 1 + len(history)]
        # The round at whose end it was stopped was not kept yet; those before it were.
        assert counted.rounds == 3 - max(0, stop_at - 1)
        assert not list(cache.glob("*.rounds"))
        shutil.rmtree(cache)


@pytest.mark.parametrize("learn", [recorded, trained])
def test_half_a_training_that_is_damaged_is_made_anew(federation, start, cache, reference, learn):
    # Found here: a damaged checkpoint was refused, and every cell of the federation failed until somebody removed it.
    for number in range(6 if learn is recorded else 4):
        with pytest.raises(KeyboardInterrupt):
            learn(start, federation, RECIPE, progress=Rounds(2))
        (path,) = cache.glob("*.history/0000.json" if number == 5 else "*.rounds")
        path.write_bytes(broken(path.read_bytes())[number]) if number < 4 else path.unlink()
        made = learn(start, federation, RECIPE, progress=Rounds())
        model, *history = made if isinstance(made, tuple) else (made,)
        assert [fingerprint(model), *map(contents, history)] == [*reference][: 1 + len(history)]
        shutil.rmtree(cache)


def test_another_average_has_a_name_and_is_cached_apart(federation, start, reference):
    usual, other, third = Rounds(), Rounds(), Rounds()
    options = {"averaging": Shifted, "named": "shifted"}
    model, history = recorded(start, federation, RECIPE, progress=other, **options)
    assert fingerprint(trained(start, federation, RECIPE, progress=usual)) == reference[0]
    _, plain = recorded(start, federation, RECIPE, progress=usual)
    recorded(start, federation, RECIPE, progress=third, averaging=Shifted, named="of another name")
    assert (usual.trainings, other.trainings, third.trainings) == (2, 1, 1)
    expected = RECIPE.train(start, federation, averaging=Shifted).model
    assert fingerprint(model) == fingerprint(expected) != reference[0]
    kept = contents(history)
    plain.remove()  # takes none of another average
    counted = Rounds()
    again, history = recorded(start, federation, RECIPE, progress=counted, **options)
    assert counted.trainings == 0
    assert (fingerprint(again), contents(history)) == (fingerprint(model), kept)


def _record_beside_another(federation: Federation, start: nn.Module, meet, answers) -> None:
    """In a process of its own: begin together with the other, and tell what was trained and what can be read."""
    counted = Rounds()

    def progress(what: str, done: int, total: int) -> None:
        counted(what, done, total)
        time.sleep(0.05)  # so that the other one comes in between

    meet.wait(60)
    model, history = recorded(start, federation, RECIPE, progress=progress)
    answers.put((counted.rounds, fingerprint(model), contents(history)))


def test_two_processes_at_once_train_once_and_end_with_one_sound_history(federation, start, cache, reference):
    apart = multiprocessing.get_context("fork")
    meet, answers = apart.Barrier(2), apart.Queue()
    arguments = (federation, start, meet, answers)
    both = [apart.Process(target=_record_beside_another, args=arguments, daemon=True) for _ in range(2)]
    for process in both:
        process.start()
    found = [answers.get(timeout=120) for _ in both]
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert sorted(rounds for rounds, *_ in found) == [0, 3]  # one trained, and the other waited for it
    assert all((model, kept) == reference for _, model, kept in found)
    counted = Rounds()
    model, history = recorded(start, federation, RECIPE, progress=counted)
    assert counted.trainings == 0
    assert (fingerprint(model), contents(history)) == reference
    assert len(list(cache.glob("*.history"))) == len(list(cache.glob("*.safetensors"))) == 1


def _use_until(told: str, start: nn.Module, federation: Federation) -> None:
    done = use_histories(start, federation, RECIPE)
    Path(told).touch()
    while Path(told).exists():
        time.sleep(0.01)
    done()


@pytest.mark.parametrize("killed", [False, True])
def test_histories_stay_until_their_last_user_is_done_or_killed(federation, start, cache, tmp_path, killed):
    done = use_histories(start, federation, RECIPE)
    recorded(start, federation, RECIPE, progress=Rounds())
    recorded(start, federation, RECIPE, progress=Rounds(), named="another way")
    busy = tmp_path / "busy"
    other = multiprocessing.get_context("fork").Process(target=_use_until, args=(str(busy), start, federation))
    other.start()
    while not busy.exists():
        time.sleep(0.01)
    done()
    assert len(list(cache.glob("*.history"))) == 2  # the other process may be reading them
    if killed:
        other.kill()
    busy.unlink()
    other.join(60)
    use_histories(start, federation, RECIPE)()
    assert not list(cache.glob("*.history"))
    assert len(list(cache.glob("*.safetensors"))) == 2  # the models stay

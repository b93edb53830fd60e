"""A federation is trained once: the same content gives the same bits from the cache, any other content is trained."""

import copy
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedup import Federation, Forget, fingerprint
from fedup.bench.history import History
from fedup.bench.training_cache import keep, recorded, trained, use_histories
from fedup.errors import StorageError
from fedup.federation import Client
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
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "federations"


@pytest.fixture(scope="module")
def federation() -> Federation:
    return RECIPE.federation(RECIPE.load())


@pytest.fixture
def start(small_model) -> nn.Module:
    """With BatchNorm, whose buffers must come back too."""
    return copy.deepcopy(small_model)


def files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*")) if cache.exists() else []


def test_the_second_time_it_comes_from_the_cache_with_the_same_bits(federation, start, cache):
    first, second = Rounds(), Rounds()
    made = trained(start, federation, RECIPE, progress=first)
    again = trained(start, federation, RECIPE, progress=second)
    assert (first.trainings, first.rounds) == (1, 3)
    assert (second.trainings, second.rounds) == (0, 0)
    assert fingerprint(made) == fingerprint(again) != fingerprint(start)
    state, other = made.state_dict(), again.state_dict()
    assert all(torch.equal(state[name], other[name]) and state[name].dtype == other[name].dtype for name in state)
    assert not again.training
    assert len(files(cache)) == 1  # no rest of the training


def test_the_first_weights_are_left_as_they_are(federation, start):
    before, mode = fingerprint(start), start.training
    for _ in range(2):  # trained, and from the cache
        made = trained(start, federation, RECIPE, progress=Rounds())
        assert fingerprint(start) == before
        assert start.training is mode
        assert made is not start


def test_what_is_changed_in_a_model_from_the_cache_does_not_reach_the_next(federation, start):
    expected = fingerprint(trained(start, federation, RECIPE, progress=Rounds()))
    spoilt = trained(start, federation, RECIPE, progress=Rounds())
    with torch.no_grad():
        next(spoilt.parameters()).zero_()
    assert fingerprint(trained(start, federation, RECIPE, progress=Rounds())) == expected


def _moved(federation: Federation) -> Federation:
    """One training row changes hands."""
    first, second, *others = federation.clients
    clients = (
        Client(first.id, first.train[1:], first.validation, first.heldout),
        Client(second.id, torch.cat([second.train, first.train[:1]]).sort().values, second.validation, second.heldout),
    )
    return replace(federation, clients=(*clients, *others))


def _changed_x(federation: Federation) -> Federation:
    x = federation.x.clone()
    x.view(len(x), -1)[federation.clients[-1].train[-1], -1] += 1e-3  # one pixel of one row
    return replace(federation, x=x)


def _changed_y(federation: Federation) -> Federation:
    y = federation.y.clone()
    row = federation.clients[1].train[3]
    y[row] = (y[row] + 1) % 10
    return federation.relabeled(y)


def _swapped_x(federation: Federation) -> Federation:
    """The same images in other rows."""
    x, rows = federation.x.clone(), federation.clients[0].train[:2]
    x[rows] = x[rows.flip(0)]
    return replace(federation, x=x)


FEDERATIONS = {
    "a row at another client": _moved,
    "a row left out": lambda f: f.without(Forget.samples({0: [int(f.clients[0].train[0])]})),
    "a class left out": lambda f: f.without(Forget.classes([3])),
    "a client left out": lambda f: f.without(Forget.clients([1])),
    "one pixel": _changed_x,
    "images in other rows": _swapped_x,
    "one label": _changed_y,
    "a client with another number": lambda f: replace(f, clients=(*f.clients[:2], replace(f.clients[2], id=7))),
}


@pytest.mark.parametrize("change", FEDERATIONS.values(), ids=FEDERATIONS.keys())
def test_other_rows_or_labels_are_trained_anew(federation, start, change):
    trained(start, federation, RECIPE, progress=Rounds())
    counted = Rounds()
    trained(start, change(federation), RECIPE, progress=counted)
    assert counted.trainings == 1


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": 2},
        {"epochs": 2},
        {"batch_size": 31},
        {"lr": 0.049},
        {"momentum": 0.8},
        {"optimizer": "adam"},
        {"precision": "bfloat16"},
        {"clients_per_round": 2},
        {"seed": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_setting_is_trained_anew(federation, start, change):
    trained(start, federation, RECIPE, progress=Rounds())
    counted = Rounds()
    trained(start, federation, replace(RECIPE, **change), progress=counted)
    assert counted.trainings == 1


def test_other_first_weights_are_trained_anew_even_in_a_buffer(federation, start):
    trained(start, federation, RECIPE, progress=Rounds())
    for change in ("1.weight", "2.running_mean"):
        other = copy.deepcopy(start)
        with torch.no_grad():
            other.state_dict()[change].flatten()[0] += 1e-3
        counted = Rounds()
        trained(other, federation, RECIPE, progress=counted)
        assert counted.trainings == 1, change


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


def test_what_nobody_trains_on_does_not_matter(federation, start):
    x = federation.x.clone()
    x[federation.rows("heldout")] = 0
    made = trained(start, federation, RECIPE, progress=Rounds())
    counted = Rounds()
    again = trained(start, replace(federation, x=x), RECIPE, progress=counted)
    assert counted.trainings == 0
    assert fingerprint(again) == fingerprint(made)


def test_names_of_data_and_model_do_not_matter(federation, start):
    trained(start, federation, RECIPE, progress=Rounds())
    counted = Rounds()
    trained(start, federation, replace(RECIPE, data="another name for it", cut="4"), progress=counted)
    assert counted.trainings == 0


DAMAGE = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[: len(data) // 2],
    "one bit": lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    "text": lambda data: b"no model",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_trained_anew_to_the_same_bits(federation, start, cache, damage):
    expected = fingerprint(trained(start, federation, RECIPE, progress=Rounds()))
    (path,) = cache.iterdir()
    good = path.read_bytes()
    path.write_bytes(damage(good))
    counted = Rounds()
    assert fingerprint(trained(start, federation, RECIPE, progress=counted)) == expected
    assert counted.trainings == 1
    assert path.read_bytes() == good


def test_a_file_of_another_model_in_its_place_is_not_taken(federation, start, cache):
    expected = fingerprint(trained(start, federation, RECIPE, progress=Rounds()))
    (path,) = cache.iterdir()
    other = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    trained(other, federation, RECIPE, progress=Rounds())
    (foreign,) = (one for one in cache.iterdir() if one != path)
    foreign.replace(path)
    assert fingerprint(trained(start, federation, RECIPE, progress=Rounds())) == expected


@pytest.mark.parametrize("stop_at", [0, 1, 2, 3])
def test_an_interrupted_training_goes_on_to_the_same_bits(federation, start, cache, tmp_path, monkeypatch, stop_at):
    expected = fingerprint(trained(start, federation, RECIPE, progress=Rounds()))
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "other"))
    with pytest.raises(KeyboardInterrupt):
        trained(start, federation, RECIPE, progress=Rounds(stop_at))
    counted = Rounds()
    assert fingerprint(trained(start, federation, RECIPE, progress=counted)) == expected
    # The round at whose end it was stopped was not kept yet; those before it were.
    assert counted.rounds == 3 - max(0, stop_at - 1)
    assert len(files(tmp_path / "other" / "federations")) == 1


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_rounds_of_an_interrupted_training_are_trained_anew(federation, start, cache, damage):
    # Found here: a damaged checkpoint was refused, and every cell of the federation failed until somebody removed it.
    with pytest.raises(KeyboardInterrupt):
        trained(start, federation, RECIPE, progress=Rounds(2))
    (path,) = cache.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    counted = Rounds()
    trained(start, federation, RECIPE, progress=counted)
    assert counted.rounds == 3
    assert len(files(cache)) == 1


def test_a_model_that_was_kept_is_what_training_gives(federation, start, tmp_path, monkeypatch):
    made = trained(start, federation, RECIPE, progress=Rounds())
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "other"))
    keep(made, start, federation, RECIPE)
    counted = Rounds()
    assert fingerprint(trained(start, federation, RECIPE, progress=counted)) == fingerprint(made)
    assert counted.trainings == 0


def test_a_cache_that_cannot_be_written_is_said(federation, start, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="Could not write"):
        trained(start, federation, RECIPE, progress=Rounds())
    assert (tmp_path / "file").read_text() == "mine"


def test_rows_beyond_a_block_decide_too(start):
    # The digest reads the data in blocks of 4,096 rows.
    digits = load_dataset("digits")
    x, y = digits.x.repeat(4, 1, 1, 1), digits.y.repeat(4)
    federation = Federation.split(x, y, [torch.arange(len(y))], heldout=0, validation=0, num_classes=10)
    recipe = replace(RECIPE, clients=1, rounds=1, batch_size=512)
    trained(start, federation, recipe, progress=Rounds())
    changed = x.clone()
    changed[-1, 0, 0, 0] += 1
    counted = Rounds()
    trained(start, replace(federation, x=changed), recipe, progress=counted)
    assert counted.trainings == 1


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


def test_a_recorded_model_is_the_trained_one_to_the_bit_and_its_history_that_of_the_training(
    federation, start, tmp_path, monkeypatch, reference
):
    plain = trained(start, federation, RECIPE, progress=Rounds())
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "other"))
    counted = Rounds()
    model, history = recorded(start, federation, RECIPE, progress=counted)
    assert (counted.trainings, counted.rounds) == (1, 3)
    assert fingerprint(model) == fingerprint(plain) == reference[0]
    assert contents(history) == reference[1]
    assert not model.training


def test_the_second_time_model_and_history_come_from_the_cache(federation, start, cache, reference):
    first, _ = recorded(start, federation, RECIPE, progress=Rounds())
    before, counted = files(cache), Rounds()
    again, history = recorded(start, federation, RECIPE, progress=counted)
    assert (counted.trainings, counted.rounds) == (0, 0)
    assert fingerprint(again) == fingerprint(first)
    assert contents(history) == reference[1]
    assert files(cache) == before
    assert not list(cache.glob("*.rounds"))  # no rest of the training


def test_recording_leaves_the_first_weights_as_they_are(federation, start):
    before = fingerprint(start)
    for _ in range(2):  # trained, and from the cache
        made, _ = recorded(start, federation, RECIPE, progress=Rounds())
        assert fingerprint(start) == before
        assert made is not start


def test_a_history_that_was_removed_is_made_again_with_its_model(federation, start, cache, reference):
    _, history = recorded(start, federation, RECIPE, progress=Rounds())
    history.remove()
    assert not list(cache.glob("*.history"))
    counted = Rounds()
    model, again = recorded(start, federation, RECIPE, progress=counted)
    assert (counted.trainings, counted.rounds) == (1, 3)
    assert (fingerprint(model), contents(again)) == reference


def test_a_model_that_was_removed_is_made_again_with_its_history(federation, start, cache, reference):
    recorded(start, federation, RECIPE, progress=Rounds())
    (path,) = cache.glob("*.safetensors")
    path.unlink()
    counted = Rounds()
    model, again = recorded(start, federation, RECIPE, progress=counted)
    assert (counted.trainings, counted.rounds) == (1, 3)
    assert (fingerprint(model), contents(again)) == reference


LOST = {
    "a round's list": lambda folder: (folder / "0001.json").unlink(),
    "the last round's list": lambda folder: (folder / "0002.json").unlink(),
    "a damaged list": lambda folder: (folder / "0001.json").write_text("{"),
    "an upload": lambda folder: (folder / "0001-client-2.safetensors").unlink(),
    "half an upload": lambda folder: (folder / "0001-client-2.safetensors").write_bytes(b"half"),
}


@pytest.mark.parametrize("lose", [pytest.param(lose, id=name) for name, lose in LOST.items()])
def test_a_history_that_is_not_whole_is_made_again(federation, start, cache, reference, lose):
    recorded(start, federation, RECIPE, progress=Rounds())
    (folder,) = cache.glob("*.history")
    lose(folder)
    counted = Rounds()
    model, again = recorded(start, federation, RECIPE, progress=counted)
    assert counted.rounds == 3
    assert (fingerprint(model), contents(again)) == reference


@pytest.mark.parametrize("stop_at", [0, 1, 2, 3])
def test_an_interrupted_recording_goes_on_to_the_same_model_and_history(federation, start, cache, reference, stop_at):
    with pytest.raises(KeyboardInterrupt):
        recorded(start, federation, RECIPE, progress=Rounds(stop_at))
    counted = Rounds()
    model, history = recorded(start, federation, RECIPE, progress=counted)
    assert (fingerprint(model), contents(history)) == reference
    assert counted.rounds == 3 - max(0, stop_at - 1)
    assert not list(cache.glob("*.rounds"))


@pytest.mark.parametrize("lost", ["*.rounds", "*.history/0000.json"])
def test_half_a_recording_without_its_other_half_is_made_anew(federation, start, cache, reference, lost):
    with pytest.raises(KeyboardInterrupt):
        recorded(start, federation, RECIPE, progress=Rounds(2))
    (path,) = cache.glob(lost)
    path.unlink()
    model, history = recorded(start, federation, RECIPE, progress=Rounds())
    assert (fingerprint(model), contents(history)) == reference
    assert not list(cache.glob("*.rounds"))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_rounds_of_an_interrupted_recording_are_trained_anew(federation, start, cache, reference, damage):
    with pytest.raises(KeyboardInterrupt):
        recorded(start, federation, RECIPE, progress=Rounds(2))
    (path,) = cache.glob("*.rounds")
    path.write_bytes(damage(path.read_bytes()))
    model, history = recorded(start, federation, RECIPE, progress=Rounds())
    assert (fingerprint(model), contents(history)) == reference


def test_another_average_has_a_name_and_is_cached_apart(federation, start, reference):
    usual, other, third = Rounds(), Rounds(), Rounds()
    recorded(start, federation, RECIPE, progress=usual)
    options = {"averaging": Shifted, "named": "shifted"}
    model, history = recorded(start, federation, RECIPE, progress=other, **options)
    recorded(start, federation, RECIPE, progress=third, averaging=Shifted, named="of another name")
    assert (usual.trainings, other.trainings, third.trainings) == (1, 1, 1)
    expected = RECIPE.train(start, federation, averaging=Shifted).model
    assert fingerprint(model) == fingerprint(expected) != reference[0]
    assert contents(history) != reference[1]
    for averaging in ({}, options):  # each still gets its own
        counted = Rounds()
        again, kept = recorded(start, federation, RECIPE, progress=counted, **averaging)
        assert counted.trainings == 0
        assert fingerprint(again) == (fingerprint(model) if averaging else reference[0])
        assert contents(kept) == (contents(history) if averaging else reference[1])


def test_a_history_removed_takes_none_of_another_average(federation, start):
    _, usual = recorded(start, federation, RECIPE, progress=Rounds())
    _, other = recorded(start, federation, RECIPE, progress=Rounds(), averaging=Shifted, named="shifted")
    expected = contents(other)
    usual.remove()
    assert contents(other) == expected


def test_a_model_is_taken_from_a_recording_where_there_is_one_even_without_its_history(federation, start, reference):
    _, history = recorded(start, federation, RECIPE, progress=Rounds())
    for _ in range(2):
        counted = Rounds()
        assert fingerprint(trained(start, federation, RECIPE, progress=counted)) == reference[0]
        assert counted.trainings == 0
        history.remove()


def test_a_model_of_another_average_is_not_taken_for_the_trained_one(federation, start, reference):
    recorded(start, federation, RECIPE, progress=Rounds(), averaging=Shifted, named="shifted")
    counted = Rounds()
    assert fingerprint(trained(start, federation, RECIPE, progress=counted)) == reference[0]
    assert counted.trainings == 1


def test_a_model_without_a_history_is_no_recording(federation, start, reference):
    trained(start, federation, RECIPE, progress=Rounds())
    counted = Rounds()
    model, history = recorded(start, federation, RECIPE, progress=counted)
    assert counted.trainings == 1
    assert (fingerprint(model), contents(history)) == reference


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


def test_histories_stay_until_their_last_user_is_done(federation, start, cache, tmp_path):
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
    busy.unlink()
    other.join(60)
    assert other.exitcode == 0
    assert not list(cache.glob("*.history"))
    assert len(list(cache.glob("*.safetensors"))) == 2  # the models stay


def test_a_user_that_was_killed_is_none(federation, start, cache, tmp_path):
    recorded(start, federation, RECIPE, progress=Rounds())
    busy = tmp_path / "busy"
    other = multiprocessing.get_context("fork").Process(target=_use_until, args=(str(busy), start, federation))
    other.start()
    while not busy.exists():
        time.sleep(0.01)
    other.kill()
    other.join(60)
    use_histories(start, federation, RECIPE)()
    assert not list(cache.glob("*.history"))

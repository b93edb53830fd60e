"""A recipe is chosen from candidates with a seed that no table uses; experiments that name it take it, or wait."""

import pytest

from fedup.bench import recipes
from fedup.bench.experiment import load_experiment
from fedup.bench.recipes import load_candidates, tune_recipe
from fedup.bench.reproduction.queue import _Commands
from fedup.bench.runner import BudgetSpentError
from fedup.bench.tuned import Tuned, load_recipe, save_tuned
from fedup.errors import SettingError

pytestmark = pytest.mark.usefixtures("cache")
CANDIDATES = """
into = "chosen.toml"
[federation]
data = "digits"
rows = 300
clients = 3
batch_size = 32
rounds = 1
[candidates.short]
[candidates.longer]
rounds = 6
schedule = "cosine"
"""
EXPERIMENT = """
tuned = "tuned"
[tuned_like]
digits-resnet18 = "digits-lenet5"
[[federations]]
data = "digits"
recipe = "chosen.toml"
[[federations]]
data = "digits"
model = "resnet18"
[scenarios.class]
[scenarios.client]
[methods.finetune]
[methods.federaser]
"""


def trials(place, **how):
    candidates = load_candidates(place / "candidates.toml")
    return list(tune_recipe(candidates, "candidates.toml", device="cpu", progress=lambda *step: None, **how))


def test_the_best_candidate_is_chosen_once_all_are_tried_and_reaches_the_experiments_that_name_it(
    tmp_path, monkeypatch
):
    (tmp_path / "candidates.toml").write_text(CANDIDATES)
    (tmp_path / "mine.toml").write_text(EXPERIMENT)
    waiting = load_experiment(tmp_path / "mine.toml")
    assert list(waiting.waiting) == ["digits-lenet5"]
    with pytest.raises(BudgetSpentError):
        trials(tmp_path, budget_s=0.0)
    real = recipes._try

    def stop(recipe, *how):
        if recipe.rounds == 6:
            raise KeyboardInterrupt
        return real(recipe, *how)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recipes, "_try", stop)
        trials(tmp_path)
    assert load_recipe(tmp_path / "chosen.toml") is None and load_experiment(tmp_path / "mine.toml").waiting
    (second,) = trials(tmp_path)  # the first is not tried again
    assert (second["name"], second["seed"]) == ("longer", 100) and trials(tmp_path) == []
    chosen = load_experiment(tmp_path / "mine.toml")
    assert not chosen.waiting and (chosen.recipes[0].rounds, chosen.recipes[0].schedule) == (6, "cosine")
    assert chosen.recipes[0].rows == 300


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("into = ", "seed = 3\ninto = ", "seed of 100"),
        ("rounds = 6", "rouds = 6", "rouds"),
        ("candidates.", "other.", "other"),
    ],
)
def test_candidates_that_are_none_are_refused_with_the_reason(tmp_path, old, new, told):
    (tmp_path / "candidates.toml").write_text(CANDIDATES.replace(old, new))
    with pytest.raises(SettingError, match=told):
        load_candidates(tmp_path / "candidates.toml")


def test_a_federation_takes_anothers_tuning_until_it_has_its_own_and_untuned_cells_wait(tmp_path):
    (tmp_path / "mine.toml").write_text(EXPERIMENT.replace('recipe = "chosen.toml"', ""))

    def choose(federation, rounds):
        place = Tuned(federation, "class", {"rounds": rounds}, {}, [], {})
        save_tuned(tmp_path / "tuned" / "finetune.toml", "finetune", "mine", [place])

    def rounds_of(federation):
        cells = load_experiment(tmp_path / "mine.toml").cells([0], [federation, "class", "finetune"])
        return [cell.method.settings.rounds for cell in cells]

    choose("digits-lenet5", 7)
    assert rounds_of("digits-lenet5") == rounds_of("digits-resnet18") == [7]
    choose("digits-resnet18", 5)
    assert (rounds_of("digits-lenet5"), rounds_of("digits-resnet18")) == ([7], [5])
    (tmp_path / "mine.toml").write_text((tmp_path / "mine.toml").read_text().replace("resnet18", "resnet34"))
    experiment = load_experiment(tmp_path / "mine.toml")
    commands = _Commands([], tmp_path)
    commands._tuning[experiment.tuned_folder.resolve()] = "tune"
    waits = {str(cell): commands.before(experiment, cell) for cell in experiment.cells([0])}
    assert {name for name, command in waits.items() if command} == set()  # no choice anywhere for clients or FedEraser
    without = load_experiment(_written(tmp_path, '[tuned_like]\ndigits-resnet34 = "digits-lenet5"\n', ""))
    waits = [str(cell) for cell in without.cells([0]) if commands.before(without, cell)]
    assert waits == ["digits-resnet34, class, finetune, seed 0"]


def _written(folder, old, new):
    text = (folder / "mine.toml").read_text()
    assert old in text
    (folder / "mine.toml").write_text(text.replace(old, new))
    return folder / "mine.toml"

"""A recipe is enough to make federation and model again, to the bit."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup import Federation, LocalTraining, Observer, dirichlet, fingerprint, iid, pathological
from fedup.errors import ArtifactError, DataError, SettingError
from fedup.tasks.datasets import input_of, load_dataset
from fedup.tasks.recipe import Recipe
from fedup.training.fedavg import Rounds, Runtime, federate

RECIPE = Recipe.suited_to("digits", rounds=1, clients=4, rows=300, seed=3)
recipes = st.builds(
    Recipe,
    data=st.just("digits"),
    model=st.sampled_from(["lenet5", "resnet18"]),
    rounds=st.integers(0, 50),
    clients=st.integers(2, 100),
    partition=st.sampled_from(["iid", "dirichlet:0.1", "pathological:3"]),
    rows=st.none() | st.integers(1, 1437),
    lr=st.floats(1e-6, 1),
    optimizer=st.sampled_from(["sgd", "adam"]),
    precision=st.sampled_from(["float32", "bfloat16", "auto"]),
    clients_per_round=st.none() | st.integers(1, 5),
    weight_decay=st.sampled_from([0.0, 5e-4]),
    cut=st.none() | st.just("fc2"),
    seed=st.integers(0, 2**31),
)


@pytest.fixture(autouse=True)
def no_wish(monkeypatch):
    """Of whoever runs the tests."""
    monkeypatch.delenv("FEDUP_ENGINE", raising=False)


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits")


def shares(federation):
    return [[part.tolist() for part in (c.train, c.validation, c.heldout)] for c in federation.clients]


def test_the_same_recipe_gives_the_same_federation_and_the_same_trained_bits():
    made = []
    for _ in range(2):
        torch.manual_seed(len(made))  # what others drew before does not matter
        dataset = RECIPE.load()
        federation = RECIPE.federation(dataset)
        blank = RECIPE.blank_model(dataset.x.shape[1:], dataset.num_classes)
        start = fingerprint(blank)
        trained = federate(blank, federation, rounds=1, local=RECIPE.local, seed=RECIPE.seed).model
        made.append((federation.digest(), shares(federation), start, fingerprint(trained)))
    assert made[0] == made[1]
    assert made[0][2] != made[0][3]


def test_another_seed_gives_other_rows_another_split_and_other_weights(digits):
    other = replace(RECIPE, seed=4)
    assert not torch.equal(RECIPE.load().x, other.load().x)
    assert shares(RECIPE.federation(digits)) != shares(other.federation(digits))
    blanks = [recipe.blank_model((1, 28, 28), 10) for recipe in (RECIPE, other)]
    assert fingerprint(blanks[0]) != fingerprint(blanks[1])


def test_a_blank_model_leaves_the_global_random_numbers_alone():
    before = torch.random.get_rng_state()
    RECIPE.blank_model([1, 28, 28], 10)
    assert torch.equal(torch.random.get_rng_state(), before)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(recipes)
def test_a_recipe_comes_back_from_what_the_journal_says(digits, recipe):
    about = json.loads(json.dumps(recipe.about(digits)))
    assert Recipe.from_about(about) == recipe
    assert about["class_names"] == list("0123456789")
    assert about["input_shape"] == [1, 28, 28]
    assert about["input"] == input_of("digits").identity()


@pytest.mark.parametrize(
    "name", [name for name in asdict(RECIPE) if name not in ("weights", "precision", "weight_decay")]
)
def test_a_folder_that_does_not_say_all_of_it_is_refused_with_what_is_missing(digits, name):
    about = RECIPE.about(digits)
    del about[name]
    with pytest.raises(ArtifactError, match=rf"'{name}' is missing"):
        Recipe.from_about(about)


def test_a_folder_of_before_there_was_a_choice_of_precision_is_in_single_precision(digits):
    about = replace(RECIPE, precision="bfloat16").about(digits)
    assert about.pop("precision") == "bfloat16"
    assert Recipe.from_about(about) == replace(RECIPE, precision="float32")


def test_defaults_are_the_data_sets_own_and_what_is_chosen_comes_first():
    suited = Recipe.suited_to("digits")
    assert (suited.data, suited.model, suited.rounds, suited.batch_size) == ("digits", "lenet5", 30, 16)
    chosen = Recipe.suited_to("digits", rounds=0, batch_size=7, lr=None, seed=9)
    assert (chosen.rounds, chosen.batch_size, chosen.lr, chosen.seed) == (0, 7, suited.lr, 9)


@pytest.mark.parametrize(
    ("partition", "parts"),
    [
        ("iid", lambda y: iid(y, 4, seed=3)),
        ("dirichlet", lambda y: dirichlet(y, 4, concentration=0.5, seed=3)),
        ("dirichlet:", lambda y: dirichlet(y, 4, concentration=0.5, seed=3)),
        ("dirichlet:0.1", lambda y: dirichlet(y, 4, concentration=0.1, seed=3)),
        ("dirichlet:1e2", lambda y: dirichlet(y, 4, concentration=100.0, seed=3)),
        ("pathological", lambda y: pathological(y, 4, classes_per_client=2, seed=3)),
        ("pathological:3", lambda y: pathological(y, 4, classes_per_client=3, seed=3)),
    ],
)
def test_a_partition_is_the_one_it_names(digits, partition, parts):
    made = replace(RECIPE, partition=partition).federation(digits)
    expected = Federation.split(digits.x, digits.y, parts(digits.y), seed=3, num_classes=10)
    assert shares(made) == shares(expected)
    assert made.num_classes == 10


@pytest.mark.parametrize(
    "partition",
    [
        *("", "random", "Dirichlet:0.5", " iid", ":0.5", "dirichlet=0.5", "dirichlet:much", "dirichlet:0.5:1"),
        *("dirichlet:0", "dirichlet:-1", "dirichlet:nan", "dirichlet:inf"),
        *("pathological:0", "pathological:-1", "pathological:2.5", "pathological:many"),
    ],
)
def test_a_partition_that_is_none_is_refused(digits, partition):
    with pytest.raises(SettingError, match=r"partition is|concentration|classes_per_client"):
        replace(RECIPE, partition=partition).federation(digits)


@pytest.mark.parametrize("clients", [0, -1, 1000])
def test_a_number_of_clients_that_the_rows_do_not_give_is_refused(digits, clients):
    with pytest.raises(SettingError, match="clients"):
        replace(RECIPE, clients=clients).federation(digits)


@pytest.mark.parametrize("rows", [1, 10, 300, 1436])
def test_a_subset_holds_so_many_rows_of_the_data_set_each_once_with_its_label(digits, rows):
    subset = replace(RECIPE, rows=rows).load()
    assert (len(subset.x), len(subset.y)) == (rows, rows)
    places = {row.numpy().tobytes(): (place, int(digits.y[place])) for place, row in enumerate(digits.x)}
    found = [places[row.numpy().tobytes()] for row in subset.x]
    assert [label for _, label in found] == subset.y.tolist()
    assert [place for place, _ in found] == sorted({place for place, _ in found})
    assert torch.equal(subset.test_x, digits.test_x)
    assert torch.equal(subset.test_y, digits.test_y)
    assert subset.class_names == digits.class_names


def test_a_smaller_subset_is_part_of_a_larger_one():
    small, large = (replace(RECIPE, rows=rows).load() for rows in (50, 200))
    assert {row.numpy().tobytes() for row in small.x} < {row.numpy().tobytes() for row in large.x}


def test_all_rows_are_the_data_set_as_it_is(digits):
    for rows in (None, 1437):
        assert torch.equal(replace(RECIPE, rows=rows).load().x, digits.x)


@pytest.mark.parametrize("rows", [0, -5, 1438])
def test_a_number_of_rows_that_is_not_there_is_refused(rows):
    with pytest.raises(DataError, match=rf"rows must lie in 1 … 1437.*found {rows}"):
        replace(RECIPE, rows=rows).load()


def test_an_unknown_optimizer_data_set_or_model_is_refused():
    with pytest.raises(SettingError, match="optimizer must be 'sgd' or 'adam'; found 'sdg'"):
        _ = replace(RECIPE, optimizer="sdg").local
    with pytest.raises(SettingError, match="digits"):
        replace(RECIPE, data="digit").load()
    with pytest.raises(SettingError, match="lenet5"):
        replace(RECIPE, model="lenet").blank_model((1, 28, 28), 10)


def test_clients_train_as_the_recipe_says():
    local = Recipe("digits", "lenet5", 1, epochs=2, batch_size=9, lr=0.3, momentum=0.1, optimizer="adam").local
    assert (local.epochs, local.batch_size, local.lr, local.momentum, local.optimizer) == (2, 9, 0.3, 0.1, "adam")


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "auto"])
def test_precision_reaches_the_clients(precision):
    assert replace(RECIPE, precision=precision).local.precision == precision
    assert Recipe.suited_to("digits", precision=precision).precision == precision


def test_precision_is_single_unless_the_model_or_the_user_says_otherwise():
    assert Recipe("digits", "vit", 1).precision == "float32"
    assert Recipe.suited_to("digits").precision == "float32"
    assert Recipe.suited_to("digits", model="vit").precision == "auto"
    assert Recipe.suited_to("digits", model="vit", precision="float32").precision == "float32"


@pytest.mark.parametrize("precision", ["half", "float16", "FLOAT32", "", None, 16, True])
def test_an_unknown_precision_is_refused_with_those_there_are(precision):
    with pytest.raises(SettingError, match=rf"precision must be 'float32', 'bfloat16' or 'auto'; found {precision!r}"):
        Recipe("digits", "lenet5", 1, precision=precision)


SETTINGS = {
    "as they are": {},
    "others": {"epochs": 2, "batch_size": 9, "lr": 0.01, "momentum": 0.5, "optimizer": "adam", "seed": 8},
    "some clients": {"clients_per_round": 2, "rounds": 3},
    "bfloat16": {"precision": "bfloat16"},
}


@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS.keys())
def test_training_by_a_recipe_is_fedavg_with_its_settings(small_model, digits_federation, chosen):
    recipe = replace(RECIPE, clients=5, **chosen)
    found = recipe.train(small_model, digits_federation)
    local = LocalTraining(
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        lr=recipe.lr,
        momentum=recipe.momentum,
        optimizer=recipe.optimizer,
        precision=recipe.precision,
    )
    expected = federate(
        small_model,
        digits_federation,
        rounds=Rounds(recipe.rounds, clients_per_round=recipe.clients_per_round),
        local=local,
        seed=recipe.seed,
    )
    assert fingerprint(found.model) == fingerprint(expected.model) != fingerprint(small_model)
    assert (found.rounds, found.engine) == (recipe.rounds, "plain")


def test_rounds_engine_observers_and_checkpoint_are_passed_on(small_model, digits_federation, tmp_path):
    class Watch(Observer):
        seen = 0

        def on_round(self, round_index, model):
            self.seen += 1

    watch, recipe = Watch(), replace(RECIPE, clients=5)
    found = recipe.train(
        small_model, digits_federation, rounds=2, observers=[watch], runtime=Runtime(checkpoint=tmp_path / "rounds")
    )
    assert (found.rounds, watch.seen) == (2, 2)
    assert (tmp_path / "rounds").exists()
    with pytest.raises(SettingError, match="CUDA"):
        recipe.train(small_model, digits_federation, runtime=Runtime(engine="captured"))
    assert fingerprint(recipe.train(small_model, digits_federation, rounds=0).model) == fingerprint(small_model)


def test_settings_that_came_later_are_said_only_where_they_are_chosen():
    assert not {"precision", "weight_decay"} & set(RECIPE.settings())
    assert replace(RECIPE, weight_decay=5e-4).settings()["weight_decay"] == 5e-4


def test_what_is_chosen_comes_before_a_preset_and_an_unknown_one_is_refused():
    chosen = Recipe.suited_to("digits", preset="authors", lr=0.01, rounds=2)
    assert (chosen.lr, chosen.rounds, chosen.epochs) == (0.01, 2, 5)
    with pytest.raises(SettingError, match="default, authors"):
        Recipe.suited_to("digits", preset="author")

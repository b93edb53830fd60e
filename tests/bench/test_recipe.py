"""A recipe is enough to make federation and model again, to the bit."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup import Federation, LocalTraining, dirichlet, fingerprint, iid, pathological
from fedup.errors import ArtifactError, DataError, SettingError
from fedup.tasks.datasets import input_of, load_dataset
from fedup.tasks.recipe import Recipe
from fedup.training.fedavg import Rounds, federate

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
    schedule=st.sampled_from(["constant", "cosine"]),
    augment=st.sampled_from(["none", "flip_crop"]),
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


def test_the_same_recipe_gives_the_same_federation_and_trained_bits_and_another_seed_others():
    made = []
    for seed in (3, 3, 4):
        before = torch.manual_seed(len(made)).get_state()  # what others drew before does not matter
        recipe = replace(RECIPE, seed=seed)
        dataset = recipe.load()
        federation = recipe.federation(dataset)
        blank = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes)
        assert torch.equal(torch.random.get_rng_state(), before)
        start = fingerprint(blank)
        trained = federate(blank, federation, rounds=1, local=recipe.local, seed=recipe.seed).model
        made.append((federation.digest(), start, fingerprint(trained), str(shares(federation))))
    assert made[0] == made[1]
    assert made[0][1] != made[0][2]
    assert not set(made[0]) & set(made[2])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(recipes, st.data())
def test_a_recipe_comes_back_from_what_the_journal_says_or_it_is_said_what_is_missing(digits, recipe, data):
    about = json.loads(json.dumps(recipe.about(digits)))
    assert Recipe.from_about(about) == recipe
    assert about["class_names"] == list("0123456789")
    assert about["input_shape"] == [1, 28, 28]
    assert about["input"] == input_of("digits").identity()
    late = {"weights", "precision", "weight_decay", "file", "schedule", "warmup_rounds", "augment"}
    name = data.draw(st.sampled_from(sorted(set(asdict(recipe)) - late)))
    with pytest.raises(ArtifactError, match=rf"'{name}' is missing"):
        Recipe.from_about({key: value for key, value in about.items() if key != name})
    older = {key: value for key, value in about.items() if key != "precision"}  # before there was a choice
    assert Recipe.from_about(older) == replace(recipe, precision="float32")
    assert ("weight_decay" in recipe.settings()) == (recipe.weight_decay > 0)
    assert ("precision" in recipe.settings()) == (recipe.precision != "float32")


def test_defaults_are_the_data_sets_own_and_what_is_chosen_comes_first():
    suited = Recipe.suited_to("digits")
    assert (suited.data, suited.model, suited.rounds, suited.batch_size) == ("digits", "lenet5", 30, 16)
    chosen = Recipe.suited_to("digits", rounds=0, batch_size=7, lr=None, seed=9)
    assert (chosen.rounds, chosen.batch_size, chosen.lr, chosen.seed) == (0, 7, suited.lr, 9)
    chosen = Recipe.suited_to("digits", preset="authors", lr=0.01, rounds=2)
    assert (chosen.lr, chosen.rounds, chosen.epochs) == (0.01, 2, 5)
    assert (suited.precision, Recipe.suited_to("digits", model="vit").precision) == ("float32", "auto")
    assert Recipe.suited_to("digits", model="vit", precision="float32").precision == "float32"
    with pytest.raises(SettingError, match="default, authors"):
        Recipe.suited_to("digits", preset="author")


@pytest.mark.parametrize(
    ("partition", "parts"),
    [
        ("iid", lambda y: iid(y, 4, seed=3)),
        ("dirichlet", lambda y: dirichlet(y, 4, concentration=0.5, seed=3)),
        ("dirichlet:0.1", lambda y: dirichlet(y, 4, concentration=0.1, seed=3)),
        ("pathological", lambda y: pathological(y, 4, classes_per_client=2, seed=3)),
        ("pathological:3", lambda y: pathological(y, 4, classes_per_client=3, seed=3)),
    ],
)
def test_a_partition_is_the_one_it_names(digits, partition, parts):
    made = replace(RECIPE, partition=partition).federation(digits)
    expected = Federation.split(digits.x, digits.y, parts(digits.y), seed=3, num_classes=10)
    assert shares(made) == shares(expected)
    assert made.num_classes == 10


@settings(max_examples=25, deadline=None)
@given(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from(["Dirichlet:0.5", " iid", ":0.5", "dirichlet=0.5", "dirichlet:0.5:1", "pathological:2.5"]),
        st.floats(max_value=0).map("dirichlet:{}".format),
        st.integers(max_value=0).map("pathological:{}".format),
        st.sampled_from(["dirichlet:nan", "dirichlet:inf", "dirichlet:much", "pathological:many"]),
    )
)
def test_a_partition_that_is_none_is_refused(digits, partition):
    with pytest.raises(SettingError, match=r"partition is|concentration|classes_per_client"):
        replace(RECIPE, partition=partition).federation(digits)


@pytest.mark.parametrize("rows", [1, 300, 1437, None])
def test_a_subset_holds_so_many_rows_of_the_data_set_each_once_with_its_label(digits, rows):
    subset = replace(RECIPE, rows=rows).load()
    assert len(subset.x) == len(subset.y) == (rows or 1437)
    places = {row.numpy().tobytes(): (place, int(digits.y[place])) for place, row in enumerate(digits.x)}
    found = [places[row.numpy().tobytes()] for row in subset.x]
    assert [label for _, label in found] == subset.y.tolist()
    assert [place for place, _ in found] == sorted({place for place, _ in found})
    assert torch.equal(subset.test_x, digits.test_x) and torch.equal(subset.test_y, digits.test_y)
    smaller = replace(RECIPE, rows=1).load()  # is part of a larger one
    assert smaller.x[0].numpy().tobytes() in {row.numpy().tobytes() for row in subset.x}


def test_what_there_is_not_is_refused(digits):
    with pytest.raises(SettingError, match="optimizer must be 'sgd' or 'adam'; found 'sdg'"):
        _ = replace(RECIPE, optimizer="sdg").local
    with pytest.raises(SettingError, match="digits"):
        replace(RECIPE, data="digit").load()
    with pytest.raises(SettingError, match="lenet5"):
        replace(RECIPE, model="lenet").blank_model((1, 28, 28), 10)
    for precision in ("half", "", None, True):
        with pytest.raises(
            SettingError, match=rf"precision must be 'float32', 'bfloat16' or 'auto'; found {precision!r}"
        ):
            Recipe("digits", "lenet5", 1, precision=precision)
    for rows in (0, 1438):
        with pytest.raises(DataError, match=rf"rows must lie in 1 … 1437.*found {rows}"):
            replace(RECIPE, rows=rows).load()
    for clients in (0, 1000):
        with pytest.raises(SettingError, match="clients"):
            replace(RECIPE, clients=clients).federation(digits)


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
    names = ("epochs", "batch_size", "lr", "momentum", "optimizer", "precision")
    local = LocalTraining(**{name: getattr(recipe, name) for name in names})
    rounds = Rounds(recipe.rounds, clients_per_round=recipe.clients_per_round)
    expected = federate(small_model, digits_federation, rounds=rounds, local=local, seed=recipe.seed)
    assert fingerprint(found.model) == fingerprint(expected.model) != fingerprint(small_model)
    assert (found.rounds, found.engine) == (recipe.rounds, "plain")

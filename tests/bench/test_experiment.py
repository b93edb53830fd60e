"""An experiment's TOML file gives the cells it says, each with a hash of all that decides its result; or one error."""

import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedup.bench.experiment import BenchCell, Experiment, Named, load_experiment
from fedup.bench.methods import method_class
from fedup.bench.scenarios import scenario_class
from fedup.errors import MissingDataError, SettingError

EXPERIMENTS = sorted((Path(__file__).parents[2] / "benchmarks" / "experiments").glob("*.toml"))
GOOD = """
title = "Two by two by two"
seeds = [0, 3]

[[federations]]
data = "digits"
rounds = 2
clients = 4

[[federations]]
data = "mnist"
model = "resnet18"

[scenarios.class]
[scenarios.client]
client = 1

[methods.fedup]
[methods.retrain]
"""


def names(cells: list[BenchCell]) -> list[tuple[str, str, str, int]]:
    return [(c.group.federation, c.group.scenario.name, c.method.name, c.group.recipe.seed) for c in cells]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_of_the_project_loads_and_says_what_each_cell_is(path):
    experiment = load_experiment(path)
    cells = experiment.cells()
    table = tomllib.loads(path.read_text())
    assert experiment.name == path.stem
    assert experiment.title == table.get("title", path.stem)
    pairs = sum(len(table["scenarios"]) - len(one.get("leave_out", [])) for one in table["federations"])
    assert len(cells) == pairs * len(table.get("seeds", [0])) * len({*table["methods"], "retrain"})
    lines = [line for by_scenario in table.get("goals", {}).values() for line in by_scenario.values()]
    assert len(experiment.goals) == sum(map(len, lines))
    assert len({cell.hash for cell in cells}) == len(cells)
    assert len({str(cell) for cell in cells}) == len(cells)


def test_cells_are_all_combinations_and_those_of_a_group_stand_together(read):
    cells = read(GOOD).cells()
    assert names(cells) == [
        (federation, scenario, method, seed)
        for federation in ("digits-lenet5", "mnist-resnet18")
        for seed in (0, 3)
        for scenario in ("class", "client")
        for method in ("retrain", "fedup")
    ]
    assert names(read(GOOD).cells(seeds=[7]))[0] == ("digits-lenet5", "class", "retrain", 7)


def test_settings_are_those_of_the_file_and_the_data_sets_defaults_elsewhere(read):
    first, second = (replace(recipe) for recipe in read(GOOD).recipes)
    assert (first.data, first.model, first.rounds, first.clients, first.batch_size) == ("digits", "lenet5", 2, 4, 16)
    assert (second.data, second.model, second.rounds, second.batch_size) == ("mnist", "resnet18", 10, 64)
    assert read(GOOD).scenarios["digits-lenet5"] == (
        Named("class", "class", scenario_class("class")()),
        Named("client", "client", scenario_class("client")(client=1)),
    )


def test_retrain_is_always_there_and_first_and_a_title_and_seeds_need_not_be_given(read):
    for methods in ("[methods.fedup]", "[methods.none]\n[methods.fedup]\n[methods.retrain]", "[methods.retrain]"):
        experiment = read(f'[[federations]]\ndata="digits"\n[scenarios.class]\n{methods}')
        found = [method.name for method in experiment.methods]
        assert found[0] == "retrain" and found.count("retrain") == 1
        assert (experiment.title, experiment.seeds) == ("mine", (0,))


def test_use_gives_a_part_under_another_name_with_settings_of_its_own(read):
    text = GOOD + '[methods.fedup-small]\nuse = "fedup"\nrank = 4\n[scenarios.nine]\nuse = "class"\nclasses = [9]\n'
    experiment = read(text)
    small = next(method for method in experiment.methods if method.name == "fedup-small")
    assert small == Named("fedup-small", "fedup", method_class("fedup")(rank=4))
    nine = next(one for one in experiment.scenarios["digits-lenet5"] if one.name == "nine")
    assert nine.settings.classes == (9,)
    assert len({cell.hash for cell in experiment.cells()}) == len(experiment.cells())


def test_a_federation_may_have_scenario_settings_of_its_own(read):
    text = GOOD.replace("clients = 4\n", "clients = 4\n[federations.scenarios.client]\nclient = 3\n")
    experiment = read(text)
    clients = {
        federation: next(one.settings.client for one in scenarios if one.name == "client")
        for federation, scenarios in experiment.scenarios.items()
    }
    assert clients == {"digits-lenet5": 3, "mnist-resnet18": 1}


@pytest.mark.parametrize("content", [b"title = ", b"a = 1\na = 2\n", b"title = '\xff'", b"\0"])
def test_what_is_no_toml_or_not_there_is_named(tmp_path, content):
    path = tmp_path / "mine.toml"
    with pytest.raises(MissingDataError, match=r"no experiment .*mine\.toml"):
        load_experiment(path)
    path.write_bytes(content)
    for place in (path, tmp_path):
        with pytest.raises(SettingError, match=rf"{place.name} is no readable TOML file"):
            load_experiment(place)


WRONG = {
    "an unknown top key": ("title =", "titel =", r"top level: there is no key 'titel'.*Did you mean 'title'\?"),
    "a seed that is no number": ("[0, 3]", '[0, "3"]', r"seeds\[1\] must be a whole number; found '3'"),
    "a seed twice": ("[0, 3]", "[0, 0]", r"seeds must be at least one, each once"),
    "an unknown data set": ('"digits"', '"digitz"', r"no 'digitz'.*Did you mean 'digits'\?"),
    "an unknown method": ("[methods.fedup]", "[methods.fedupp]", r"no 'fedupp'.*Did you mean 'fedup'\?"),
    "an unknown federation key": ("clients = 4", "client = 4", r"federations\[0\]: .*'client'.*mean 'clients'\?"),
    "an unknown scenario key": ("client = 1", "cleint = 1", r"scenarios\.client: .*'cleint'.*Did you mean 'client'\?"),
    "a federation's own scenario": (
        "clients = 4",
        "clients = 4\n[federations.scenarios.clients]\nclient = 3",
        r"federations\[0\]\.scenarios: there is no key 'clients'; there are class, client\. Did you mean 'client'",
    ),
    "a value out of range": ("[methods.fedup]", "[methods.fedup]\nrank = 0", r"methods\.fedup: .*rank"),
    "a seed of its own": ("clients = 4", "seed = 4", r"federations\[0\]: there is no key 'seed'"),
    "a name that is taken": ("[methods.fedup]", '[methods.none]\nuse = "fedup"', r"methods\.none: none is the name"),
    "another reference": ("[methods.fedup]", '[methods.mine]\nuse = "retrain"', r"methods: retrain is what the others"),
    "the same pair twice": (
        'data = "mnist"\nmodel = "resnet18"',
        'data = "digits"',
        r"federations\[1\]: digits-lenet5 is there already",
    ),
}


@pytest.mark.parametrize(("old", "new", "told"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_named_with_file_and_key(read, old, new, told):
    assert old in GOOD
    with pytest.raises(SettingError, match=rf"(?s)mine\.toml: .*{told}"):
        read(GOOD.replace(old, new, 1))


PLACES = ["title", "seeds", "federations", "scenarios", "methods", "tuned", "goals", "rounds", "data", "leave_out"]
PLACES += ["shadow", "paper", "tuned_like", "recipe"]
PLACES += [
    "scenarios.class",
    "methods.fedup",
    "federations.scenarios",
    "methods.fedup.rank",
    "methods.fedup.class_policy",
]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(PLACES),
    st.sampled_from(["3", '"text"', "true", "0.5", "nan", "[1]", "[[1]]", "{}", "[]", "{ a = 3 }", '["a"]', "-7"]),
)
@example("methods", "{}")
def test_whatever_stands_in_a_file_it_loads_or_is_refused_with_file_and_place(tmp_path_factory, place, value):
    parts = {"federations": '[{ data = "digits" }]', "scenarios": "{ class = {} }", "methods": "{ fedup = {} }"}
    if place in ("rounds", "data", "leave_out", "recipe", "federations.scenarios"):
        parts["federations"] = f'[{{ data = "digits", {place.partition(".")[2] or place} = {value} }}]'
        if place == "data":
            parts["federations"] = f"[{{ data = {value} }}]"
    elif "." in place:
        kind, name, *key = place.split(".")
        parts[kind] = f"{{ {name} = {{ {key[0]} = {value} }} }}" if key else f"{{ {name} = {value} }}"
    else:
        parts[place] = value
    path = tmp_path_factory.mktemp("odd") / "mine.toml"
    path.write_text("\n".join(f"{name} = {part}" for name, part in parts.items()))
    try:
        load_experiment(path)
    except SettingError as error:
        assert str(error).startswith(f"{path}: ") and place.split(".")[0] in str(error)
        assert "must be ;" not in str(error)
        if value in ("{}", "[]") and place in ("federations", "scenarios", "methods"):
            assert f"{place}: there is none; add [" in str(error) or "must be" in str(error)


ONLY = {
    (): lambda cell: True,
    ("fedup",): lambda cell: cell[2] == "fedup",
    ("fedup", "retrain"): lambda cell: True,
    ("digits",): lambda cell: cell[0] == "digits-lenet5",
    ("digits-lenet5", "resnet18"): lambda cell: True,
    ("digits", "mnist", "client"): lambda cell: cell[1] == "client",
    ("digits", "fedup"): lambda cell: cell[0] == "digits-lenet5" and cell[2] == "fedup",
    ("class", "client", "retrain", "mnist"): lambda cell: cell[0] == "mnist-resnet18" and cell[2] == "retrain",
}


@pytest.mark.parametrize(("only", "wanted"), ONLY.items(), ids=["+".join(only) or "all" for only in ONLY])
def test_names_of_one_kind_widen_the_choice_and_names_of_different_kinds_narrow_it(read, only, wanted):
    experiment = read(GOOD)
    everything = names(experiment.cells())
    for order in (only, only[::-1]):
        assert names(experiment.cells(only=order)) == [cell for cell in everything if wanted(cell)]
    with pytest.raises(SettingError, match=r"--only: nothing in mine is called 'clas'; .*Did you mean 'class'"):
        experiment.cells(only=[*only, "clas"])


ONE = '[[federations]]\ndata = "digits"\nrounds = 2\n[scenarios.class]\n[methods.retrain]\n[methods.fedup]\n'


def fedup_hash(experiment: Experiment, **how) -> str:
    return experiment.cells(**how)[1].hash


def test_the_hash_does_not_depend_on_names_order_or_what_else_there_is(read):
    expected = fedup_hash(read(ONE))
    assert fedup_hash(read("# a comment\n" + ONE, "other")) == expected
    assert fedup_hash(read('title = "Another title"\nseeds = [0, 1, 2]\n' + ONE)) == expected
    assert fedup_hash(read(ONE.replace('data = "digits"\nrounds = 2', 'rounds = 2\ndata = "digits"'))) == expected
    assert fedup_hash(read("[methods.fedup]\n[scenarios.class]\n" + ONE.split("[scenarios")[0])) == expected
    assert fedup_hash(read(ONE.replace("[methods.fedup]", '[methods.ours]\nuse = "fedup"'))) == expected
    assert fedup_hash(read(ONE.replace("[scenarios.class]", '[scenarios.mine]\nuse = "class"'))) == expected
    assert fedup_hash(read(ONE + '[[federations]]\ndata = "mnist"\n[methods.none]\n[scenarios.client]')) == expected
    # a default that is said is the same setting
    assert fedup_hash(read(ONE.replace("[methods.fedup]", "[methods.fedup]\nrank = 32"))) == expected
    assert fedup_hash(read(ONE.replace("rounds = 2", 'rounds = 2\nmodel = "lenet5"\nclients = 10'))) == expected


CHANGES = [
    ("rounds = 2", "rounds = 3"),
    *[
        ("rounds = 2", f"rounds = 2\n{line}")
        for line in (
            *("clients = 9", 'partition = "iid"', "rows = 500", "epochs = 2", "batch_size = 17", "lr = 0.04"),
            *("momentum = 0.8", 'optimizer = "adam"', 'precision = "auto"', "clients_per_round = 5", 'cut = "fc2"'),
            *('weights = "some.safetensors"', 'model = "resnet18"'),
        )
    ],
    ("[scenarios.class]", "[scenarios.class]\nclasses = [1]"),
    ("[scenarios.class]", "[scenarios.client]"),
    *[
        ("[methods.fedup]", f"[methods.fedup]\n{line}")
        for line in (
            *("ratio = 0.7", "sigma = 0.1", 'cut = "head"', "cache = false", "rank = 31", "alpha = 0.4", "steps = 299"),
            *("batch_size = 127", "lr = 0.002", "guard = false", 'preset = "paper"', 'filter = "bottleneck"'),
            *('filter = "both"', 'eraser_cut = "fc1"', "max_variance_loss = 0.03", "gentle = false"),
        )
    ],
    *[("[scenarios.class]", f"[scenarios.sample]\n{line}") for line in ("", 'trigger = "blend"')],
    ("[methods.fedup]", "[methods.none]"),
]


def test_any_changed_setting_is_another_hash(read):
    hashes = [fedup_hash(read(ONE.replace(old, new, 1))) for old, new in [("", ""), *CHANGES]]
    hashes += [fedup_hash(read(ONE), seeds=[seed]) for seed in (1, 2, -1)]
    assert len(set(hashes)) == len(hashes)


FIRST_SETTINGS = {  # what results told before anything was added
    "fedup": "use ratio sigma cut cache rank alpha steps batch_size lr class_policy guard weighted",
    "sample": "use share target holders clients",
}


def added(config: dict, which: str) -> dict:
    """What a configuration tells besides the first settings, all of which it must tell."""
    first = set(FIRST_SETTINGS[which].split())
    assert first <= set(config)
    return {key: value for key, value in config.items() if key not in first}


AS_BEFORE = ONE.replace("[scenarios.class]", "[scenarios.sample]") + 'filter = "bottleneck"\n'  # the one there was


def test_settings_that_were_added_later_are_told_only_where_they_differ_from_what_was_before(read):
    said = 'preset = "default"\neraser_cut = "auto"\nmax_variance_loss = 0.02\ngentle = true\n'
    cell, same = read(AS_BEFORE).cells()[1], read(AS_BEFORE + said).cells()[1]
    assert added(cell.config()["method"], "fedup") == added(cell.config()["scenario"], "sample") == {}
    assert (same.config(), same.hash) == (cell.config(), cell.hash)
    text = AS_BEFORE.replace("[scenarios.sample]", '[scenarios.sample]\ntrigger = "blend"')
    config = read(text.replace("bottleneck", "erasure") + "gentle = false\n").cells()[1].config()
    assert added(config["method"], "fedup") == {"filter": "erasure", "gentle": False}
    assert added(config["scenario"], "sample") == {"trigger": "blend"}


def test_a_default_that_measures_otherwise_than_before_is_told(read):
    (silent, said) = (read(AS_BEFORE.replace('filter = "bottleneck"\n', line)) for line in ("", 'filter = "auto"\n'))
    assert added(silent.cells()[1].config()["method"], "fedup") == {"filter": "auto"}
    assert fedup_hash(silent) == fedup_hash(said) != fedup_hash(read(AS_BEFORE))


def precise(precision: str | None, model: str = "lenet5") -> str:
    said = f'\nprecision = "{precision}"' if precision else ""
    return ONE.replace("rounds = 2", f'rounds = 2\nmodel = "{model}"{said}')


LATER = {"file", "precision", "weight_decay", "schedule", "warmup_rounds", "augment"}


def test_another_precision_than_single_is_told_and_the_one_that_suits_a_model_is_taken(read):
    silent, said = (read(precise(precision)).cells()[1] for precision in (None, "float32"))
    assert set(silent.config()["federation"]) == set(asdict(silent.group.recipe)) - LATER
    assert (silent.config(), silent.hash) == (said.config(), said.hash)
    half = read(precise("bfloat16")).cells()[1]
    assert half.config()["federation"]["precision"] == half.group.recipe.local.precision == "bfloat16"
    suited, single = (read(precise(precision, "vit")).cells()[1] for precision in (None, "float32"))
    assert suited.config()["federation"]["precision"] == "auto"
    assert "precision" not in single.config()["federation"]

"""An experiment's TOML file gives the cells it says, each with a hash of all that decides its result; or one error."""

import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.bench.experiment import BenchCell, Experiment, Named, hash_of, load_experiment
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


@pytest.fixture
def read(tmp_path):
    """Read an experiment from its text."""

    def read(text: str, name: str = "mine") -> Experiment:
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        return load_experiment(path)

    return read


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


def test_there_are_experiments():
    assert {path.stem for path in EXPERIMENTS} >= {"main", "smoke", "sample", "sample_kinds", "defaults"}


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


def test_a_title_and_seeds_need_not_be_given(read):
    experiment = read('[[federations]]\ndata = "digits"\n[scenarios.class]\n[methods.none]\n')
    assert (experiment.title, experiment.seeds) == ("mine", (0,))


def test_retrain_is_always_there_and_first(read):
    for methods in ("[methods.fedup]", "[methods.none]\n[methods.fedup]\n[methods.retrain]", "[methods.retrain]"):
        found = [m.name for m in read(f'[[federations]]\ndata="digits"\n[scenarios.class]\n{methods}').methods]
        assert found[0] == "retrain"
        assert found.count("retrain") == 1


# --- variants


def test_use_gives_a_part_under_another_name_with_settings_of_its_own(read):
    text = GOOD + '[methods.fedup-small]\nuse = "fedup"\nrank = 4\n[scenarios.nine]\nuse = "class"\nclasses = [9]\n'
    experiment = read(text)
    small = next(method for method in experiment.methods if method.name == "fedup-small")
    assert small == Named("fedup-small", "fedup", method_class("fedup")(rank=4))
    nine = next(one for one in experiment.scenarios["digits-lenet5"] if one.name == "nine")
    assert nine.settings.classes == (9,)
    assert len({cell.hash for cell in experiment.cells()}) == len(experiment.cells())


def test_use_may_be_a_file_of_ones_own(read, tmp_path):
    own = tmp_path / "mine.py"
    own.write_text((Path(__file__).parents[2] / "src/fedup/bench/methods/finetune.py").read_text())
    experiment = read(GOOD + f'[methods.mine]\nuse = "{own}"\nrounds = 7\n')
    assert experiment.methods[-1].settings.rounds == 7
    with pytest.raises(SettingError, match=r"methods\.mine\.rounds must be a whole number"):
        read(GOOD + f'[methods.mine]\nuse = "{own}"\nrounds = "7"\n')


def test_a_federation_may_have_scenario_settings_of_its_own(read):
    text = GOOD.replace("clients = 4\n", "clients = 4\n[federations.scenarios.client]\nclient = 3\n")
    experiment = read(text)
    clients = {
        federation: next(one.settings.client for one in scenarios if one.name == "client")
        for federation, scenarios in experiment.scenarios.items()
    }
    assert clients == {"digits-lenet5": 3, "mnist-resnet18": 1}


@pytest.mark.parametrize(
    ("own", "told"),
    [
        (
            "[federations.scenarios.clients]\nclient = 3",
            r"federations\[0\]\.scenarios: there is no key 'clients'; there are class, client\. Did you mean 'client'",
        ),
        ("[federations.scenarios.client]\nclinet = 3", r"scenarios\.client: there is no key 'clinet'.*'client'"),
        ('[federations.scenarios.client]\nclient = "3"', r"scenarios\.client\.client must be a whole number"),
        ("[federations.scenarios]\nclient = 3", r"scenarios\.client must be a table.*; found 3"),
        ("scenarios = 3", r"federations\[0\]\.scenarios must be a table; found 3"),
    ],
)
def test_a_federations_own_scenario_settings_are_checked_too(read, own, told):
    with pytest.raises(SettingError, match=told):
        read(GOOD.replace("clients = 4\n", f"clients = 4\n{own}\n"))


# --- what is wrong is named with file and key


def test_an_experiment_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MissingDataError, match=r"no experiment .*nowhere\.toml"):
        load_experiment(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    "content", [b"title = ", b"[methods", b'a = 1\na = 2\n[methods.fedup]\nrank=4\nrank="4"', b"title = '\xff'", b"\0"]
)
def test_what_is_no_toml_is_named(tmp_path, content):
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(SettingError, match=r"mine\.toml is no readable TOML file"):
        load_experiment(path)


def test_a_folder_is_no_experiment(tmp_path):
    with pytest.raises(SettingError, match="is no readable TOML file"):
        load_experiment(tmp_path)


WRONG = {
    "an unknown top key": ("title =", "titel =", r"top level: there is no key 'titel'.*Did you mean 'title'\?"),
    "an unknown table": ("[methods.fedup]", "[method.fedup]", r"top level: there is no key 'method'.*'methods'\?"),
    "a title that is no text": ('"Two by two by two"', "2", r"title must be a text; found 2"),
    "seeds that are no list": ("[0, 3]", "3", r"seeds must be a list; found 3"),
    "a seed that is no number": ("[0, 3]", '[0, "3"]', r"seeds\[1\] must be a whole number; found '3'"),
    "a seed that is a truth": ("[0, 3]", "[true]", r"seeds\[0\] must be a whole number; found True"),
    "an unknown data set": ('"digits"', '"digitz"', r"no 'digitz'.*Did you mean 'digits'\?"),
    "an unknown model": ('"resnet18"', '"resnet81"', r"no 'resnet81'.*Did you mean 'resnet18'\?"),
    "an unknown scenario": ("[scenarios.client]", "[scenarios.clinet]", r"no 'clinet'.*Did you mean 'client'\?"),
    "an unknown method": ("[methods.fedup]", "[methods.fedupp]", r"no 'fedupp'.*Did you mean 'fedup'\?"),
    "an unknown federation key": ("clients = 4", "client = 4", r"federations\[0\]: .*'client'.*mean 'clients'\?"),
    "an unknown scenario key": ("client = 1", "cleint = 1", r"scenarios\.client: .*'cleint'.*Did you mean 'client'\?"),
    "an unknown method key": (
        "[methods.fedup]",
        "[methods.fedup]\nrnak = 1",
        r"methods\.fedup: .*'rnak'.*mean 'rank'\?",
    ),
    "text for a number": ("rounds = 2", 'rounds = "2"', r"federations\[0\]\.rounds must be a whole number; found '2'"),
    "a fraction for a number": ("rounds = 2", "rounds = 2.5", r"federations\[0\]\.rounds must be a whole number"),
    "a truth for a number": ("client = 1", "client = true", r"scenarios\.client\.client must be a whole number"),
    "a wrong choice": (
        "[methods.fedup]",
        '[methods.fedup]\nclass_policy = "dorp"',
        r"methods\.fedup\.class_policy must be one of 'drop'",
    ),
    "a value out of range": ("[methods.fedup]", "[methods.fedup]\nrank = 0", r"methods\.fedup: .*rank"),
    "clients out of range": ("clients = 4", "clients = 0", r"federations\[0\]: .*clients 1 or more"),
    "no data": ('data = "digits"', "", r"federations\[0\]: data is missing"),
    "data that is no text": ('"digits"', "3", r"federations\[0\]\.data must be a text; found 3"),
    "a seed of its own": ("clients = 4", "seed = 4", r"federations\[0\]: there is no key 'seed'"),
    "the same pair twice": (
        'data = "mnist"\nmodel = "resnet18"',
        'data = "digits"',
        r"federations\[1\]: digits-lenet5 is there already",
    ),
    "use that is no text": ("[methods.fedup]", "[methods.fedup]\nuse = 3", r"methods\.fedup\.use must be a text"),
    "use of nothing": ("[methods.fedup]", '[methods.mine]\nuse = "no.py"', r"no Python file no\.py"),
    "a method that is no table": (
        "[methods.fedup]",
        "[methods]\nfedup = 3",
        r"methods\.fedup must be a table.*found 3",
    ),
}


@pytest.mark.parametrize(("old", "new", "told"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_named_with_file_and_key(read, old, new, told):
    assert old in GOOD
    with pytest.raises(SettingError, match=rf"(?s)mine\.toml: .*{told}"):
        read(GOOD.replace(old, new, 1))


@pytest.mark.parametrize("which", ["federations", "scenarios", "methods"])
@pytest.mark.parametrize("value", ["3", '"text"', "true", "[1]", "[[1]]", "{}", "[]", "{ a = 3 }"])
def test_a_part_that_is_no_list_of_tables_or_table_of_tables_is_refused(read, which, value):
    parts = {
        "federations": '[{ data = "digits" }]',
        "scenarios": "{ class = {} }",
        "methods": "{ fedup = {} }",
        which: value,
    }
    with pytest.raises(SettingError, match=rf"mine\.toml: {which}") as caught:
        read("\n".join(f"{name} = {part}" for name, part in parts.items()))
    assert "must be ;" not in str(caught.value)


@pytest.mark.parametrize("which", ["federations", "scenarios", "methods"])
def test_an_experiment_without_a_part_says_what_to_add(read, which):
    lines = {
        "federations": '[[federations]]\ndata = "digits"',
        "scenarios": "[scenarios.class]",
        "methods": "[methods.fedup]",
    }
    with pytest.raises(SettingError, match=rf"mine\.toml: {which}: there is none; add \["):
        read("\n".join(line for name, line in lines.items() if name != which))


# --- which cells


ONLY = {
    (): lambda cell: True,
    ("fedup",): lambda cell: cell[2] == "fedup",
    ("fedup", "retrain"): lambda cell: True,
    ("digits",): lambda cell: cell[0] == "digits-lenet5",
    ("digits-lenet5",): lambda cell: cell[0] == "digits-lenet5",
    ("resnet18",): lambda cell: cell[0] == "mnist-resnet18",
    ("digits", "resnet18"): lambda cell: True,
    ("digits", "mnist", "client"): lambda cell: cell[1] == "client",
    ("digits", "fedup"): lambda cell: cell[0] == "digits-lenet5" and cell[2] == "fedup",
    ("class", "client", "retrain", "mnist"): lambda cell: cell[0] == "mnist-resnet18" and cell[2] == "retrain",
}


@pytest.mark.parametrize(("only", "wanted"), ONLY.items(), ids=["+".join(only) or "all" for only in ONLY])
def test_names_of_one_kind_widen_the_choice_and_names_of_different_kinds_narrow_it(read, only, wanted):
    experiment = read(GOOD)
    everything = names(experiment.cells())
    assert names(experiment.cells(only=only)) == [cell for cell in everything if wanted(cell)]
    assert names(experiment.cells(only=only[::-1])) == [cell for cell in everything if wanted(cell)]


@pytest.mark.parametrize(("name", "near"), [("fedupp", "fedup"), ("clas", "class"), ("digit", "digits")])
def test_a_name_that_nothing_bears_is_refused_with_the_closest(read, name, near):
    with pytest.raises(SettingError, match=rf"--only: nothing in mine is called '{name}'; .*Did you mean '{near}'"):
        read(GOOD).cells(only=["retrain", name])


# --- hashes


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
            "clients = 9",
            'partition = "iid"',
            "rows = 500",
            "epochs = 2",
            "batch_size = 17",
            "lr = 0.04",
            "momentum = 0.8",
            'optimizer = "adam"',
            'precision = "bfloat16"',
            'precision = "auto"',
            "clients_per_round = 5",
            'cut = "fc2"',
            'weights = "some.safetensors"',
            'model = "resnet18"',
        )
    ],
    ('"digits"', '"mnist"'),
    ("[scenarios.class]", "[scenarios.class]\nclasses = [1]"),
    ("[scenarios.class]", "[scenarios.client]"),
    *[
        ("[methods.fedup]", f"[methods.fedup]\n{line}")
        for line in (
            "ratio = 0.7",
            "sigma = 0.1",
            'cut = "head"',
            "cache = false",
            "rank = 31",
            "alpha = 0.4",
            "steps = 299",
            "batch_size = 127",
            "lr = 0.002",
            "guard = false",
            'preset = "paper"',
            'filter = "bottleneck"',
            'filter = "erasure"',
            'filter = "both"',
            'eraser_cut = "fc1"',
            "max_variance_loss = 0.03",
            "gentle = false",
        )
    ],
    *[
        ("[scenarios.class]", f"[scenarios.sample]\n{line}")
        for line in ("", 'trigger = "patch"', 'trigger = "blend"', 'trigger = "pixel"')
    ],
    ("[scenarios.class]", "[scenarios.memorised]"),
    ("[scenarios.class]", "[scenarios.random_samples]"),
    ("[methods.fedup]", "[methods.none]"),
]


def test_any_changed_setting_is_another_hash(read):
    hashes = [fedup_hash(read(ONE.replace(old, new, 1))) for old, new in [("", ""), *CHANGES]]
    hashes += [fedup_hash(read(ONE), seeds=[seed]) for seed in (1, 2, -1)]
    assert len(set(hashes)) == len(hashes)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.text(), st.integers() | st.floats(allow_nan=False) | st.text() | st.lists(st.integers()) | st.none()
    )
)
def test_a_hash_does_not_depend_on_the_order_of_keys_and_does_on_every_value(config):
    assert hash_of(dict(reversed(config.items()))) == hash_of(config)
    for key in config:
        assert hash_of({**config, key: "another value"}) != hash_of(config) or config[key] == "another value"


def test_the_configuration_of_a_cell_is_plain_data_that_says_all(read):
    cell = read(GOOD).cells(seeds=[4])[3]
    config = cell.config()
    assert config["federation"]["seed"] == 4
    assert config["federation"]["data"] == "digits"
    assert config["scenario"] == {"use": "client", "client": 1}
    assert config["method"]["use"] == "fedup"
    assert config["method"]["rank"] == 32
    assert hash_of(config) == cell.hash


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


def test_settings_that_were_added_later_are_not_told_while_results_from_before_are_as_with_them(read):
    said = 'preset = "default"\neraser_cut = "auto"\nmax_variance_loss = 0.02\ngentle = true\n'
    cell, same = read(AS_BEFORE).cells()[1], read(AS_BEFORE + said).cells()[1]
    assert added(cell.config()["method"], "fedup") == {}
    assert added(cell.config()["scenario"], "sample") == {}
    assert (same.config(), same.hash) == (cell.config(), cell.hash)


def test_another_value_of_a_setting_that_was_added_later_is_told(read):
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


def test_single_precision_is_not_told_so_that_results_of_before_there_was_a_choice_stay_valid(read):
    silent, said = (read(precise(precision)).cells()[1] for precision in (None, "float32"))
    assert set(silent.config()["federation"]) == set(asdict(silent.group.recipe)) - {"precision", "weight_decay"}
    assert silent.config() == said.config()
    assert silent.hash == said.hash


@pytest.mark.parametrize("precision", ["bfloat16", "auto"])
def test_another_precision_is_told_and_kept(read, precision):
    cell = read(precise(precision)).cells()[1]
    assert cell.config()["federation"]["precision"] == precision
    assert cell.group.recipe.local.precision == precision


def test_the_precision_that_suits_a_model_is_taken_and_single_precision_can_be_asked_for(read):
    suited, single = (read(precise(precision, "vit")).cells()[1] for precision in (None, "float32"))
    assert suited.config()["federation"]["precision"] == "auto"
    assert "precision" not in single.config()["federation"]
    assert suited.hash != single.hash


def test_an_unknown_precision_is_refused_with_file_and_key(read):
    with pytest.raises(SettingError, match=r"mine\.toml: .*precision must be .*found 'half'"):
        read(precise("half"))

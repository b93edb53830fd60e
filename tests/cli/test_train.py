"""`fedup train`: what is trained by which engine and in which precision, and wrong wishes that block nothing."""

import pytest
from tests.cli._in_process import fedup, ok

from fedup.run.folder import Run
from fedup.tasks.recipe import Recipe

SMALL = ("--rows", 300, "--clients", 3, "--rounds", 1)


@pytest.fixture(autouse=True)
def no_wish(monkeypatch):
    """Of whoever runs the tests."""
    monkeypatch.delenv("FEDUP_ENGINE", raising=False)


def test_every_way_to_ask_for_the_plain_engine_gives_the_same_model(tmp_path):
    ways = {"auto": ((), {}), "option": (("--engine", "plain"), {}), "environment": ((), {"FEDUP_ENGINE": "plain"})}
    found = {}
    for name, (options, environment) in ways.items():
        told = ok("train", "--run", tmp_path / name, *SMALL, *options, "--json", **environment).json
        found[name] = told["fingerprint"]
        state = Run(tmp_path / name).read()
        assert state.trained.body["engine"] == "plain"
        assert "precision" not in state.about  # single, as it always was before there was a choice
    assert len(set(found.values())) == 1


def test_an_option_comes_before_the_environment(tmp_path):
    ok("train", "--run", tmp_path / "run", *SMALL, "--engine", "plain", FEDUP_ENGINE="captured")


def test_precision_is_kept_with_the_run_and_decides_the_model(tmp_path):
    prints = {}
    for precision in ("float32", "auto", "bfloat16"):
        run = tmp_path / precision
        prints[precision] = ok("train", "--run", run, *SMALL, "--precision", precision, "--json").json["fingerprint"]
        assert Run(run).read().about.get("precision", "float32") == precision
    assert prints["auto"] == prints["float32"] != prints["bfloat16"]  # no GPU here


WRONG = {
    "unknown engine": (("--engine", "fast"), {}, "engine must be 'auto', 'plain' or 'captured'; found 'fast'"),
    "no engine": (("--engine", ""), {}, "engine must be"),
    "unknown engine in the environment": ((), {"FEDUP_ENGINE": "fast"}, "FEDUP_ENGINE must be"),
    "graphs on a CPU": (("--engine", "captured"), {}, "needs a CUDA device"),
    "graphs on a CPU in the environment": ((), {"FEDUP_ENGINE": "captured"}, "needs a CUDA device"),
    "unknown precision": (("--precision", "half"), {}, "precision must be 'float32', 'bfloat16' or 'auto'"),
}


@pytest.mark.parametrize(("options", "environment", "told"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_wish_is_one_error_and_blocks_no_later_call(tmp_path, options, environment, told):
    run = tmp_path / "run"
    ran = fedup("train", "--run", run, *SMALL, *options, **environment)
    assert (ran.code, ran.out) == (1, "")
    errors = [line for line in ran.err.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and told in errors[0] and errors[0] == ran.err.splitlines()[-1]
    assert "Traceback" not in ran.err
    if "captured" not in (*options, *environment.values()):
        assert not run.exists()
    others = ("--rows", 300, "--clients", 4, "--rounds", 1, "--precision", "bfloat16")  # not even other settings
    ok("train", "--run", run, *others)
    assert Run(run).read().trained is not None


def test_what_was_trained_stays_when_a_later_call_asks_for_what_cannot_be(tmp_path):
    run = tmp_path / "run"
    before = ok("train", "--run", run, *SMALL, "--json").json
    for options, environment, _ in WRONG.values():
        fedup("train", "--run", run, *SMALL, *options, **environment)
        again = ok("train", "--run", run, *SMALL, "--json").json
        assert again == before | {"already": True}


def test_another_precision_is_another_training(tmp_path):
    run = tmp_path / "run"
    ok("train", "--run", run, *SMALL)
    ran = fedup("train", "--run", run, *SMALL, "--precision", "bfloat16")
    assert ran.code == 1
    assert "precision" in ran.told


def test_a_folder_of_before_there_was_a_choice_of_precision_is_one_in_single_precision(tmp_path, monkeypatch):
    run, about = tmp_path / "run", Recipe.about
    with monkeypatch.context() as before:
        older = lambda recipe, data: {k: v for k, v in about(recipe, data).items() if k != "precision"}  # noqa: E731
        before.setattr(Recipe, "about", older)
        trained = ok("train", "--run", run, *SMALL, "--json").json
    assert "precision" not in Run(run).read().about
    assert ok("train", "--run", run, *SMALL, "--json").json == trained | {"already": True}
    assert fedup("train", "--run", run, *SMALL, "--precision", "bfloat16").code == 1


def test_help_shows_engine_and_precision():
    told = " ".join(ok("train", "--help").out.replace("│", " ").split())
    for word in ("--engine", "--precision", "plain", "captured", "FEDUP_ENGINE", "float32", "bfloat16"):
        assert word in told

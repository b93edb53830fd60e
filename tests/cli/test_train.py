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


def test_engine_and_precision_are_on_record_and_decide_the_model(tmp_path):
    ways = {
        "auto": ((), {}),
        "option": (("--engine", "plain", "--precision", "auto"), {"FEDUP_ENGINE": "captured"}),  # which comes first
        "environment": ((), {"FEDUP_ENGINE": "plain"}),
        "short": (("--precision", "bfloat16"), {}),
    }
    prints, precisions = {}, {}
    for name, (options, environment) in ways.items():
        told = ok("train", "--run", tmp_path / name, *SMALL, *options, "--json", **environment).json
        prints[name] = told["fingerprint"]
        state = Run(tmp_path / name).read()
        assert state.trained.body["engine"] == "plain"
        precisions[name] = state.about.get("precision")
    assert prints["auto"] == prints["option"] == prints["environment"] != prints["short"]  # no GPU here
    # None: single, as it always was before there was a choice
    assert precisions == {"auto": None, "option": "auto", "environment": None, "short": "bfloat16"}


WRONG = {
    "unknown engine": (("--engine", "fast"), {}, "engine must be 'auto', 'plain' or 'captured'; found 'fast'"),
    "unknown engine in the environment": ((), {"FEDUP_ENGINE": "fast"}, "FEDUP_ENGINE must be"),
    "graphs on a CPU": (("--engine", "captured"), {}, "needs a CUDA device"),
    "unknown precision": (("--precision", "half"), {}, "precision must be 'float32', 'bfloat16' or 'auto'"),
}


def test_a_wrong_wish_is_one_error_that_blocks_no_call_and_what_was_trained_stays(tmp_path):
    run, others = tmp_path / "run", ("--rows", 300, "--clients", 4, "--rounds", 1)
    for options, environment, told in WRONG.values():
        ran = fedup("train", "--run", run, *SMALL, *options, **environment)
        assert (ran.code, ran.out) == (1, "")
        errors = [line for line in ran.err.splitlines() if line.startswith("Error: ")]
        assert len(errors) == 1 and told in errors[0] and errors[0] == ran.err.splitlines()[-1]
        assert "Traceback" not in ran.err
        assert "captured" in options or not run.exists()
    before = ok("train", "--run", run, *others, "--json").json  # not even other settings are blocked
    for options, environment, _ in WRONG.values():
        assert fedup("train", "--run", run, *others, *options, **environment).code in (0, 1)
        assert ok("train", "--run", run, *others, "--json").json == before | {"already": True}


def test_a_folder_of_before_there_was_a_choice_of_precision_is_one_in_single_precision(tmp_path, monkeypatch):
    run, about = tmp_path / "run", Recipe.about
    with monkeypatch.context() as before:
        older = lambda recipe, data: {k: v for k, v in about(recipe, data).items() if k != "precision"}  # noqa: E731
        before.setattr(Recipe, "about", older)
        trained = ok("train", "--run", run, *SMALL, "--json").json
    assert "precision" not in Run(run).read().about
    assert ok("train", "--run", run, *SMALL, "--json").json == trained | {"already": True}
    assert fedup("train", "--run", run, *SMALL, "--precision", "bfloat16").code == 1

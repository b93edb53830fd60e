"""`fedup bench tune`: choices in a file, places that are done left alone, and clear refusals."""

import pytest
from tests.cli._in_process import fedup, ok

from fedup.bench.experiment import load_experiment
from fedup.bench.tuned import load_tuned

TOML = """
tuned = "chosen"
[[federations]]
data = "digits"
rows = 90
clients = 3
rounds = 1
[scenarios.class]
[scenarios.client]
[methods.finetune]
[methods.none]
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "equal.toml").write_text(TOML)
    return tmp_path / "equal.toml"


def test_choices_go_to_the_folder_and_from_there_into_the_experiment_and_only_what_is_missing_is_tuned(experiment):
    out = ok("bench", "tune", "all", experiment, "--only", "class").out
    (chosen,) = load_tuned(experiment.parent / "chosen" / "finetune.toml")
    assert f"digits-lenet5, class, finetune: rounds = {chosen.settings['rounds']} (score" in out
    (cell,) = load_experiment(experiment).cells([0], ["finetune", "class"])
    assert cell.method.settings.rounds == chosen.settings["rounds"]
    out = ok("bench", "tune", "finetune", experiment).out
    assert "digits-lenet5, client, finetune" in out and "digits-lenet5, class, finetune" not in out
    assert len(load_tuned(experiment.parent / "chosen" / "finetune.toml")) == 2


@pytest.mark.parametrize(
    ("method", "told"),
    [("nothing", "there is no 'nothing'"), ("none", "declares no GRID"), ("fused", "has no method fused")],
)
def test_a_method_that_cannot_be_tuned_is_refused_and_so_is_a_file_without_a_folder_for_choices(
    experiment, method, told
):
    ran = fedup("bench", "tune", method, experiment)
    assert ran.code in (1, 2)
    assert told in " ".join(ran.err.split())
    assert not (experiment.parent / "chosen").exists()
    experiment.write_text(TOML.replace('tuned = "chosen"', ""))
    ran = fedup("bench", "tune", "finetune", experiment)
    assert ran.code != 0 and "does not say where choices go" in " ".join(ran.err.split())

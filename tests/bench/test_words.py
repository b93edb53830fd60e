"""One line for each row, borne out by the result files."""

import pytest
from tests.bench._made_up import TOML, MadeUp

from fedup.bench.experiment import load_experiment
from fedup.bench.summary import summarize
from fedup.bench.tuned import Tuned, save_tuned
from fedup.bench.verdicts import rows_in_words

MORE = 'tuned = "chosen"\n' + TOML + "[methods.finetune]\n"


@pytest.fixture
def lines(tmp_path):
    """Lines by method, of three seeds of a class request."""

    def make(did="it did so", **figures):
        made_up = MadeUp(tmp_path, MORE)
        for method, metrics in figures.items():
            for cell in made_up.experiment.cells(only=["class", method]):
                about = {"machine": {"processor": "p", "threads": 1, "torch": "2"}, "device": "cpu", "story": "S."}
                made_up.results.save(cell, {**about, "metrics": metrics, "about": {"did": did} if did else {}})
                made_up.put_timing(cell, metrics)
        experiment = load_experiment(tmp_path / "made_up.toml")
        (block,) = summarize(experiment, made_up.results)
        return {line.split(" ")[0].rstrip(":"): line for line in rows_in_words(experiment, block)}

    return make


BASE = {"r_a": 0.9, "f_a": 0.0, "time": 2.0, "bytes_all": 5_000_000, "storage_bytes": 1000}


def test_a_line_says_what_was_done_what_it_took_and_how_it_stands_beside_retrain(lines):
    line = lines(retrain={**BASE, "r_a": 0.95}, fedup=BASE)["fedup"]
    assert "it did so." in line and "It took 2.00 s, traffic of 5.0 MB, storage of 1.0 kB." in line
    assert "R-A 0.900 (Retrain 0.950), F-A 0.000 (Retrain 0.000)." in line


def test_where_fedup_loses_is_said_and_where_it_wins(lines):
    told = lines(retrain=BASE, fedup=BASE, none={**BASE, "r_a": 0.95, "time": 9.0})
    assert "FedUP loses to it on R-A. FedUP is better on time." in told["none"]
    assert "loses" not in told["fedup"]


def test_fewer_bytes_and_seconds_count_by_a_tenth_and_a_result_without_words_gets_no_line(lines):
    near, far = {**BASE, "bytes_all": 4_900_000}, {**BASE, "bytes_all": 4_000_000}
    assert "FedUP loses to it nowhere. FedUP is better nowhere." in lines(retrain=BASE, fedup=BASE, none=near)["none"]
    assert "FedUP loses to it on all bytes." in lines(retrain=BASE, fedup=BASE, none=far)["none"]
    assert lines(did=None, retrain=BASE, fedup=BASE, none=far) == {}


def test_what_could_be_chosen_is_told_with_who_chose_it(lines, tmp_path):
    assert "finetune (rounds = 3; not tuned): it did so." in lines(retrain=BASE, finetune=BASE)["finetune"]
    choice = Tuned("mnist-lenet5", "class", {"rounds": 5}, {}, [], {})
    save_tuned(tmp_path / "chosen" / "finetune.toml", "finetune", "made_up", [choice])
    assert "finetune (rounds = 5; tuned): it did so." in lines(retrain=BASE, finetune=BASE)["finetune"]


def test_a_line_says_what_outputs_still_tell_of_forgotten_rows(lines):
    goal = {**BASE, "mia_learned": 0.55, "forget_loss": 11.0, "tv": 0.0}
    line = lines(retrain=goal, fedup={**BASE, "mia_learned": 0.64, "forget_loss": 5.0, "tv": 0.4})["fedup"]
    assert "TV to Retrain 0.400, loss, forgotten 5.000 (Retrain 11.000), MIA, paper 0.640 (Retrain 0.550)." in line

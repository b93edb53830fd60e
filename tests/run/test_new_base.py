"""A new base in place of the served one: trained on, or trained anew without what was forgotten."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli._in_process import QUICK, contents, copy_of, fedup, ok, refused, sample_ids

from fedup import Forget
from fedup.cli._session import Session
from fedup.errors import ArtifactError, BusyError
from fedup.models.views import fingerprint
from fedup.request import union
from fedup.run.folder import Run
from fedup.run.ledger import ledger_of
from fedup.run.lock import held
from fedup.run.training_files import LOCK, checkpoint, training
from fedup.statistics.store_file import load_centroids
from fedup.training.fedavg import Runtime
from fedup.training.local import LocalTraining

ANY = ("--force", "--max-class-loss", 100)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a class, a client and samples in force; nobody changes it."""
    return copy_of("answered", tmp_path_factory.mktemp("answered"))


def _copy(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, place / "run"))


def _state(run: Path) -> Any:
    return Run(run).read()


def _trained_without(run: Path, forget: Forget, rounds: range, start: torch.nn.Module | None = None) -> str:
    """The fingerprint of the recipe's own training on what is left, without a folder."""
    session = Session(run)
    state, federation = session.run.read(), session.recipe.federation(session.dataset)
    start = start or session.recipe.blank_model(state.about["input_shape"], len(state.about["class_names"]))
    trained = session.recipe.train(start, federation.without(forget), rounds=rounds, runtime=Runtime("cpu", threads=1))
    return fingerprint(trained.model)


def test_a_retrained_model_is_bit_for_bit_the_recipes_own_training_without_all_requests(answered, tmp_path):
    run = _copy(answered, tmp_path)
    before, forgets = _state(run), [request.forget for request in _state(run).requests]
    expected = _trained_without(run, union(forgets), range(10))
    planned, untouched = ok("retrain", "--run", run, "--dry-run", "--json").json, contents(run)
    assert (planned["requests"], planned["rounds"], planned["rounds_done"]) == (["R1", "R2", "R3"], 10, 0)
    assert contents(run) == untouched == contents(answered)
    done = ok("retrain", "--run", run, *ANY, "--threads", 1, "--json").json
    state = _state(run)
    assert done["base"] == state.base == expected != before.base
    # One event: model, and nothing of filter or statistics; what was sealed is in no file.
    assert [event.kind for event in state.events[len(before.events) :]] == ["retrained"]
    assert [path.name for path in (run / "files").iterdir()] == [state.model.name]
    assert not (run / "training").exists()
    assert {request.status for request in state.requests} == {"finished"}
    assert not state.active and state.collected is None and state.generation == 2
    for name in ("R1", "R2", "R3"):
        refused("restore", name, "--run", run, told="is finished")
    # The base serves as it is, and every page says what the weights hold.
    session = Session(run)
    _, served = session.answering()
    assert fingerprint(served) == expected
    assert "R1, R2, R3: not in the weights: trained without it" in ok("status", "--run", run).out
    ok("evidence", "R1", "--run", run)
    page, data = ((run / "evidence" / f"R1.{kind}").read_text() for kind in ("html", "json"))
    evidence = json.loads(data)
    assert "not in the weights: trained without it" in page and "the weights still hold it" not in page
    assert evidence["base"]["fingerprint"] == before.base and evidence["base"]["generation"] == 1
    assert evidence["base"]["served_now"] == {"fingerprint": expected, "generation": 2}
    assert not any("weights have forgotten" in sentence for sentence in evidence["not_claimed"])
    # Nothing of finished requests comes back: not by a request, a collection or a later training.
    assert ok("unlearn", "--client", 2, "--run", run, "--json").json["already"][0]["finished"] is True
    refused("unlearn", "--samples", f"1:{sample_ids(1)[0]}", "--run", run, told="was not trained on")
    ok("collect", "--run", run)
    store = load_centroids(run / "files" / _state(run).centroids.name)
    assert store.how.ratio == 0.8  # as it was collected before
    assert not any(cell.client == 2 or cell.label == 7 for cell in store.cells)
    left = Session(run).federation
    assert len(left.forgotten(union(forgets))) == 0
    base = Session(run).served()[1].base
    expected = _trained_without(run, union(forgets), range(10, 12), base)
    assert ok("train", "--more-rounds", 2, "--run", run, *ANY, "--threads", 1, "--json").json["base"] == expected
    assert ok("verify", "--run", run, "--json").json["ok"] is True
    assert ok("retrain", "--run", run, "--json").json["requests"] == []  # nothing in force: nothing to do


def test_training_goes_on_without_what_is_in_force_and_its_requests_follow_in_one_event(answered, tmp_path):
    run = _copy(answered, tmp_path)
    before, forgets = _state(run), union(request.forget for request in _state(run).requests)
    expected = _trained_without(run, forgets, range(10, 13), Session(run).served()[1].base)
    done = ok("train", "--more-rounds", 3, "--run", run, *ANY, "--threads", 1, "--json").json
    state = _state(run)
    assert done["base"] == state.base == expected
    assert [event.kind for event in state.events[len(before.events) :]] == ["continued"]
    assert (state.generation, state.rounds, done["followed"]) == (2, 13, ["R1", "R2", "R3"])
    assert state.forgets == before.forgets and state.filter != before.filter
    served = Session(run).served()[1]
    assert served.served.base == expected and served.requests == state.forgets
    # Statistics of what was forgotten were not stored anew, and samples are left out of theirs.
    store = load_centroids(run / "files" / state.centroids.name)
    assert store.base == expected and store.how == load_centroids(answered / "files" / before.centroids.name).how
    forgotten = [cell for cell in store.cells if cell.client == 2 or cell.label == 7]
    assert forgotten and all(cell.name in store.purged for cell in forgotten)
    assert ok("verify", "--run", run, "--json").json["ok"] is True
    # Pages say which base they hold for; the same holds for a request taken back, which asks clients.
    ok("evidence", "R2", "--run", run)
    evidence = json.loads((run / "evidence" / "R2.json").read_text())
    assert evidence["base"]["generation"] == 2 and evidence["base"]["fingerprint"] == expected
    assert evidence["request"]["asked_at"] == before.request("R2").asked_in.at < evidence["request"]["answered_at"]
    assert evidence["weights"] == "suppressed; the weights still hold it"
    ok("restore", "R1", "--run", run, *ANY)
    ok("restore", "--all", "--run", run)
    assert fingerprint(Session(run).answering()[1]) == expected
    # The recipe's own length is known: a training anew has as many rounds.
    ok("unlearn", "--client", 2, "--run", run, *QUICK)
    anew = _trained_without(run, Forget.clients([2]), range(13))
    assert ok("retrain", "--run", run, *ANY, "--threads", 1, "--json").json["base"] == anew


def test_a_request_that_comes_in_while_rounds_are_added_stops_the_swap_and_nothing_is_lost(answered, tmp_path):
    run = _copy(answered, tmp_path)
    before = _state(run)
    with _meanwhile(("unlearn", "--class", 3, "--run", run, *QUICK), 11):
        stopped = fedup("train", "--more-rounds", 2, "--run", run, *ANY)
    assert stopped.code == 1 and "came in: the new model was made for other requests" in stopped.told
    state = _state(run)
    assert state.base == before.base and state.events[-1].kind == "unlearned"
    assert len(state.active) == len(before.active) + 1
    assert ok("verify", "--run", run, "--json").json["ok"] is True
    ok("restore", state.active[-1].id, "--run", run, *ANY)
    assert not (run / "training").exists()  # rounds that nothing goes on from


def test_requests_that_keep_coming_in_cannot_delay_a_retraining_and_are_answered_from_the_new_base(answered, tmp_path):
    run = _copy(answered, tmp_path)
    before = _state(run)
    expected = _trained_without(run, before.left_out, range(10))
    others = ("unlearn", "--class", 3, "--run", run, *QUICK), ("unlearn", "--client", 0, "--run", run, *QUICK)
    with _meanwhile(others[0], 1), _meanwhile(others[1], 9):
        done = ok("retrain", "--run", run, *ANY, "--threads", 1, "--json").json
    state = _state(run)
    assert (done["requests"], done["followed"], done["base"]) == (["R1", "R2", "R3"], ["R4", "R5"], expected)
    assert [request.status for request in state.requests] == [*["finished"] * 3, *["in force"] * 2]
    assert state.base == expected and state.rounds == before.rounds
    assert [event.kind for event in state.events[len(before.events) :]] == ["unlearned", "unlearned", "continued"]
    served = Session(run).served()[1]  # never without the filter for those whose rows it was trained on
    assert served.requests == state.forgets == frozenset([Forget.classes([3]), Forget.clients([0])])
    store = load_centroids(run / "files" / state.centroids.name)
    assert store.base == expected and not any(cell.client == 2 or cell.label == 7 for cell in store.cells)
    held = {cell.name for cell in store.cells if store.rows_in(cell)}
    assert not any(client == 0 or label == 3 for client, label in held)  # what they forget was not stored anew
    assert ok("verify", "--run", run, "--json").json["ok"] is True
    status = ok("status", "--run", run).out
    assert "R1, R2, R3: not in the weights" in status and "R4, R5: suppressed; the weights still hold it" in status
    for name, words in {"R1": "not in the weights: trained without it", "R4": "the weights still hold it"}.items():
        ok("evidence", name, "--run", run)
        assert words in (run / "evidence" / f"{name}.html").read_text()
    both = _trained_without(run, state.left_out | before.left_out, range(10))
    assert ok("retrain", "--run", run, *ANY, "--threads", 1, "--json").json["base"] == both
    assert {request.status for request in _state(run).requests} == {"finished"}


def test_rounds_that_were_put_in_place_before_a_kill_are_not_trained_again_after_another_command(answered, tmp_path):
    run = _copy(answered, tmp_path)
    place = checkpoint(run, _state(run), "continue")
    ok("train", "--more-rounds", 1, "--run", run, *ANY)
    place.parent.mkdir()  # as after a kill between the event and the end of the command
    place.touch()
    ok("unlearn", "--class", 3, "--run", run, *QUICK)
    said = ok("train", "--more-rounds", 1, "--run", run, *ANY)
    assert "trained before" in said.err and _state(run).rounds == 11 and not place.exists()
    ok("train", "--more-rounds", 1, "--run", run, *ANY)
    assert _state(run).rounds == 12


def test_a_request_taken_back_while_the_model_is_trained_anew_stops_it(answered, tmp_path):
    run = _copy(answered, tmp_path)
    with _meanwhile(("restore", "R1", "--run", run, *ANY), 1):
        stopped = fedup("retrain", "--run", run, *ANY)
    assert stopped.code == 1 and "R1 is taken back" in stopped.told
    assert [request.status for request in _state(run).requests] == ["taken back", "in force", "in force"]


@contextmanager
def _meanwhile(words: tuple[Any, ...], at: int) -> Iterator[None]:
    """In that round of a training a command runs, as another process would run it."""
    original = LocalTraining.in_round
    done: list[int] = []

    def in_round(self: LocalTraining, number: int) -> LocalTraining:
        if number == at and not done:
            done.append(number)
            ok(*words)
        return original(self, number)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalTraining, "in_round", in_round)
        yield


def test_a_worse_model_is_declined_its_rounds_are_kept_and_only_one_trains_at_a_time(answered, tmp_path):
    run = _copy(answered, tmp_path)
    files = contents(run / "files")
    said = fedup("retrain", "--run", run, "--max-loss", 0, "--max-class-loss", 0, "--json")
    assert said.code == 1 and "are allowed" in said.json["declined"]
    assert contents(run / "files") == files and _state(run).events[-1].kind == "declined"
    assert "10 rounds done beside the served base, interrupted; `fedup retrain` goes on" in ok(
        "status", "--run", run
    ).out.replace("\n            ", "")
    assert ok("retrain", "--run", run, "--dry-run", "--json").json["rounds_done"] == 10
    with held(run / LOCK, "retrain"), pytest.raises(BusyError, match="fedup retrain"), training(run, "train", wait_s=0):
        raise AssertionError("two at once")
    kept = checkpoint(run, _state(run), "retrain").read_bytes()
    ok("unlearn", "--class", 3, "--run", run, *QUICK)  # its rounds are of no use any more
    assert not (run / "training").exists()
    ok("restore", "R4", "--run", run, *ANY)
    place = checkpoint(run, _state(run), "retrain")
    place.parent.mkdir()
    place.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))  # damaged: nothing of it is used
    with pytest.raises(ArtifactError):
        Session(run).recipe.train(
            Session(run).blank(_state(run)), Session(run).federation, runtime=Runtime(checkpoint=place)
        )
    place.write_bytes(kept)
    done = ok("retrain", "--run", run, *ANY, "--json")
    assert "round 1 of 10" not in done.err and done.json["generation"] == 2


def test_charges_survive_a_new_base_and_a_budget_refuses_before_the_first_round(tmp_path):
    run = copy_of("private", tmp_path)
    ok("unlearn", "--client", 2, "--run", run, *QUICK)
    before = ledger_of(_state(run)).charges
    ok("train", "--more-rounds", 1, "--run", run, *ANY)
    spent = ledger_of(_state(run)).charges
    assert [charge.client for charge in spent[len(before) :]] == [0, 1, 2, 3]  # the same guarantee, charged again
    assert ok("verify", "--run", run, "--json").json["ok"] is True
    ok("budget", "--epsilon", 13, "--run", run)
    said = refused("train", "--more-rounds", 1, "--run", run, told="has spent")
    assert "round 1" not in said.err
    ok("retrain", "--run", run, *ANY)
    assert ledger_of(_state(run)).charges == spent
    refused("collect", "--run", run, told="has spent")  # by the settings before, under the budget
    ok("budget", "--epsilon", 30, "--run", run)
    ok("collect", "--run", run)
    charged = [charge.client for charge in ledger_of(_state(run)).charges[len(spent) :]]
    assert charged == [0, 1, 3]  # never again the client that the model was trained without
    assert ok("verify", "--run", run, "--json").json["ok"] is True


def test_folders_without_anything_to_train_are_refused(tmp_path):
    exact, unfinished = tmp_path / "exact", copy_of("trained", tmp_path / "trained")
    ok("train", "--backbone", "random_conv", "--rows", 300, "--clients", 3, "--run", exact)
    for words in (("retrain",), ("train", "--more-rounds", 1)):
        before = contents(exact)
        refused(*words, "--run", exact, told="nothing to")
        assert contents(exact) == before
    assert fedup("train", "--more-rounds", 1, "--lr", 0.1, "--run", unfinished).code == 2
    assert ok("train", "--more-rounds", 1, "--run", unfinished, "--json").json["collected"] is False
    assert _state(unfinished).generation == 2 and _state(unfinished).centroids is None


def test_rounds_in_two_parts_give_the_bits_of_one_training(tmp_path):
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    for run, rounds in ((parts, 2), (whole, 4)):
        ok("train", "--rows", 300, "--clients", 3, "--clients-per-round", 2, "--rounds", rounds, "--run", run)
    ok("train", "--more-rounds", 2, "--run", parts)
    assert _state(parts).base == _state(whole).base

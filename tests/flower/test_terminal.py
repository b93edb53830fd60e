"""The folder of a server app at the terminal: it answers inputs, and a restoration that needs nodes is queued."""

import json
import resource
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cli._in_process import contents, fedup, ok, refused
from tests.flower._grid import FIRST, digits
from tests.flower.test_queue import ANY, QUEUED, Setting, killed
from tests.run._forked import check_sound, copy, run

from fedup import Forget, MomentConfig
from fedup.cli._session import Session
from fedup.errors import RequestError
from fedup.run.folder import Run
from fedup.run.limits import Limits


@pytest.fixture(scope="session")
def answered(world, tmp_path_factory) -> Path:
    """A class and samples of two clients are in force."""
    setting = Setting(world, tmp_path_factory.mktemp("terminal") / "run")
    setting.server().collect(setting.contact(), statistics=MomentConfig(by_class="always"))
    setting.unlearn("--class", 3, "--reference", "T-1")
    for client in (1, 2):
        setting.unlearn(*setting.samples(client), "--reference", f"T-{client + 1}", code=3)
    assert [status for _, status in setting.serve()] == ["answered", "answered"]
    return setting.path


@pytest.fixture
def setting(world, answered, tmp_path) -> Setting:
    return Setting(world, copy(answered, tmp_path / "run"))


def test_rows_as_the_nodes_prepare_them_are_answered_under_the_filter_in_force(setting, world, tmp_path):
    rows, before = world.test_x[:6].numpy(), contents(setting.path)
    np.save(tmp_path / "rows.npy", rows)
    np.savez(tmp_path / "rows.npz", x=rows)
    (tmp_path / "misnamed.npz").write_bytes((tmp_path / "rows.npy").read_bytes())
    model = Session(setting.path).answering()[1]
    with torch.no_grad():
        expected = model(world.test_x[:6]).argmax(1).tolist()
    by_name = "--model", "tests.flower._grid:World.blank"
    for name, more in (("rows.npy", ()), ("misnamed.npz", ()), ("rows.npz", by_name)):
        said = ok("predict", tmp_path / name, "--run", setting.path, "--json", *more).out.splitlines()
        assert [answer["class"] for answer in map(json.loads, said)] == expected and 3 not in expected
        assert {json.loads(answer)["filter"] for answer in said} == {setting.server().state.filter.id}
    np.save(tmp_path / "wrong.npy", rows[:, :, :5])
    (tmp_path / "damaged.npz").write_bytes(b"PK no archive")
    (tmp_path / "digit.png").write_bytes(b"no array")
    told = {"wrong.npy": "takes rows of shape", "damaged.npz": "cannot be read", "digit.png": ".npy"}
    for name, words in told.items():
        refused("predict", tmp_path / name, "--run", setting.path, told=words)
    refused("predict", tmp_path / "rows.npy", "--run", setting.path, "--model", "nowhere:make", told="cannot be made")
    assert contents(setting.path) == before


def test_a_restoration_that_needs_nodes_is_queued_and_the_request_stays_in_force_until_the_server_has_done_it(
    setting, world, answered, tmp_path
):
    before = setting.server().state
    back = ("restore", "T-2", *ANY, "--run", setting.path)
    said = fedup(*back, "--json")
    assert said.code == QUEUED and said.json["queued"] == ["R2"]
    assert fedup(*back).code == QUEUED  # it is not queued twice
    state = setting.server().state
    assert len(state.events) == len(before.events) + 1 and state.filter == before.filter
    assert state.forgets == before.forgets and [own.id for own in state.returning] == ["R2"]
    assert "To be taken back R2" in ok("status", "--run", setting.path).out
    (served,) = setting.server().answer_queued(setting.contact(model=world.blank()))
    assert served.status == "postponed" and "another base" in setting.status()["returning"][0]["postponed"]
    assert setting.server().state.filter == before.filter
    with pytest.raises(RequestError, match="R2 is to be taken back"):  # no model without its rows is put in place
        setting.server().put_retrained(world.model, before)
    with pytest.raises(RequestError, match="R2 is to be taken back"):  # nor is it finished for good
        setting.server().put_retrained(world.model, setting.server().state)
    assert setting.serve() == [("R2", "restored")]
    assert [own.status for own in setting.server().state.requests] == ["in force", "taken back", "in force"]
    check_sound(setting.path)
    other = Setting(world, copy(answered, tmp_path / "other"))
    with other.server().desk("restore", other.contact(), None) as desk:
        desk.restore([desk.writer.state.request("R2")], limits=Limits(None, force=True, max_class_loss=100))
    assert setting.server().state.filter == other.server().state.filter  # by its hash
    ok("restore", "--all", "--run", setting.path)
    assert not setting.server().state.returning


def test_a_restoration_that_would_cost_more_than_allowed_is_refused_by_the_server_and_the_request_stays(setting):
    served = setting.server().state.filter
    assert fedup("restore", "T-2", "--run", setting.path).code == QUEUED
    measured = {name: {"validation": {"retain": value}} for name, value in (("original", 0.9), ("forgotten", 0.8))}
    judge = lambda plugged, requests: {**measured, "restored": {}, "restored_bit_identical": True}  # noqa: E731
    (answer,) = setting.server().answer_queued(setting.contact(), judge=judge)
    assert (answer.id, answer.status) == ("R2", "not restored")
    state = setting.server().state
    assert (state.filter, state.returning, len(state.active)) == (served, (), 3)
    assert "points" in state.request("R2").postponed
    check_sound(setting.path)


def test_requests_that_together_leave_nobody_are_refused_and_nothing_changes(setting):
    for client in range(3):
        assert fedup("unlearn", "--client", client, *ANY, "--run", setting.path).code in (0, QUEUED)
    before = contents(setting.path)
    refused("unlearn", "--client", 3, *ANY, "--run", setting.path, told="leaves no client")
    assert contents(setting.path) == before


@pytest.mark.parametrize("step", ["answer", "restore", "train_on", "put_retrained"])
@pytest.mark.parametrize("limit_bytes", [0, 20_000])
def test_a_full_disk_in_the_middle_of_a_step_leaves_the_folder_as_it_was_and_the_step_can_be_done_again(
    setting, step, limit_bytes
):
    later, server = digits(1).model, setting.server()
    if step == "answer":
        setting.unlearn(*setting.samples(0), code=QUEUED)
    if step == "restore":
        assert fedup("restore", "T-2", *ANY, "--run", setting.path).code == QUEUED
    before, fresh = server.state, setting.contact(model=later)
    new = {"rounds": 1, "limits": Limits(None, force=True), "statistics": MomentConfig(by_class="always")}
    work = {
        "answer": setting.serve,
        "restore": setting.serve,
        "train_on": lambda: server.train_on(later, fresh, before, **new),
        "put_retrained": lambda: server.put_retrained(later, before),
    }[step]

    def on_a_full_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        work()
        raise SystemExit(0)

    ended = run("status", prepare=on_a_full_disk)
    state = server.state
    assert (state.base, state.files, state.forgets) == (before.base, before.files, before.forgets)
    if ended.code:  # else there was room to note that it is postponed
        assert "what was there before is untouched" in ended.err.lower()
    check_sound(setting.path)
    assert work() not in ([], None)
    assert (server.state.base, server.state.files) != (before.base, before.files)
    check_sound(setting.path)


@pytest.mark.parametrize("each", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", ["restore", "finish and follow"])
def test_a_server_killed_at_any_step_has_done_nothing_or_all(setting, tmp_path, step, each):
    later, before = digits(1).model, setting.server().state
    if step == "restore":
        assert fedup("restore", "T-2", *ANY, "--run", setting.path).code == QUEUED
    else:
        limits = Limits(None, force=True, max_class_loss=100)
        setting.server().unlearn(
            Forget.classes([5]), setting.contact(), limits=limits
        )  # came in while a model was trained anew

    def work(path: Path) -> None:
        own = Setting(setting.world, path)
        if step == "restore":
            own.serve()
            return
        leaving = [own.world.rows(client)[30:] for client in (1, 2)]  # operators have taken rows out
        for client, rows in zip((1, 2), leaving, strict=True):
            data = own.world.federation.x[rows], own.world.federation.y[rows]
            ids = rows.tolist()
            own.grid.apps[FIRST + client] = own.world.app(client, data=lambda _, d=data: d, ids=lambda _, i=ids: i)
        how = {"limits": Limits(None, force=True), "statistics": MomentConfig(by_class="always")}
        assert own.server().put_retrained(later, before, own.contact(model=later), **how).declined is None

    def seen(path: Path) -> tuple:
        state = Run(path).read()
        return state.generation, state.filter, [own.status for own in state.requests]

    work(undisturbed := copy(setting.path, tmp_path / "undisturbed"))
    start, after, kills = seen(setting.path), seen(undisturbed), 0
    for point in range(1, 400, each):
        path = copy(setting.path, tmp_path / f"run-{point}")
        if not killed(path, point, partial(work, path)):
            break
        kills += 1
        check_sound(copy(path, tmp_path / f"seen-{point}"))
        assert seen(path) in (start, after)
        if seen(path) == start:
            work(path)
            assert seen(path) == after
    assert kills > 1 and start != after

"""Requests at the terminal for a Flower federation: answered there, or queued in the folder for its server."""

import json
import signal
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from tests.cli._in_process import fedup, ok, refused
from tests.flower._contact import refused as not_on_sundays
from tests.flower._contact import spoiling, untouched
from tests.flower._grid import FIRST, LocalGrid, World, digits
from tests.run._forked import Child, check_sound, copy, run, signalled_at, succeed

from fedup import Forget, MomentConfig
from fedup.errors import DataError, RequestError
from fedup.flower import GridContact, RunServer, leave_out, retained_rows
from fedup.flower.left_out import RECORD
from fedup.run.folder import Run
from fedup.run.limits import Limits
from fedup.run.queue import in_service
from fedup.subjects import SubjectKey

ANY = ("--force", "--max-class-loss", "100")  # so few rows: any client costs some class most of its rows
QUEUED = 3  # exit status


@dataclass
class Setting:
    """Nodes, and the folder of a server app that has trained and collected."""

    world: World
    path: Path
    grid: LocalGrid = field(init=False)

    def __post_init__(self) -> None:
        self.grid = self.world.grid()

    def contact(self, **settings) -> GridContact:
        return self.world.contact(self.grid, **{"timeout_s": 0.1, "retries": 0, **settings})

    def server(self) -> RunServer:
        server = RunServer(self.path, self.world.blank)
        server.keep(self.world.model)
        return server

    def samples(self, client: int, rows: int = 30) -> tuple[str, str]:
        return "--samples", f"{client}:{','.join(map(str, self.world.rows(client)[:rows].tolist()))}"

    def unlearn(self, *what, code: int = 0):
        ran = fedup("unlearn", *what, *ANY, "--run", self.path, "--json")
        assert ran.code == code, ran
        return ran.json

    def status(self) -> dict:
        return ok("status", "--run", self.path, "--json").json

    def serve(self, **settings) -> list[tuple[str, str]]:
        return [(own.id, own.status) for own in self.server().answer_queued(self.contact(**settings))]


@pytest.fixture(scope="session")
def collected(world, tmp_path_factory) -> Path:
    setting = Setting(world, tmp_path_factory.mktemp("queue") / "run")
    setting.server().collect(setting.contact(), statistics=MomentConfig(by_class="always"))
    return setting.path


@pytest.fixture
def setting(world, collected, tmp_path) -> Setting:
    return Setting(world, copy(collected, tmp_path / "run"))


def test_what_needs_no_client_is_answered_at_the_terminal_and_the_rest_by_the_server_as_if_it_had_been_asked(
    setting, world, collected, tmp_path
):
    at_once = setting.unlearn("--class", 3, "--reference", "T-1")
    assert (at_once["requests"][0]["id"], at_once["queued"]) == ("R1", [])
    queued = setting.unlearn(*setting.samples(2), "--reference", "T-2", code=QUEUED)
    assert [own["id"] for own in queued["queued"]] == ["R2"]
    assert setting.grid.sent == []  # nobody was asked anything
    assert setting.status()["queued"] == [{"id": "R2", "postponed": None}]
    assert Run(setting.path).read().left_out.sample_ids == world.samples(c2=30).sample_ids
    before = Run(setting.path).read().head
    assert setting.unlearn(*setting.samples(2))["already"][0]["queued"]  # it is not queued twice
    assert Run(setting.path).read().head == before
    assert setting.serve() == [("R2", "answered")]
    state = Run(setting.path).read()
    assert [(own.id, own.reference) for own in state.active] == [("R1", "T-1"), ("R2", "T-2")]

    other = Setting(world, copy(collected, tmp_path / "other"))
    limits = Limits(None, force=True, max_class_loss=100)
    other.server().unlearn(Forget.classes([3]), other.contact(), limits=limits)
    other.server().unlearn(world.samples(c2=30), other.contact(), limits=limits)
    assert state.filter == Run(other.path).read().filter  # by its hash
    assert ok("verify", "--run", setting.path).out.rstrip().endswith("The folder is sound.")  # the model was found, too
    ok("evidence", "T-2", "--run", setting.path)
    ok("restore", "--all", "--run", setting.path)
    assert Run(setting.path).read().filter is None


def test_a_request_is_postponed_while_its_node_refuses_and_nobody_else_waits_for_it(setting):
    setting.unlearn(*setting.samples(2), code=QUEUED)
    setting.unlearn(*setting.samples(1), code=QUEUED)
    setting.grid.spoil = spoiling(not_on_sundays, FIRST + 2, "labels")
    assert setting.serve() == [("R1", "postponed"), ("R2", "answered")]
    (queued,) = setting.status()["queued"]
    assert queued["id"] == "R1" and "not on Sundays" in queued["postponed"]
    events = len(Run(setting.path).read().events)
    assert setting.serve() == [("R1", "postponed")]
    assert len(Run(setting.path).read().events) == events  # the same reason is not written again
    setting.grid.spoil = untouched
    assert setting.serve() == [("R1", "answered")]
    check_sound(setting.path)


def test_others_write_while_nodes_answer_and_what_they_change_is_part_of_the_answer(
    setting, world, collected, tmp_path
):
    # Real processes: the server waits for nodes, and the operator answers, cancels and looks meanwhile.
    setting.unlearn(*setting.samples(2), code=QUEUED)
    setting.unlearn(*setting.samples(1), code=QUEUED)
    state, meanwhile = {}, iter([("unlearn", "--class", "3", *ANY), ("restore", "R2")])

    def operator(node, reply):
        if (words := next(meanwhile, None)) is not None:
            assert Run(setting.path).holder is None
            state.update(in_service(Run(setting.path)))
            succeed(*words, "--run", setting.path, "--wait", "0")
            assert json.loads(succeed("status", "--run", setting.path, "--json").out)["in_service"] == state
        return reply

    setting.grid.spoil = operator
    assert setting.serve() == [("R1", "answered"), ("R2", "withdrawn")]
    assert state["request"] == "R1"
    assert [own.id for own in Run(setting.path).read().active] == ["R1", "R3"]
    together = Setting(world, copy(collected, tmp_path / "together"))
    together.unlearn("--class", 3)
    together.unlearn(*together.samples(2), code=QUEUED)
    together.serve()
    assert Run(setting.path).read().filter == Run(together.path).read().filter  # nothing stale is in it
    check_sound(setting.path)


def test_a_request_that_is_cancelled_while_nodes_answer_gets_no_filter(setting):
    setting.unlearn(*setting.samples(2), code=QUEUED)
    cancelled = iter([True])

    def cancel(node, reply):
        if next(cancelled, False):
            succeed("restore", "R1", "--run", setting.path, "--wait", "0")
        return reply

    setting.grid.spoil = cancel
    assert setting.serve() == [("R1", "withdrawn")]
    state = Run(setting.path).read()
    assert (state.filter, state.active, state.queued) == (None, (), ())
    assert not state.left_out.kind
    check_sound(setting.path)


def test_a_server_that_only_waits_locks_nothing(setting):
    looks = 0

    def until() -> bool:
        nonlocal looks
        looks += 1
        assert Run(setting.path).holder is None
        if looks == 3:
            setting.unlearn(*setting.samples(2), code=QUEUED)
        return looks > 6

    held = Child("unlearn", "--class", "3", *ANY, "--run", setting.path)  # and opening it beside a writer does not wait
    server, contact = setting.server(), setting.contact()
    server.collect(contact)
    assert held.wait().code == 0
    assert [own.status for own in server.serve_queue(contact, until=until, poll_s=0.001)] == ["answered"]


def person_of(world: World, client: int) -> list[str]:
    """Whose each training row of a client is."""
    return [f"P-{row % 7}" for row in world.rows(client).tolist()]


def test_what_cannot_be_answered_is_refused_with_a_reason_and_changes_nothing_else(setting, world, tmp_path):
    key = SubjectKey.new()
    key.save(tmp_path / "key")
    persons = {"subjects": lambda context: person_of(world, context.node_config["partition-id"]), "subject_key": key}
    setting.grid = world.grid(**persons)
    before = Run(setting.path).read().head
    for what, words in {
        ("--client", 9): "Unknown client [9]",
        ("--class", 77): "Unknown class",
        ("--samples", "9:1"): "Unknown client [9]",
        ("--subject", "P-1"): "--subject-key",
        ("--class", 3, "--model", "nowhere.at.all:make"): "cannot be made here",
    }.items():
        refused("unlearn", *what, *ANY, "--run", setting.path, told=words)
    assert Run(setting.path).read().head == before
    by_key = ("--subject-key", tmp_path / "key")
    for person in ("nobody", "P-1"):  # nodes alone know persons
        setting.unlearn("--subject", person, *by_key, code=QUEUED)
    setting.unlearn(*setting.samples(1), code=QUEUED)
    again = (*setting.samples(1), "--reason", "poison", *ANY)
    refused("unlearn", *again, "--run", setting.path, told="Take R3 back first")
    setting.unlearn("--samples", "2:999999", code=QUEUED)  # a row that its node does not have, or not any more
    assert setting.serve() == [("R1", "refused"), ("R2", "answered"), ("R3", "answered"), ("R4", "postponed")]
    status = setting.status()
    assert (status["in_force"], [own["id"] for own in status["refused"]]) == (["R2", "R3"], ["R1"])
    assert "no client" in status["refused"][0]["why"] and "999999" in status["queued"][0]["postponed"]
    rows = [person for client in range(4) for person in person_of(world, client)].count("P-1")
    assert sum(map(len, Run(setting.path).read().request("R2").forget.sample_ids.values())) == rows > 1
    check_sound(setting.path)
    for name in ("R1", "R2", "R4"):
        ok("evidence", name, "--run", setting.path)
    ok("restore", "R4", "R1", "--run", setting.path)  # cancelled; what was refused is left alone
    assert setting.status()["queued"] == []


def test_a_server_of_another_base_answers_nothing_from_the_queue(setting, world):
    setting.unlearn(*setting.samples(2), code=QUEUED)
    contact = setting.contact(model=world.blank())
    (served,) = setting.server().answer_queued(contact)
    assert served.status == "postponed" and "another base" in served.why
    assert setting.grid.asked("summarize", "integer moments", "sketch") == []


def killed(path: Path, point: int, work: Callable[[], object]) -> bool:
    """Whether a process that does this was killed at that step; if not, it came to its end before."""

    def prepare() -> None:
        signalled_at(path, point, signal.SIGKILL)()
        work()
        raise SystemExit(0)

    ended = run("status", prepare=prepare)
    assert ended.code in (0, -signal.SIGKILL), ended
    return ended.code != 0


@pytest.mark.parametrize("each", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("anew", [False, True], ids=["train_on", "put_retrained"])
def test_a_server_killed_at_any_step_of_a_new_base_serves_the_old_one_or_wholly_the_new_one(
    setting, tmp_path, each, anew
):
    setting.unlearn("--class", 3, "--reference", "T-1")
    model, new = digits(1).model, {"rounds": 2, "limits": Limits(None, force=True, max_class_loss=100)}

    def put(path: Path) -> None:
        own = Setting(setting.world, path)
        if anew:
            own.server().put_retrained(model, own.server().state)
            return
        contact, statistics = own.contact(model=model), MomentConfig(by_class="always")
        assert own.server().train_on(model, contact, own.server().state, statistics=statistics, **new).declined is None

    def seen(path: Path) -> tuple:
        state = Run(path).read()
        return state.generation, state.filter, [own.status for own in state.requests], state.centroids is None

    put(undisturbed := copy(setting.path, tmp_path / "undisturbed"))
    before, after, kills = seen(setting.path), seen(undisturbed), 0
    assert before != after
    for point in range(1, 400, each):
        path = copy(setting.path, tmp_path / f"run-{point}")
        if not killed(path, point, partial(put, path)):
            break
        kills += 1
        check_sound(copy(path, tmp_path / f"seen-{point}"))
        assert seen(path) in (before, after)
        if seen(path) == before:
            put(path)
            assert seen(path) == after
    assert kills > 1


@pytest.mark.parametrize("each", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_a_server_killed_at_any_step_leaves_a_request_queued_or_wholly_answered(setting, tmp_path, each):
    setting.unlearn(*setting.samples(2), code=QUEUED)

    expected = Setting(setting.world, copy(setting.path, tmp_path / "undisturbed"))
    expected.serve()
    filter_expected, kills = Run(expected.path).read().filter, 0
    for point in range(1, 200, each):
        path = copy(setting.path, tmp_path / f"run-{point}")
        if not killed(path, point, Setting(setting.world, path).serve):
            break
        kills += 1
        state = Run(path).read()
        assert bool(state.queued) != bool(state.active), state.requests
        check_sound(copy(path, tmp_path / f"seen-{point}"))
        Setting(setting.world, path).serve()
        assert Run(path).read().filter == filter_expected
    assert kills > 1


def test_forgotten_clients_rows_and_persons_are_left_out_of_later_rounds(setting, world, tmp_path):
    setting.unlearn("--class", 3, "--client", 1)
    setting.unlearn(*setting.samples(2), code=QUEUED)
    left_out, contact = setting.server().left_out, setting.contact()
    person = Forget.subjects(["P-1"], key=(key := SubjectKey.new()))  # whose rows no client has named yet
    strategy, sent = FedAvg(fraction_evaluate=0.0, min_available_nodes=4), {}
    leave_out(strategy, left_out | person, contact.nodes)
    for message in strategy.configure_train(1, ArrayRecord(world.model.state_dict()), ConfigRecord(), setting.grid):
        sent[message.metadata.dst_node_id - FIRST] = message
    assert sorted(sent) == [0, 2, 3]  # client 1 is not asked to train
    for client, message in sent.items():
        ids = world.rows(client).tolist()
        about = {"ids": ids, "labels": world.federation.y[world.rows(client)]}
        kept = retained_rows(message, **about, subjects=person_of(world, client), subject_key=key)
        forgotten = world.samples(c2=30).sample_ids[2] if client == 2 else ()
        expected = [
            row not in forgotten and label != 3 and owner != "P-1"
            for row, label, owner in zip(ids, about["labels"].tolist(), person_of(world, client), strict=True)
        ]
        assert kept.tolist() == expected
        with pytest.raises(DataError, match="whose its rows are"):
            retained_rows(message, **about)
        others = {row for own in range(4) if own != client for row in world.rows(own).tolist()}
        assert not others & set(message.content[RECORD]["samples"])  # nothing about other clients' rows


def test_a_new_base_expires_statistics_and_requests_follow_it_or_are_finished(setting, world):
    setting.unlearn("--class", 3, "--reference", "T-1")
    setting.unlearn(*setting.samples(2), code=QUEUED)
    server, before, moments = setting.server(), setting.server().state, MomentConfig(by_class="always")
    model, any_loss = digits(1).model, Limits(None, force=True, max_class_loss=100)
    new = {"rounds": 2, "limits": any_loss, "statistics": moments}
    with pytest.raises(RequestError, match="another model"):
        server.train_on(model, setting.contact(), before, **new)
    assert server.train_on(model, setting.contact(model=model), before, **new).declined is None
    state = server.state
    assert (state.generation, [own.reference for own in state.active]) == (2, ["T-1"])
    assert [own.status for own in server.answer_queued(setting.contact())] == ["postponed"]  # asks about the old base
    assert [own.status for own in server.answer_queued(setting.contact(model=model))] == ["answered"]
    check_sound(setting.path)
    before = server.state
    setting.unlearn(*setting.samples(1), "--reference", "T-3", code=QUEUED)  # while the model is trained anew
    server.put_retrained(world.model, before)
    assert [own.status for own in server.state.requests] == ["finished", "finished", "queued, no filter"]
    assert (server.state.centroids, server.state.filter) == (None, None)
    assert server.left_out.class_ids == {3}
    assert [own.status for own in server.answer_queued(setting.contact())] == ["postponed"]  # nothing is collected yet
    with pytest.raises(RequestError, match="Client 2 still has rows"):
        server.collect(setting.contact(), statistics=moments)
    rows = world.rows(2)[30:]  # its operator takes them out
    left = {
        "data": lambda context: (world.federation.x[rows], world.federation.y[rows]),
        "ids": lambda _: rows.tolist(),
    }
    setting.grid.apps[FIRST + 2] = world.app(2, **left)
    setting.grid.contexts[FIRST + 2].state = RecordDict()
    server.collect(setting.contact(), statistics=moments)
    contact, questions = setting.contact(), []
    asks = contact.ask
    contact.ask = lambda own, **how: questions.extend(own.values()) or asks(own, **how)
    assert [own.status for own in server.answer_queued(contact)] == ["answered"]
    groups = [question.groups for question in questions if hasattr(question, "groups")]
    assert groups and all(3 in own.forget_set.class_ids for own in groups)  # what is finished is nobody's comparison
    check_sound(setting.path)


def test_a_folder_of_another_version_is_refused_by_the_terminal_and_by_the_server(setting):
    setting.unlearn(*setting.samples(2), code=QUEUED)
    with sqlite3.connect(setting.path / "run.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    refused("unlearn", "--class", 3, "--run", setting.path, told="format 99")
    with pytest.raises(ValueError, match="format 99"):
        setting.server()

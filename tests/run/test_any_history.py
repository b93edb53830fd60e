"""Any history of a run folder: what is served depends on the requests in force alone, and refusals change nothing."""

import shutil
import signal
import tempfile
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.cli._in_process import QUICK, contents, copy_of, fedup, filter_file, ok, sample_ids, sha256
from tests.run._forked import run, signalled_at

from fedup import load_centroids
from fedup.cli._session import Session
from fedup.run.folder import Run
from fedup.run.ledger import ledger_of

POOR = ("--max-loss", 0, "--max-class-loss", 100, "--rank", 1, "--steps", 1)  # a filter that no limit lets pass
REFUSED = (
    ("unlearn", "--class", 99),
    ("unlearn", "--samples", "0:99999"),
    ("unlearn", "--class", 3, "--alpha", 2),
    ("unlearn", *(word for client in range(4) for word in ("--client", client))),  # leaves nothing to keep
    ("restore", "R99"),
    ("collect", "--ratio", 0.5),
    ("budget", "--epsilon", 1, "--client", 9),
    ("purge",),
)


@cache
def pool() -> list[tuple[str, ...]]:
    """Requests as options: clients, classes, samples, and mixtures."""
    ids = {client: sample_ids(client) for client in range(4)}
    return [
        ("--client", "0"),
        ("--class", "1"),
        ("--class", "7"),
        ("--samples", f"1:{ids[1][0]},{ids[1][1]}"),
        ("--samples", f"1:{ids[1][1]},{ids[1][20]},{ids[1][30]}"),  # shares a sample with the one above
        ("--samples", f"2:{','.join(map(str, ids[2][:12]))}"),  # a whole cell and more
        ("--samples", f"1:{','.join(map(str, ids[1][40:70]))}"),  # enough for an eraser
        ("--samples", f"3:{ids[3][5]}", "--samples", f"2:{ids[2][40]}"),
        ("--class", "2", "--samples", f"0:{ids[0][0]},{ids[0][30]}"),
        ("--client", "3", "--samples", f"2:{ids[2][41]}", "--class", "8"),
    ]


def csv_of(requests: list[tuple[str, ...]], path: Path) -> Path:
    """A file with these requests."""
    rows = ["reference,client,class,sample"]
    for number, options in enumerate(requests):
        for name, value in zip(options[::2], options[1::2], strict=True):
            client, _, ids = value.partition(":")
            cells = {
                "--client": (value, "", ""),
                "--class": ("", value, ""),
                "--samples": (client, "", ids.replace(",", " ")),
            }[name]
            rows.append(",".join((str(number), *cells)))
    path.write_text("\n".join(rows))
    return path


def kept(run: Path) -> dict[str, str]:
    """What the folder holds, less what a killed command left there, which the next one that writes removes."""
    leftovers = {f"files/{name}" for name in ok("status", "--run", run, "--json").json["leftovers"]}
    return {name: digest for name, digest in contents(run).items() if name not in leftovers}


@torch.no_grad()
def answers(run: Path) -> torch.Tensor:
    """Logits of the folder's own inputs for checks, as it serves them."""
    session = Session(run)
    state, plugged = session.served()
    return (plugged if state.active else plugged.base)(session.probe(state))


class History(RuleBasedStateMachine):
    """Requests come, go, are refused, planned and killed; beside the folder a plain account of what is in force."""

    filters: ClassVar[dict[frozenset[tuple[str, ...]], str]] = {}  # by requests in force, over all histories

    @initialize(private=st.sampled_from([False, False, True]))
    def start(self, private: bool) -> None:
        self.private = private
        self.home = Path(tempfile.mkdtemp(prefix="fedup-history-"))
        self.run = copy_of("private" if private else "collected", self.home / "run")
        self.in_force: dict[str, tuple[str, ...]] = {}
        self.charges_lost = False  # of an answer that was declined or killed: spent, and in no file of statistics
        self.model = sha256(next((self.run / "files").glob("model-*")))
        self.before = answers(self.run)

    def free(self, data: st.DataObject, most: int) -> list[tuple[str, ...]]:
        choices = st.sampled_from([options for options in pool() if options not in self.in_force.values()])
        return data.draw(st.lists(choices, min_size=1, max_size=most, unique=True))

    @precondition(lambda self: len(self.in_force) < 6)
    @rule(data=st.data(), sealed=st.sampled_from([(), ("--keep-sealed",)]))
    def unlearn(self, data: st.DataObject, sealed: tuple[str, ...]) -> None:
        new = self.free(data, 3)
        what = new[0] if len(new) == 1 else ("--csv", csv_of(new, self.home / "requests.csv"))
        done = ok("unlearn", "--run", self.run, *what, *sealed, *QUICK, "--json").json
        self.in_force |= {one["id"]: options for one, options in zip(done["requests"], new, strict=True)}
        again = kept(self.run)
        assert ok("unlearn", "--run", self.run, *what, "--json").json["requests"] == []
        assert kept(self.run) == again

    @precondition(lambda self: self.in_force)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        back = data.draw(st.lists(st.sampled_from(sorted(self.in_force)), min_size=1, max_size=3, unique=True))
        ok("restore", *back, "--run", self.run, "--force", "--max-class-loss", 100)
        self.in_force = {name: options for name, options in self.in_force.items() if name not in back}

    @precondition(lambda self: self.in_force)
    @rule()
    def purge(self) -> None:
        ok("purge", "--yes", "--run", self.run)

    @precondition(lambda self: len(self.in_force) < 6)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        before = kept(self.run)
        ok("unlearn", "--run", self.run, *self.free(data, 1)[0], *QUICK, "--dry-run")
        assert kept(self.run) == before

    @rule(arguments=st.sampled_from(REFUSED))
    def refuse(self, arguments: tuple[object, ...]) -> None:
        before = kept(self.run)
        assert fedup(*arguments, "--run", self.run).code in (1, 2)
        assert kept(self.run) == before

    @precondition(lambda self: len(self.in_force) < 6)
    @rule(data=st.data())
    def decline(self, data: st.DataObject) -> None:
        before = kept(self.run)
        assert fedup("unlearn", "--run", self.run, *self.free(data, 1)[0], "--filter", "bottleneck", *POOR).code == 1
        after = kept(self.run)
        assert after.pop("run.sqlite") != before.pop("run.sqlite")  # it says that a filter was declined
        assert after == before
        self.charges_lost = self.private

    @precondition(lambda self: len(self.in_force) < 6)
    @rule(data=st.data(), touch=st.integers(1, 12))
    def kill(self, data: st.DataObject, touch: int) -> None:
        (options,) = self.free(data, 1)
        known = Run(self.run).read().active
        dies = signalled_at(self.run, touch, signal.SIGKILL)  # by what it did: a clock would kill elsewhere each time
        ended = run("unlearn", *options, *QUICK, "--run", self.run, prepare=dies)
        assert ended.code in (-signal.SIGKILL, 0), ended
        new = [request.id for request in Run(self.run).read().active if request not in known]
        self.in_force |= dict.fromkeys(new, options)
        assert len(new) <= 1
        self.charges_lost = self.private

    @invariant()
    def the_folder_is_sound_and_says_what_is_in_force(self) -> None:
        assert ok("verify", "--run", self.run, "--json").json["ok"] is True
        state = Run(self.run).read()
        in_force = sorted(self.in_force, key=lambda name: int(name[1:]))
        assert [request.id for request in state.active] == in_force
        assert [request.id for request in state.requests] == [f"R{n + 1}" for n in range(len(state.requests))]
        assert all(state.request(request.id.lower()) is request for request in state.requests)
        assert {file.name for file in state.files} <= {path.name for path in (self.run / "files").iterdir()}
        assert sha256(next((self.run / "files").glob("model-*"))) == self.model

    @invariant()
    def the_same_requests_in_force_have_the_same_filter(self) -> None:
        found = filter_file(self.run)
        assert (found is not None) == bool(self.in_force)
        if found and not self.private:  # whose noise is drawn anew for samples
            assert self.filters.setdefault(frozenset(self.in_force.values()), sha256(found)) == sha256(found)

    @invariant()
    def the_file_of_the_statistics_tells_the_charges_of_the_journal(self) -> None:
        state = Run(self.run).read()
        known, stored = (
            ledger.charges
            for ledger in (ledger_of(state), load_centroids(self.run / "files" / state.centroids.name).ledger)
        )
        assert bool(known) == self.private
        assert all(charge in known for charge in stored)
        assert self.charges_lost or stored == known

    def teardown(self) -> None:
        if self.in_force and not self.private:  # all at once, in the other order, in a folder without a history
            fresh = copy_of("collected", self.home / "fresh")
            path = csv_of([*self.in_force.values()][::-1], self.home / "all.csv")
            ok("unlearn", "--run", fresh, "--csv", path, *QUICK)
            assert sha256(filter_file(fresh)) == sha256(filter_file(self.run))
        ok("restore", "--all", "--run", self.run)
        assert filter_file(self.run) is None
        assert torch.equal(answers(self.run), self.before)
        shutil.rmtree(self.home)


def _histories(examples: int, steps: int) -> type:
    class Some(History):
        pass

    Some.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    return Some.TestCase


TestFewHistories = _histories(6, 8)
TestManyHistories = pytest.mark.slow(_histories(16, 15))

"""What the server does for each client of a collection, without nodes, an engine or a wire.

Synthetic replies go through the real contact, intake, ledger, store and journal. Each size and kind runs in a process
of its own: `python -m fedup.bench.server_work 1000 moments OUT.json` is one.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedup.bench.scale import watched_memory
from fedup.clients.all_questions import QUESTIONS
from fedup.clients.messages import NONCE, RULES, SPENT, answer_text
from fedup.clients.question import ClientData, ExactQuestion, PrivateQuestion, Question
from fedup.errors import DataError, SettingError
from fedup.federation import Client
from fedup.privacy import DP
from fedup.statistics.private_features import blank_row
from fedup.tasks.machine import describe_code, describe_machine
from fedup.tasks.progress import Progress

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message

WIDTH, CLASSES, ROWS = 128, 10, 60  # features at the cut, classes, rows of a client
TEMPLATES = 64  # clients with rows of their own; all others repeat their answers under another number
KINDS: dict[str, dict[str, Any]] = {
    "moments": {"statistics": "moments"},
    "centroids": {"statistics": "centroids"},
    "private": {"privacy": DP(4.0, clip="unit")},
}
GOAL_MS, GOAL_BYTES = 1.0, 300_000_000  # for each client; beyond what the process had before
_NAME_BYTES = 16  # of a release
_FIRST = 10**18  # number of the first node: Flower's have 64 bits


def run_server_work(sizes: Sequence[int], *, progress: Progress) -> dict[str, Any]:
    """Figures for each number of replies and each kind of statistics, and what made them."""
    if find_spec("flwr") is None:
        raise SettingError("Flower is not installed. Add it: pip install 'fedup[flower]'")
    cases, figures = list(itertools.product(sizes, KINDS)), []
    for done, (clients, kind) in enumerate(cases):
        progress(f"{clients:,} replies, {kind}", done, len(cases))
        figures.append(_in_own_process(clients, kind))
    progress("all sizes", len(cases), len(cases))
    about = {"width": WIDTH, "classes": CLASSES, "rows": ROWS, "templates": TEMPLATES}
    goals = {"ms": GOAL_MS, "peak_bytes": GOAL_BYTES}
    result = {"about": about, "goals": goals, "machine": describe_machine(), "code": describe_code()}
    return {**result, "runs": figures}


def _in_own_process(clients: int, kind: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        command = [sys.executable, "-m", "fedup.bench.server_work", str(clients), kind, str(out)]
        with log.open("w") as file:
            subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, stdout=file, stderr=file, check=False)
        if not out.exists():
            raise DataError(f"{clients} replies with {kind} failed:\n{log.read_text()[-2000:]}")
        return dict(json.loads(out.read_text()))


def feature_net() -> nn.Module:
    """A head on features that are given: what clients compute is not measured here."""
    head = nn.Linear(WIDTH, CLASSES, bias=False)
    with torch.no_grad():
        head.weight.copy_(_centres() - _centres().mean(0))
    return nn.Sequential(OrderedDict(hidden=nn.ReLU(), head=head)).eval()


def _centres() -> Tensor:
    """Where the rows of each class lie. (CLASSES, WIDTH)"""
    block = torch.arange(WIDTH) * CLASSES // WIDTH
    return 2.0 * (block == torch.arange(CLASSES)[:, None]).float()


def client_data(model: nn.Module, number: int) -> ClientData:
    """The rows of a made-up client."""
    rng = torch.Generator().manual_seed(number)
    rows = ROWS + int(torch.randint(-10, 11, (), generator=rng))
    y = torch.arange(rows) % CLASSES
    x = (_centres()[y] + 0.5 * torch.randn(rows, WIDTH, generator=rng)).relu()
    nothing = torch.zeros(0, dtype=torch.int64)
    return ClientData(model, x, y, Client(number, torch.arange(rows), nothing, nothing), CLASSES)


@dataclass
class _Clock:
    """Seconds of wall time and of this process's own CPU time."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    @contextmanager
    def runs(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall_s += time.perf_counter() - wall
            self.cpu_s += time.process_time() - cpu


@dataclass
class SyntheticGrid:
    """Nodes that answer at once, with answers that were made before, each under its own number.

    Its own work is timed by `clock`: it stands for nodes, engine and wire, which are not the server's. What it keeps is
    counted as the server's memory, and is little: 26 bytes for each message on its way, and the answers of 64 clients.
    Its messages have names as long as Flower's: the server keeps those until they are answered.
    """

    model: nn.Module
    clients: int
    clock: _Clock = field(default_factory=_Clock)

    def __post_init__(self) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 0, 1  # else no message can be made
        # By message: its node, the place of its question among those that came, and the name of the release.
        self._nodes, self._asked, self._names = array("Q"), array("H"), bytearray()
        self._digests: list[str] = []
        self._templates: dict[str, list[tuple[str, ArrayRecord | None]]] = {}  # by question: text and arrays

    def get_node_ids(self) -> Iterable[int]:
        """All nodes."""
        return range(_FIRST, _FIRST + self.clients)

    def push_messages(self, messages: Iterable["Message"]) -> list[str]:
        """Take questions."""
        from fedup.flower.wire import read_ask

        with self.clock.runs():
            numbers = []
            for message in messages:
                numbers.append(f"{len(self._nodes):064x}")
                ask = read_ask(message.content)
                if ask.digest not in self._templates:
                    question = QUESTIONS[ask.kind].from_message(ask.details, ask.arrays)
                    self._templates[ask.digest] = [self._template(question, ask.base, n) for n in range(TEMPLATES)]
                    self._digests.append(ask.digest)
                self._nodes.append(message.metadata.dst_node_id)
                self._asked.append(self._digests.index(ask.digest))
                self._names += bytes.fromhex(ask.details.get(NONCE, "")).ljust(_NAME_BYTES, b"\0")
            return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> "list[Message]":
        """Answer them."""
        with self.clock.runs():
            return [self._reply(number) for number in message_ids]

    def _reply(self, number: str) -> "Message":
        from flwr.app import ConfigRecord, Message, RecordDict

        place = int(number, 16)
        node, digest = self._nodes[place], self._digests[self._asked[place]]
        raw = self._names[_NAME_BYTES * place : _NAME_BYTES * (place + 1)]
        name = raw.hex() if any(raw) else ""  # an answer that is no release has none
        client = node - _FIRST
        text, arrays = self._templates[digest][client % TEMPLATES]
        text = text.replace('"client": 0', f'"client": {client}, "{NONCE}": "{name}"')
        content = RecordDict({"fedup": ConfigRecord({"json": text})})
        if arrays is not None:
            content["arrays"] = arrays
        asked = Message(RecordDict(), node, "query.fedup", group_id="")
        asked.metadata.__dict__["_message_id"] = number  # as Flower's own grids do
        return Message(content, reply_to=asked)

    def _template(self, question: Question[Any], base: str, number: int) -> "tuple[str, ArrayRecord | None]":
        from fedup.flower.wire import record_of

        details: dict[str, Any] = {"client": 0, RULES: "open"}
        arrays: Mapping[str, Tensor] = {}
        if question.needs_model:
            data = client_data(self.model, number)
            if isinstance(question, PrivateQuestion):
                plan = question.plan(self.model, blank_row(data.x), CLASSES)
                answer, details[SPENT] = question.release(plan, data), question.dp.mu**2
            else:
                assert isinstance(question, ExactQuestion)
                answer = question.answer(data)
            own, arrays = question.answer_message(answer)
            details |= own
        return answer_text("ok", base, details), record_of(arrays) if arrays else None


def measure(clients: int, kind: str) -> dict[str, Any]:
    """A collection of so many replies into a run folder, and the folder opened again."""
    from fedup.flower import Delivery, GridContact, RunServer

    model, collected, opened = feature_net(), _Clock(), _Clock()
    grid = SyntheticGrid(model, clients)
    with TemporaryDirectory() as folder:
        server = RunServer(Path(folder) / "run", feature_net)
        server.keep(model)
        contact = GridContact(
            grid,  # type: ignore[arg-type]
            model,
            example=torch.zeros(1, WIDTH),
            num_classes=CLASSES,
            delivery=Delivery(timeout_s=3600),
        )
        load = os.getloadavg()[0]
        with watched_memory() as peaks, collected.runs():
            store = server.collect(contact, **KINDS[kind])
        assert len(store.clients) == clients and not contact.left_out, dict(list(contact.left_out.items())[:3])
        del store
        with opened.runs():
            events = len(server.state.events)
        sizes = {path.name.split("-")[0]: path.stat().st_size for path in (Path(folder) / "run").rglob("*.s*")}
    work = {name: getattr(collected, name) - getattr(grid.clock, name) for name in ("wall_s", "cpu_s")}
    return {
        "clients": clients,
        "kind": kind,
        **{name.replace("_s", "_ms"): 1000 * seconds / clients for name, seconds in work.items()},
        "grid_ms": 1000 * grid.clock.wall_s / clients,
        "open_ms": 1000 * opened.wall_s / clients,
        "peak_bytes": max(peaks, default=None),
        "events": events,
        "bytes": sizes,
        "load": load,
        "load_after": os.getloadavg()[0],
    }


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(measure(int(sys.argv[1]), sys.argv[2])))

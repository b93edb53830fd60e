"""All methods of a group get the same cohorts, batches and first weights, and one history, kept for as long as some
cell of the group may need it."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench._progress import Watch, silent
from torch import Tensor, nn

import fedup.training.engines.plain as plain
import fedup.training.fedavg as fedavg
from fedup import Federation, Forget
from fedup.bench.experiment import BenchCell
from fedup.bench.history import History
from fedup.bench.methods import method_class, needs_history
from fedup.bench.results import Results
from fedup.bench.runner import BudgetSpentError, CellEvent, run_cells
from fedup.bench.task import Task
from fedup.registry import names
from fedup.tasks.recipe import Recipe
from fedup.training.averaging import weights_of
from fedup.training.local import Job

pytestmark = pytest.mark.usefixtures("cache")

# --- the same cohorts, batches and first weights

SIZES = (13, 20, 9, 26, 17)  # training rows of the five clients; batches of 8
RECIPE = Recipe("digits", "lenet5", rounds=4, clients=len(SIZES), batch_size=8, lr=0.1, seed=5)
RECIPES = {
    "all clients": RECIPE,
    "cohorts of two": replace(RECIPE, clients_per_round=2, epochs=2, seed=32),  # the target is in the last
}
TRAINING = {
    "retrain": {},
    "finetune": {"rounds": 3},
    "federaser": {"every": 1, "ratio": 0.5, "post_rounds": 1},
    "eraseclient": {"post_rounds": 1},
    "fused": {"rounds": 3, "layers": ("0", "4")},
    "fused_retained": {"rounds": 3},
    "exact_fun": {"answer": False},  # its own federation, ahead of any request
    "exact_fun, answered": {},
}
WHOLE = Forget.clients([1])


def make_federation() -> Federation:
    total = sum(SIZES)
    x = torch.randn(total, 6, generator=torch.Generator().manual_seed(0))
    y = torch.arange(total) % 3
    return Federation.split(x, y, list(torch.arange(total).split(list(SIZES))), heldout=0, validation=0)


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


class Seen:
    """What clients were given in each round: the rows of every batch that a step was taken on, what dropout draws, and
    the weights that they started from."""

    def __init__(self) -> None:
        self.batches: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        self.dropout: dict[tuple[int, int], int] = {}
        self.started_from: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.cohorts: dict[int, list[int]] = {}
        self.now = (-1, -1)


@contextmanager
def watching() -> Iterator[Seen]:
    """Looks over the engine's shoulder; nothing is put in its place."""
    seen = Seen()
    draw, run, step = fedavg._draw_jobs, plain.PlainEngine.run, plain.train_step

    def drawn(ids: Any, rows: Any, local: Any, size: Any, seed: Any, round_index: int) -> list[Job]:
        jobs = draw(ids, rows, local, size, seed, round_index)
        seen.now = (round_index, -1)
        seen.cohorts.setdefault(round_index, []).extend(job.client for job in jobs)
        return jobs

    def ran(self: Any, job: Job, optimizer: Any = None) -> Any:
        seen.now = (seen.now[0], job.client)
        assert seen.now not in seen.batches, "a client trains once in a round"
        seen.batches[seen.now] = []
        seen.dropout[seen.now] = job.dropout_seed
        seen.started_from[seen.now] = {name: tensor.clone() for name, tensor in self.weights.items()}
        return run(self, job, optimizer)

    def stepped(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, batch: Tensor, how: Any) -> None:
        seen.batches[seen.now].append(tuple(batch.tolist()))
        step(model, optimizer, x, y, batch, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedavg, "_draw_jobs", drawn)
        patch.setattr(plain.PlainEngine, "run", ran)
        patch.setattr(plain, "train_step", stepped)
        yield seen


class Group:
    """One federation, what it saw when it learned, and what methods let clients see when they answer."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.federation, self.start = recipe, make_federation(), make_model()
        self.history, self._seen = History(), dict[tuple[str, Forget], Seen]()
        with watching() as self.original:
            self.model = recipe.train(self.start, self.federation, observers=[self.history]).model

    def answers(self, method: str, request: Forget) -> Seen:
        """What clients see of a method's answer."""
        if (method, request) not in self._seen:
            self._seen[method, request] = self._answer(method, request)
        return self._seen[method, request]

    def _answer(self, method: str, request: Forget) -> Seen:
        task = Task(self.federation, request, self.model, self.start, self.recipe, _probe, silent, self.history)
        made = method_class(method.partition(",")[0])(**TRAINING[method])
        if "answered" in method:
            made.unlearn(task)  # its own federation is learned: what follows is the answer alone
        with watching() as seen, pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedup.bench.methods.eraseclient._random_model", lambda task, number: make_model())
            made.unlearn(task)
        return seen


def _probe(model: nn.Module) -> dict[str, float]:
    return {"r_a": 0.5, "unwanted": 0.5}


@pytest.fixture(scope="module", params=RECIPES)
def group(request) -> Group:
    return Group(RECIPES[request.param])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def prefix(short: list[Any], long: list[Any]) -> bool:
    return 0 < len(short) <= len(long) and long[: len(short)] == short


@pytest.mark.parametrize("method", TRAINING)
def test_a_client_gets_cohorts_and_batches_of_the_training_where_it_keeps_its_rows(group, method):
    """FedEraser's clients train for fewer epochs: those are the first ones."""
    seen, original = group.answers(method, WHOLE), group.original
    gone = set() if method == "exact_fun" else {1}  # its own federation is there before the request
    for number, cohort in seen.cohorts.items():
        if number < group.recipe.rounds:
            assert cohort == [client for client in original.cohorts[number] if client not in gone], number
    shared = [place for place in seen.batches if place[0] < group.recipe.rounds]
    for place in shared:
        assert prefix(seen.batches[place], original.batches[place]), place
        assert seen.dropout[place] == original.dropout[place]
    # all rounds of EraseClient come after those of the training
    assert seen.batches and (not shared if method == "eraseclient" else len(shared) >= 3)


@pytest.mark.parametrize("request_", [WHOLE, Forget.classes([1]), Forget.samples({3: [42, 43, 50]})], ids=str)
def test_all_methods_agree_on_the_batches_of_a_client_and_round_with_the_same_retained_rows(group, request_):
    own_federation = ("exact_fun",)  # which learns from all rows
    overwrites = ("fused",) if request_.class_ids else ()  # which learns from relabelled rows, too
    can = [name for name in TRAINING if method_class(name.partition(",")[0])().supports(request_)]
    answers = {name: group.answers(name, request_) for name in can if name not in own_federation + overwrites}
    reference = answers["retrain"]
    retained = group.federation.without(request_)
    assert len(answers) >= 4
    for name, seen in answers.items():
        for (number, client), batches in seen.batches.items():
            allowed = set(retained.client(client).train.tolist())
            assert {row for batch in batches for row in batch} == allowed, name  # all it retains, and nothing else
            if number >= group.recipe.rounds:
                continue
            assert prefix(batches, reference.batches[number, client]), (name, number, client)
            if name != "federaser":
                assert batches == reference.batches[number, client], (name, number, client)


def test_rounds_after_the_training_are_alike_and_what_overwrites_a_class_has_the_batches_of_the_training(group):
    one, other = (group.answers(name, WHOLE) for name in ("federaser", "eraseclient"))
    later = {place for place in one.batches if place[0] >= group.recipe.rounds}
    assert later == set(other.batches) != set()
    for place in later:
        assert prefix(one.batches[place], other.batches[place])
    overwriting = group.answers("fused", Forget.classes([1])).batches
    assert overwriting == {place: group.original.batches[place] for place in overwriting} != {}


def started_from(seen: Seen) -> dict[str, Tensor]:
    return seen.started_from[min(seen.batches)]


def test_what_learns_anew_starts_from_the_first_weights_and_what_goes_on_from_what_was_learned(group):
    first = weights_of(group.start)
    for seen in (group.original, group.answers("retrain", WHOLE), group.answers("exact_fun", WHOLE)):
        assert same(started_from(seen), first)
    assert same(group.history.before(0), first)
    assert same(started_from(group.answers("finetune", WHOLE)), weights_of(group.model))
    deltas = started_from(group.answers("fused_retained", WHOLE))
    assert deltas and not any(bool(tensor.any()) for tensor in deltas.values())


# --- one history for all who need it


FEDERATION = """
[[federations]]
data = "digits"
rounds = 2
clients = 3
rows = 60
batch_size = 32
"""
ONE = FEDERATION + "[scenarios.clean_client]\n"
FAST = {name: "" for name in names("fedup.bench.methods") if name != "retrain"} | {
    "fedup": "steps = 5\n",
    "head_only": "steps = 5\n",
    "finetune": "rounds = 1\n",
    "fused": "rounds = 1\n",
    "fused_retained": "rounds = 1\n",
}


class Told(Watch):
    """Progress that may say that the time is over when a cell is."""

    def __init__(self, stop_after_cells: int | None = None) -> None:
        super().__init__()
        self._cells = stop_after_cells

    def __call__(self, what: str, done: int, total: int) -> None:
        super().__call__(what.rpartition(": ")[2], done, total)
        if not what and self._cells is not None:  # a moment to stop at, between two cells
            self._cells -= 1
            if self._cells == 0:
                raise BudgetSpentError


LEARNS = "the federation learns"
ROUNDED = "the federation learns with weights rounded to 0.001"


def run(cells: list[BenchCell], results: Results, told: Told | None = None, **how: Any) -> list[CellEvent]:
    return list(run_cells(cells, results, progress=told or Told(), **how))


def files(folder: Path) -> dict[str, str]:
    """All files below the folders of histories, by content."""
    found = (path for history in folder.glob("*.history") for path in history.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.fixture
def cache(cache) -> Path:
    return cache / "federations"


def of(*methods: str) -> str:
    return "".join(f"[methods.{name}]\n{FAST[name]}" for name in methods)


@pytest.mark.parametrize("name", FAST)
def test_a_history_is_kept_exactly_when_some_method_of_the_experiment_needs_one(read, name):
    experiment = read(ONE + "[scenarios.class]\n" + of("none", *({name} - {"none"})))
    expected = name in ("federaser", "eraseclient", "fused_retained")
    assert needs_history(method_class(name)()) is expected
    assert {group.recorded for group in experiment.groups()} == {expected}
    for only in (["none"], ["retrain", "clean_client"]):
        assert {cell.group.recorded for cell in experiment.cells(only=only)} == {expected}, only
    plain_cells = {str(cell): cell.hash for cell in read(ONE + of("none")).cells()}
    kept = {str(cell): cell.hash for cell in experiment.cells()}
    assert plain_cells.items() <= kept.items()  # what is kept beside a training does not make it another one


def test_a_run_that_is_stopped_keeps_histories_and_the_next_one_uses_them_and_ends_them(read, results, cache):
    experiment = read(ONE + of("exact_fun", "federaser", "fused_retained"))
    with pytest.raises(BudgetSpentError):
        run(experiment.cells(), results, Told(stop_after_cells=2))  # Retrain and Exact-Fun are measured
    kept, told = files(cache), Told()
    assert len(list(cache.glob("*.history"))) == 2
    done = []
    for event in run_cells(experiment.cells(), results, progress=told):
        assert event.outcome == "done", event.result.get("failed")
        assert files(cache) == kept != {}  # used, not made again
        done.append(event.cell.method.name)
    assert done == ["federaser", "fused_retained"]
    assert LEARNS not in told.trainings and ROUNDED not in told.trainings
    assert list(cache.glob("*.history")) == []  # Exact-Fun's own, too


OWN = """
from dataclasses import dataclass
import torch
from fedup.bench.cost import Cost
from fedup.bench.task import Unlearned

@dataclass(frozen=True)
class Method:
    def supports(self, request):
        return True

    def unlearn(self, task):
        with torch.no_grad():
            next(task.model.parameters()).zero_()
        return Unlearned(task.model, Cost())
"""


def test_the_next_method_gets_the_history_after_one_that_spoilt_the_task_and_it_goes(read, results, cache, tmp_path):
    (tmp_path / "spoils.py").write_text(OWN)
    experiment = read(f'{ONE}[methods.spoils]\nuse = "{tmp_path / "spoils.py"}"\n' + of("federaser"))
    told = Told()
    outcomes = {event.cell.method.name: event.outcome for event in run(experiment.cells(), results, told)}
    assert outcomes == {"retrain": "done", "spoils": "failed", "federaser": "done"}
    assert told.trainings.count(LEARNS) == 1
    assert list(cache.glob("*.history")) == []

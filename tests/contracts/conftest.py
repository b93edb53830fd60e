"""A small trained world that contracts are checked in: digits at four clients, one situation for each scenario."""

import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fedup import Federation, Forget, fingerprint
from fedup.bench.case import Case, EvaluationData, Outputs
from fedup.bench.experiment import Group, Named
from fedup.bench.methods import Method, method_class
from fedup.bench.scenarios import Situation, scenario_class
from fedup.bench.shared_setup import SharedSetup
from fedup.bench.task import Task, Unlearned
from fedup.tasks.recipe import Recipe

MIXED = "mixed"  # a request for a client, a class and samples at once; no scenario makes one
PLACES = ("class", "client", "sample", MIXED)  # one request of each kind: methods and metrics are tried there
RECIPE = Recipe.suited_to("digits", rounds=2, clients=4, rows=400, batch_size=16, seed=3)


PARTS = ("train", "validation", "heldout")


def bits_of(federation: Federation) -> str:
    """sha256 of all that a federation is made of: rows, labels, and who holds which."""
    parts = {f"{c.id} {part}": getattr(c, part) for c in federation.clients for part in PARTS}
    tensors: dict[str, Tensor] = {"x": federation.x, "y": federation.y, **parts}
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def quick(name: str) -> Method:
    """A method with its default settings, but for the number of steps: contracts do not ask how well it forgets. Of the
    two rounds each is stored, where a method stores some: else it would have nothing to do."""
    method = method_class(name)
    own = {one.name for one in dataclasses.fields(method)}
    return method(**{setting: value for setting, value in {"steps": 10, "every": 1}.items() if setting in own})


@dataclass(frozen=True, eq=False)
class Place:
    """One task, where its answers are measured, and what they are compared with."""

    name: str
    task: Task
    data: EvaluationData
    original: Outputs
    retrained: Outputs

    def state(self) -> tuple[object, ...]:
        """What no method and no metric may change."""
        task = self.task
        modes = [module.training for model in (task.model, task.start) for module in model.modules()]
        return fingerprint(task.model), fingerprint(task.start), modes, bits_of(task.federation), task.request

    def outputs(self, model: nn.Module) -> Outputs:
        return Outputs(model, self.data)

    def case(self, unlearned: Unlearned) -> Case:
        """An answer beside the references, with nothing computed yet."""
        models = unlearned.model, self.original.model, self.retrained.model
        return Case(unlearned, *map(self.outputs, models))


@dataclass(frozen=True, eq=False)
class Answer:
    """What a method made of a task, and the task's state before and after."""

    unlearned: Unlearned
    before: tuple[object, ...]
    after: tuple[object, ...]


class World:
    """Places by scenario and answers by method, each made when first asked for."""

    def __init__(self, cache: str) -> None:
        self._cache = cache
        self.quick = quick
        self._places: dict[str, Place] = {}
        self._answers: dict[tuple[str, str], Answer] = {}
        self.dataset = RECIPE.load()
        self.recipe = RECIPE

    def honest(self, seed: int = RECIPE.seed) -> Federation:
        """A federation that no scenario has touched, over arrays of its own."""
        made = dataclasses.replace(RECIPE, seed=seed).federation(self.dataset)
        return dataclasses.replace(made, x=made.x.clone(), y=made.y.clone())

    def place(self, name: str) -> Place:
        if name not in self._places:
            self._places[name] = self._mixed() if name == MIXED else self._of_scenario(name)
        return self._places[name]

    def places(self) -> Iterator[Place]:
        yield from map(self.place, PLACES)

    def answer(self, method: str, place: Place) -> Answer:
        if (method, place.name) not in self._answers:
            before = place.state()
            unlearned = self.unlearn(quick(method), place.task)
            self._answers[method, place.name] = Answer(unlearned, before, place.state())
        return self._answers[method, place.name]

    def unlearn(self, method: Method, task: Task) -> Unlearned:
        """A method's answer; a federation of its own, where it trains one, is kept in this world's cache."""
        with self._in_own_cache():
            return method.unlearn(task)

    def answers(self, method: str) -> Iterator[tuple[Place, Unlearned]]:
        """A method's answers in the situations that it supports."""
        for place in self.places():
            if method_class(method)().supports(place.task.request):
                yield place, self.answer(method, place).unlearned

    @contextmanager
    def _in_own_cache(self) -> Iterator[None]:
        """The user's own is neither read nor written."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FEDUP_CACHE", self._cache)
            yield

    def _of_scenario(self, name: str) -> Place:
        group = Group(RECIPE, Named(name, name, scenario_class(name)()), recorded=True)
        with self._in_own_cache():
            setup = SharedSetup(group, "cpu", lambda *_: None)
            setup.make(reference=True)
        return Place(name, setup.task, setup.data, setup.original, setup.retrained)

    def _mixed(self) -> Place:
        """The honest federation that `class` trained, asked for everything at once, the very first rows included."""
        trained = self.place("class").task
        federation, y = trained.federation, trained.federation.y
        of_row_0 = next(c for c in federation.clients if 0 in torch.cat([getattr(c, part) for part in PARTS]))
        gone = {of_row_0.id, federation.clients[0].id}
        other = max((c for c in federation.clients if c.id not in gone), key=lambda client: len(client.train))
        label = int(y[other.train[0]])
        samples = other.train[y[other.train] != label][:5]
        request = Forget.clients(gone) | Forget.classes([label]) | Forget.samples({other.id: samples.tolist()})
        data = EvaluationData(Situation(federation, request, "A client, a class and samples."), self.dataset)
        probe = lambda model: Outputs(model, data).moment()  # noqa: E731
        task = dataclasses.replace(trained, request=request, probe=probe, _collected={}, _learned={})
        retrained = self.unlearn(method_class("retrain")(), task).model
        return Place(MIXED, task, data, Outputs(task.model, data), Outputs(retrained, data))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def bits():
    return bits_of

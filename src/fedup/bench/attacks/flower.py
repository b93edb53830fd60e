"""Attack 5: hostile nodes of a Flower federation. What does one node's answer do to everybody else's model?

One node (or a pair) falsifies its answers to a collection. Then another client asks to be forgotten, and the served
model is measured: retained accuracy, what the worst class loses against the same run with honest nodes, memory, and
whether the server named the node. The nodes' own code answers, over a grid in this process.
"""

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedup.bench.attacks import flower_answers as send
from fedup.bench.attacks.flower_answers import Insider
from fedup.bench.attacks.flower_grid import FIRST, Falsify, HostileGrid
from fedup.bench.memory import memory_bytes
from fedup.bench.training_cache import trained
from fedup.clients.collect import collect
from fedup.errors import FedUPError, HarmError
from fedup.federation import Federation
from fedup.flower.contact import GridContact
from fedup.flower.messaging import Delivery
from fedup.models.cut import find_cut
from fedup.privacy import DP
from fedup.request import Forget
from fedup.serving.plugged import PluggedModel, plug
from fedup.tasks.datasets import check_there
from fedup.tasks.evaluation import accuracy, accuracy_per_class
from fedup.tasks.machine import describe_code, describe_machine
from fedup.tasks.progress import Progress
from fedup.tasks.recipe import Recipe
from fedup.unlearning.unlearn import unlearn

PARTITION = "dirichlet:1"
ATTACKER, PARTNER, REQUESTER = 1, 2, 0  # clients
STATISTICS: dict[str, dict[str, Any]] = {
    "centroids": {"statistics": "centroids"},
    "moments": {"statistics": "moments"},
    "DP, ε = 8": {"privacy": DP(8.0, clip="unit", replay_seed=0)},
}
CENTROIDS, MOMENTS, PRIVATE = STATISTICS
SAMPLES = 21  # of its own, that a node asks to forget
HONEST, CONTROL = "honest", "control"
_LONG_REPLY = 1_000_000_000  # bytes


@dataclass(frozen=True)
class Hostile:
    """What nodes do: by client, how they falsify answers. `kind` is honest, fixed, adaptive or control."""

    name: str
    nodes: Mapping[int, Falsify] = field(default_factory=dict)
    kind: str = "fixed"
    samples: bool = False  # whether the request is for samples of the hostile node itself


@dataclass(frozen=True)
class Outcome:
    """What a hostile node did to the others."""

    attack: str
    kind: str
    statistics: str
    retained_accuracy: float | None  # of the model that is served; None if the server could not go on
    worst_class_loss: float | None  # points, against honest nodes
    memory_bytes: int  # at most, beyond what was taken before and the reply that Flower holds
    named: bool  # whether the server says which node it was
    left_out: bool
    refused: bool  # the request, since its answer would harm: the original model is served
    said: str = ""  # what the server says of it


def attacks_on(statistics: str, insider: Insider) -> Iterator[Hostile]:
    """All that is tried on one kind of statistics."""

    def one(name: str, falsify: Falsify, kind: str = "fixed") -> Hostile:
        return Hostile(name, {ATTACKER: falsify}, kind)

    def rows(name: str, made: Callable[[], send.Rows], kind: str = "fixed") -> Hostile:
        return one(name, send.rows_instead(insider, made), kind)

    yield Hostile(HONEST, kind=HONEST)
    if statistics == CENTROIDS:
        for factor in (1e3, 1e6, 1e12, 3e37):
            yield one(f"own vectors × {factor:.0e}", send.scaled_vectors(factor))
        for count in (4e6, 1e8, 1e12):
            no_size = {"labels": [0], "sizes": [0], "excluded": [[]], "rows": [[0, int(count)]]}
            nothing = {name: lambda array: array[:0] for name in ("vectors", "counts")}
            yield one(f"no centroids of {count:.0e} rows", send.other_details(no_size, **nothing))
        for value in ("1e400", "NaN", "9" * 5000):
            text = send.other_text('"paper_epsilons": []', f'"paper_epsilons": [{value}]')
            yield one(f"an epsilon of {value if len(value) < 9 else '5,000 digits'}", text)
    if statistics == MOMENTS:
        yield rows("own rows × 1e+06, at the bound", lambda: (insider.own()[0] * 1e6, insider.own()[1]))
        for count in (1e7, 3e9):
            yield one(f"{count:.0e} rows of each class", send.many_moment_rows(int(count)))
        yield one("all rows of everybody were shortened", send.other_details({"shortened": 2**52}))
    if statistics == PRIVATE:
        for factor in (-1e3, 1e3):
            yield one(f"message × {factor:g}", send.scaled_vectors(factor))
    if insider.nonnegative:
        yield rows("own rows × −1", lambda: (-insider.own()[0], insider.own()[1]))
    yield rows("400 rows a class, next label", lambda: insider.next_label(lambda label: 400))
    yield rows("1,000 rows: 4s labelled 8", lambda: (insider.drawn(4, 1000), torch.full((1000,), 8)))
    yield one("another's client number", send.other_details({"client": REQUESTER + 3}))
    yield one("an unknown client number", send.other_details({"client": 2**64 - 1}))
    yield one("deep JSON", send.other_text('"details": {', '"details": {"x": ' + "[" * 50_000 + "]" * 50_000 + ", "))
    yield one("a reply of 1 GB", send.long_reply(_LONG_REPLY))
    yield rows("own rows, next label", insider.own_next_label, CONTROL)
    yield rows("own rows, two fifths of each class flipped", insider.part_flipped, CONTROL)
    yield rows("own rows, next label, moved until the last layer agrees", insider.disguised, "adaptive")
    longest = partial(insider.part_flipped, longest=True)
    yield rows("own rows, two fifths of each class flipped, as long as any", longest, "adaptive")
    pair = {ATTACKER: insider, PARTNER: Insider.of(insider.model, insider.cut, insider.federation, PARTNER)}
    both = {client: send.rows_instead(own, own.disguised) for client, own in pair.items()}
    yield Hostile("own rows, next label, moved until the last layer agrees, by a pair", both, "adaptive")
    held = {client: send.rows_instead(own, own.own_next_label) for client, own in pair.items()}
    yield Hostile("own rows, next label, by a pair", held, CONTROL)
    if statistics != PRIVATE:
        yield Hostile("honest, its own samples", kind=HONEST, samples=True)
        for factor, counts in ((10.0, False), (1e4, False), (-3.0, False), (2.0, True), (10.0, True)):
            name = f"eraser's statistics × {factor:g}" + (", and counts" if counts else "")
            yield Hostile(
                name, {ATTACKER: send.lying_eraser(factor, insider.num_classes, also_counts=counts)}, samples=True
            )


@dataclass(frozen=True, eq=False)
class World:
    """A trained federation, and test rows."""

    federation: Federation
    model: nn.Module
    blank: Callable[[], nn.Module]
    unseen_x: Tensor  # test rows, and all that nobody trained on
    unseen_y: Tensor

    @classmethod
    def of(cls, recipe: Recipe, progress: Progress) -> "World":
        """The federation of a recipe, from the cache if it was trained before."""
        dataset = recipe.load()
        federation, shape = recipe.federation(dataset), dataset.x.shape[1:]
        start = recipe.blank_model(shape, dataset.num_classes)
        network = trained(start, federation, recipe, progress=progress).eval()
        blank = lambda: recipe.blank_model(shape, dataset.num_classes)  # noqa: E731
        rest = torch.cat([federation.rows("validation"), federation.rows("heldout")])
        unseen_x, unseen_y = (
            torch.cat([dataset.test_x, federation.x[rest]]),
            torch.cat([dataset.test_y, federation.y[rest]]),
        )
        return cls(federation, network, blank, unseen_x, unseen_y)

    def contact(self, hostile: Mapping[int, Falsify], folder: Path) -> GridContact:
        """A server's contact with the nodes, some of them hostile."""
        grid = HostileGrid(self.federation, self.blank, hostile)
        delivery = Delivery(timeout_s=5.0, retries=0, least_fraction=0.5)
        classes, example = self.federation.num_classes, torch.zeros_like(self.federation.x[:1])
        return GridContact(
            grid, self.model, example=example, num_classes=classes, delivery=delivery, folder=folder / "answers"
        )

    def recalls(self, served: nn.Module) -> list[float]:
        """The recall of each class on unseen rows."""
        return accuracy_per_class(served, self.unseen_x, self.unseen_y, self.federation.num_classes)

    def request(self, attack: Hostile) -> Forget:
        """What is asked for after the collection: another client, or some samples of the hostile one."""
        if not attack.samples:
            return Forget.clients([REQUESTER])
        return Forget.samples({ATTACKER: self.federation.client(ATTACKER).train[:SAMPLES].tolist()}, reason="poison")


def measure(world: World, attack: Hostile, statistics: str, honest: list[float] | None) -> tuple[Outcome, list[float]]:
    """Collect, answer the request, and see what became of the model; `honest` has the recalls without an attack."""
    plugged, said, refused = plug(world.model), "", False
    with tempfile.TemporaryDirectory() as folder:
        contact = world.contact(attack.nodes, Path(folder))
        before = _start_of_peak()
        try:
            store = collect(world.model, contact, **STATISTICS[statistics])
            unlearn(plugged, store, world.request(attack), clients=contact)
            broken = False
        except HarmError:
            broken, refused = False, True
        except Exception as error:  # an untyped one is worse, and the table says so
            broken, said = True, f"{'' if isinstance(error, FedUPError) else type(error).__name__ + ': '}{error}"
        reply = _LONG_REPLY if "1 GB" in attack.name else 0
        memory = max(0, memory_bytes("VmHWM") - before - reply)
    nodes = [FIRST + client for client in attack.nodes]
    reasons = {**getattr(contact, "flagged", {}), **contact.left_out}
    left_out = all(node in contact.left_out for node in nodes) and bool(nodes)
    named = all(node in reasons for node in nodes) and bool(nodes)
    said = said or "; ".join(dict.fromkeys(str(reasons[node]) for node in nodes if node in reasons))
    about = {"memory_bytes": memory, "named": named, "left_out": left_out, "refused": refused, "said": said[:300]}
    if broken:
        return Outcome(attack.name, attack.kind, statistics, None, None, **about), []
    return _judged(world, attack, statistics, plugged, honest, about)


def _judged(
    world: World,
    attack: Hostile,
    statistics: str,
    plugged: PluggedModel,
    honest: list[float] | None,
    about: dict[str, Any],
) -> tuple[Outcome, list[float]]:
    served: nn.Module | PluggedModel = plugged if plugged.served is not None else world.model
    recalls = world.recalls(served)
    loss = max(100 * (was - now) for was, now in zip(honest or recalls, recalls, strict=True))
    retained = accuracy(served, world.unseen_x, world.unseen_y)
    return Outcome(attack.name, attack.kind, statistics, retained, loss, **about), recalls


def _start_of_peak() -> int:
    """Memory now; from here on the system's peak is counted anew."""
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")


def run_hostile_nodes(
    data: str, *, model: str | None = None, rounds: int | None = None, seed: int = 0, progress: Progress
) -> dict[str, Any]:
    """Every attack on every kind of statistics, as plain data."""
    check_there(data)
    recipe = Recipe.suited_to(data, model=model, rounds=rounds, partition=PARTITION, seed=seed)
    world = World.of(recipe, progress)
    insider = Insider.of(world.model, find_cut(world.model, recipe.cut), world.federation, ATTACKER)
    outcomes: list[Outcome] = []
    for statistics in STATISTICS:
        honest: dict[bool, list[float]] = {}
        plan = list(attacks_on(statistics, insider))
        measure(world, plan[0], statistics, None)  # what is loaded once takes memory once
        for done, attack in enumerate(plan):
            progress(f"Hostile nodes: {statistics}", done, len(plan))
            outcome, recalls = measure(world, attack, statistics, honest.get(attack.samples))
            honest.setdefault(attack.samples, recalls)
            outcomes.append(outcome)
        progress(f"Hostile nodes: {statistics}", len(plan), len(plan))
    return {
        "recipe": recipe.settings(),
        "policy": None,
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "machine": describe_machine(),
        "code": describe_code(),
    }

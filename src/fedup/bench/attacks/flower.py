"""Attack 5: hostile nodes of a Flower federation. What does one node's answer do to everybody else's model?

One node (or a pair) falsifies its answers to a collection. Then another client asks to be forgotten, and the served
model is measured: retained accuracy, what the worst class loses against the same run with honest nodes, memory, and
whether the server named the node. The nodes' own code answers, over a grid in this process.
"""

import ctypes
import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedup.bench.attacks import flower_answers as send
from fedup.bench.attacks.flower_alarms import measure_alarms
from fedup.bench.attacks.flower_answers import Insider
from fedup.bench.attacks.flower_grid import FIRST, Falsify, HostileGrid
from fedup.bench.attacks.flower_world import World
from fedup.bench.memory import memory_bytes
from fedup.clients.collect import collect
from fedup.clients.intake import Intake
from fedup.errors import ContactError, FedUPError, HarmError
from fedup.federation import Federation
from fedup.flower.contact import GridContact
from fedup.models.cut import find_cut
from fedup.privacy import DP
from fedup.request import Forget
from fedup.serving.plugged import PluggedModel, plug
from fedup.statistics.store import Centroids
from fedup.tasks.datasets import check_there
from fedup.tasks.evaluation import accuracy
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
SEEDS = (0, 1, 2, 3, 4)  # of federations, and of noise: one class of one of them has 80 test rows or so
SAMPLES = 21  # of its own, that a node asks to forget
HONEST, ABSENT, ADAPTIVE, CONTROL = "honest", "absent", "adaptive", "control"
OTHER_NOISE = "honest, other noise"
_LONG_REPLY = 1_000_000_000  # bytes


@dataclass(frozen=True)
class Hostile:
    """What nodes do: by client, how they falsify answers. `kind` is honest, absent, fixed, adaptive or control."""

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
    memory_bytes: int  # at most, beyond what was taken before, with all replies there
    named: bool  # whether the server says which node it was
    left_out: bool
    refused: bool  # the request; the original model is served
    said: str = ""  # what the server says of it


@dataclass(frozen=True)
class Repeat:
    """The same in several federations, where those with other seeds have other splits, models and noise."""

    attack: str
    kind: str
    statistics: str
    retained_accuracy: tuple[float, ...]
    worst_class_loss: tuple[float, ...]  # points, each against honest nodes in the same federation
    left_out: int  # federations


def attacks_on(statistics: str, insider: Insider) -> Iterator[Hostile]:
    """All that is tried on one kind of statistics."""

    def one(name: str, falsify: Falsify, kind: str = "fixed") -> Hostile:
        return Hostile(name, {ATTACKER: falsify}, kind)

    def rows(name: str, made: Callable[[], send.Rows], kind: str = "fixed") -> Hostile:
        return one(name, send.rows_instead(insider, made), kind)

    yield Hostile(HONEST, kind=HONEST)
    yield one("no answer at all", send.refusing(), ABSENT)
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
    yield rows("own rows, next label, moved until the last layer agrees", insider.disguised, ADAPTIVE)
    longest = partial(insider.part_flipped, longest=True)
    yield rows("own rows, two fifths of each class flipped, as long as any", longest, ADAPTIVE)
    pair = {ATTACKER: insider, PARTNER: Insider.of(insider.model, insider.cut, insider.federation, PARTNER)}
    both = {client: send.rows_instead(own, own.disguised) for client, own in pair.items()}
    yield Hostile("own rows, next label, moved until the last layer agrees, by a pair", both, ADAPTIVE)
    held = {client: send.rows_instead(own, own.own_next_label) for client, own in pair.items()}
    yield Hostile("own rows, next label, by a pair", held, CONTROL)
    if statistics != PRIVATE:
        yield Hostile("honest, its own samples", kind=HONEST, samples=True)
        for factor, counts in ((10.0, False), (1e4, False), (-3.0, False), (2.0, True), (10.0, True)):
            name = f"eraser's statistics × {factor:g}" + (", and counts" if counts else "")
            yield Hostile(
                name, {ATTACKER: send.lying_eraser(factor, insider.num_classes, also_counts=counts)}, samples=True
            )


def _request(federation: Federation, attack: Hostile) -> Forget:
    """What is asked for after the collection: another client, or some samples of the hostile one."""
    if not attack.samples:
        return Forget.clients([REQUESTER])
    return Forget.samples({ATTACKER: federation.client(ATTACKER).train[:SAMPLES].tolist()}, reason="poison")


@dataclass(frozen=True)
class _Answered:
    """What became of a collection and a request."""

    contact: GridContact
    plugged: PluggedModel
    memory_bytes: int
    refused: bool = False
    error: str = ""  # that ended it

    def served(self, world: World) -> nn.Module:
        """The model that answers now."""
        return self.plugged if self.plugged.served is not None else world.model


def _answer(world: World, attack: Hostile, statistics: str, grid: HostileGrid, noise: int = 0) -> _Answered:
    """Collect, and answer the request; `noise` is the seed of noise, where there is any."""
    plugged, refused, ended = plug(world.model), False, ""
    settings = dict(STATISTICS[statistics])
    if "privacy" in settings:
        settings["privacy"] = replace(settings["privacy"], replay_seed=noise)
    with tempfile.TemporaryDirectory() as folder:
        contact = world.contact(grid, Path(folder), "off" if attack.kind == CONTROL else Intake.policy)
        before = _start_of_peak()
        try:
            store = collect(world.model, contact, **settings)
            refused = _refuses(plugged, store, _request(world.federation, attack), contact)
        except Exception as error:  # an untyped one is worse, and the table says so
            ended = f"{'' if isinstance(error, FedUPError) else type(error).__name__ + ': '}{error}"
        return _Answered(contact, plugged, max(0, memory_bytes("VmHWM") - before), refused, ended)


def _refuses(plugged: PluggedModel, store: Centroids, request: Forget, contact: GridContact) -> bool:
    """Whether a request is refused: its answer would harm others, or the node that has to help is not believed."""
    try:
        unlearn(plugged, store, request, clients=contact)
    except (HarmError, ContactError):
        return True
    return False


def measure(world: World, attack: Hostile, statistics: str, honest: list[float] | None) -> tuple[Outcome, list[float]]:
    """Collect, answer the request, and see what became of the model; `honest` has the recalls without an attack."""
    grid = HostileGrid(world.federation, world.blank, attack.nodes)
    _answer(world, attack, statistics, grid)  # the nodes do their work
    answered = _answer(world, attack, statistics, grid)
    left_out = answered.contact.left_out
    nodes, reasons = [FIRST + client for client in attack.nodes], {**answered.contact.flagged, **left_out}
    said = answered.error or "; ".join(dict.fromkeys(str(reasons[node]) for node in nodes if node in reasons))
    about: dict[str, Any] = {
        "memory_bytes": answered.memory_bytes,
        "named": bool(nodes) and all(node in reasons for node in nodes),
        "left_out": bool(nodes) and all(node in left_out for node in nodes),
        "refused": answered.refused,
        "said": said[:300],
    }
    if answered.error:
        return Outcome(attack.name, attack.kind, statistics, None, None, **about), []
    served = answered.served(world)
    recalls = world.recalls(served)
    loss = max(100 * (was - now) for was, now in zip(honest or recalls, recalls, strict=True))
    retained = accuracy(served, world.unseen_x, world.unseen_y)
    return Outcome(attack.name, attack.kind, statistics, retained, loss, **about), recalls


def measure_repeats(data: str, progress: Progress, **settings: Any) -> list[Repeat]:
    """What adaptive nodes do in several federations, beside controls, absent nodes and other noise."""
    figures: dict[tuple[str, str, str], list[tuple[float, float, bool]]] = {}
    for done, seed in enumerate(SEEDS):
        progress("Hostile nodes in other federations", done, len(SEEDS))
        recipe = Recipe.suited_to(data, partition=PARTITION, seed=seed, **settings)
        world = World.of(recipe, progress)
        insider = Insider.of(world.model, find_cut(world.model, recipe.cut), world.federation, ATTACKER)
        for statistics in STATISTICS:
            honest: list[float] = []
            for attack in _repeated(statistics, insider):
                grid = HostileGrid(world.federation, world.blank, attack.nodes)
                noise = seed + len(SEEDS) if attack.name == OTHER_NOISE else seed
                answered = _answer(world, attack, statistics, grid, noise)
                recalls = world.recalls(answered.served(world))
                honest = honest or recalls
                loss = max(100 * (was - now) for was, now in zip(honest, recalls, strict=True))
                right = accuracy(answered.served(world), world.unseen_x, world.unseen_y)
                left_out = all(FIRST + client in answered.contact.left_out for client in attack.nodes)
                name = attack.name, attack.kind, statistics
                figures.setdefault(name, []).append((right, loss, bool(attack.nodes) and left_out))
    progress("Hostile nodes in other federations", len(SEEDS), len(SEEDS))
    return [
        Repeat(
            *name, tuple(right for right, _, _ in own), tuple(loss for _, loss, _ in own), sum(out for *_, out in own)
        )
        for name, own in figures.items()
    ]


def _repeated(statistics: str, insider: Insider) -> Iterator[Hostile]:
    kinds = (HONEST, ABSENT, CONTROL, ADAPTIVE)
    yield from (each for each in attacks_on(statistics, insider) if each.kind in kinds and not each.samples)
    if statistics == PRIVATE:
        yield Hostile(OTHER_NOISE, kind=HONEST)


def _start_of_peak() -> int:
    """Memory now; from here on the system's peak is counted anew. What was freed is given back first: else it would be
    taken again without a trace."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
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
        "policy": Intake.policy,
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "repeats": [asdict(own) for own in measure_repeats(data, progress, model=model, rounds=rounds)],
        "alarms": [asdict(alarms) for alarms in measure_alarms(progress)],
        "machine": describe_machine(),
        "code": describe_code(),
    }

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
from statistics import fmean
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
SEEDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)  # of federations: one class of one of them has 80 test rows or so
DRAWS = 8  # of noise, under differential privacy: in one of them a class moves by some points by chance
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
    noise: int = 0  # seed of the first draw of noise, where there is any
    control: str = ""  # the name of the attack that this one is compared with


@dataclass(frozen=True)
class Outcome:
    """What a hostile node did to the others: figures are means over draws of noise, where there is noise."""

    attack: str
    kind: str
    statistics: str
    retained_accuracy: float | None  # of the model that is served; None if the server could not go on
    worst_class_loss: float | None  # points of mean recall, against honest nodes
    memory_bytes: int  # at most, beyond what was taken before, with all replies there
    named: bool  # whether the server says which node it was, in every draw
    left_out: bool  # in every draw
    refused: bool  # the request, in any draw; the original model is served
    said: str = ""  # what the server says of it
    accuracies: tuple[float, ...] = ()  # of each draw
    losses: tuple[float, ...] = ()  # of each draw: its own worst class, against honest nodes in the same draw
    loss_error: float | None = None  # standard error of the worst class's mean loss


@dataclass(frozen=True)
class Repeat:
    """The same in several federations, where those with other seeds have other splits, models and noise."""

    attack: str
    kind: str
    statistics: str
    control: str  # the name of the attack that this one is compared with
    retained_accuracy: tuple[float, ...]
    worst_class_loss: tuple[float, ...]  # points, each against honest nodes in the same federation
    left_out: int  # federations


def attacks_on(statistics: str, insider: Insider) -> Iterator[Hostile]:
    """All that is tried on one kind of statistics."""

    def one(name: str, falsify: Falsify, kind: str = "fixed") -> Hostile:
        return Hostile(name, {ATTACKER: falsify}, kind)

    def rows(name: str, made: Callable[[], send.Rows], kind: str = "fixed", control: str = "") -> Hostile:
        return replace(one(name, send.rows_instead(insider, made), kind), control=control)

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
    flipped, some = "own rows, next label", "own rows, two fifths of each class flipped"
    yield rows(flipped, insider.own_next_label, CONTROL)
    yield rows(some, insider.part_flipped, CONTROL)
    yield rows(f"{flipped}, moved until the last layer agrees", insider.disguised, ADAPTIVE, flipped)
    yield rows(f"{some}, as long as any", partial(insider.part_flipped, longest=True), ADAPTIVE, some)
    pair = {ATTACKER: insider, PARTNER: Insider.of(insider.model, insider.cut, insider.federation, PARTNER)}
    both = {client: send.rows_instead(own, own.disguised) for client, own in pair.items()}
    held, by_pair = {c: send.rows_instead(own, own.own_next_label) for c, own in pair.items()}, f"{flipped}, by a pair"
    yield Hostile(f"{flipped}, moved until the last layer agrees, by a pair", both, ADAPTIVE, control=by_pair)
    yield Hostile(by_pair, held, CONTROL)
    if statistics == PRIVATE:
        yield Hostile(OTHER_NOISE, kind=HONEST, noise=DRAWS)
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


def measure(
    world: World,
    attack: Hostile,
    statistics: str,
    honest: list[list[float]] | None,
    *,
    draws: int = DRAWS,
    again: bool = True,
) -> tuple[Outcome, list[list[float]]]:
    """Collect, answer the request, and see what became of the model, in several draws of noise where there is noise;
    `honest` has the recalls without an attack, a list for each draw. `again` for the memory of the server alone."""
    grid, noise = HostileGrid(world.federation, world.blank, attack.nodes), attack.noise
    first = _answer(world, attack, statistics, grid, noise)
    if again:  # the nodes have done their work
        first = _answer(world, attack, statistics, grid, noise)
    drawn = [first]
    for draw in range(1, draws if statistics == PRIVATE else 1):
        drawn.append(_answer(world, attack, statistics, grid, noise + draw))
    nodes = [FIRST + client for client in attack.nodes]
    reasons = [{**answered.contact.flagged, **answered.contact.left_out} for answered in drawn]
    error = next((answered.error for answered in drawn if answered.error), "")
    said = error or "; ".join(dict.fromkeys(str(reasons[0][node]) for node in nodes if node in reasons[0]))
    about: dict[str, Any] = {
        "memory_bytes": first.memory_bytes,
        "named": bool(nodes) and all(node in own for own in reasons for node in nodes),
        "left_out": bool(nodes) and all(node in answered.contact.left_out for answered in drawn for node in nodes),
        "refused": any(answered.refused for answered in drawn),
        "said": said[:300],
    }
    if error:
        return Outcome(attack.name, attack.kind, statistics, None, None, **about), []
    served = [answered.served(world) for answered in drawn]
    recalls = [world.recalls(model) for model in served]
    accuracies = [accuracy(model, world.unseen_x, world.unseen_y) for model in served]
    about |= {"accuracies": tuple(accuracies), **_losses(honest or recalls, recalls)}
    return Outcome(attack.name, attack.kind, statistics, fmean(accuracies), **about), recalls


def _losses(honest: list[list[float]], recalls: list[list[float]]) -> dict[str, Any]:
    """What the worst class loses: of the means over draws, and in each draw."""
    lost = 100 * (torch.tensor(honest, dtype=torch.float64) - torch.tensor(recalls, dtype=torch.float64))  # (draws, K)
    worst = int(lost.mean(0).argmax())
    error = float(lost[:, worst].std() / len(lost) ** 0.5) if len(lost) > 1 else None
    return {
        "worst_class_loss": float(lost.mean(0)[worst]),
        "losses": tuple(lost.amax(1).tolist()),
        "loss_error": error,
    }


def measure_repeats(data: str, progress: Progress, **settings: Any) -> list[Repeat]:
    """What adaptive nodes do in several federations, beside controls, absent nodes and other noise; one draw of noise
    in each."""
    outcomes: dict[tuple[str, str, str, str], list[Outcome]] = {}
    for done, seed in enumerate(SEEDS):
        progress("Hostile nodes in other federations", done, len(SEEDS))
        recipe = Recipe.suited_to(data, partition=PARTITION, seed=seed, **settings)
        world = World.of(recipe, progress)
        insider = Insider.of(world.model, find_cut(world.model, recipe.cut), world.federation, ATTACKER)
        for statistics in STATISTICS:
            honest: list[list[float]] = []
            for attack in attacks_on(statistics, insider):
                if attack.kind in (HONEST, ABSENT, CONTROL, ADAPTIVE) and not attack.samples:
                    own = replace(attack, noise=attack.noise + 2 * DRAWS * seed)
                    outcome, recalls = measure(world, own, statistics, honest or None, draws=1, again=False)
                    honest = honest or recalls
                    name = attack.name, attack.kind, statistics, attack.control
                    outcomes.setdefault(name, []).append(outcome)
    progress("Hostile nodes in other federations", len(SEEDS), len(SEEDS))
    return [
        Repeat(
            *name,
            tuple(outcome.accuracies[0] for outcome in own),
            tuple(outcome.losses[0] for outcome in own),
            sum(outcome.left_out for outcome in own),
        )
        for name, own in outcomes.items()
    ]


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
        honest: dict[bool, list[list[float]]] = {}
        plan = list(attacks_on(statistics, insider))
        measure(world, plan[0], statistics, None, draws=1)  # what is loaded once takes memory once
        for done, attack in enumerate(plan):
            progress(f"Hostile nodes: {statistics}", done, len(plan))
            outcome, recalls = measure(world, attack, statistics, honest.get(attack.samples))
            honest.setdefault(attack.samples, recalls)
            outcomes.append(outcome)
        progress(f"Hostile nodes: {statistics}", len(plan), len(plan))
    return {
        "recipe": recipe.settings(),
        "policy": Intake.policy,
        "draws": DRAWS,
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "repeats": [asdict(own) for own in measure_repeats(data, progress, model=model, rounds=rounds)],
        "alarms": [asdict(alarms) for alarms in measure_alarms(progress)],
        "machine": describe_machine(),
        "code": describe_code(),
    }

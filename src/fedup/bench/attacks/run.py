"""All attacks on one federation, as a result file, and the tables made of such files."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fedup.bench.attacks import AttackData, Result
from fedup.bench.attacks.canary import audit_guarantees, audit_paper
from fedup.bench.attacks.interface import audit_interface
from fedup.bench.attacks.membership import membership
from fedup.bench.attacks.reidentify import reidentify
from fedup.bench.tables import markdown_table
from fedup.bench.training_cache import trained
from fedup.models.cut import find_cut
from fedup.tasks.datasets import check_there
from fedup.tasks.machine import describe_code, describe_machine, show_commit
from fedup.tasks.progress import Progress
from fedup.tasks.recipe import Recipe

HEAD = ("attack", "protection", "measure", "figure", "95 % interval", "chance", "bound", "kept", "n")
NOTES = (
    "Bound: what the protection claims to allow at most. Kept: `no` where the whole interval lies above it.",
    "Canary audit: the bound is the ε that is claimed, the figure a lower bound on the true one at 99.99 % confidence. "
    "Counted: of counts alone. As Gaussian: of the same counts, where noise is known to be Gaussian. Noise's tail: "
    "true positives counted, false positives from the noise's known tail. What so many trials can show at most "
    "stands at n.",
    "none, paper: centroids at ρ = 0.8; the attack knows nothing else, and takes what is nearest. DP: δ = 1e-5, clip = "
    "unit; re-identification and the second membership attack know the mechanism and all other records of the client, "
    "and are the best there can be.",
    "Node's interface: crafted questions to two nodes that are one record apart; what comes back but the noisy numbers "
    "(status, reason, details, sizes, charges) must be the same. Pixels and labels: found by asking, all other records "
    "left out. Without a rule the node is asked for exact statistics.",
    "Guarantees are about messages: the model itself was trained without one; the control is what it tells by itself.",
    "Noise is replayed from seeds, so that figures can be made again, but for the audit `as deployed` and that of a "
    "node's interface.",
)


def run_attacks(
    data: str,
    *,
    model: str | None = None,
    rounds: int | None = None,
    trials: int = 2000,
    seed: int = 0,
    candidates: int = 100,
    progress: Progress,
) -> dict[str, Any]:
    """Train the federation, or take it from the cache, attack what its clients send, and tell as plain data."""
    check_there(data)
    recipe = Recipe.suited_to(data, model=model, rounds=rounds, seed=seed)
    dataset = recipe.load()
    federation = recipe.federation(dataset)
    start = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes)
    network = trained(start, federation, recipe, progress=progress)
    attacked = AttackData.of(network, federation, find_cut(network, recipe.cut))
    results = attack(attacked, trials=trials, seed=seed, candidates=candidates, progress=progress)
    return {
        "recipe": recipe.settings(),
        "trials": trials,
        "candidates": candidates,
        "results": [asdict(result) for result in results],
        "machine": describe_machine(),
        "code": describe_code(),
    }


def attack(data: AttackData, *, trials: int, seed: int, candidates: int, progress: Progress) -> list[Result]:
    """All attacks, with that many trials each; ten times as many for the audit of a guarantee."""
    return [
        *reidentify(data, trials=trials, seed=seed, candidates=candidates, progress=progress),
        *membership(data, trials=trials, seed=seed, progress=progress),
        *audit_guarantees(data, trials=trials, seed=seed, progress=progress),
        *audit_paper(data, trials=trials, seed=seed, progress=progress),
        *audit_interface(data, seed=seed, progress=progress),
    ]


def results_of(content: dict[str, Any]) -> list[Result]:
    """The results in a file's content."""
    return [Result(**result) for result in content["results"]]


def title(content: dict[str, Any]) -> str:
    """What was attacked, in one line."""
    recipe = content["recipe"]
    return (
        f"{recipe['data']}, {recipe['model']}, {recipe['clients']} clients, {recipe['partition']}, "
        f"{recipe['rounds']} rounds, seed {recipe['seed']}"
    )


def cells(result: Result) -> list[str]:
    """One line of a table, in the order of `HEAD`."""
    interval = "–" if result.low is None or result.high is None else f"{_number(result.low)} … {_number(result.high)}"
    figure, chance, bound = map(_number, (result.figure, result.chance, result.bound))
    kept = "–" if result.bound is None else "no" if result.exceeds else "yes"
    return [result.name, result.protection, result.measure, figure, interval, chance, bound, kept, result.n]


def attacks_table(results: Sequence[dict[str, Any]]) -> str:
    """Files' contents as Markdown, a section each."""
    return "\n\n".join([*map(_section, results), "\n".join(f"- {note}" for note in NOTES)])


def _section(content: dict[str, Any]) -> str:
    results, recipe = results_of(content), content["recipe"]
    command = (
        f"fedup bench attack --data {recipe['data']} --model {recipe['model']} --rounds {recipe['rounds']} "
        f"--trials {content['trials']} --seed {recipe['seed']}"
    )
    command = content.get("command", command)
    remarks: dict[str, list[str]] = {}
    for result in results:
        if result.note:
            remarks.setdefault(result.note, []).append(result.protection)
    return "\n\n".join(
        [
            f"## {title(content)}",
            f"`{command}`, commit {show_commit(content['code'])}, torch {content['machine']['torch']}.",
            markdown_table(HEAD, [cells(result) for result in results]),
            "\n".join(f"- {'; '.join(dict.fromkeys(of))}: {note}." for note, of in remarks.items()),
        ]
    )


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if value >= 1e4 else f"{value:.1f}" if value >= 100 else f"{value:.3f}"

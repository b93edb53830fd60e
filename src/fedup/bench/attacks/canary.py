"""Attack 3: an audit. How large must ε be, judged by what two worlds, one record apart, send?

A mechanism that is (ε, δ)-DP obeys TPR ≤ e^ε·FPR + δ for every test between the worlds, and the same with the worlds
exchanged. So rates that were counted bound ε from below. The test's threshold is chosen on one half of the trials, the
rates are bounded on the other (Clopper & Pearson, 99.99 % for both together), so that chance passes a true claim once
in 10,000 audits. Where noise is known to be Gaussian the same counts bound μ, and ε more tightly (Nasr et al. 2023).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedup.bench.attacks import CENTROIDS, RATIO, AttackData, Result, guarantees, message_of, shown
from fedup.bench.attacks.intervals import NORMAL, Scores, clopper_pearson
from fedup.errors import DataError
from fedup.privacy import DP, epsilon_of
from fedup.privacy.dp import joint_vector
from fedup.privacy.paper import SIGMA, paper_epsilon
from fedup.rng import seed_for
from fedup.statistics.kmeans import centroid_count
from fedup.tasks.progress import Progress

NAME = "canary audit"
COUNTED, GAUSSIAN, PROVED = "ε ≥, counted", "ε ≥, as Gaussian", "ε ≥, noise's tail"
CONFIDENCE = 0.9999
_MORE = 10  # canary trials of a guarantee for each trial asked for: they are cheap
_SMALLEST_CELL = 10  # rows: with fewer, the paper's δ = 1/n says nothing


class QuarterNoise(DP):
    """A guarantee that is broken on purpose: it claims ε, with a quarter of the noise. The audit must find out."""

    @property
    def sigma(self) -> float:
        """A quarter of what it should be."""
        return super().sigma / 4


@dataclass(frozen=True)
class Rates:
    """What a test was counted to do in the half of the trials that it was not chosen on."""

    tpr_low: float
    fpr_high: float

    def epsilon(self, delta: float) -> float:
        """The ε that these rates need at least; 0 where they need none."""
        return max(0.0, math.log((self.tpr_low - delta) / self.fpr_high)) if self.tpr_low > delta else 0.0

    def gaussian(self, delta: float) -> float:
        """The same where the noise is Gaussian."""
        if self.tpr_low <= self.fpr_high or self.fpr_high >= 1:
            return 0.0
        return epsilon_of(NORMAL.inv_cdf(self.tpr_low) - NORMAL.inv_cdf(self.fpr_high), delta)


def lower_bound(inside: Scores, outside: Scores, of: Callable[[Rates], float]) -> float:
    """The lower bound on ε that two worlds' scores prove, by the better of the two directions on the first half."""
    directions = [(inside, outside), (-outside, -inside)]
    chosen = [(*_choose(a[: len(a) // 2], b[: len(b) // 2], of), a, b) for a, b in directions]
    _, threshold, *worlds = max(chosen, key=lambda choice: choice[0])
    a, b = (world[len(world) // 2 :] for world in worlds)
    tpr_low, _ = clopper_pearson(int((a > threshold).sum()), len(a), CONFIDENCE)
    _, fpr_high = clopper_pearson(int((b > threshold).sum()), len(b), CONFIDENCE)
    return of(Rates(tpr_low, fpr_high))


def ceiling(trials: int, of: Callable[[Rates], float]) -> float:
    """The largest lower bound that so many trials a world can prove, where the worlds never overlap."""
    half = trials - trials // 2
    return of(Rates(clopper_pearson(half, half, CONFIDENCE)[0], clopper_pearson(0, half, CONFIDENCE)[1]))


def _choose(inside: Scores, outside: Scores, of: Callable[[Rates], float]) -> tuple[float, float]:
    """The most promising threshold, by quick approximate bounds (Wilson 1927); it proves nothing yet."""
    thresholds = np.quantile(np.concatenate([inside, outside]), np.linspace(0, 1, 401))
    tpr = _wilson(_share_above(inside, thresholds), len(inside), -1)
    fpr = _wilson(_share_above(outside, thresholds), len(outside), +1)
    values = [of(Rates(float(t), float(f))) for t, f in zip(tpr, fpr, strict=True)]
    best = int(np.argmax(values))
    return values[best], float(thresholds[best])


def _share_above(sample: Scores, thresholds: Scores) -> Scores:
    return 1 - np.searchsorted(np.sort(sample), thresholds, "right") / len(sample)


def _wilson(rates: Scores, n: int, sign: int) -> Scores:
    z = NORMAL.inv_cdf((1 + CONFIDENCE) / 2)
    middle, reach = rates + z * z / (2 * n), z * np.sqrt(rates * (1 - rates) / n + z * z / (4 * n * n))
    return np.clip((middle + sign * reach) / (1 + z * z / n), 1e-12, 1 - 1e-12)


def audit_guarantees(data: AttackData, *, trials: int, seed: int = 0, progress: Progress) -> list[Result]:
    """Lower bounds on the ε of every guarantee, of one as deployed, and of a broken one, for comparison."""
    trials *= _MORE
    protections = guarantees()
    at_one = next(dp for dp in protections.values() if dp.epsilon == 1)
    broken = QuarterNoise(1.0, at_one.delta, clip=at_one.clip)
    cases: dict[str, tuple[DP, str]] = {
        **{name: (dp, "") for name, dp in protections.items()},
        "DP, ε = 1, as deployed": (at_one, "noise of the system's entropy: another figure in every run"),
        "DP, ε = 1, noise ÷ 4": (broken, "broken on purpose: the audit must tell"),
    }
    results = []
    for name, (dp, note) in shown(cases.items(), "Canary audit of the guarantee", progress):
        worlds = guarded_worlds(data, dp, trials=trials, seed=None if name.endswith("as deployed") else seed)
        results += _results(name, *worlds, claimed=dp.epsilon, delta=dp.delta, note=note)
    return results


def guarded_worlds(data: AttackData, dp: DP, *, trials: int, seed: int | None) -> tuple[Scores, Scores]:
    """How far each world's messages go along what the canary adds, with it and without it: the likelihood ratio.

    The canary is the worst case: a vector of the clip's norm, in a class that the client does not have where there is
    one. Every trial is a release of its own; without a seed its noise is what a real client's would be.
    """
    client = data.federation.clients[0]
    points, labels = data.points(dp)[client.train], data.federation.y[client.train]
    label = labels.bincount(minlength=data.num_classes).argmin()
    canary = torch.nn.functional.one_hot(torch.tensor([0]), points.shape[1]).to(points) * dp.scale
    without, with_it = (
        joint_vector(dp, x, y, None, data.num_classes)[label]
        for x, y in ((points, labels), (torch.cat([points, canary]), torch.cat([labels, label[None]])))
    )
    added = (with_it - without) / (with_it - without).norm()

    def scores(exact: Tensor, world: str) -> Scores:
        messages = (
            message_of(dp, exact, client=client.id, seed=seed, trial=("canary", world, trial))
            for trial in range(trials)
        )
        return np.array([float((message - without) @ added) for message in messages])

    return scores(with_it, "with"), scores(without, "without")


@dataclass(frozen=True)
class _Replaced:
    """Two training sets of a client's class that differ in one real record, and the direction it stands out in."""

    client: int
    with_it: Tensor  # (n,) rows
    without: Tensor  # (n,) rows
    direction: Tensor  # (D,)
    reach: float  # how far the record goes along it
    widest: float  # how far any centroid without the record does: no mean goes further than its points


def audit_paper(data: AttackData, *, trials: int, seed: int = 0, progress: Progress) -> list[Result]:
    """The ε that the paper's formula claims for its noise, beside lower bounds counted in the same way.

    The formula's ε at σ = 0.001 is in the hundreds, more than counting can ever refute. So it is refuted in two ways:
    with as much noise as makes it claim ε = 1, by counting alone; and as published, with a false-positive rate that is
    not counted but follows from the noise's tail, which is known.
    """
    worlds = _replaced(data)
    x = data.federation.x
    claim = max(paper_epsilon(x[rows], 1.0) for rows in (worlds.with_it, worlds.without))  # at σ = 1
    delta = 1 / len(worlds.with_it)
    results: list[Result] = []
    cases = {next(name for name, sigma in CENTROIDS.items() if sigma): SIGMA, "paper, σ for ε = 1": claim}
    for name, sigma in shown(cases.items(), "Canary audit of the paper's noise", progress):
        inside, outside = (
            paper_scores(data, worlds, rows, sigma=sigma, trials=trials, seed=seed_for(seed, name, world))
            for world, rows in (("with", worlds.with_it), ("without", worlds.without))
        )
        note = f"one real record of {len(worlds.with_it)} replaced, σ = {sigma:.3g}, δ = 1/n = {delta:.2g}"
        counted, _ = _results(name, inside, outside, claimed=claim / sigma, delta=delta, note=note)
        results.append(counted)
        if sigma == SIGMA:
            proved = _proved(inside, worlds, sigma=sigma, delta=delta)
            results.append(replace(counted, measure=PROVED, figure=proved, n=f"{trials} with"))
    return results


def paper_scores(data: AttackData, worlds: _Replaced, rows: Tensor, *, sigma: float, trials: int, seed: int) -> Scores:
    """How far the furthest uploaded vector goes along the record's direction: a message of its own in each trial."""
    federation = data.federation
    client = replace(federation.client(worlds.client), train=rows)
    world = replace(data, federation=replace(federation, clients=(client,)))
    label = int(federation.y[rows[0]])
    messages = (world.centroids(client.id, label, sigma=sigma, seed=seed_for(seed, trial)) for trial in range(trials))
    return np.array([float((vectors @ worlds.direction).max()) for vectors in messages])


def _replaced(data: AttackData) -> _Replaced:
    """The record that stands out most of a cell of middling size, and a held-out record of the same class instead."""
    x, y = data.federation.x, data.federation.y
    cells = []
    for client in data.federation.clients:
        for label in y[client.heldout].unique().tolist():
            own = client.train[y[client.train] == label]
            if len(own) >= _SMALLEST_CELL:
                cells.append((len(own), client.id, own, client.heldout[y[client.heldout] == label][:1]))
    if not cells:
        raise DataError(f"No client has {_SMALLEST_CELL} training rows of a class and one held out.")
    _, client_id, own, other = sorted(cells, key=lambda cell: cell[:2])[len(cells) // 2]
    choices = []
    for row in own:
        rest = torch.cat([own[own != row], other])
        direction = torch.nn.functional.normalize(x[row] - x[rest].mean(0), dim=0)
        reach, widest = float(x[row] @ direction), float((x[rest] @ direction).max())
        choices.append(_Replaced(client_id, own, rest, direction, reach, widest))
    return max(choices, key=lambda choice: choice.reach - choice.widest)


def _proved(inside: Scores, worlds: _Replaced, *, sigma: float, delta: float) -> float:
    """A bound whose false-positive rate is not counted, with a threshold half-way to the record, which nothing chose.

    Without the record none of k noisy vectors gets z·σ beyond the widest point but with probability kΦ(−z), which is at
    most k·exp(−z²/2)/(z√(2π)).
    """
    threshold = (worlds.reach + worlds.widest) / 2
    z, k = (threshold - worlds.widest) / sigma, centroid_count(len(worlds.without), RATIO)
    tpr_low, _ = clopper_pearson(int((inside > threshold).sum()), len(inside), CONFIDENCE)
    if z <= 0 or tpr_low <= delta:
        return 0.0
    log_fpr = min(0.0, math.log(k) - z * z / 2 - math.log(z * math.sqrt(2 * math.pi)))
    return max(0.0, math.log(tpr_low - delta) - log_fpr)


def _results(
    protection: str, inside: Scores, outside: Scores, *, claimed: float, delta: float, note: str
) -> list[Result]:
    results = []
    for measure, of in ((COUNTED, Rates.epsilon), (GAUSSIAN, Rates.gaussian)):
        needed = partial(of, delta=delta)
        figure = lower_bound(inside, outside, needed)
        n = f"{len(inside)} a world, can show {ceiling(len(inside), needed):.1f}"
        results.append(Result(NAME, measure, protection, figure, None, None, None, claimed, n, note))
    return results

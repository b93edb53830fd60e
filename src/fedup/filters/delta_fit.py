"""The fit of a delta: forgotten rows get the losses of rows never trained on, and retained rows keep their answers.

It is a pure function of a client's own rows. No setting depends on the data set: a trust region on rows never trained
on says how far it may go, and it stops as soon as the forgotten rows look unseen.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, smooth_l1_loss

from fedup.filters.delta import ChangedWeight, changed_weights, weighted_layers
from fedup.filters.delta_targets import LEAST_UNSEEN, Losses, early_layer, hardness_of, unseen_targets
from fedup.models.cut import logits_of
from fedup.models.features import FEATURE_BATCH
from fedup.models.views import shared_view
from fedup.rng import generator, sample

LEAST_FORGOTTEN = 5  # rows: the change of fewer would show them
MOST_ALONE = 0.2  # share of the forgotten rows whose class has fewer than LEAST_UNSEEN unseen rows
_MOST_ROWS = 2000  # of a kind that are looked at again and again: more would hardly change the fit
_LEAST_RISE = 0.1  # share of the mean loss wanted: rows that close to unseen ones need no delta,
_NO_LOSS = 0.01  # nor do rows with so small a rise
_SMALL_RISE = 0.3  # of the mean loss: below it errors of losses count in proportion
Outcome = Literal["fitted", "too few rows", "no unseen rows", "look unseen", "not reached"]


@dataclass(frozen=True)
class DeltaRule:
    """How a delta is fitted, the same for all models and data sets.

    Every `check_every` steps the trust region is checked on rows never trained on. The mean KL divergence of their
    answers from the original's may be `max_divergence` of what the loss of forgotten rows is to rise by. A share of
    `max_loss` of them may be answered wrongly in addition, beyond what chance explains (two deviations); a client that
    leaves altogether needs no answers of its own. Outside, the fit goes back to the last good weights and takes half
    the rate, `halvings` times at most. It stops once the forgotten rows look unseen: their mean loss has come `reached`
    of the way to that of unseen rows, and not more of them than `close` are answered rightly in addition. If the loss
    has not come `least_way`, nothing is sent.
    """

    lr: float = 1e-3
    steps: int = 400
    batch_size: int = 64
    anchor: float = 30.0  # weight of the answers to retained rows
    check_every: int = 10
    max_divergence: float = 0.25
    max_loss: float = 0.01
    halvings: int = 4
    reached: float = 0.97
    close: float = 0.01
    least_way: float = 0.3


DEFAULT_RULE = DeltaRule()


@dataclass(frozen=True, eq=False)
class DeltaRows:
    """A client's rows, by number."""

    forgotten: Tensor
    retained: Tensor
    unseen: Tensor  # never trained on
    retained_weight: float = 1.0  # how many rows each of the retained ones stands for


@dataclass(frozen=True, eq=False)
class ClientDelta:
    """What a client answers: changes, or why there are none, and the means that it has measured itself."""

    outcome: Outcome
    changes: dict[str, Tensor]
    loss_before: float = 0.0  # mean over its forgotten rows
    loss_after: float = 0.0
    loss_unseen: float = 0.0  # that of rows never trained on that are as hard


def fit_delta(
    model: nn.Module,
    cut: str,
    x: Tensor,
    y: Tensor,
    rows: DeltaRows,
    *,
    rule: DeltaRule = DEFAULT_RULE,
    targets: Tensor | None = None,
) -> ClientDelta:
    """The change of weights before the cut for a client's forgotten rows; `targets` are losses to give them instead of
    those of unseen rows."""
    if len(rows.forgotten) < LEAST_FORGOTTEN:
        return ClientDelta("too few rows", {})
    if len(rows.unseen) < LEAST_UNSEEN or float(_alone(y, rows).float().mean()) > MOST_ALONE:
        return ClientDelta("no unseen rows", {})
    retained, unseen = (sample(own, _MOST_ROWS, "delta") for own in (rows.retained, rows.unseen))
    weight = len(rows.retained) / max(len(retained), 1)
    rows = replace(rows, retained=retained, unseen=unseen, retained_weight=weight)
    with torch.inference_mode(False), torch.enable_grad():
        return _Fit(model, cut, x, y, rows, rule, targets).run()


def _alone(y: Tensor, rows: DeltaRows) -> Tensor:
    """Which forgotten rows are of classes with too few unseen rows. (N,)"""
    labels, counts = y[rows.unseen].unique(return_counts=True)
    return ~torch.isin(y[rows.forgotten], labels[counts >= LEAST_UNSEEN])


def _anchor_weights(forgotten: Tensor, unseen: Tensor, retained: int) -> Tensor:
    """How often each row is drawn whose answer is to stay: half of the draws are retained rows, half unseen ones with
    the classes of the forgotten rows, which a change for these would move first. (retained + unseen,)"""
    classes = int(max(forgotten.max(), unseen.max())) + 1
    share = torch.bincount(forgotten, minlength=classes) / torch.bincount(unseen, minlength=classes).clamp(min=1)
    alike = share[unseen].double() + 1e-3 / len(unseen)
    return torch.cat([torch.full((retained,), 1 / max(retained, 1)).double(), alike.cpu() / alike.sum().cpu()])


class _ChangedView:
    """A view of a model with weights base + change, where the change takes gradients."""

    def __init__(self, model: nn.Module, changed: tuple[ChangedWeight, ...]) -> None:
        self.view, self.changed = shared_view(model, frozen=True), changed
        device = next(model.parameters()).device
        self._directions = [weight.directions.to(device) if weight.rank else None for weight in changed]
        self._base, self._owners = [], []
        for weight in changed:
            owner, _, name = weight.name.rpartition(".")
            module = self.view.get_submodule(owner)
            own = module._parameters.pop(name)
            assert own is not None  # changed_weights names those that are there
            self._base.append(own.detach())
            self._owners.append((module, name))
        self.sent = [torch.zeros(weight.sent_shape, device=device, requires_grad=True) for weight in changed]

    def __call__(self, x: Tensor) -> Tensor:
        parts = zip(self.changed, self._owners, self._base, self.sent, self._directions, strict=True)
        for weight, (module, name), base, sent, directions in parts:
            object.__setattr__(module, name, base + weight.whole(sent, directions).to(base.dtype))
        return logits_of(self.view(x)).float()

    def copy(self) -> list[Tensor]:
        """The changes as they are now."""
        return [sent.detach().clone() for sent in self.sent]

    @torch.no_grad()
    def put(self, changes: list[Tensor]) -> None:
        """Take other changes."""
        for sent, change in zip(self.sent, changes, strict=True):
            sent.copy_(change)


class _Fit:
    def __init__(
        self,
        model: nn.Module,
        cut: str,
        x: Tensor,
        y: Tensor,
        rows: DeltaRows,
        rule: DeltaRule,
        targets: Tensor | None,
    ) -> None:
        self._x, self._y, self._rule, self._forgotten = x, y, rule, rows.forgotten
        self._changed = _ChangedView(model, changed_weights(model, cut))
        original = shared_view(model, frozen=True)
        answer: Callable[[Tensor], Tensor] = lambda batch: logits_of(original(batch)).float()  # noqa: E731
        self._leaves = not len(rows.retained)
        mixed = rows.unseen[torch.randperm(len(rows.unseen), generator=generator(0, "delta guard")).to(x.device)]
        half = (mixed, mixed) if self._leaves else mixed.tensor_split(2)
        self._anchors, self._guards = torch.cat([rows.retained, half[0]]), half[1]
        self._often = _anchor_weights(y[rows.forgotten], y[half[0]], len(rows.retained))
        self._kept_logits = self._answers(answer, self._anchors)
        self._kept = log_softmax(self._kept_logits, 1)
        self._guarded = log_softmax(self._answers(answer, self._guards), 1)
        self._before = self._losses(self._answers(answer, self._forgotten), self._forgotten)
        self._watched = sample(torch.arange(len(self._before), device=x.device), _MOST_ROWS, "delta watched")
        self._targets, self._expected = self._wanted(model, cut, rows, answer) if targets is None else (targets, 1.0)
        self._rise = float(self._targets.mean() - self._before.mean())

    def _wanted(
        self, model: nn.Module, cut: str, rows: DeltaRows, answer: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, float]:
        """The losses that forgotten rows should get, and the share of right answers."""
        x, y = self._x, self._y
        unseen = self._answers(answer, rows.unseen)
        retained = self._losses(self._kept_logits[: len(rows.retained)], rows.retained)
        losses = Losses(self._before, retained, self._losses(unseen, rows.unseen))
        numbers = Losses(rows.forgotten, rows.retained, rows.unseen)
        labels = Losses(*(y[own] for own in (rows.forgotten, rows.retained, rows.unseen)))
        hardness = hardness_of(model, early_layer(weighted_layers(model, cut)), x, y, numbers)
        right, weight = unseen.argmax(1) == labels.unseen, rows.retained_weight
        targets = unseen_targets(losses, labels, right, hardness, retained_weight=weight)
        return targets.losses, float(targets.right[self._watched].mean())

    @torch.no_grad()
    def _answers(self, model: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        return torch.cat([model(self._x[batch]) for batch in rows.split(FEATURE_BATCH)])

    def _losses(self, logits: Tensor, rows: Tensor) -> Tensor:
        return cross_entropy(logits, self._y[rows], reduction="none")

    def run(self) -> ClientDelta:
        """Steps until the forgotten rows look unseen, within the trust region."""
        if self._rise <= max(_NO_LOSS, _LEAST_RISE * float(self._targets.mean())):
            return self._result("look unseen")
        rule, changed, draws = self._rule, self._changed, generator(0, "delta batches")
        lr, halved, good = rule.lr, 0, changed.copy()
        optimizer = torch.optim.Adam(changed.sent, lr=lr)
        for step in range(1, rule.steps + 1):
            self._step(optimizer, draws)
            if step % rule.check_every and step < rule.steps:
                continue
            if self._is_trusted():
                good = changed.copy()
                if self._look_unseen():
                    break
                continue
            changed.put(good)
            lr, halved = lr / 2, halved + 1
            if halved > rule.halvings:
                break
            optimizer = torch.optim.Adam(changed.sent, lr=lr)
        changed.put(good)
        return self._result("fitted" if self._look()[0] >= rule.least_way else "not reached")

    def _step(self, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
        size, device = self._rule.batch_size, self._x.device
        own = torch.randint(len(self._forgotten), (size,), generator=draws).to(device)
        other = torch.multinomial(self._often, size, replacement=True, generator=draws).to(device)
        logits = self._changed(self._x[torch.cat([self._forgotten[own], self._anchors[other]])])
        losses = cross_entropy(logits[:size], self._y[self._forgotten[own]], reduction="none")
        kept = kl_div(log_softmax(logits[size:], 1), self._kept[other], log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        unit = min(1.0, self._rise / _SMALL_RISE)
        (smooth_l1_loss(losses / unit, self._targets[own] / unit) + self._rule.anchor * kept).backward()
        nn.utils.clip_grad_norm_(self._changed.sent, 1.0)
        optimizer.step()

    def _is_trusted(self) -> bool:
        """Whether rows never trained on are answered nearly as before; numbers that are none are not."""
        now, wanted = log_softmax(self._answers(self._changed, self._guards), 1), self._y[self._guards]
        divergence = float(kl_div(now, self._guarded, log_target=True, reduction="batchmean"))
        before, after = (answers.argmax(1) == wanted for answers in (self._guarded, now))
        lost, changed = int(before.sum()) - int(after.sum()), int((before != after).sum())
        allowed = math.inf if self._leaves else self._rule.max_loss * len(wanted) + 2 * math.sqrt(changed)
        return divergence <= self._rule.max_divergence * self._rise and lost <= allowed

    def _look_unseen(self) -> bool:
        way, right = self._look()
        return way >= self._rule.reached and right <= self._expected + self._rule.close

    def _look(self) -> tuple[float, float]:
        """How far the mean loss of the forgotten rows has come from its own to that of unseen rows, and the share of
        them that is answered rightly."""
        rows = self._forgotten[self._watched]
        logits = self._answers(self._changed, rows)
        rise = float((self._losses(logits, rows) - self._before[self._watched]).mean())
        return rise / self._rise, float((logits.argmax(1) == self._y[rows]).float().mean())

    def _result(self, outcome: Outcome) -> ClientDelta:
        before = float(self._before.mean())
        means = before, before + self._look()[0] * self._rise, before + self._rise
        names = [weight.name for weight in self._changed.changed]
        changes = dict(zip(names, self._changed.copy(), strict=True)) if outcome == "fitted" else {}
        return ClientDelta(outcome, changes, *means)

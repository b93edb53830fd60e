"""Phase 3: the one-shot fit of a filter to centroids, through the frozen tail of the model."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fedup.errors import DataError, SettingError
from fedup.filters.bottleneck import Bottleneck, FilterConfig, OptimizerName
from fedup.filters.guard import Guard
from fedup.rng import generator
from fedup.threads import threads_for, using_threads


@dataclass(frozen=True)
class Examples:
    """What a filter is fitted to: rows of the centroid store and the class that each should keep."""

    vectors: Tensor  # (M, D) the whole store, not copied
    rows: Tensor  # (N,) rows in use
    labels: Tensor  # (N,)
    nonnegative: bool
    guarded: Sequence[int] = ()  # forgotten classes to guard against
    basis: Tensor | None = None  # (D, d) orthonormal: features are known within it only, and no more passes
    shares: Tensor | None = None  # (N,) relative frequency of each row; None: all the same


@dataclass
class Trace:
    """Losses every so many steps of a fit, and whatever `measure` returns for the filter at that step."""

    every: int = 10
    measure: Callable[[nn.Module], dict[str, float]] | None = None
    steps: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise SettingError(f"A trace records every so many steps, at least 1; found {self.every}.")

    def record(self, step: int, losses: dict[str, Tensor], fitted: nn.Module) -> None:
        """Record this step if it is due."""
        if step % self.every == 0:
            with torch.no_grad():
                measured = self.measure(fitted) if self.measure else {}
            values = {name: float(loss.detach()) for name, loss in losses.items()}
            self.steps.append({"step": step, **values, **measured})


def fit_filter(
    tail: Callable[[Tensor], Tensor], examples: Examples, config: FilterConfig, *, trace: Trace | None = None
) -> Bottleneck:
    """A filter for which tail(filter(centroid)) keeps the centroid's class: α·CE + (1−α)·MSE, within the guard.

    The tail's weights get no gradient.
    """
    _check(tail, examples)
    # The work of encoder and decoder on a batch dominates.
    work = 2 * config.rank_for(examples.vectors.shape[1]) * examples.vectors.shape[1] * config.batch_size
    with using_threads(threads_for(work)):
        return _fit(tail, examples, config, trace)


def _fit(tail: Callable[[Tensor], Tensor], examples: Examples, config: FilterConfig, trace: Trace | None) -> Bottleneck:
    source = generator(config.seed, "filter")
    width = examples.vectors.shape[1]
    fitted = Bottleneck(width, config.rank_for(width), nonnegative=examples.nonnegative, source=source)
    fitted.to(examples.vectors.device)
    guard = None
    if examples.guarded and config.guard:
        rows = {"vectors": examples.vectors, "rows": examples.rows}
        guard = Guard.against(examples.guarded, tail=tail, **rows, nonnegative=examples.nonnegative, seed=config.seed)
    fitted.constant = guard.constant() if guard is not None else None
    optimizer = _OPTIMIZERS[config.optimizer](list(fitted.parameters()), lr=config.lr)
    with torch.enable_grad():
        for step, batch in enumerate(_batches(examples, config, source)):
            centroids = examples.vectors.index_select(0, examples.rows[batch])  # (B, D)
            passed = fitted(centroids)
            losses = {
                "cross_entropy": cross_entropy(tail(passed), examples.labels[batch]),
                "reconstruction": mse_loss(passed, centroids),
            }
            total = config.alpha * losses["cross_entropy"] + (1 - config.alpha) * losses["reconstruction"]
            optimizer.step(torch.autograd.grad(total, optimizer.weights))
            if guard is not None:
                guard.enforce(fitted.decoder.data)
            if trace is not None:
                trace.record(step + 1, {**losses, "total": total}, _within(fitted, examples.basis))
    if guard is not None:
        guard.finish(fitted.decoder.data)
    if not all(bool(weight.isfinite().all()) for weight in fitted.state_dict().values()):
        raise DataError("The fit diverged: the filter is not finite. Use a smaller lr, or check the centroids' scale.")
    return _within(fitted, examples.basis).eval().requires_grad_(False)


def _within(fitted: Bottleneck, basis: Tensor | None) -> Bottleneck:
    """The filter restricted to inputs within the basis: the rest was never part of an example."""
    if basis is None:
        return fitted
    narrowed = copy.deepcopy(fitted)
    narrowed.encoder.data = (fitted.encoder.data @ basis) @ basis.T
    return narrowed


def _check(tail: Callable[[Tensor], Tensor], examples: Examples) -> None:
    if len(examples.rows) == 0:
        raise DataError("No centroid is left to fit a filter to.")
    with torch.no_grad():
        outputs = tail(examples.vectors[examples.rows[:1]]).shape[1]
    highest = max(int(examples.labels.max()), *examples.guarded, 0)
    if highest >= outputs:
        raise DataError(
            f"The model has {outputs} outputs and the data a class {highest}: use a head with one per class."
        )
    for rows in examples.rows.split(1024):  # in parts: no second array of the store's size
        if not bool(examples.vectors.index_select(0, rows).sum().isfinite()):
            raise DataError("Some retained centroids are NaN or infinite: collect them again.")


def _batches(examples: Examples, config: FilterConfig, source: torch.Generator) -> Iterator[Tensor]:
    """One batch of positions in `examples.rows` for each step: drawn without replacement, so that each centroid counts
    once an epoch, or in proportion to its share."""
    n, device = len(examples.rows), examples.rows.device
    size = min(n, config.batch_size)
    pool = torch.empty(0, dtype=torch.long)
    for _ in range(config.steps_for(n)):
        if examples.shares is not None:
            yield torch.multinomial(examples.shares.cpu(), size, replacement=True, generator=source).to(device)
            continue
        if len(pool) < size:
            pool = torch.cat([pool, torch.randperm(n, generator=source)])
        yield pool[:size].to(device)
        pool = pool[size:]


class _SGD:
    """Gradient descent without momentum. torch.optim takes a second on first use to load the compiler."""

    def __init__(self, weights: list[nn.Parameter], lr: float) -> None:
        self.weights, self._lr = weights, lr

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.sub_(gradient, alpha=self._lr)


class _Adam(_SGD):
    """Adam (Kingma & Ba 2015)."""

    def __init__(self, weights: list[nn.Parameter], lr: float) -> None:
        super().__init__(weights, lr)
        self._first, self._second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
        self._steps = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> None:
        self._steps += 1
        size = self._lr / (1 - beta1**self._steps)
        for weight, gradient, first, second in zip(self.weights, gradients, self._first, self._second, strict=True):
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            scale = (second / (1 - beta2**self._steps)).sqrt_().add_(eps)
            weight.addcdiv_(first, scale, value=-size)


_OPTIMIZERS: dict[OptimizerName, type[_SGD]] = {"adam": _Adam, "sgd": _SGD}

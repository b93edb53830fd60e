"""A frozen feature extractor that learned nothing from the clients, with where it comes from and its public grid."""

import math
from collections import OrderedDict
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from fedup.errors import CutError, SettingError
from fedup.models.cut import logits_of
from fedup.rng import generator

HEAD = "head"  # the name of the last layer, and the cut before it
MOST_STEPS = 32767  # steps of the grid within the bound: 16 bits hold a feature
_PROBES = 16  # noise images or texts, from which an unknown grid is chosen
_DIRECTIONS = 1024  # of noise, to see how much longer random features make rows
_WORDS = 100  # ids of word pieces in a noise text are below this
_ROOM = 4.0  # by which the bound exceeds the longest features of noise
MOST_FEATURES = 8192  # a second moment of so many takes 270 MB
TRAINED_MARK = "trained_by_fedup"


@dataclass(frozen=True)
class Origin:
    """Where a backbone comes from, and who says that it is public and never saw the clients' data."""

    source: str  # a package and version, a hub's address, or how it was drawn
    licence: str
    declared_by: str

    def __post_init__(self) -> None:
        empty = [name for name, value in asdict(self).items() if not str(value).strip()]
        if empty:
            raise SettingError(f"The origin of a backbone needs {', '.join(empty)}: who says where it comes from.")


class Backbone(nn.Module):
    """A module that gives a row of features for each input, frozen.

    `example` is a blank row of inputs: its shape and type matter, never its content. `step` is the public grid:
    features are rounded to multiples of it, and rows longer than 32,767 steps are shortened. It is a power of two;
    without one it is chosen from the features of noise, so that no client's row decides it. `preprocessing` says in
    words how inputs are made; None says that clients' rows decide it, so that nothing is exact.

    >>> Backbone(nn.Linear(4, 8), torch.zeros(1, 4)).width
    8
    """

    def __init__(
        self,
        module: nn.Module,
        example: Tensor,
        *,
        origin: Origin | None = None,
        step: float | None = None,
        preprocessing: str | None = "none",
    ) -> None:
        super().__init__()
        if origin is not None and was_trained(module):
            raise SettingError(
                "This backbone was trained here, on clients' data: its origin is not public. Take the model as it was "
                "published, or leave origin out; without one nothing is claimed to be exact."
            )
        self.module, self.origin, self.preprocessing = module.eval().requires_grad_(False), origin, preprocessing
        self.eval()
        self.width, longest = self._probe(torch.zeros_like(example[:1]))
        self.step = _power_of_two(longest * _ROOM / MOST_STEPS) if step is None else float(step)
        if not (0 < self.step < math.inf) or math.frexp(self.step)[0] != 0.5:
            raise SettingError(f"step must be a power of two, as 2**-10: sums are exact then; found {step}.")

    @property
    def bound(self) -> float:
        """The longest row of features (l2)."""
        return MOST_STEPS * self.step

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.module(x)).flatten(1)  # (N, D)

    def train(self, mode: bool = True) -> "Backbone":
        """It stays as it is: nothing in it may learn, or be random."""
        return super().train(False)

    @torch.no_grad()
    def _probe(self, blank: Tensor) -> tuple[int, float]:
        """The width, and the length of the longest features of noise; raises where features are of no use."""
        noise = _noise(blank)
        try:
            first, again, alone = self(noise), self(noise), self(noise[:1])
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CutError(f"The backbone does not take inputs of shape {tuple(blank.shape)}: {error}") from error
        if first.ndim != 2 or len(first) != len(noise) or not first.is_floating_point():
            raise CutError(f"A backbone gives one row of features for each input; found {tuple(first.shape)}.")
        if not bool(first.isfinite().all()):
            raise CutError("The backbone gives features that are not finite, of noise: its weights are damaged.")
        if not torch.equal(first, again):
            raise CutError(
                "The backbone gives other features for the same input the second time: it has active dropout or "
                "another source of chance. Take that out; in eval mode nothing may be random."
            )
        if not torch.allclose(first[:1], alone, atol=1e-3 * float(first.abs().max()) + 1e-12):
            raise CutError("The features of a row depend on the other rows of its batch: no sum of them is exact.")
        return first.shape[1], float(first.double().norm(dim=1).max())


class Projected(nn.Module):
    """Features times a fixed random matrix with orthonormal columns, drawn from a public seed: fewer of them."""

    matrix: Tensor

    def __init__(self, module: nn.Module, width: int, to: int, seed: int = 0) -> None:
        super().__init__()
        if not 1 <= to <= width:
            raise SettingError(f"A projection of {width} features has 1 to {width} of them; found {to}.")
        self.module = module
        drawn = torch.randn(width, to, generator=generator(seed, "projection", width, to), dtype=torch.float64)
        self.register_buffer("matrix", torch.linalg.qr(drawn).Q.float())

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x).flatten(1) @ self.matrix


class Widened(nn.Module):
    """Features, and behind them max(0, w · x) for random directions w from a public seed: more of them.

    A linear head on these bends (the arc-cosine kernel, Cho & Saul 2009). The new ones are scaled so that all of them
    together are about as long as the features before; a few of them, so that each is about as large as those before.
    """

    matrix: Tensor

    def __init__(self, module: nn.Module, width: int, to: int, seed: int = 0) -> None:
        super().__init__()
        if not width < to <= MOST_FEATURES:
            raise SettingError(f"{width} features become {width + 1} to {MOST_FEATURES:,} of them; found {to}.")
        self.module, more = module, to - width
        drawn = torch.randn(width, more, generator=generator(seed, "widening", width, to), dtype=torch.float64)
        self.register_buffer("matrix", (drawn * (2 / max(more, width)) ** 0.5).float())

    @property
    def lengthens(self) -> float:
        """How many times as long rows become, at most, of noise."""
        noise = torch.randn(_DIRECTIONS, len(self.matrix), generator=generator(0, "widened probe")).double()
        added = (noise @ self.matrix.double()).relu().norm(dim=1) / noise.norm(dim=1)
        return float((1 + added.square()).sqrt().max())

    def forward(self, x: Tensor) -> Tensor:
        features = self.module(x).flatten(1)
        return torch.cat([features, (features @ self.matrix).relu()], 1)


def resized(backbone: Backbone, to: int, example: Tensor, seed: int = 0) -> Backbone:
    """The same backbone with fewer features, by a projection, or with more, by random ones behind them.

    Stores and messages grow with the square of their number. No client's row decides any of it. With more features
    rows are longer, and the grid is coarser by a factor of two, or by more where noise shows that this is not enough.
    """
    if to == backbone.width:
        return backbone
    fewer, before = to < backbone.width, backbone.preprocessing
    module = (Projected if fewer else Widened)(backbone, backbone.width, to, seed)
    coarser = max(2.0, _power_of_two(module.lengthens)) if isinstance(module, Widened) else 1.0
    words = f"random projection to {to} features" if fewer else f"random features behind them, {to} in all"
    return Backbone(
        module,
        example,
        origin=backbone.origin,
        step=coarser * backbone.step,
        preprocessing=None if before is None else f"{before}; {words}, seed {seed}",
    )


def with_blank_head(backbone: Backbone, num_classes: int) -> nn.Sequential:
    """The model that clients are asked about: the backbone, and a last layer of zeros that knows nothing of anybody."""
    head = nn.Linear(backbone.width, num_classes).requires_grad_(False)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(OrderedDict(backbone=backbone, **{HEAD: head})).eval()


def mark_trained(model: nn.Module) -> None:
    """Note on a model and all its parts that clients' data went into it."""
    for module in model.modules():
        setattr(module, TRAINED_MARK, True)


def was_trained(model: nn.Module) -> bool:
    """Whether this library trained a part of the model. The mark is lost where weights alone are saved and loaded."""
    return any(getattr(module, TRAINED_MARK, False) for module in model.modules())


def _noise(blank: Tensor) -> Tensor:
    """The same random inputs for everybody, of the shape and type of a blank row."""
    source, shape = generator(0, "backbone probe"), (_PROBES, *blank.shape[1:])
    if blank.is_floating_point():
        return torch.randn(shape, generator=source).to(blank)
    return torch.randint(1, _WORDS, shape, generator=source).to(blank)


def _power_of_two(value: float) -> float:
    """The smallest power of two that is at least so large."""
    return 2.0 ** math.ceil(math.log2(max(value, 2.0**-40)))

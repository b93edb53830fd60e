"""The settings of a filter, and the bottleneck at a cut."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fedup.errors import SettingError, check_choice

ClassPolicy = Literal["drop", "remap", "remap_client"]
FilterKind = Literal["auto", "closed_form", "bottleneck", "erasure", "both", "delta"]
OptimizerName = Literal["adam", "sgd"]
DEFAULT_RANK = 32


@dataclass(frozen=True)
class FilterConfig:
    """How a filter is shaped and fitted.

    `rank` is the width of the bottleneck: by default 32, or the number of features if that is less. A rank wider than
    the features is refused.

    The fit takes `steps` of `batch_size` centroids, however many there are, or `epochs` over all of them if these are
    given. The `optimizer` is Adam, or SGD without momentum.

    `class_policy` says what becomes of a forgotten class: `drop` uses none of its centroids and guards against it
    (`fedup.filters.guard`); `remap` relabels each of its centroids to a random retained class; `remap_client` does so
    per client.

    `filter` selects the bottleneck, the closed form (`fedup.filters.closed_form`, from moments), an eraser
    (`fedup.filters.eraser`), both eraser and bottleneck, or a delta (`fedup.filters.delta`) for withdrawn rows and
    clients, with `auto` for all else. `auto` takes an eraser for samples; for all else, and beside it, the bottleneck
    where there are centroids and the closed form where there are moments. `eraser_cut` names the eraser's cut; `auto`
    chooses it. `max_variance_loss` is the share of the variance that an eraser may take. A `gentle` bottleneck is
    fitted again if it would cost a class its recall.
    """

    rank: int | None = field(
        default=None,
        metadata={"help": "Width of the filter's bottleneck.", "min": 1, "default": "32, or the features where fewer"},
    )
    alpha: float = field(default=0.5, metadata={"help": "Weight of the classes against the features, 0 to 1."})
    steps: int = field(default=300, metadata={"help": "Steps of the fit.", "min": 1})
    batch_size: int = 128
    lr: float = 3e-3
    class_policy: ClassPolicy = field(
        default="drop",
        metadata={"help": "drop (nothing of a forgotten class is used), remap or remap_client (it is relabelled)."},
    )
    guard: bool = True
    seed: int = field(default=0, metadata={"help": "Seed of the fit."})
    filter: FilterKind = field(
        default="auto",
        metadata={
            "help": "auto (an eraser for samples, else by statistics), closed_form, bottleneck, erasure, both or delta."
        },
    )
    eraser_cut: str = field(default="auto", metadata={"help": "Cut of the eraser; `fedup list cuts MODEL` names them."})
    max_variance_loss: float = 0.02
    gentle: bool = True
    optimizer: OptimizerName = "adam"
    epochs: int | None = None

    def __post_init__(self) -> None:
        check_choice("filter", self.filter, FilterKind)
        check_choice("optimizer", self.optimizer, OptimizerName)
        check_choice("class_policy", self.class_policy, ClassPolicy)
        if not 0 < self.max_variance_loss <= 1:
            raise SettingError(
                f"max_variance_loss is a share of the variance, in (0, 1]; found {self.max_variance_loss}."
            )
        if not self.eraser_cut or not isinstance(self.eraser_cut, str):
            raise SettingError(f"eraser_cut is 'auto' or the name of a cut; found {self.eraser_cut!r}.")
        if not 0 <= self.alpha <= 1:
            raise SettingError(f"alpha weighs cross-entropy against reconstruction, in [0, 1]; found {self.alpha}.")
        rank = DEFAULT_RANK if self.rank is None else self.rank
        whole = {"rank": rank, "steps": self.steps, "batch_size": self.batch_size, "epochs": self.epochs or 0}
        for name, value in whole.items():
            if not isinstance(value, int):
                raise SettingError(f"{name} must be a whole number; found {value!r}.")
        if rank < 1:
            raise SettingError(f"rank, the width of the bottleneck, must be at least 1; found {self.rank}.")
        if self.steps < 1 or self.batch_size < 1 or not 0 < self.lr < float("inf"):
            raise SettingError(
                f"steps and batch_size must be 1 or more, lr above 0; found {self.steps}, {self.batch_size}, {self.lr}."
            )
        if self.epochs is not None and self.epochs < 1:
            raise SettingError(f"epochs, where they are chosen, must be 1 or more; found {self.epochs}.")

    @property
    def wants_eraser(self) -> bool:
        """Whether samples are erased where possible."""
        return self.filter in ("auto", "closed_form", "erasure", "both", "delta")

    @property
    def requires_eraser(self) -> bool:
        """Whether an eraser is made for every kind of request."""
        return self.filter in ("erasure", "both")

    @property
    def wants_bottleneck(self) -> bool:
        """Whether a filter may be fitted at the cut: a bottleneck, or from moments a closed form."""
        return self.filter != "erasure"

    def rank_for(self, width: int) -> int:
        """The width of a bottleneck for this many features; a chosen rank that is wider is refused.

        >>> FilterConfig().rank_for(512), FilterConfig().rank_for(8), FilterConfig(rank=4).rank_for(8)
        (32, 8, 4)
        """
        if self.rank is None:
            return min(DEFAULT_RANK, width)
        _check_rank(self.rank, width)
        return self.rank

    def steps_for(self, centroids: int) -> int:
        """The steps of a fit to this many centroids; an epoch leaves out the incomplete batch.

        >>> FilterConfig().steps_for(1005), FilterConfig(epochs=50, batch_size=10).steps_for(1005)
        (300, 5000)
        """
        return self.steps if self.epochs is None else self.epochs * max(1, centroids // self.batch_size)


def _check_rank(rank: int, width: int) -> None:
    if rank > width:
        raise SettingError(
            f"rank {rank} is wider than the {width} features at the cut: use FilterConfig(rank={width}) or less."
        )


class Filter(nn.Module):
    """A module at a cut: features in, features of the same shape out."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the filter's weights."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())


class Bottleneck(Filter):
    """The paper's filter: d → rank → d, no bias, ReLU between; a final ReLU where features cannot be negative.

    It acts on a row's features as one vector. A guard may add a `constant` to its output, so that a forgotten class
    does not come back by its bias.

    >>> Bottleneck(512, 32, nonnegative=True).size_bytes
    131072
    """

    def __init__(self, width: int, rank: int, *, nonnegative: bool, source: torch.Generator | None = None) -> None:
        super().__init__()
        _check_rank(rank, width)
        self.nonnegative = nonnegative
        self.encoder = nn.Parameter(torch.empty(rank, width))
        self.decoder = nn.Parameter(torch.empty(width, rank))
        self.register_buffer("constant", None)  # (width,)
        for weight in (self.encoder, self.decoder):  # as nn.Linear does
            nn.init.kaiming_uniform_(weight, a=5**0.5, generator=source)

    constant: Tensor | None

    @property
    def rank(self) -> int:
        """Width of the bottleneck."""
        return self.encoder.shape[0]

    @property
    def width(self) -> int:
        """Number of features of a row."""
        return self.encoder.shape[1]

    def forward(self, features: Tensor) -> Tensor:
        flat = features.flatten(1).to(self.encoder.dtype)  # (N, D)
        passed = linear(torch.relu(linear(flat, self.encoder)), self.decoder, self.constant)
        if self.nonnegative:
            passed = torch.relu(passed)
        return passed.reshape(features.shape).to(features.dtype)

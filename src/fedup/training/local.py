"""How a client trains in a round: settings, batches, and the job that an engine is given."""

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedup.errors import SettingError, check_choice
from fedup.rng import generator, seed_for
from fedup.training.augment import Augmentation, augmented

Schedule = Literal["constant", "cosine"]
_LATER = ("precision", "schedule", "warmup_rounds", "schedule_rounds", "augment")  # left out of settings at defaults


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains in one round; the optimizer starts anew each time.

    With `precision="bfloat16"` matrix products are computed in bfloat16, and weights stay in single precision; "auto"
    does so on a GPU that supports it.

    `lr` is the rate of every round, unless `schedule_rounds` are named: then it rises in even steps over the first
    `warmup_rounds`, and with `schedule="cosine"` falls along half a cosine to the last of them. Rounds after them have
    the full rate again. `augment="flip_crop"` flips half of a batch's images and moves all by up to four pixels.
    """

    epochs: int = 1
    batch_size: int = 64
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    optimizer: Literal["sgd", "adam"] = "sgd"
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    schedule: Schedule = "constant"
    warmup_rounds: int = 0
    schedule_rounds: int = 0  # 0: none
    augment: Augmentation = "none"

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise SettingError(f"epochs and batch_size must be at least 1; found {self.epochs} and {self.batch_size}.")
        if not 0 < self.lr < math.inf or not 0 <= self.momentum < 1 or not 0 <= self.weight_decay < math.inf:
            found = f"{self.lr}, {self.momentum} and {self.weight_decay}"
            raise SettingError(f"lr must be above 0, momentum in [0, 1), weight_decay at least 0; found {found}.")
        if self.optimizer not in ("sgd", "adam"):
            raise SettingError(f"optimizer must be 'sgd' or 'adam'; found {self.optimizer!r}.")
        if self.precision not in ("float32", "bfloat16", "auto"):
            raise SettingError(f"precision must be 'float32', 'bfloat16' or 'auto'; found {self.precision!r}.")
        check_choice("schedule", self.schedule, Schedule)
        check_choice("augment", self.augment, Augmentation)
        if not 0 <= self.warmup_rounds <= max(self.schedule_rounds, 0):
            found = f"{self.warmup_rounds} of {self.schedule_rounds}"
            raise SettingError(f"warmup_rounds must lie within the rounds of the schedule; found {found}.")

    @property
    def is_scheduled(self) -> bool:
        """Whether the rate differs from round to round."""
        return bool(self.schedule_rounds) and (self.schedule != "constant" or self.warmup_rounds > 1)

    def in_round(self, round_index: int) -> "LocalTraining":
        """The same with the rate of that round.

        >>> cosine = LocalTraining(lr=1.0, schedule="cosine", warmup_rounds=2, schedule_rounds=6)
        >>> [round(cosine.in_round(number).lr, 2) for number in range(7)]
        [0.5, 1.0, 1.0, 0.85, 0.5, 0.15, 1.0]
        """
        if not self.is_scheduled or round_index >= self.schedule_rounds:
            return self
        done, left = round_index - self.warmup_rounds, self.schedule_rounds - self.warmup_rounds
        share = (round_index + 1) / self.warmup_rounds if done < 0 else 1.0
        if done > 0 and self.schedule == "cosine":
            share = (1 + math.cos(math.pi * done / left)) / 2
        return replace(self, lr=self.lr * share)

    def start(self, model: nn.Module, *, fused: bool = True, rate: Tensor | None = None) -> torch.optim.Optimizer:
        """A fresh optimizer for the model's parameters, fused into one kernel where torch does that correctly.

        A `rate` on the device replaces `lr`: captured steps read it anew each time.
        """
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trainable:
            raise SettingError(f"No parameter of {type(model).__name__} takes a gradient: there is nothing to train.")
        fused = fused and all(_can_be_fused(weight) for weight in trainable)
        lr = self.lr if rate is None else rate
        options: dict[str, Any] = {"lr": lr, "weight_decay": self.weight_decay, "fused": fused}
        if self.optimizer == "sgd":
            return torch.optim.SGD(trainable, momentum=self.momentum, **options)
        on_gpu = any(weight.device.type == "cuda" for weight in trainable)  # then the step count is there, too
        return torch.optim.Adam(trainable, capturable=on_gpu, **options)

    def settings(self) -> dict[str, Any]:
        """Plain data; settings added later only where they are chosen, so that settings from before still match."""
        usual = LocalTraining()
        return {k: value for k, value in asdict(self).items() if k not in _LATER or value != getattr(usual, k)}

    def prepared(self, inputs: Tensor) -> Tensor:
        """A batch as the model sees it in training."""
        return inputs if self.augment == "none" else augmented(inputs)

    def in_bfloat16(self, device: torch.device) -> bool:
        """Whether products on this device are computed in bfloat16."""
        gpu_can = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return self.precision == "bfloat16" or (self.precision == "auto" and gpu_can)

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context of one forward pass; around several steps it would cache the weights of the first."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.in_bfloat16(device))

    def batch_of(self, rows: int) -> int:
        """The batch size of a client with so many rows; all its batches are equal in size."""
        return max(2, min(rows, self.batch_size))

    def steps_of(self, rows: int) -> int:
        """Gradient steps that a client with so many rows makes in a round."""
        return self.epochs * -(-rows // self.batch_of(rows))


def restart(*optimizers: torch.optim.Optimizer) -> None:
    """Set momenta and counts to zero: the optimizer then works like a new one.

    In place: no new memory, and captured steps read and write these tensors.
    """
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    values = [value for state in states for value in state.values() if value is not None]  # None without momentum
    if values:
        torch._foreach_zero_(values)


def _can_be_fused(weight: nn.Parameter) -> bool:
    """Fused kernels need dense memory; in torch 2.13 those for half types on a CPU do not change the weights."""
    dense = weight.is_contiguous() or (weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last))
    known = weight.dtype in (torch.float32, torch.float64) or weight.device.type == "cuda"
    return dense and known and weight.is_floating_point() and weight.device.type in ("cpu", "cuda")


def full_batches(n: int, size: int, order: torch.Generator) -> Tensor:
    """A shuffled epoch in batches of one size, (steps, size): the last is filled from the start of the permutation.

    BatchNorm and captured graphs need full batches. Fewer than `size` rows make one batch; a single row counts twice.
    """
    size = max(2, min(n, size))
    permutation = torch.randperm(n, generator=order)
    missing = -n % size
    return (torch.cat([permutation, permutation[:missing]]) if missing else permutation).view(-1, size)


@dataclass(frozen=True, eq=False)
class Job:
    """One client's part in a round; its draws depend on its seed only, not on when or where it runs."""

    client: int
    rows: Tensor  # its training rows, on the CPU
    local: LocalTraining
    seed: int
    share: float = 1.0  # in the average

    @cached_property
    def size(self) -> int:
        """Rows in each of its batches."""
        return self.local.batch_of(len(self.rows))

    @cached_property
    def steps(self) -> int:
        """How many batches it trains on."""
        return self.local.steps_of(len(self.rows))

    @cached_property
    def dropout_seed(self) -> int:
        """For what the model draws in training."""
        return seed_for(self.seed, "dropout")

    def batches(self) -> Tensor:
        """The rows of each batch. (steps, size)"""
        order = generator(self.seed, "batches")
        epochs = [full_batches(len(self.rows), self.local.batch_size, order) for _ in range(self.local.epochs)]
        return self.rows[epochs[0] if len(epochs) == 1 else torch.cat(epochs)]

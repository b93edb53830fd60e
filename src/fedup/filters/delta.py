"""A small change of weights: served as base + change in a view, so that unplugging gives the base back bit for bit."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedup.errors import CutError, PlugError
from fedup.models.cut import find_cut
from fedup.rng import generator

LAYERS = 2  # weight layers before the cut that change
MOST_NUMBERS = 2**16  # of a layer's change: larger layers change in fixed directions only
MERGED = -1  # the name of changes that are not known by client any more
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Changes = Mapping[str, Tensor]  # by name of a parameter: the whole change, or its coefficients


@dataclass(frozen=True)
class ChangedWeight:
    """A parameter that changes: by any numbers, or with a `rank` by coefficients (out, rank) of fixed directions.

    The directions are drawn from the parameter's name and shape, so nobody sends them, and the changes of several
    clients add up.
    """

    name: str
    shape: tuple[int, ...]
    rank: int | None = None

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape of what a client sends."""
        return self.shape if self.rank is None else (self.shape[0], self.rank)

    @property
    def directions(self) -> Tensor:
        """Signs of about unit length; the same on every machine. (rank, numbers of one output)"""
        width = math.prod(self.shape[1:])
        stream = generator(0, "delta directions", self.name, self.shape, self.rank)
        signs = torch.randint(0, 2, (self.rank or 0, width), generator=stream)
        return (2.0 * signs - 1) / math.sqrt(width)

    def whole(self, sent: Tensor, directions: Tensor | None = None) -> Tensor:
        """The change itself, from what was sent."""
        if self.rank is None:
            return sent
        directions = self.directions if directions is None else directions
        return (sent @ directions.to(sent)).reshape(self.shape)


def changed_weights(model: nn.Module, cut: str) -> tuple[ChangedWeight, ...]:
    """The weights that a delta changes: the last layers before the cut, known from the model alone.

    The layers behind the cut stay: a closed form or a guard there keeps what it promises.
    """
    before = weighted_layers(model, cut)
    if not before:
        raise CutError(
            f"{type(model).__name__} has no linear or convolutional layer before its cut {cut!r}, so a delta has "
            "nothing to change. Use another filter."
        )
    changed = []
    for name in before[-LAYERS:]:
        weight = model.get_parameter(f"{name}.weight")
        out, rank = len(weight), MOST_NUMBERS // len(weight)
        small = weight.numel() <= MOST_NUMBERS or rank < 1
        shape = tuple(weight.shape)
        changed.append(ChangedWeight(f"{name}.weight", shape, None if small else min(rank, math.prod(shape[1:]))))
        if getattr(model.get_submodule(name), "bias", None) is not None:
            changed.append(ChangedWeight(f"{name}.bias", (out,)))
    return tuple(changed)


def weighted_layers(model: nn.Module, cut: str) -> list[str]:
    """The names of linear and convolutional layers before the cut, in order."""
    names, shared = list(dict(model.named_modules())), _shared(model)
    before = [(name, model.get_submodule(name)) for name in names[: names.index(find_cut(model, cut))]]
    weighted = [(name, module) for name, module in before if isinstance(module, _WEIGHTED)]
    return [name for name, module in weighted if id(module.weight) not in shared and module.weight.is_floating_point()]


def _shared(model: nn.Module) -> set[int]:
    """Parameters that several modules use: changing them in one place is not defined."""
    seen: set[int] = set()
    twice: set[int] = set()
    for _, weight in model.named_parameters(remove_duplicate=False):
        (twice if id(weight) in seen else seen).add(id(weight))
    return twice


@dataclass(frozen=True, eq=False)
class Delta:
    """Changes of weights by client; what is served is their sum.

    Each client's change depends on its own rows only, so a set of requests gives one sum whatever their order. A client
    is not asked twice: its change is kept with the digest of the question that it answered. `merged` forgets whose
    changes they are.
    """

    by_client: Mapping[int, Changes]  # empty where the rows looked unseen already
    questions: Mapping[int, str]  # by client, the digest of the question that its change answers
    requests: frozenset[str]  # digests of the requests that it answers
    scale: float = 1.0  # what is served of the sum

    @property
    def size_bytes(self) -> int:
        """Bytes of all changes."""
        return sum(change.nbytes for changes in self.by_client.values() for change in changes.values())

    @property
    def total(self) -> dict[str, Tensor]:
        """What is served: the scaled sum over clients, in the order of their numbers."""
        total: dict[str, Tensor] = {}
        for client in sorted(self.by_client):
            for name, change in self.by_client[client].items():
                total[name] = total[name] + change if name in total else change
        return {name: self.scale * change for name, change in total.items()}

    @property
    def is_merged(self) -> bool:
        """Whether it holds nothing but the sum."""
        return set(self.by_client) == {MERGED}

    @property
    def merged(self) -> "Delta":
        """The same delta with the sum alone."""
        return replace(self, by_client={MERGED: replace(self, scale=1.0).total})

    @property
    def about(self) -> dict[str, Any]:
        """Plain data for reports."""
        clients = sorted(self.questions)
        return {"requests": sorted(self.requests), "clients": clients, "scale": self.scale, "bytes": self.size_bytes}

    @torch.no_grad()
    def apply_to(self, view: nn.Module, cut: str) -> None:
        """Replace weights of a view by changed ones; the tensors of the base stay as they are."""
        if not self.fits(view, cut):
            raise PlugError("The delta changes other weights than this model has: it was made for another model.")
        total = self.total
        for weight in changed_weights(view, cut) if total else ():
            owner, _, attribute = weight.name.rpartition(".")
            module, base = view.get_submodule(owner), view.get_parameter(weight.name)
            change = weight.whole(total[weight.name].to(base.device)).to(base.dtype)
            setattr(module, attribute, nn.Parameter(base.detach() + change, requires_grad=False))

    def fits(self, model: nn.Module, cut: str) -> bool:
        """Whether it changes exactly the weights that a delta of this model does, or of some clients none."""
        wanted = {weight.name: weight.sent_shape for weight in changed_weights(model, cut)}
        shapes = ({name: tuple(own.shape) for name, own in changes.items()} for changes in self.by_client.values())
        return all(own in (wanted, {}) for own in shapes)

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain data, to store or send."""
        tensors = {f"{client}.{name}": own for client, of in self.by_client.items() for name, own in of.items()}
        questions = {str(client): digest for client, digest in sorted(self.questions.items())}
        described = {"questions": questions, "requests": sorted(self.requests), "scale": self.scale}
        return tensors, {**described, "clients": sorted(self.by_client)}

    @classmethod
    def from_parts(cls, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> "Delta":
        """The inverse of `parts`; raises ValueError if something is missing."""
        by_client: dict[int, dict[str, Tensor]] = {int(client): {} for client in described["clients"]}
        for name, own in tensors.items():
            client, _, weight = name.partition(".")
            if own.dtype != torch.float32:
                raise ValueError("a change of its delta is not in single precision")
            by_client[int(client)][weight] = own
        questions = {int(client): str(digest) for client, digest in described["questions"].items()}
        if not by_client or not by_client.keys() <= {MERGED, *questions}:
            raise ValueError("its delta does not say whose changes it holds")
        return cls(by_client, questions, frozenset(map(str, described["requests"])), float(described["scale"]))

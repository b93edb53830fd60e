"""Phase 4, serving and restoring: a filter is plugged into a model that never changes."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedup.errors import FingerprintError, NotFittedError, PlugError, StaleFilterError
from fedup.filters.bottleneck import Bottleneck, Filter, FilterConfig
from fedup.filters.closed_form import ClosedForm
from fedup.filters.delta import Delta
from fedup.filters.eraser import PlacedEraser
from fedup.models.cut import find_cut
from fedup.models.views import fingerprint, shared_view, spot_check, tensors
from fedup.request import Forget

# One request at a time changes what is served and what the server stores; serving itself never waits.
REQUEST_LOCK = threading.RLock()
# The blocks of restored() that this thread or task is in, or inherited from the one that started it.
_BLOCKS: ContextVar[tuple["_RestoredBlock", ...]] = ContextVar("restored", default=())


@dataclass(frozen=True)
class Served:
    """Fitted filters and their requests: a bottleneck at the cut, an eraser at any cut, a delta of the weights before
    the cut, or several of them."""

    filter: Bottleneck | ClosedForm | None
    requests: frozenset[Forget]
    config: FilterConfig
    base: str  # fingerprint
    cut: str
    erasure: PlacedEraser | None = None
    question: str | None = None  # digest of the questions for the eraser, which are not asked twice
    delta: Delta | None = None

    @property
    def placed(self) -> list[tuple[str, Filter]]:
        """The filters and their cuts, in the order in which they act at one cut."""
        placed: list[tuple[str, Filter]] = [(self.erasure.cut, self.erasure.filter)] if self.erasure else []
        return [*placed, (self.cut, self.filter)] if self.filter is not None else placed

    @property
    def size_bytes(self) -> int:
        """Bytes of the filters' weights."""
        return sum(fitted.size_bytes for _, fitted in self.placed) + (self.delta.size_bytes if self.delta else 0)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as they were used, as plain data, with the rank of the bottleneck."""
        return asdict(self.config) | ({} if self.filter is None else {"rank": self.filter.rank})

    @property
    def derived_from_forgotten(self) -> bool:
        """Whether it contains statistics of forgotten rows, as every eraser and every delta does."""
        return self.erasure is not None or self.delta is not None


_WALKS = ("parameters", "buffers", "named_parameters", "named_buffers", "named_modules", "modules")


class _AtCut:
    """The hook that filters the input of a cut; a bound method, so that copies keep their own filter."""

    def __init__(self, fitted: nn.Module) -> None:
        self.filter = fitted

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.filter(args[0]), *args[1:])

    @staticmethod
    def after(module: nn.Linear, args: tuple[Any, ...], scores: Tensor) -> Tensor:
        """The scores behind a closed form. In autocast's half precision a dropped class could win: the layer answers
        again without it."""
        device = scores.device.type
        if not torch.is_autocast_enabled(device):
            return scores
        with torch.autocast(device, enabled=False):
            return torch.nn.functional.linear(args[0].to(module.weight.dtype), module.weight, module.bias)


def filtered_view(model: nn.Module, served: Served | None) -> nn.Module:
    """A view of a model with these filters at their cuts and changed weights; None gives the plain model."""
    view = shared_view(model, frozen=True)
    if served is not None and not served.placed and served.delta is None:
        raise PlugError("There is no filter in it: nothing would be forgotten.")
    if served is not None and served.delta is not None:
        served.delta.apply_to(view, served.cut)
    for cut, fitted in served.placed if served is not None else ():
        module, hooks = view.get_submodule(find_cut(view, cut)), _AtCut(fitted.to(next(tensors(model)).device))
        module.register_forward_pre_hook(hooks.before)
        if isinstance(fitted, ClosedForm):
            module.register_forward_hook(hooks.after)
    return view


class _RestoredBlock:
    """One block of `restored()`: contexts that were copied inside share it, so its end holds in all of them."""

    def __init__(self, plugged: "PluggedModel") -> None:
        self._plugged: PluggedModel | None = plugged
        self._process = os.getpid()  # a forked process never learns of the end

    def end(self) -> None:
        """End the block for everyone; a running call may finish."""
        self._plugged = None

    @property
    def plugged(self) -> "PluggedModel | None":
        """The model that answers unfiltered inside; None once the block has ended."""
        return self._plugged if self._process == os.getpid() else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies end with the block, too

    def __reduce__(self) -> tuple[Any, ...]:
        return _ended_block, ()


def _ended_block() -> _RestoredBlock:
    """A block unpickled in another process, where it has always ended."""
    block = _RestoredBlock.__new__(_RestoredBlock)
    block._plugged, block._process = None, 0
    return block


def plug(model: nn.Module, cut: str | None = None) -> "PluggedModel":
    """A model with a slot for a filter at the cut: the one named, or before the last linear layer.

    >>> plugged = plug(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    >>> plugged.cut
    '2'
    """
    if not isinstance(model, nn.Module):
        raise PlugError(f"plug() takes a model, a torch.nn.Module; found {type(model).__name__}.")
    if isinstance(model, PluggedModel):
        raise PlugError("This model is plugged already: unplug() it first, or plug its base a second time.")
    return PluggedModel(model, find_cut(model, cut))


class _Front(nn.Module):
    """A module without weights that answers through a view, chosen and checked at each call."""

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A compiled model skips this frame and compiles the view behind it."""
        return self.forward(*args, **kwargs)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._answering()(*args, **kwargs)

    def _answering(self) -> nn.Module:
        """The view that answers this call; raises if there is none, or the base has changed."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> Self:
        """Stays in eval mode: training would move the base's BatchNorm statistics."""
        return super().train(False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        raise PlugError("A plugged model does not move or change its type: move the base model, then plug it again.")


class _RestoredModel(_Front):
    """The result of `restored()`: answers as the original model, in any thread, until the end of the block."""

    def __init__(self, block: _RestoredBlock) -> None:
        super().__init__()
        self._block = block
        self.eval()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _answering(self) -> nn.Module:
        plugged = self._block.plugged
        if plugged is None:
            raise PlugError(
                "The block of restored() that gave this model has ended, and its unfiltered answers with it. Call it "
                "inside the block, or open another one: `with plugged.restored() as original:`."
            )
        return plugged._original_view()


class PluggedModel(_Front):
    """A base model seen through a filter, always in eval mode.

    Without a filter, calls fail: unfiltered answers are given inside `restored()` only. Each filter has its own view of
    the base, so swapping filters and serving from many threads never mix. The base's weights are not parameters of this
    module: an optimizer, `.to()` or `state_dict()` cannot reach them.

    `torch.compile(plugged)` compiles the view: checks stay, and a new filter costs no new graph.
    """

    def __init__(self, base: nn.Module, cut: str) -> None:
        super().__init__()
        # Plain attributes, not submodules: the base is not to be trained, moved or saved through this module.
        self.__dict__["_base"] = base
        self.__dict__["_original"] = shared_view(base, frozen=True)
        self.__dict__["_view"] = None
        self.cut = cut
        self.base_fingerprint = fingerprint(base)
        self._served: Served | None = None
        self._state, self._spots = _state(base), spot_check(base)
        self.eval()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _answering(self) -> nn.Module:
        if any(block.plugged is self for block in _BLOCKS.get()):
            return self._original_view()
        return self._filtered_view()

    def _original_view(self) -> nn.Module:
        self._check_base_unchanged()
        original: nn.Module = self.__dict__["_original"]
        return original

    def _filtered_view(self) -> nn.Module:
        self._check_base_unchanged()
        view: nn.Module | None = self.__dict__["_view"]
        if view is None:
            raise NotFittedError(
                "No filter is fitted: call fedup.unlearn(plugged, …) or load_filter(plugged, …) first. "
                "The original model answers inside `with plugged.restored():`."
            )
        return view

    @property
    def base(self) -> nn.Module:
        """The original model, unchanged."""
        base = self.__dict__["_base"]
        if base is None:
            raise PlugError("This model was unplugged: plug the base again.")
        return base

    @property
    def served(self) -> Served | None:
        """The active filter and its requests; None if there is none."""
        return self._served

    @property
    def requests(self) -> frozenset[Forget]:
        """The active requests."""
        return self._served.requests if self._served else frozenset()

    def view(self) -> nn.Module:
        """The module with the filter at its cut, inside `restored()` as well, to export or trace. A snapshot: later
        requests make a new one."""
        return self._filtered_view()

    def serve(self, served: Served | None) -> None:
        """Swap the filter at once: a call sees the old one or the new one, never a mixture."""
        self.check_base()
        if served is None:
            self.__dict__["_view"], self._served = None, None
            return
        if served.base != self.base_fingerprint or served.cut != self.cut:
            raise FingerprintError(
                f"The filter was made for base {served.base[:12]} at cut {served.cut!r}; this is base "
                f"{self.base_fingerprint[:12]} at cut {self.cut!r}. Use the filter of this model."
            )
        self.__dict__["_view"], self._served = filtered_view(self.base, served), served

    @contextmanager
    def restored(self) -> Iterator[nn.Module]:
        """Inside, the model answers as the original, bit for bit; so does the model that the block gives.

        Tasks and threads with a copied context (`asyncio.to_thread`) that start inside are inside, too; all others stay
        filtered. The end of the block holds for everyone. A generator has no context of its own: if it yields inside
        the block, its caller is inside until it resumes.
        """
        self.check_base(hashed=True)
        block = _RestoredBlock(self)
        try:
            _BLOCKS.set((*_BLOCKS.get(), block))
            yield _RestoredModel(block)
        finally:
            block.end()
            # Not reset(): a generator may be closed in another context, and blocks may end in any order.
            _BLOCKS.set(tuple(other for other in _BLOCKS.get() if other.plugged is not None))

    def unplug(self) -> nn.Module:
        """The base model, its weights hashed once more; this plugged model does not answer any more."""
        base = self.base
        self.check_base(hashed=True)
        self.__dict__.update(_base=None, _original=None, _view=None, _served=None)
        return base

    def check_base(self, *, hashed: bool = False) -> None:
        """Raise if the base's weights are not those it was plugged with.

        They are not hashed again while all tensors are the same objects in the same memory, PyTorch has counted no
        write to them, and 64 numbers of each are what they were. Writes through `.data`, numpy or storages and fused
        optimizers are not counted; the numbers show them where they change a whole tensor. A few single numbers
        written in these ways show in a hash alone: it is computed if `hashed` (by `restored`, `unplug`, `save_filter`
        and run folders), and always for tensors made in inference mode, which have no count.
        """
        if hashed or not self._is_trusted():
            self._hash_base()

    def _is_trusted(self) -> bool:
        counted = not any(tensor.is_inference() for tensor in _all_tensors(self.base))
        return counted and _state(self.base) == self._state and spot_check(self.base) == self._spots

    def _hash_base(self) -> None:
        if fingerprint(self.base) != self.base_fingerprint:
            raise StaleFilterError(
                "The base model's weights changed after it was plugged, so no filter made before fits it. "
                "Plug the new model, collect from it and unlearn again."
            )
        self._state, self._spots = _state(self.base), spot_check(self.base)

    def _check_base_unchanged(self) -> None:
        """Cheap at each call: hashes only if a tensor was replaced or a write was counted since the last check."""
        if _state(self.base) != self._state:
            self._hash_base()


def _state(model: nn.Module) -> list[int]:
    """Identity, address and PyTorch's count of in-place writes of each tensor of a model: plain numbers in one list,
    so that the garbage collector has nothing to track."""
    state: list[int] = []
    for tensor in _all_tensors(model):
        state += id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    return state


def _all_tensors(model: nn.Module) -> Iterator[Tensor]:
    """The model's tensors; at each call, so in half the time of nn.Module's own walk."""
    if any(getattr(type(model), name) is not getattr(nn.Module, name) for name in _WALKS):
        yield from tensors(model)  # the model overrides it
        return
    pending, seen = [model], {id(model)}
    while pending:
        module = pending.pop()
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
        yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)

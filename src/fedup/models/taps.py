"""Features at several cuts of a model, read in one pass."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedup.errors import CutError, DataError
from fedup.models.cut import FEATURE_BATCH
from fedup.models.views import shared_view


class Taps:
    """A view of the model that notes what arrives at some cuts. Nothing is asked of what follows them: an eraser can
    sit where no tail can be written down as a function of features alone."""

    def __init__(self, model: nn.Module, cuts: Sequence[str]) -> None:
        self._view = shared_view(model, frozen=True)
        self._seen: dict[str, list[Tensor]] = {cut: [] for cut in cuts}
        for cut in cuts:
            self._view.get_submodule(cut).register_forward_pre_hook(partial(self._note, cut))

    def read(self, x: Tensor, rows: Tensor, batch_size: int = FEATURE_BATCH) -> Iterator[dict[str, Tensor]]:
        """Features of the rows at each cut, batch by batch; raises where some are not finite. (B, *shape) each"""
        for batch in rows.split(batch_size):
            found = self.at_once(x.index_select(0, batch))
            for cut, features in found.items():
                if not bool(features.isfinite().all()):
                    raise DataError(
                        f"Some rows have NaN or infinite features at the cut {cut!r}. Check inputs and weights."
                    )
            yield found

    @torch.no_grad()
    def at_once(self, batch: Tensor) -> dict[str, Tensor]:
        """Features of a batch at each cut, whatever they are. (B, *shape) each"""
        for seen in self._seen.values():
            seen.clear()
        with torch.autocast(batch.device.type, enabled=False):  # the same bits whatever the caller is doing
            self._view(batch)
        return {cut: self._once(cut, seen, len(batch)) for cut, seen in self._seen.items()}

    def _note(self, cut: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor):
            raise CutError(f"The module at the cut {cut!r} gets no tensor as its first argument: cut elsewhere.")
        self._seen[cut].append(args[0].clone())  # a module that works in place would change it

    def _once(self, cut: str, seen: list[Tensor], rows: int) -> Tensor:
        if len(seen) != 1 or len(seen[0]) != rows:
            raise CutError(f"The module at the cut {cut!r} does not see each batch once and whole: cut elsewhere.")
        return seen.pop().float()

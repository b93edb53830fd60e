"""Phase 2 over Flower in one call."""

from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedup.clients import collect as core
from fedup.errors import DataError
from fedup.flower.contact import GridContact
from fedup.flower.wire import tensor_of
from fedup.request import Forget
from fedup.statistics.store import Centroids


def load_arrays(model: nn.Module, arrays: ArrayRecord) -> nn.Module:
    """The model with weights as Flower's strategies return them, in place and ready to be asked about."""
    try:
        model.load_state_dict({name: tensor_of(array, name) for name, array in arrays.items()})
    except (RuntimeError, KeyError) as error:
        raise DataError(f"The arrays do not fit {type(model).__name__}: they are of another model.") from error
    return model.eval()


def collect(
    grid: Grid,
    arrays: ArrayRecord,
    *,
    model: nn.Module,
    example: Tensor,
    num_classes: int,
    request: Forget | None = None,
    contact: dict[str, Any] | None = None,
    **how: Any,
) -> Centroids:
    """Ask every node, once, for the centroids of its cells; the same store as `fedup.collect` gives in process.

    `model` takes the arrays; `example` is one blank row of its inputs. With a `request` this is the paper's protocol:
    nodes leave out what it names. `contact` are settings of `GridContact` (timeout, least_fraction, folder, …), `how`
    those of `fedup.collect` (ratio, privacy, seed, cut, folder, …).
    """
    reached = GridContact(grid, load_arrays(model, arrays), example=example, num_classes=num_classes, **(contact or {}))
    return core.collect(model, reached, forget=[request] if request else (), **how)

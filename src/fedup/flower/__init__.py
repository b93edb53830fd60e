"""FedUP as an add-on to Flower (extra `flower`): clients mount a query, the server collects and unlearns.

```python
fedup.flower.mount(client_app, data=load_rows, model=Net)                             # in client_app.py

contact = fedup.flower.GridContact(grid, model, example=blank_row, num_classes=10)    # in server_app.py, after training
centroids = fedup.collect(model, contact)
plugged = fedup.plug(model)
fedup.unlearn(plugged, centroids, fedup.Forget.clients([3]), clients=contact)
```
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedup.clients.intake import Intake
    from fedup.flower.contact import GridContact
    from fedup.flower.declared import declared_rows
    from fedup.flower.head_server import HeadServer
    from fedup.flower.messaging import Delivery
    from fedup.flower.node import mount
    from fedup.flower.policy import Policy
    from fedup.flower.run_server import RunServer
    from fedup.flower.wire import load_arrays

__all__ = [
    "Delivery",
    "GridContact",
    "HeadServer",
    "Intake",
    "Policy",
    "RunServer",
    "declared_rows",
    "load_arrays",
    "mount",
]
_MODULES = ["messaging", "contact", "head_server", "messaging", "policy", "run_server", "declared", "wire", "node"]
_WHERE = dict(zip(__all__, _MODULES, strict=True))


def __getattr__(name: str) -> Any:
    """On first use: a node is a new process for each message, and needs nothing of the server's."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)

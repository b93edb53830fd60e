"""FedUP as an add-on to Flower (extra `flower`): clients mount a query, the server collects and unlearns.

```python
fedup.flower.mount(client_app, data=load_data, model=Net)                      # in client_app.py

contact = fedup.flower.GridContact(grid, model, num_classes=10)                # in server_app.py, after training
centroids = fedup.collect(model, contact)
plugged = fedup.plug(model)
fedup.unlearn(plugged, centroids, fedup.Forget.clients([3]), clients=contact)
```
"""

from fedup.flower.collecting import collect
from fedup.flower.contact import GridContact
from fedup.flower.memory import RunMemory
from fedup.flower.node import mount
from fedup.flower.policy import Policy

__all__ = ["GridContact", "Policy", "RunMemory", "collect", "mount"]

"""Any nn.Module with a linear head works: here one with BatchNorm, a residual block and a functional ReLU.

The model need not come from fedup's own FedAvg; a trained one from anywhere will do. Run:
python examples/bring_your_own_model.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

import fedup
from fedup import Federation, Forget
from fedup.tasks.datasets import load_dataset
from fedup.tasks.evaluation import retain_and_forget


class MyModel(nn.Module):
    """Nothing in here knows of fedup."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 128), nn.BatchNorm1d(128), nn.ReLU())
        self.inner = nn.Linear(128, 128)
        self.classifier = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        return self.classifier(relu(hidden + self.inner(hidden)))


def train_centrally(model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


data = load_dataset("digits")
federation = Federation.split(data.x, data.y, fedup.dirichlet(data.y, 5))
torch.manual_seed(0)
model = MyModel()
rows = federation.rows("train")
train_centrally(model, data.x[rows], data.y[rows])
before = fedup.fingerprint(model)

plugged = fedup.plug(model)  # the cut is found: before the last linear layer; name another with cut="inner"
store = fedup.collect(model, federation)
print(f"cut {plugged.cut!r}, features of shape {store.shape}, nonnegative: {store.nonnegative}")
for request in (Forget.classes([3]), Forget.samples({0: federation.clients[0].train[:25].tolist()})):
    fedup.unlearn(plugged, store, request, clients=federation)
    print(f"{request}: {retain_and_forget(plugged, federation, request)}")
    fedup.restore(plugged, store, request)  # each request on its own here; they would also add up
print("(a model that generalises well still knows withdrawn samples when it is retrained without them)")
print("weights untouched:", fedup.fingerprint(plugged.unplug()) == before)

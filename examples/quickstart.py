"""The main line on one screen: learn, collect, unlearn, serve, restore. Run: python examples/quickstart.py"""

import torch

import fedup
from fedup import Federation, Forget
from fedup.tasks.datasets import load_dataset
from fedup.tasks.evaluation import retain_and_forget
from fedup.tasks.models import build_model

data = load_dataset("digits")
federation = Federation.split(data.x, data.y, fedup.dirichlet(data.y, 10))
torch.manual_seed(0)
start = build_model("lenet5", (1, 28, 28), 10)
request = Forget.classes([7])

model = fedup.federate(start, federation, rounds=20, local=fedup.LocalTraining(batch_size=16)).model  # 1 learn
store = fedup.collect(model, federation)  # 2 once, kept at the server
plugged = fedup.plug(model)
print("original ", retain_and_forget(model, federation, request))

report = fedup.unlearn(plugged, store, request, clients=federation)  # 3 what is retained gives a filter
print("forgotten", retain_and_forget(plugged, federation, request), f"in {report.total_time_s:.2f} s")

with plugged.restored():  # 4 the original model, bit for bit
    print("restored ", torch.equal(plugged(data.test_x), model(data.test_x)))

fedup.save_filter(plugged, "runs/quickstart/filter.safetensors")
model = plugged.unplug()

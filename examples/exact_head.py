"""Forget exactly: a head on a public backbone, learned in one round. Run: python examples/exact_head.py"""

import fedup
from fedup import Federation, Forget
from fedup.tasks.backbones import load_backbone
from fedup.tasks.datasets import load_dataset
from fedup.tasks.evaluation import accuracy

data = load_dataset("digits")
federation = Federation.split(data.x, data.y, fedup.dirichlet(data.y, 10))
backbone = load_backbone("random_conv", (1, 28, 28))  # or efficientnet_lite0, minilm, your own

model = fedup.learn_head(backbone, federation, num_classes=10)  # one round: clients send integer sums
print(f"learned    {accuracy(model, data.test_x, data.test_y):.3f}, totals {model.totals_hash()[:12]}")

leaver = Forget.clients([3])
report = fedup.unlearn(model, model.store, leaver)  # subtract and solve again; no client is asked
print(f"forgotten  {accuracy(model, data.test_x, data.test_y):.3f}, totals {model.totals_hash()[:12]}")
print(f"           in {1000 * report.total_time_s:.0f} ms; claim: {model.claim.kind}")

without = fedup.learn_head(backbone, federation.without(leaver), num_classes=10, cache=model.cache)
print(f"without    {accuracy(without, data.test_x, data.test_y):.3f}, totals {without.totals_hash()[:12]}")
print("equal     ", without.totals == model.totals and without(data.test_x).equal(model(data.test_x)))

fedup.purge(model, model.store)  # the server keeps nothing of client 3 any more
print(f"purged     claim: {model.claim.kind}")
fedup.restore(model, model.store, leaver, clients=federation)  # it sends its sums again
print(f"restored   {accuracy(model, data.test_x, data.test_y):.3f}, totals {model.totals_hash()[:12]}")
fedup.save_head(model, "runs/exact_head")
model = fedup.load_head(backbone, "runs/exact_head")

"""Reading features at the cut, against a bare forward pass over the same batches."""

from collections.abc import Iterator

import torch

from fedup.bench.speed._rows import Row, Tell
from fedup.bench.speed._settings import LENET5, RESNET18, Setting, even_jobs
from fedup.bench.turns import in_turns
from fedup.models.features import FEATURE_BATCH, FeatureReader

_CLIENTS = 10
_ROWS = {LENET5: (10_240, 51_200), RESNET18: (80, 12_800)}  # on a CPU, on a GPU


def measure(device: torch.device, tell: Tell) -> Iterator[Row]:
    """A small and a large model, all clients one after another."""
    for setting, counts in _ROWS.items():
        tell(f"features of {setting.title}")
        yield _measure_model(setting, counts[device.type == "cuda"], device)


def _measure_model(setting: Setting, rows: int, device: torch.device) -> Row:
    x, _ = setting.data(rows, device)
    model = setting.build(device).eval()
    clients = [job.rows.to(device) for job in even_jobs(rows, _CLIENTS, setting.local(device))]

    def read() -> None:
        reader = FeatureReader(model, "head")
        for own in clients:
            reader.read(x, own)

    @torch.no_grad()
    def forward() -> None:
        for own in clients:
            for batch in own.split(FEATURE_BATCH):
                model(x[batch])

    times = in_turns({"read": read, "forward": forward}, device, repeats=7 if device.type == "cuda" else 5)
    detail = {"rows": rows, "batch": FEATURE_BATCH, **times.medians()}
    name = f"{setting.title}: features, over a bare forward pass"
    return Row(name, times.ratio("read", "forward"), "×", 1.2, detail=detail)

"""Reading features at the cut, against a bare forward pass over the same batches."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fedup.bench.speed._rows import Row, in_turns
from fedup.bench.speed._settings import LENET5, RESNET18, even_jobs
from fedup.models.features import FEATURE_BATCH, FeatureReader

_CLIENTS = 10
_ROWS = {LENET5: (10_240, 51_200), RESNET18: (80, 12_800)}  # on a CPU, on a GPU


def measure(device: torch.device, tell: Callable[[str], None]) -> Iterator[Row]:
    """A small and a large model, all clients one after another."""
    on_gpu = device.type == "cuda"
    for setting, counts in _ROWS.items():
        tell(f"features of {setting.title}")
        rows = counts[on_gpu]
        x, _ = setting.data(rows, device)
        model = setting.build(device).eval()
        clients = [job.rows.to(device) for job in even_jobs(rows, _CLIENTS, setting.local(device))]
        times = in_turns(
            {"read": _reading(model, x, clients), "forward": _passing(model, x, clients)},
            device,
            repeats=7 if on_gpu else 5,
        )
        detail = {"rows": rows, "batch": FEATURE_BATCH} | {f"{name}_s": times.median(name) for name in times.of}
        name = f"{setting.title}: features, over a bare forward pass"
        yield Row(name, times.ratio("read", "forward"), "×", 1.2, detail=detail)


def _reading(model: nn.Module, x: Tensor, clients: list[Tensor]) -> Callable[[], None]:
    def read() -> None:
        reader = FeatureReader(model, "head")
        for rows in clients:
            reader.read(x, rows)

    return read


def _passing(model: nn.Module, x: Tensor, clients: list[Tensor]) -> Callable[[], None]:
    @torch.no_grad()
    def forward() -> None:
        for rows in clients:
            for batch in rows.split(FEATURE_BATCH):
                model(x[batch])

    return forward

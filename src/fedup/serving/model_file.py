"""Model weights on disk: parameters and buffers with their fingerprint, loaded into an architecture at hand."""

from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError, FingerprintError
from fedup.models.views import fingerprint


def save_model(model: nn.Module, path: str | Path) -> None:
    """Write all parameters and buffers; what a model's code does is not in the file."""
    save_tensors(path, _weights(model), kind="model", header={"fingerprint": fingerprint(model)})


def load_model(model: nn.Module, path: str | Path) -> nn.Module:
    """The same model with the file's weights, in eval mode; a file that is refused changes nothing.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp(), "model.safetensors")
    >>> save_model(nn.Linear(2, 2), path)
    >>> load_model(nn.Linear(2, 2), path)
    Linear(in_features=2, out_features=2, bias=True)
    """
    tensors, header = load_tensors(path, kind="model")
    weights = _weights(model)
    other = [
        f"{name} is {_shape(tensors.get(name))} in the file and {_shape(weights.get(name))} in the model"
        for name in sorted({*weights, *tensors})
        if _shape(tensors.get(name)) != _shape(weights.get(name))
    ]
    if other:
        raise FingerprintError(
            f"The weights in {path} are of another architecture: {'; '.join(other[:3])}"
            f"{f' and {len(other) - 3} more' if len(other) > 3 else ''}. Build the model they were saved from."
        )
    before = {name: tensor.detach().clone() for name, tensor in weights.items()}
    _copy(tensors, weights)
    if fingerprint(model) != header.get("fingerprint"):
        _copy(before, weights)
        raise ArtifactError(f"The weights in {path} do not have the fingerprint stored with them: take a good copy.")
    return model.eval()


@torch.no_grad()
def _copy(tensors: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    for name, tensor in weights.items():
        tensor.copy_(tensors[name])


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return dict(chain(model.named_parameters(), model.named_buffers()))


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"

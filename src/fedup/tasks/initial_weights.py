"""Weights that a user brings: a safetensors file of fedup's own, or of any state_dict."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedup.errors import ArtifactError


def take_weights(model: nn.Module, path: Path) -> None:
    """Copy a file's weights into the model, by name; nothing may be missing, left over or of another shape.

    From a folder the model itself takes what it can use, where it knows how (`load_pretrained`).
    """
    if path.is_dir():
        if not hasattr(model, "load_pretrained"):
            raise ArtifactError(f"{path} is a folder, and {type(model).__name__} takes a file of weights only.")
        model.load_pretrained(path)  # type: ignore[operator]
        return
    if not path.is_file():
        raise ArtifactError(f"There is no file of weights at {path}.")
    try:
        tensors = load_file(path)
        with torch.no_grad():
            model.load_state_dict(tensors, strict=True)
    except SafetensorError as error:
        raise ArtifactError(
            f"{path} is damaged or no safetensors file ({error}): save the state_dict as one."
        ) from error
    except (RuntimeError, OSError) as error:
        why = " ".join(str(error).split())[:300]
        raise ArtifactError(
            f"The weights in {path} do not fit the model: {why.rstrip('.')}. Name the model they are of."
        ) from error

"""A model with its filter as one program that needs only torch."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedup.errors import ArtifactError, CutError
from fedup.files import replacing
from fedup.models.cut import logits_of

NOTE = "fedup.json"  # the extra file that says what the program is


class _Logits(nn.Module):
    """The model with logits as its only output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.model(x))


def export_program(model: nn.Module, inputs: Tensor, path: str | Path, *, about: Mapping[str, Any]) -> None:
    """Write a `torch.export` program of the model for batches of any size, checked against the model itself.

    `about` is stored in it as the extra file fedup.json. To run it: `torch.export.load(path).module()(x)`.
    """
    wrapped = _Logits(model).eval()
    with torch.no_grad():
        expected = wrapped(inputs)
        try:
            program = torch.export.export(wrapped, (inputs,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        except Exception as error:  # torch.export raises many kinds
            raise CutError(
                f"torch.export cannot follow this model ({str(error).splitlines()[0]}). Serve it with fedup itself."
            ) from error
    written = io.BytesIO()
    torch.export.save(program, written, extra_files={NOTE: json.dumps(dict(about), ensure_ascii=False)})
    written.seek(0)
    with torch.no_grad():
        loaded = torch.export.load(written).module()
        answers = torch.cat([loaded(inputs[:1]), loaded(inputs[1:])])
    if not torch.allclose(answers, expected, atol=1e-4, rtol=1e-4):
        raise ArtifactError("The exported program does not answer as the model does: it was not written.")
    with replacing(path) as partial:
        partial.write_bytes(written.getvalue())

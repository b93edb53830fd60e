"""Encoders in Hugging Face's layout: a folder with config.json and weights, pooled to one row of features."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedup.errors import MissingDataError, SettingError, check_choice
from fedup.models.backbone import Backbone, Origin

Pooling = Literal["mean", "cls"]
ABOUT_FILE = "fedup.json"  # beside config.json: source, licence, declared_by, and optionally pooling and step


class PooledEncoder(nn.Module):
    """Token features averaged over a text's tokens, or those of its first token.

    With `depths` those behind several layers, one behind the other: 0 is the embeddings. `unit` gives each length 1.
    The depths are among the weights, so that its fingerprint covers them, and they are those of weights that it loads.
    """

    read_at: Tensor | None

    def __init__(
        self, encoder: nn.Module, pooling: Pooling = "mean", *, unit: bool = False, depths: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        check_choice("pooling", pooling, Pooling)
        self.encoder, self.pooling, self.unit, self.depths = encoder, pooling, unit, depths
        self.register_buffer("read_at", torch.tensor(depths) if depths else None)
        self.register_load_state_dict_post_hook(_take_depths)  # type: ignore[no-untyped-call]

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 0).long()  # [PAD] is 0 in BERT's vocabularies
        given = self.encoder(input_ids=ids, attention_mask=mask, output_hidden_states=bool(self.depths))
        tokens = [given.hidden_states[depth] for depth in self.depths] or [given.last_hidden_state]
        return torch.cat([self._pooled(own, mask) for own in tokens], 1)

    def _pooled(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """One row for each text. (N, T, D) to (N, D)"""
        if self.pooling == "cls":
            pooled = tokens[:, 0]
        else:
            weights = mask[..., None].to(tokens.dtype)
            pooled = (tokens * weights).sum(1) / weights.sum(1).clamp(min=1)
        return nn.functional.normalize(pooled, dim=1) if self.unit else pooled


def _take_depths(module: nn.Module, _: object) -> None:
    assert isinstance(module, PooledEncoder)
    if module.read_at is not None:
        module.depths = tuple(module.read_at.tolist())


def load_encoder(folder: Path) -> nn.Module:
    """The encoder in a folder; nothing is downloaded."""
    try:
        from transformers import AutoModel, logging
    except ModuleNotFoundError as error:
        raise MissingDataError("Such backbones need the package transformers: pip install 'fedup[text]'.") from error

    if not (folder / "config.json").is_file():
        raise MissingDataError(f"{folder} holds no model in Hugging Face's layout: config.json is missing.")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # layers that the file lacks (a pooler, which is not used) are drawn, always the same
            return AutoModel.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise MissingDataError(f"The model in {folder} cannot be read: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def folder_backbone(folder: Path, shape: tuple[int, ...], inputs: Mapping[str, Any] | None = None) -> Backbone:
    """Any encoder of texts or images in a folder. `fedup.json` in it declares its origin; without one nothing is
    claimed to be exact. `inputs` says how the data set scales pixels."""
    if len(shape) not in (1, 3):
        raise SettingError(f"{folder} takes texts or images, and the data set has rows of shape {shape}.")
    about = _about(folder / ABOUT_FILE)
    pooling = about.pop("pooling", "mean")
    step = about.pop("step", None)
    try:
        origin = Origin(**about) if about else None
    except TypeError as error:
        raise SettingError(f"{folder / ABOUT_FILE} must hold source, licence and declared_by ({error}).") from error
    declared: dict[str, Any] = {"origin": origin, "step": step}
    if len(shape) == 1:
        words = f"word pieces of the data set, {pooling} pooling"
        blank = torch.zeros(1, *shape, dtype=torch.long)
        return Backbone(PooledEncoder(load_encoder(folder), pooling), blank, **declared, preprocessing=words)
    from fedup.tasks.backbones._hugging_face_images import PREPROCESSOR, PooledImages, Preparation

    prepare = Preparation.read(folder / PREPROCESSOR)
    module = PooledImages(load_encoder(folder), prepare, pooling, inputs)
    words = f"pixels from 0 to 1, {prepare.in_words}; {pooling} pooling"
    return Backbone(module, torch.zeros(1, *shape), **declared, preprocessing=words)


def _about(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise SettingError(f"{path} is no JSON object ({error}).") from error

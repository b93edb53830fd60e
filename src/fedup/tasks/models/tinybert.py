"""The 2-layer, 128-wide BERT, through transformers; the last layer reads the pooler's output."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from fedup.errors import ArtifactError, CutError, MissingDataError, SettingError

TAKES = "text"
CUTS = {"bert.encoder.layer.0": "tokens", "bert.encoder.layer.1": "tokens", "bert.pooler": "each", "head": "each"}
TRAINING = {"optimizer": "adam", "lr": 3e-4}
FUSED_LAYERS = ("bert.encoder.layer.1.output.dense",)  # of the last layer
_VOCABULARY = 30522  # of bert-base-uncased


class TinyBert(nn.Module):
    """Ids of word pieces to logits; id 0 fills up short texts and is not attended to."""

    def __init__(self, length: int, num_classes: int) -> None:
        super().__init__()
        try:
            from transformers import BertConfig, BertModel
        except ModuleNotFoundError as error:
            raise MissingDataError("tinybert needs the package transformers: pip install 'fedup[text]'.") from error
        self.bert = BertModel(
            BertConfig(
                vocab_size=_VOCABULARY,
                hidden_size=128,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=512,
                max_position_embeddings=max(512, length),
            )
        )
        self.head = nn.Linear(128, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        pooled: Tensor = self.bert(input_ids=ids, attention_mask=(ids != 0).long()).pooler_output
        return self.head(pooled)

    def tail(self, features: Tensor, cut: str) -> Tensor:
        """What follows a cut: the pooler reads a text's first piece, the last layer the pooler's output."""
        if cut not in ("bert.pooler", "head"):
            raise CutError(
                f"What follows {cut} attends to a text's own pieces only, which its features do not tell: an eraser "
                "can sit there, a bottleneck cannot. Cut at bert.pooler or head."
            )
        pooler: Any = self.bert.pooler
        return self.head(pooler(features) if cut == "bert.pooler" else features)

    def load_pretrained(self, folder: Path) -> None:
        """Take the encoder's weights from a folder that transformers saved; the last layer stays as it is."""
        from transformers import BertModel

        try:
            loaded: Any = BertModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
            found, about = loaded
            if about["missing_keys"]:  # transformers would make them up
                raise ValueError(f"missing: {', '.join(sorted(about['missing_keys']))}")
            self.bert.load_state_dict(found.state_dict())
        except (OSError, ValueError, RuntimeError, TypeError, SafetensorError) as error:
            raise ArtifactError(
                f"{folder} holds no weights of a 2-layer, 128-wide BERT ({' '.join(str(error).split())[:200]}): it "
                "must have the config.json and model.safetensors of such a model."
            ) from error


def build(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """TinyBert for texts of (length,) word pieces; random weights until `load_pretrained`."""
    if len(shape) != 1:
        raise SettingError(f"tinybert reads texts as one row of word pieces; found inputs of shape {shape}.")
    return TinyBert(shape[0], num_classes)

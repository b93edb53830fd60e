"""A learned head on disk: the statistics it is a function of, and the head itself with the requests it leaves out."""

from pathlib import Path
from typing import TypeVar

from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError
from fedup.files import explained
from fedup.filters.closed_form import Scores
from fedup.filters.ridge_head import HeadRule
from fedup.models.backbone import Backbone
from fedup.request import Forget
from fedup.statistics.feature_cache import FeatureCache
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store_file import load_centroids, save_centroids
from fedup.unlearning.exact import HeadModel
from fedup.unlearning.exact_model import ExactModel, described

HEAD_FILE, STATISTICS_FILE = "head.safetensors", "statistics.safetensors"
_KIND = "exact head"
Model = TypeVar("Model", bound=ExactModel)


def save_head(model: HeadModel, folder: str | Path) -> None:
    """Write the statistics and the head into a folder. The backbone is public and is not written."""
    with explained(f"make the folder {folder}"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    save_centroids(model.store, Path(folder) / STATISTICS_FILE)
    write_head(model, Path(folder) / HEAD_FILE)


def load_head(backbone: Backbone, folder: str | Path, *, cache: FeatureCache | None = None) -> HeadModel:
    """Read a model back; raises where head and statistics do not fit each other, or the backbone is another one."""
    store = load_centroids(Path(folder) / STATISTICS_FILE)
    if not isinstance(store, MomentStore):
        raise ArtifactError(f"{folder} holds centroids, and a head needs moments: take a good copy.")
    return read_head(backbone, store, Path(folder) / HEAD_FILE, cache=cache)


def write_head(model: ExactModel, path: Path) -> None:
    """The head alone, with the requests that it leaves out."""
    header = {
        **described(model),
        "base": model.base_fingerprint,
        "requests": sorted((request.to_json() for request in model.requests), key=str),
        "totals": model.totals_hash(),
    }
    save_tensors(path, {"weight": model.head.weight, "bias": model.head.bias}, kind=_KIND, header=header)


def read_head(backbone: Backbone, store: MomentStore, path: Path, *, cache: FeatureCache | None = None) -> HeadModel:
    """The model of a head's file; its head is solved again from the statistics, and must be the one in the file."""
    _, _, requests, rule = _parts_of(path)
    return with_stored_head(HeadModel(backbone, store, rule=rule, requests=requests, cache=cache), path)


def with_stored_head(model: Model, path: Path) -> Model:
    """The model with the very bits of a head's file; raises where its totals give another head."""
    scores, totals, _, _ = _parts_of(path)
    if model.totals_hash() != totals:
        raise ArtifactError(f"The head in {path} was learned from other totals than the statistics have.")
    if not model.head.fits(scores):
        raise ArtifactError(f"The head in {path} is not the one that its totals give. Take a good copy of it.")
    model.head.put(scores)
    return model


def _parts_of(path: Path) -> tuple[Scores, str, frozenset[Forget], HeadRule]:
    """Scores, the hash of totals, requests and the rule."""
    tensors, header = load_tensors(path, kind=_KIND)
    try:
        requests = frozenset(map(Forget.from_json, header["requests"]))
        scores = Scores(tensors["weight"], tensors["bias"])
        return scores, str(header["totals"]), requests, HeadRule(**header["rule"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path} lacks a part of a head ({error!r}). Take a good copy of it.") from error

"""Federations trained once, kept in the cache folder and shared by all methods, scenarios and experiments."""

import copy
import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

import fedup
from fedup.bench.datasets._cache import cache_folder
from fedup.bench.models import model_code
from fedup.bench.recipe import Recipe
from fedup.bench.watching import Progress, RoundsShown
from fedup.errors import ArtifactError
from fedup.federation import Federation
from fedup.model_file import load_model, save_model
from fedup.sharing import fingerprint


def trained(
    start: nn.Module, federation: Federation, recipe: Recipe, *, progress: Progress, what: str = "the federation learns"
) -> nn.Module:
    """The model that a federation learns from these first weights; from the cache where it was learned before.

    What decides is the content: rows, labels, first weights, settings, kind of device and version of torch. An
    interrupted training goes on where it stopped.
    """
    device = federation.x.device
    path = _path(start, federation, recipe)
    blank = copy.deepcopy(start)
    with suppress(ArtifactError):  # a damaged file is made again
        if path.exists():
            return load_model(blank, path).to(device)
    checkpoint = path.with_suffix(".rounds")
    watch = RoundsShown(progress, f"{recipe.data}, seed {recipe.seed}: {what}", recipe.rounds)
    learn = partial(recipe.train, start, federation, device=device, observers=[watch], checkpoint=checkpoint)
    try:
        model = learn().model
    except (ArtifactError, FileNotFoundError):  # a checkpoint that is damaged, or that another process took away
        checkpoint.unlink(missing_ok=True)
        model = learn().model
    save_model(model, path)
    checkpoint.unlink(missing_ok=True)
    return model


def keep(model: nn.Module, start: nn.Module, federation: Federation, recipe: Recipe) -> None:
    """Put a model that was trained elsewhere in just this way into the cache."""
    save_model(model, _path(start, federation, recipe))


def _path(start: nn.Module, federation: Federation, recipe: Recipe) -> Path:
    how = {
        "local": asdict(recipe.local),
        "rounds": recipe.rounds,
        "clients_per_round": recipe.clients_per_round,
        "seed": recipe.seed,
        "device": federation.x.device.type,
        "torch": torch.__version__,
        "code": [model_code(recipe.model), _training_code()],
        "start": fingerprint(start),
        "federation": federation.digest(),
    }
    digest = hashlib.sha256(json.dumps(how, sort_keys=True).encode())
    for rows in federation.rows("train").sort().values.split(4096):  # no second array of the data's size
        digest.update(_bytes(federation.x[rows]))
    return cache_folder() / "federations" / f"{digest.hexdigest()[:32]}.safetensors"


@cache
def _training_code() -> str:
    """sha256 of the files that decide what training gives: a model trained by other code is another model."""
    core = Path(fedup.__file__).parent
    files = [core / f"{name}.py" for name in ("fedavg", "training", "averaging", "rng", "cut")]
    files += sorted((core / "engines").glob("*.py"))
    files += sorted((core / "bench" / "models").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _bytes(values: Tensor) -> memoryview:
    return values.detach().cpu().contiguous().numpy().data.cast("B")

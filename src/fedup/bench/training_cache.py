"""Trained federations in the cache folder, shared by all methods, scenarios and experiments."""

import copy
import fcntl
import hashlib
import inspect
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn

import fedup
from fedup.bench.history import History
from fedup.errors import ArtifactError
from fedup.federation import Federation
from fedup.files import explained
from fedup.models.views import fingerprint
from fedup.run.lock import held
from fedup.serving.model_file import load_model, save_model
from fedup.tasks.datasets._cache import cache_folder
from fedup.tasks.models import model_code
from fedup.tasks.progress import Progress, RoundsShown
from fedup.tasks.recipe import Recipe
from fedup.training.averaging import RunningAverage
from fedup.training.fedavg import Averaging, Observer, Runtime

LEARNING = "the federation learns"
_A_DAY_S = 86_400.0


def trained(
    start: nn.Module, federation: Federation, recipe: Recipe, *, progress: Progress, what: str = LEARNING
) -> nn.Module:
    """The model that a federation learns from these first weights, from the cache if it is there.

    The key is the content: rows, labels, first weights, settings, kind of device and version of torch. An interrupted
    training resumes.
    """
    path, recorded_path = _path(start, federation, recipe), _path(start, federation, recipe, ["recorded"])
    found = _load(start, recorded_path, federation) or _load(start, path, federation)
    return found or _learn(start, federation, recipe, path, [_shown(recipe, progress, what)])


def recorded(
    start: nn.Module,
    federation: Federation,
    recipe: Recipe,
    *,
    progress: Progress,
    what: str = LEARNING,
    averaging: Averaging = RunningAverage,
    named: str = "",
) -> tuple[nn.Module, History]:
    """The same with the history of its training; another averaging needs a name.

    A model without its history is trained again: on a GPU a second training differs in the last bits.
    """
    path = _path(start, federation, recipe, ["recorded"])
    if named:
        path = path.with_name(f"{path.stem}-{_digest_of(averaging, named)}.safetensors")
    folder = path.with_suffix(".history")
    path.parent.mkdir(parents=True, exist_ok=True)
    with held(path.with_suffix(".lock"), "bench", wait_s=_A_DAY_S):  # two processes would mix their histories
        found, history = _load(start, path, federation), _history(folder)
        if found is None or not history.holds(recipe.rounds):
            if not history.rounds or not path.with_suffix(".rounds").exists():  # neither is of use alone
                path.with_suffix(".rounds").unlink(missing_ok=True)
                history.remove()
            watchers = [history, _shown(recipe, progress, what)]
            found = _learn(start, federation, recipe, path, watchers, averaging)
            if not history.holds(recipe.rounds):  # the checkpoint was of another training
                history.remove()
                found = _learn(start, federation, recipe, path, watchers, averaging)
    return found, history


def use_histories(start: nn.Module, federation: Federation, recipe: Recipe) -> Callable[[], None]:
    """Keep a federation's histories until the returned function is called, or this process ends. The last user's call
    deletes them: they may be many times the model's size. Models stay."""
    path = _path(start, federation, recipe, ["recorded"])
    with explained(f"write to {path.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        users = path.with_suffix(".users").open("a")  # with it the lock, until done
    fcntl.flock(users, fcntl.LOCK_SH)

    def done() -> None:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another process still reads them
        else:
            for folder in path.parent.glob(f"{path.stem}*.history"):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            users.close()

    return done


def _digest_of(averaging: Averaging, named: str) -> str:
    """A digest of the name and of the averaging's code."""
    code = Path(inspect.getfile(getattr(averaging, "func", averaging))).read_bytes()
    return hashlib.sha256(named.encode() + code).hexdigest()[:16]


def _history(folder: Path) -> History:
    try:
        return History(folder)
    except ArtifactError:  # a damaged one is made again
        shutil.rmtree(folder, ignore_errors=True)
        return History(folder)


def _load(start: nn.Module, path: Path, federation: Federation) -> nn.Module | None:
    with suppress(ArtifactError):  # a damaged file is made again
        if path.exists():
            return load_model(copy.deepcopy(start), path).to(federation.x.device)
    return None


def _shown(recipe: Recipe, progress: Progress, what: str) -> Observer:
    return RoundsShown(progress, f"{recipe.data}, seed {recipe.seed}: {what}", recipe.rounds)


def _learn(
    start: nn.Module,
    federation: Federation,
    recipe: Recipe,
    path: Path,
    observers: Sequence[Observer],
    averaging: Averaging = RunningAverage,
) -> nn.Module:
    checkpoint = path.with_suffix(".rounds")
    runtime = Runtime(device=federation.x.device, checkpoint=checkpoint)
    learn = partial(recipe.train, start, federation, averaging=averaging, observers=observers, runtime=runtime)
    try:
        model = learn().model
    except (ArtifactError, FileNotFoundError):  # a checkpoint that is damaged, or that another process took away
        checkpoint.unlink(missing_ok=True)
        model = learn().model
    save_model(model, path)
    checkpoint.unlink(missing_ok=True)
    return model


def keep(model: nn.Module, start: nn.Module, federation: Federation, recipe: Recipe) -> None:
    """Store a model that was trained elsewhere in exactly this way."""
    save_model(model, _path(start, federation, recipe))


def _path(start: nn.Module, federation: Federation, recipe: Recipe, kind: Sequence[str] = ()) -> Path:
    config = {
        **({"kind": list(kind)} if kind else {}),
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
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for rows in federation.rows("train").sort().values.split(4096):  # no second array of the data's size
        digest.update(federation.x[rows].detach().cpu().contiguous().numpy().data.cast("B"))
    return cache_folder() / "federations" / f"{digest.hexdigest()[:32]}.safetensors"


@cache
def _training_code() -> str:
    """sha256 of the code that training depends on."""
    core = Path(fedup.__file__).parent
    files = [core / f"{name}.py" for name in ("rng", "threads", "models/cut", "bench/history")]
    files += sorted((core / "training").rglob("*.py"))
    files += sorted((core / "tasks" / "models").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()

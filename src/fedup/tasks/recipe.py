"""What a run folder is about: which data, split how, which model, trained how. Enough to make all of it again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedup.errors import ArtifactError, DataError, SettingError
from fedup.federation import Federation
from fedup.partition import dirichlet, iid, pathological
from fedup.rng import generator
from fedup.subjects import SubjectKey
from fedup.tasks.datasets import Dataset, defaults_of, input_of, load_dataset, own_source, standardised
from fedup.tasks.file_options import FileOptions
from fedup.tasks.models import build_model, check_takes, training_of
from fedup.training.averaging import RunningAverage
from fedup.training.fedavg import Averaging, Observer, Rounds, Runtime, Trained, federate
from fedup.training.local import LocalTraining

# The function, and the options that the value behind the colon sets.
PARTITIONS: dict[str, tuple[Callable[..., list[Tensor]], dict[str, Callable[[str], float]]]] = {
    "iid": (iid, {}),
    "dirichlet": (dirichlet, {"concentration": float}),
    "pathological": (pathological, {"classes_per_client": int}),
}

# Settings added later: older results do not have them.
_LATER = ("precision", "weight_decay", "file", "schedule", "warmup_rounds", "augment")

# What the public code of the paper's authors does (docs/fidelity.md). Each of its 50 rounds is two rounds of FedAvg.
# The user chooses the number of clients there.
RECIPE_PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "authors": {
        "rounds": 100,
        "partition": "dirichlet:1.0",
        "epochs": 5,
        "batch_size": 64,
        "optimizer": "sgd",
        "lr": 0.005,  # 0.01 on CIFAR-100
        "momentum": 0.9,
        "weight_decay": 5e-4,
    },
}


@dataclass(frozen=True)
class Recipe:
    """All settings of a federation; the same recipe and seed give the same federation and the same model."""

    data: str
    model: str
    rounds: int = field(metadata={"help": "Rounds of FedAvg.", "min": 0, "default": "what the data set needs"})
    clients: int = field(default=10, metadata={"help": "Clients in the federation.", "min": 2})
    partition: str = field(default="dirichlet:0.5", metadata={"help": "iid, dirichlet:0.5 or pathological:2."})
    rows: int | None = field(default=None, metadata={"help": "Use a random subset of so many rows.", "min": 1})
    epochs: int = field(default=1, metadata={"help": "Local epochs in each round.", "min": 1})
    batch_size: int = field(default=64, metadata={"help": "Local batch size.", "min": 1, "default": "by data set"})
    lr: float = field(default=0.05, metadata={"help": "Local learning rate.", "default": "what suits the model"})
    momentum: float = 0.9
    optimizer: str = field(default="sgd", metadata={"help": "sgd or adam.", "default": "what suits the model"})
    precision: str = field(
        default="float32",
        metadata={"help": "float32, bfloat16, or auto (by the GPU).", "default": "what suits the model"},
    )
    weight_decay: float = 0.0
    schedule: str = "constant"  # of the rate over the rounds: or cosine
    warmup_rounds: int = 0
    augment: str = "none"  # or flip_crop
    clients_per_round: int | None = field(
        default=None, metadata={"help": "Clients drawn in each round.", "min": 1, "default": "all"}
    )
    cut: str | None = field(default=None, metadata={"help": "Module to filter at.", "default": "the last linear layer"})
    weights: str | None = None  # file or folder of first weights; a run folder knows their fingerprint instead
    seed: int = field(default=0, metadata={"help": "Same seed, same federation and model."})
    file: FileOptions | None = None  # how a file of the user's own is read

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise SettingError(f"seed must fit into 64 bits; found {self.seed}.")
        if self.rounds < 0 or self.clients < 1:
            raise SettingError(f"rounds must be 0 or more, clients 1 or more; found {self.rounds} and {self.clients}.")
        if self.clients_per_round is not None and not 1 <= self.clients_per_round <= self.clients:
            raise SettingError(f"clients_per_round must lie in 1 … {self.clients}; found {self.clients_per_round}.")
        _ = self.local  # checks the rest

    @classmethod
    def suited_to(cls, data: str, *, preset: str = "default", **chosen: Any) -> "Recipe":
        """The defaults of data set and model, overridden by the preset, overridden by `chosen` (None: not chosen)."""
        if preset not in RECIPE_PRESETS:
            raise SettingError(f"preset is one of {', '.join(RECIPE_PRESETS)}; found {preset!r}.")
        given = {name: value for name, value in chosen.items() if value is not None}
        given |= _file_settings(data, given)
        of_data = asdict(defaults_of(data, given.get("file")))
        of_model = training_of(given.get("model", of_data["model"]))
        return cls(data=data, **{**of_data, **of_model, **RECIPE_PRESETS[preset], **given})

    def about(self, dataset: Dataset) -> dict[str, Any]:
        """For the journal: the settings, and what predictions need to know of the data set."""
        return {
            **{name: value for name, value in self.settings().items() if name != "weights"},
            "class_names": list(dataset.class_names),
            **({} if dataset.targets == "classes" else {"targets": dataset.targets}),
            **({"client_names": list(dataset.client_names)} if dataset.client_names else {}),
            "input_shape": list(dataset.x.shape[1:]),
            "input": (dataset.inputs or input_of(self.data, self.file)).identity(),
        }

    def settings(self) -> dict[str, Any]:
        """All settings as plain data. Settings added later are left out at their defaults, so that older results keep
        their names."""
        settings = asdict(self) | {"file": self.file.to_json() if self.file else None}
        return {name: value for name, value in settings.items() if name not in _LATER or value != getattr(Recipe, name)}

    @classmethod
    def from_about(cls, about: Mapping[str, Any]) -> "Recipe":
        """The recipe that `about` was made from."""
        names = [one.name for one in fields(cls) if one.name in about or one.name not in ("weights", *_LATER)]
        if "file" in about:
            about = {**about, "file": FileOptions.from_json(about["file"])}
        try:
            return cls(**{name: about[name] for name in names})
        except KeyError as error:
            raise ArtifactError(
                f"The run folder does not say how its federation was made ({error} is missing): it was not made by "
                "`fedup train`, and commands that need its data cannot make it again."
            ) from error

    @property
    def schedule_rounds(self) -> int:
        """The rounds that the rate is scheduled over; 0 where it stays the same."""
        return self.rounds if self.schedule != "constant" or self.warmup_rounds else 0

    @property
    def local(self) -> LocalTraining:
        """How clients train."""
        return LocalTraining(**{setting.name: getattr(self, setting.name) for setting in fields(LocalTraining)})

    def train(
        self,
        start: nn.Module,
        federation: Federation,
        *,
        rounds: int | Sequence[int] | None = None,
        local: LocalTraining | None = None,
        averaging: Averaging = RunningAverage,
        observers: Sequence[Observer] = (),
        runtime: Runtime = Runtime(),
    ) -> Trained:
        """FedAvg by the recipe, from the weights of `start`; `rounds` and `local` override the recipe."""
        count = self.rounds if rounds is None else rounds
        return federate(
            start,
            federation,
            rounds=Rounds(count, self.clients_per_round, averaging),
            local=local or self.local,
            seed=self.seed,
            observers=observers,
            runtime=runtime,
        )

    def load(self) -> Dataset:
        """The data set, or the chosen number of its rows; a table is scaled as its clients' training rows say."""
        dataset = load_dataset(self.data, self.file)
        if dataset.inputs is not None:
            check_takes(self.model, dataset.inputs.kind)
        if self.rows is not None and self.rows != len(dataset.y):
            if not 1 <= self.rows <= len(dataset.y):
                raise DataError(f"rows must lie in 1 … {len(dataset.y)}, all there are; found {self.rows}.")
            chosen = torch.randperm(len(dataset.y), generator=generator(self.seed, "rows"))[: self.rows].sort().values
            dataset = dataset.subset(chosen)
        return dataset if dataset.inputs is None else standardised(dataset, self._split(dataset))

    def federation(self, dataset: Dataset, key: SubjectKey | None = None) -> Federation:
        """The data set, split over clients: as it says itself, or by the partition. With a key requests can name the
        persons behind its rows."""
        federation = self._split(dataset)
        return federation if dataset.subjects is None else federation.with_subjects(dataset.subjects, key=key)

    def _split(self, dataset: Dataset) -> Federation:
        parts = self._parts(dataset) if dataset.parts is None else list(dataset.parts)
        made = Federation.split(dataset.x, dataset.y, parts, seed=self.seed, num_classes=dataset.num_classes)
        return replace(made, client_names=dataset.client_names)

    def _parts(self, dataset: Dataset) -> list[Tensor]:
        name, _, value = self.partition.partition(":")
        if name not in PARTITIONS:
            known = ", ".join(PARTITIONS)
            raise SettingError(f"partition is one of {known}, as in dirichlet:0.5; found {self.partition!r}.")
        make, options = PARTITIONS[name]
        try:
            if value and not options:
                raise ValueError("takes no value")
            chosen = {option: convert(value) for option, convert in options.items() if value}
            return make(dataset.y, self.clients, seed=self.seed, **chosen)
        except (SettingError, DataError):
            raise
        except ValueError as error:
            raise SettingError(f"partition is given as in dirichlet:0.5; found {self.partition!r}.") from error

    def blank_model(self, shape: Sequence[int], num_classes: int) -> nn.Module:
        """The model with its first weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = build_model(self.model, tuple(shape), num_classes)
        if self.weights is not None:
            _take_weights(model, Path(self.weights))
        return model


def _file_settings(data: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a file of the user's own settles: its options with the file's hash, and who the clients are."""
    options: FileOptions | None = given.get("file")
    options = options.with_constants() if options else None
    own = own_source(data, options)
    if own is None:
        return {"file": None}
    own.check()  # before the file is hashed: a wrong one may be huge
    settled: dict[str, Any] = {"file": replace(own.options, sha256=own.digest())}
    if names := own.client_names:
        column = own.options.clients_column or "clients"
        chosen = [f"{name}={given[name]!r}" for name in ("clients", "partition") if name in given]
        if chosen:
            raise SettingError(
                f"The column {column!r} of {data} says who the {len(names)} clients are: leave out {', '.join(chosen)}."
            )
        settled |= {"clients": len(names), "partition": f"column:{column}"}
    return settled


def _take_weights(model: nn.Module, path: Path) -> None:
    """Copy the user's weights into the model, by name; none may be missing, left over or of another shape.

    From a folder the model itself takes what it can use, if it has `load_pretrained`.
    """
    if path.is_dir():
        if not hasattr(model, "load_pretrained"):
            raise ArtifactError(f"{path} is a folder, and {type(model).__name__} takes a file of weights only.")
        model.load_pretrained(path)  # type: ignore[operator]
        return
    if not path.is_file():
        raise ArtifactError(f"There is no file of weights at {path}.")
    try:
        model.load_state_dict(load_file(path))
    except SafetensorError as error:
        raise ArtifactError(
            f"{path} is damaged or no safetensors file ({error}): save the state_dict as one."
        ) from error
    except (RuntimeError, OSError) as error:
        why = " ".join(str(error).split())[:300].rstrip(".")
        raise ArtifactError(
            f"The weights in {path} do not fit the model: {why}. Name the model they are of."
        ) from error

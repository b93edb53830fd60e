"""What every question to a client has: how it travels, how it is answered, how its answer is checked."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Generic, Self, TypeVar, get_type_hints

from torch import Tensor, nn

from fedup.clients import checks
from fedup.clients.model_facts import ModelFacts
from fedup.errors import DataError
from fedup.models.features import FeatureReader
from fedup.models.layout import Granularity, known_granularity
from fedup.privacy.guarantee import DP
from fedup.request import Forget
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.client_data import ClientData as ClientData
from fedup.statistics.eraser_statistics import RowGroups, Weights, read_weights, write_weights
from fedup.statistics.integer_moments import MomentConfig

Details = Mapping[str, Any]  # plain data, as JSON
Arrays = Mapping[str, Tensor]
Message = tuple[dict[str, Any], dict[str, Tensor]]  # details and arrays
A = TypeVar("A")
P = TypeVar("P")
R = TypeVar("R", bound=FeatureReader)
_SENT_AS = {"config": "how", "dp": "how", "groups": "question"}  # names of fields in messages


def _centroid_config(details: Details, name: str) -> CentroidConfig:
    if "epsilon" in details[name]:
        raise DataError("Centroids are asked for without a guarantee; under one ask to 'summarize privately'.")
    return CentroidConfig(**details[name])


def _row_groups(details: Details, name: str) -> RowGroups:
    plain = details[name]
    requests = {str(request): _forget(named) for request, named in plain["requests"].items()}
    return RowGroups(requests, _forget(plain["gone"]), finished=frozenset(plain.get("finished", ())))


def _forget(plain: Details) -> Forget:
    samples = {int(client): checks.whole_set(plain["samples"], client) for client in plain["samples"]}
    return Forget(checks.whole_set(plain, "clients"), checks.whole_set(plain, "classes"), samples)


# By type of a field: how it is written as plain data, and how it is read from the details of a message.
_FORMS: dict[Any, tuple[Callable[[Any], Any], Callable[[Details, str], Any]]] = {
    str: (str, checks.text),
    bool: (bool, lambda details, name: bool(details.get(name))),
    Granularity: (str, lambda details, name: known_granularity(details[name])),
    frozenset[int]: (sorted, checks.whole_set),
    frozenset[str]: (sorted, checks.text_set),
    frozenset[int] | None: (
        lambda numbers: None if numbers is None else sorted(numbers),
        lambda details, name: None if details[name] is None else checks.whole_set(details, name),
    ),
    tuple[int, ...]: (list, lambda details, name: tuple(checks.whole_numbers(details, name))),
    Mapping[str, Granularity]: (dict, lambda details, name: details[name]),
    Weights: (write_weights, lambda details, name: read_weights(details[name])),
    CentroidConfig: (asdict, _centroid_config),
    DP: (asdict, lambda details, name: DP(**details[name])),
    MomentConfig: (asdict, lambda details, name: MomentConfig(**details[name])),
    RowGroups: (RowGroups.to_json, _row_groups),
}


class Readers(dict[str, R], Generic[R]):
    """Readers of features by cut, each made when it is first needed."""

    def __init__(self, make: Callable[[str], R]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, cut: str) -> R:
        self[cut] = reader = self._make(cut)
        return reader


@dataclass(frozen=True)
class Question(ABC, Generic[A]):
    """One question; `A` is the type of its answer.

    Subclasses are frozen dataclasses. `kind` is its name in messages, `reported_as` the name of an answer in reports.
    """

    kind: ClassVar[str]
    reported_as: ClassVar[str]
    needs_model: ClassVar[bool] = True
    reads_held_out: ClassVar[bool] = False
    reads_persons: ClassVar[bool] = False

    def to_message(self) -> Message:
        """The question as it is sent: all fields that are compared."""
        forms = self._forms()
        return {_SENT_AS.get(name, name): form[0](getattr(self, name)) for name, form in forms.items()}, {}

    @classmethod
    def from_message(cls, details: Details, arrays: Arrays) -> Self:
        """The inverse of `to_message`, at the client."""
        return cls(**{name: form[1](details, _SENT_AS.get(name, name)) for name, form in cls._forms().items()})

    @classmethod
    def _forms(cls) -> dict[str, tuple[Callable[[Any], Any], Callable[[Details, str], Any]]]:
        hints = get_type_hints(cls)
        return {field.name: _FORMS[hints[field.name]] for field in fields(cls) if field.compare}

    @abstractmethod
    def answer_message(self, answer: A) -> Message:
        """An answer as it is sent."""

    @abstractmethod
    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> A:
        """The inverse of `answer_message`, at the server. Raises DataError if the answer has a wrong shape, or answers
        another question."""

    # --- what few questions need

    def read_again(self, details: Details, arrays: Arrays, facts: ModelFacts) -> A:
        """The same for an answer that this server has read and checked before, and kept on its disk since."""
        return self.read(details, arrays, facts)

    @property
    def protection(self) -> "CentroidConfig | MomentConfig | DP | None":
        """What protects the answer; None for exact ones."""
        return None

    def with_places(self, places: Callable[[Forget], Forget]) -> Self:
        """The same question, with samples named by their place among a node's rows."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        groups = {name: value.with_places(places) for name, value in values.items() if isinstance(value, RowGroups)}
        return replace(self, **groups)

    def leaves_out(self) -> tuple[frozenset[int], frozenset[int]]:
        """Samples and classes that the client leaves out from now on, and keeps nothing of."""
        return frozenset(), frozenset()

    def check_model(self, base: str) -> None:
        """Raise if it brings a filter of another model."""

    def check_classes(self, num_classes: int) -> None:
        """Raise if it does not fit a model of so many classes; this needs neither the model nor a row."""

    def check_rows(self, answer: A, declared: int) -> None:
        """Raise DataError if an answer is of more rows than its client declared when it trained."""

    def cells_in(self, details: Details) -> int:
        """The number of cells in an answer, for reports."""
        return 0


class ExactQuestion(Question[A]):
    """A question that is answered exactly, under no guarantee."""

    @abstractmethod
    def answer(self, data: ClientData) -> A:
        """From a client's own rows: the same function in process and on a node."""


class PrivateQuestion(Question[A], Generic[A, P]):
    """A question whose answer is a release under differential privacy, charged before any row is read.

    `P` is its plan: everything that can be checked, and refused, without a row.
    """

    charged_as: ClassVar[str]
    cut: str
    dp: DP

    @property
    def protection(self) -> DP:
        return self.dp

    @abstractmethod
    def plan(self, model: nn.Module, blank: Tensor, num_classes: int, reader: FeatureReader | None = None) -> P:
        """Check everything that can be refused, with one blank row instead of data."""

    def check_data(self, data: ClientData) -> None:
        """Raise if the question does not fit the data. Never called at a node: there no refusal may depend on rows."""

    @abstractmethod
    def release(self, plan: P, data: ClientData) -> A:
        """The answer from a client's rows, made after the charge."""

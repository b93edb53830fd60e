"""What is to be forgotten: requests name data (clients, classes, sample ids, persons), never positions."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any, Literal, get_args

from fedup.errors import RequestError
from fedup.subjects import SHORT_TAG, SubjectKey

Reason = Literal["withdrawal", "poison"]


@dataclass(frozen=True)
class Forget:
    """A request to forget clients, classes, samples or persons; `|` joins several into one.

    Persons are named by tags (`SubjectKey`). Once clients were asked which rows these are of, the request has the rows
    as samples, too: it is *resolved*.

    The `reason` sets the goal: withdrawn rows should look like rows never seen, poisoned rows should lose their effect
    on their label. Requests for the same data are equal whatever their reasons.

    >>> request = Forget.classes([7]) | Forget.samples({3: [10, 11]})
    >>> request.kind
    'class+sample'
    """

    client_ids: frozenset[int] = frozenset()
    class_ids: frozenset[int] = frozenset()
    sample_ids: Mapping[int, frozenset[int]] = field(default_factory=dict)
    reason: Reason = field(default="withdrawal", compare=False)
    subject_tags: frozenset[str] = frozenset()
    resolved_tags: frozenset[str] = field(default=frozenset(), compare=False)  # persons whose rows are in sample_ids

    def __post_init__(self) -> None:
        if self.reason not in get_args(Reason):
            raise RequestError(f"The reason of a request is {' or '.join(get_args(Reason))}; found {self.reason!r}.")
        object.__setattr__(self, "client_ids", frozenset(self.client_ids))
        object.__setattr__(self, "class_ids", frozenset(self.class_ids))
        samples = {client: frozenset(ids) for client, ids in sorted(self.sample_ids.items())}
        object.__setattr__(self, "sample_ids", samples)
        object.__setattr__(self, "subject_tags", frozenset(self.subject_tags))
        object.__setattr__(self, "resolved_tags", frozenset(self.resolved_tags))

    @classmethod
    def clients(cls, ids: Iterable[int], *, reason: Reason = "withdrawal") -> "Forget":
        """Forget everything that these clients contributed."""
        return cls(client_ids=_ids(ids, "client"), reason=reason)

    @classmethod
    def classes(cls, ids: Iterable[int]) -> "Forget":
        """Forget these classes at every client."""
        return cls(class_ids=_ids(ids, "class"))

    @classmethod
    def samples(cls, ids: Mapping[int, Iterable[int]], *, reason: Reason = "withdrawal") -> "Forget":
        """Forget single samples, given by the client that holds them: `{client: sample ids}`."""
        if not isinstance(ids, Mapping):
            raise RequestError(f"A sample request maps clients to sample ids, as in {{3: [17, 42]}}; found {ids!r}.")
        clients = _ids(ids, "client")
        samples = {client: _ids(ids[client], f"sample of client {client}") for client in sorted(clients)}
        return cls(sample_ids=samples, reason=reason)

    @classmethod
    def subjects(cls, ids: Iterable[str], *, key: SubjectKey, reason: Reason = "withdrawal") -> "Forget":
        """Forget persons at every client, by their ids; the request holds their tags under this key alone."""
        if isinstance(ids, (str, bytes)):
            raise RequestError("Persons are named by a list of ids, as in ['P-113']; found a single text.")
        tags = frozenset(key.tag(subject) for subject in ids)
        if not tags:
            raise RequestError("The request forgets nothing: the list of persons is empty.")
        return cls(subject_tags=tags, reason=reason)

    def __or__(self, other: "Forget") -> "Forget":
        samples = {
            client: self.sample_ids.get(client, frozenset()) | other.sample_ids.get(client, frozenset())
            for client in sorted({*self.sample_ids, *other.sample_ids})
        }
        reason: Reason = "poison" if "poison" in (self.reason, other.reason) else "withdrawal"
        tags = self.subject_tags | other.subject_tags, self.resolved_tags | other.resolved_tags
        return Forget(self.client_ids | other.client_ids, self.class_ids | other.class_ids, samples, reason, *tags)

    def at(self, client: int) -> "Forget":
        """The part that concerns one client: nothing about other clients, and no tags."""
        samples = {client: self.sample_ids[client]} if client in self.sample_ids else {}
        return Forget(self.client_ids & {client}, self.class_ids, samples, self.reason)

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def kind(self) -> str:
        """'client', 'class', 'sample', 'subject', or several joined by '+'."""
        rows = "subject" if self.subject_tags else "sample"
        named = [("client", self.client_ids), ("class", self.class_ids), (rows, self.sample_ids or self.subject_tags)]
        return "+".join(name for name, ids in named if ids)

    @property
    def names_rows_only(self) -> bool:
        """Whether it names samples or persons, and nothing else."""
        return self.kind in ("sample", "subject")

    @property
    def is_resolved(self) -> bool:
        """Whether it is known which rows it names: false for persons until clients were asked."""
        return self.subject_tags <= self.resolved_tags

    @property
    def as_named(self) -> "Forget":
        """The request as it came in: persons without the rows that clients reported."""
        return replace(self, sample_ids={}, resolved_tags=frozenset()) if self.subject_tags else self

    @property
    def digest(self) -> str:
        """sha256 of the request's canonical form: the same for equal requests in every process."""
        return hashlib.sha256(json.dumps(self._data(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Sorted lists and strings; the reason only if it is not "withdrawal"."""
        if not self.is_resolved:
            raise RequestError(f"To {self} is stored and sent once clients have said which rows that is.")
        return self._data() | ({"reason": self.reason} if self.reason != "withdrawal" else {})

    def queued_json(self) -> dict[str, Any]:
        """The same, also of a request for persons whose rows are not known yet; `from_json` reads it."""
        if self.is_resolved:
            return self.to_json()
        return replace(self, resolved_tags=self.subject_tags).to_json() | {"unresolved": True}

    def _data(self) -> dict[str, Any]:
        return {
            "clients": sorted(self.client_ids),
            "classes": sorted(self.class_ids),
            "samples": {str(client): sorted(ids) for client, ids in sorted(self.sample_ids.items())},
            **({"subjects": sorted(self.subject_tags)} if self.subject_tags else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Forget":
        """The inverse of `to_json`."""
        samples = {int(client): frozenset(ids) for client, ids in value["samples"].items()}
        reason: Any = value.get("reason", "withdrawal")
        tags = frozenset(value.get("subjects", ()))
        known = frozenset() if value.get("unresolved") else tags
        return cls(frozenset(value["clients"]), frozenset(value["classes"]), samples, reason, tags, known)

    def __str__(self) -> str:
        wholes = {"clients": self.client_ids, "classes": self.class_ids}
        parts = [f"{name} {sorted(ids)}" for name, ids in wholes.items() if ids]
        if self.subject_tags:
            parts.append(self.persons)
        for client, ids in () if self.subject_tags else self.sample_ids.items():
            parts.append(f"{len(ids)} sample{'s' if len(ids) > 1 else ''} of client {client}")
        return "forget " + " and ".join(parts)

    @property
    def persons(self) -> str:
        """Its persons in words: by the first digits of their tags, with how many rows they have where."""
        tags = sorted(tag[:SHORT_TAG] for tag in self.subject_tags)
        several = f"{len(tags)} persons" if len(tags) > 1 else "1 person"
        shown = ", ".join(tags[:3]) + (", …" if len(tags) > 3 else "")
        rows, clients = sum(map(len, self.sample_ids.values())), len(self.sample_ids)
        held = f": {rows} row{'s'[: rows > 1]} of {clients} client{'s'[: clients > 1]}" if rows else ""
        return f"{several} ({shown}{held})"


def union(requests: Iterable[Forget]) -> Forget:
    """Several requests as one; their order does not matter."""
    return reduce(or_, requests, Forget())


def check_known(request: Forget, *, clients: Iterable[int], num_classes: int) -> None:
    """Raise unless every client and class of the request exists and something is left to keep."""
    known = clients if isinstance(clients, Set) else frozenset(clients)
    if not request.kind:
        raise RequestError("The request forgets nothing: name at least one client, class, sample or person.")
    if not request.is_resolved:
        raise RequestError(
            f"To {request}: clients must say first which rows these are. unlearn(…, clients=…) asks them; elsewhere "
            "name samples."
        )
    unknown = sorted(client for client in request.client_ids | set(request.sample_ids) if client not in known)
    if unknown:
        brief = sorted(known) if len(known) <= 20 else f"{min(known)} to {max(known)} ({len(known)} of them)"
        raise RequestError(f"Unknown client {unknown}; this federation has clients {brief}.")
    unknown = sorted(request.class_ids - set(range(num_classes)))
    if unknown:
        raise RequestError(f"Unknown class {unknown}; this federation has classes 0 to {num_classes - 1}.")
    if len(request.client_ids) >= len(known) or len(request.class_ids) == num_classes:
        raise RequestError(f"To {request} leaves nothing to keep. Take the model out of service instead.")


def _ids(ids: Iterable[int], kind: str) -> frozenset[int]:
    if isinstance(ids, (str, bytes)):
        raise RequestError(f"{kind} ids must be whole numbers; found the text {ids!r}.")
    try:
        numbers = [i.item() if hasattr(i, "item") else i for i in ids]
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"{kind} ids must be a list of whole numbers; found {ids!r}.") from error
    wrong = [i for i in numbers if isinstance(i, bool) or not isinstance(i, int) or i < 0]
    if wrong:
        raise RequestError(f"{kind} ids must be whole numbers from 0; found {wrong[:5]}.")
    if not numbers:
        raise RequestError(f"The request forgets nothing: the list of {kind} ids is empty.")
    return frozenset(numbers)

"""The data of a federation: clients as index sets over shared arrays."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from fedup.errors import DataError, RequestError, SettingError
from fedup.inputs import read_inputs
from fedup.request import Forget, check_known
from fedup.rng import generator
from fedup.subjects import SubjectKey
from fedup.targets import Targets, check_request, checked, kind_of

Part = Literal["train", "validation", "heldout"]


@dataclass(frozen=True, eq=False)
class Client:
    """One client's rows, sorted: what it trains on, what it validates on, what it holds out."""

    id: int
    train: Tensor
    validation: Tensor
    heldout: Tensor


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients over one pair of arrays; a sample's id is its row number.

    `y` says what the model learns (`targets`): classes are whole numbers (N,), labels truth values (N, K), values
    floating point numbers (N, K). `num_classes` is the number of outputs: classes, labels or values.

    `subjects` (`with_subjects`) numbers the person behind each row, for guarantees that protect a person instead of a
    record, and `subject_tags` has the tags by which requests name them; a number below 0 means unknown.

    >>> x, y = torch.randn(100, 8), torch.arange(100) % 5
    >>> federation = Federation.split(x, y, [torch.arange(i, 100, 4) for i in range(4)])
    >>> [len(client.train) for client in federation.clients]
    [18, 18, 18, 18]
    """

    x: Tensor
    y: Tensor
    clients: tuple[Client, ...]
    num_classes: int
    subjects: Tensor | None = None  # (N,)
    client_names: tuple[str, ...] = ()  # in the order of `clients`; empty: they have numbers only
    class_names: tuple[str, ...] = ()  # of the outputs; empty: they have numbers only
    subject_tags: Mapping[str, int] = field(default_factory=dict)  # the number of the person with that tag

    @classmethod
    def of(
        cls,
        data: Any,
        parts: Any = None,
        *,
        label: str | Sequence[str] | None = None,
        targets: Targets | None = None,
        seed: int = 0,
        heldout: float = 0.2,
        validation: float = 0.1,
    ) -> Self:
        """A federation from data as they come: arrays, lists, data sets, loaders or frames.

        `data` is a pair (x, y), a `torch.utils.data.Dataset`, a `DataLoader` or a pandas frame, whose column `label`
        (or several) holds the targets. `parts` says who holds which rows: a list of row numbers for each client, a
        dict of them by name, one name per row, or a frame's column. Without `parts`, `data` is a dict with the data of
        each client by name. Labels that are texts become classes in sorted order (`class_names`). `targets` says what
        `y` means where its numbers do not: 0.0 and 1.0 are "values", unless you say "labels".

        >>> x, y = [[0.0, 1.0], [1.0, 0.0], [0.5, 0.5], [1.0, 1.0]], ["no", "yes", "no", "yes"]
        >>> federation = Federation.of((x, y), ["mercy", "mercy", "st_john", "st_john"], heldout=0)
        >>> federation.class_names, federation.client_id("st_john")
        (('no', 'yes'), 1)
        """
        read = read_inputs(data, parts, label, targets)
        made = cls.split(
            read.x,
            read.y,
            read.parts,
            seed=seed,
            heldout=heldout,
            validation=validation,
            num_classes=len(read.class_names) or None,
        )
        return replace(made, client_names=read.client_names, class_names=read.class_names)

    @classmethod
    def split(
        cls,
        x: Tensor,
        y: Tensor,
        parts: Sequence[Tensor],
        *,
        seed: int = 0,
        heldout: float = 0.2,
        validation: float = 0.1,
        num_classes: int | None = None,
    ) -> Self:
        """A federation in which client i holds the rows `parts[i]` and keeps a part of them apart."""
        y, classes = _checked_arrays(x, y, num_classes)
        _check_parts(parts, len(x))
        if not (min(heldout, validation) >= 0 and heldout + validation < 1):
            raise SettingError(f"heldout and validation must leave rows to train on; found {heldout} and {validation}.")
        clients = []
        for i, rows in enumerate(parts):
            shuffled = rows[torch.randperm(len(rows), generator=generator(seed, "heldout", i))].to(y.device)
            first, second = int(len(rows) * heldout), int(len(rows) * (heldout + validation))
            pieces = [piece.sort().values for piece in shuffled.tensor_split([first, second])]
            clients.append(Client(i, train=pieces[2], validation=pieces[1], heldout=pieces[0]))
        return cls(x, y, tuple(clients), classes)

    @property
    def targets(self) -> Targets:
        """What the model learns: classes, labels or values."""
        return kind_of(self.y)

    @property
    def ids(self) -> list[int]:
        """The clients' ids, in order."""
        return [client.id for client in self.clients]

    def client_id(self, name: str) -> int:
        """The id of the client of that name, for `Forget.clients`."""
        if name not in self.client_names:
            known = f"clients {_some_of(self.client_names)}" if self.client_names else "no names of clients"
            raise RequestError(f"Unknown client {name!r}; this federation has {known}.")
        return self.clients[self.client_names.index(name)].id

    def _in_words(self, client_id: int) -> str:
        """A client by its number, and its name where it has one."""
        names = dict(zip(self.ids, self.client_names, strict=False))
        return f"{client_id} ({names[client_id]})" if client_id in names else str(client_id)

    def class_id(self, name: str) -> int:
        """The number of the class, label or output of that name, for `Forget.classes`."""
        if name not in self.class_names:
            known = f"classes {_some_of(self.class_names)}" if self.class_names else "no names of classes"
            raise RequestError(f"Unknown class {name!r}; this federation has {known}.")
        return self.class_names.index(name)

    def client(self, client_id: int) -> Client:
        """The client with this id."""
        likely = self.clients[client_id : client_id + 1]  # a client's id is mostly its index
        for client in (*likely, *self.clients):
            if client.id == client_id:
                return client
        named = f" ({_some_of(self.client_names)})" if self.client_names else ""
        raise RequestError(f"Unknown client {client_id}; this federation has clients {self.ids}{named}.")

    def rows(self, part: Part = "train") -> Tensor:
        """The rows of all clients' `part` together."""
        return torch.cat([getattr(client, part) for client in self.clients])

    def forgotten(self, request: Forget, part: Part = "train") -> Tensor:
        """The rows of `part` that the request names."""
        return torch.cat([named_rows(client, request, getattr(client, part), self.y)[0] for client in self.clients])

    def retained(self, request: Forget, part: Part = "train") -> Tensor:
        """The rows of `part` that the request does not name."""
        return torch.cat([named_rows(client, request, getattr(client, part), self.y)[1] for client in self.clients])

    def without(self, request: Forget) -> Self:
        """The same federation on the retained rows only: what Retrain trains on. Clients keep their ids and places.

        A forgotten label leaves no row out: no row has it any more.
        """
        self.check(request)
        if self.targets == "labels" and request.class_ids:
            y = self.y.clone()
            y[:, sorted(request.class_ids)] = False
            return replace(self, y=y)._without_rows(replace(request, class_ids=frozenset()))
        return self._without_rows(request)

    def _without_rows(self, request: Forget) -> Self:
        clients = tuple(
            Client(c.id, *(named_rows(c, request, part, self.y)[1] for part in (c.train, c.validation, c.heldout)))
            for c in self.clients
        )
        return replace(self, clients=clients)

    def relabeled(self, y: Tensor) -> Self:
        """The same federation with other labels."""
        y, _ = _checked_arrays(self.x, y, self.num_classes)
        return replace(self, y=y)

    def with_subjects(self, subjects: Tensor | Sequence[str], *, key: SubjectKey | None = None) -> Self:
        """The same federation with the person behind each row: numbers, or ids ("": unknown).

        With a key requests can name persons (`Forget.subjects`). Of ids numbers and tags are kept, and nothing else.
        """
        rows, tags = len(self.x), dict[str, int]()
        if not isinstance(subjects, Tensor):
            subjects, tags = number_subjects(subjects, key)
        elif key is not None:
            tags = {key.tag(str(number)): number for number in subjects.unique().tolist() if number >= 0}
        if subjects.shape != (rows,) or subjects.is_floating_point():
            raise DataError(f"subjects must be one whole number per row; found {tuple(subjects.shape)} for {rows}.")
        return replace(self, subjects=subjects, subject_tags=tags)

    def to(self, device: torch.device | str) -> Self:
        """The same federation with its arrays on a device."""
        clients = tuple(
            Client(c.id, c.train.to(device), c.validation.to(device), c.heldout.to(device)) for c in self.clients
        )
        subjects = None if self.subjects is None else self.subjects.to(device)
        return replace(self, x=self.x.to(device), y=self.y.to(device), clients=clients, subjects=subjects)

    def digest(self) -> str:
        """sha256 of who trains on which rows with which labels."""
        digest = hashlib.sha256(str(tuple(self.x.shape)).encode())
        for client in self.clients:
            digest.update(f";{client.id}:".encode())
            own = self.y[client.train]
            for part in (client.train, own if self.targets == "values" else own.long()):
                digest.update(part.cpu().numpy().tobytes())
        return digest.hexdigest()

    def check(self, request: Forget) -> None:
        """Raise unless every client, class and sample of the request is known and trained on, and something stays."""
        check_request(request, self.targets)
        check_known(request, clients=self.ids, num_classes=self.num_classes)
        for client_id, ids in request.sample_ids.items():
            check_samples(self.client(client_id).train, ids, self._in_words(client_id))
        if len(self.forgotten(request)) == 0:
            raise RequestError(f"To {request} changes nothing: no client was trained on such a row.")
        rows = replace(request, class_ids=frozenset()) if self.targets == "labels" else request
        if len(self.retained(rows)) == 0:
            raise RequestError(f"To {request} leaves no training row. Take the model out of service instead.")


def number_subjects(ids: Sequence[str], key: SubjectKey | None) -> tuple[Tensor, dict[str, int]]:
    """A number for the person of each row, -1 where it is unknown, and the numbers by tag; no tags without a key."""
    wrong = [type(subject).__name__ for subject in ids if not isinstance(subject, str)]
    if wrong or isinstance(ids, str):
        raise DataError(
            f"The person of each row is a text, '' where it is unknown; found {(wrong or ['one text'])[0]}."
        )
    numbers = {subject: number for number, subject in enumerate(dict.fromkeys(own for own in ids if own.strip()))}
    tags = {} if key is None else {key.tag(subject): number for subject, number in numbers.items()}
    return torch.tensor([numbers.get(subject, -1) for subject in ids], dtype=torch.int64), tags


def check_samples(train: Tensor, ids: frozenset[int], client_id: int | str) -> None:
    """Raise unless the client trained on all of these samples."""
    unknown = sorted(ids - set(train.tolist()))
    if unknown:
        shown = ", ".join(map(str, unknown[:5])) + (", …" if len(unknown) > 5 else "")
        raise RequestError(
            f"Client {client_id} was not trained on {len(unknown)} of the {len(ids)} samples named ({shown}): "
            "unknown there, or held out. Name ids of its training rows."
        )


def named_rows(client: Client, request: Forget, rows: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` split into those that the request names and the others."""
    if client.id in request.client_ids:
        return rows, rows[:0]
    if kind_of(y) == "classes":
        classes = torch.tensor(sorted(request.class_ids), dtype=y.dtype, device=y.device)
        of_class = torch.isin(y[rows], classes)
    else:  # rows that carry one of the labels; values have no classes
        of_class = (y[rows][:, sorted(request.class_ids)] > 0).any(1)
    samples = torch.tensor(sorted(request.sample_ids.get(client.id, ())), dtype=rows.dtype, device=rows.device)
    named = of_class | torch.isin(rows, samples)
    return rows[named], rows[~named]


def _checked_arrays(x: Tensor, y: Tensor, num_classes: int | None) -> tuple[Tensor, int]:
    """The targets in their checked form, and the number of outputs."""
    if len(x) != len(y) or len(y) == 0:
        raise DataError(f"Rows and labels must be as many, and not none; found {len(x)} rows and {len(y)} labels.")
    return checked(y, num_classes)


def _some_of(names: Iterable[str], most: int = 20) -> str:
    """Names, the first of them where they are many."""
    every = list(names)
    return ", ".join(every[:most]) + (f", … ({len(every)} of them)" if len(every) > most else "")


def _check_parts(parts: Sequence[Tensor], rows: int) -> None:
    empty = [i for i, part in enumerate(parts) if len(part) == 0]
    if empty or not parts:
        raise DataError(f"Clients without data: {empty or 'there is no client'}. Leave them out of the federation.")
    joined = torch.cat([part.cpu() for part in parts])
    if int(joined.min()) < 0 or int(joined.max()) >= rows:
        raise DataError(f"Parts must name rows 0 … {rows - 1}; found {int(joined.min())} … {int(joined.max())}.")
    if len(joined.unique()) != len(joined):
        raise DataError(f"{len(joined) - len(joined.unique())} rows belong to two clients; each row has one holder.")

"""Rows that came to a run folder after it was learned: a federation with more rows, or more clients."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedup.errors import ArtifactError, DataError, RequestError
from fedup.federation import Client, Federation
from fedup.run.state import State
from fedup.tasks.labelled import LabelledRows, find_rows, labelled_rows, rows_digest


@dataclass(frozen=True)
class Addition:
    """Rows from one file, as the journal has them. The rows stay where they are; they are read again when needed."""

    source: str
    sha256: str
    rows: int
    client: int | None  # whose all rows are; None: the file names a client for each
    client_names: tuple[str, ...]  # of all clients, with those that joined
    data: str  # the federation's digest with them
    code: Mapping[str, str] | None = None  # the copy of a .py file

    def to_json(self) -> dict[str, Any]:
        """As it stands in an event."""
        return asdict(self)

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Addition":
        """From an event."""
        return cls(**{**body, "client_names": tuple(body["client_names"])})

    def read(self, about: Mapping[str, Any], copy: str | None = None) -> LabelledRows:
        """The rows; refused if the file is another one by now. `copy` is where its code was kept."""
        source = copy or self.source
        if copy is None and rows_digest(find_rows(source)) != self.sha256:
            raise ArtifactError(f"{source} is not the file whose rows were added: its content differs. Bring it back.")
        return labelled_rows(source, about, whose=True)


def additions(state: State) -> list[Addition]:
    """All that was added to a folder, in order."""
    return [Addition.of(event.body["added"]) for event in state.events if event.kind == "added"]


def holders_of(rows: LabelledRows, client: int | None, names: Sequence[str]) -> Tensor:
    """The client of each row. (N,)"""
    if client is not None:
        return torch.full((len(rows.y),), client)
    assert rows.clients is not None
    numbers = {name: number for number, name in enumerate(names)}
    return torch.tensor([numbers[name] for name in rows.clients])


def with_rows(federation: Federation, rows: LabelledRows, holders: Tensor, names: Sequence[str] = ()) -> Federation:
    """The federation with these rows behind its own; all of them are trained on. Persons are left to the caller.

    >>> x, y = torch.randn(8, 2), torch.arange(8) % 2
    >>> before = Federation.split(x, y, [torch.arange(4), torch.arange(4, 8)])
    >>> [len(client.train) for client in with_rows(before, LabelledRows(x[:3], y[:3]), torch.tensor([1, 2, 2])).clients]
    [3, 4, 2]
    """
    if rows.x.shape[1:] != federation.x.shape[1:] or rows.y.shape[1:] != federation.y.shape[1:]:
        raise DataError(
            f"Rows of shape {tuple(rows.x.shape[1:])} do not join those of shape {tuple(federation.x.shape[1:])}."
        )
    first, device = len(federation.x), federation.x.device
    none, clients = torch.zeros(0, dtype=torch.int64, device=device), {own.id: own for own in federation.clients}
    for client in holders.unique().tolist():
        own = clients.get(client) or Client(client, none, none, none)
        new = (first + (holders == client).nonzero().flatten()).to(device)
        clients[client] = replace(own, train=torch.cat([own.train, new]))
    return replace(
        federation,
        x=torch.cat([federation.x, rows.x.to(federation.x)]),
        y=torch.cat([federation.y, rows.y.to(federation.y)]),
        clients=tuple(clients[client] for client in sorted(clients)),
        client_names=tuple(names) or federation.client_names,
        subjects=None,
        subject_tags={},
    )


def check_ids(known: Sequence[str] | None, rows: LabelledRows) -> None:
    """Refuse ids of rows that are there already: they may be the same rows."""
    if known is not None and rows.ids is not None and (both := sorted(set(known) & set(rows.ids))):
        shown = ", ".join(both[:3]) + (", …" if len(both) > 3 else "")
        raise RequestError(f"{len(both)} rows have ids that are there already ({shown}): rows are added once.")

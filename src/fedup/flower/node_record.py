"""What a node remembers of its exact answers, on its own disk: groups of rows, models, refusals, and a log.

Any two answers can be subtracted from each other, and sums of several, too. So the node keeps the *groups* into which
all answers so far divide its rows: two rows are in one group if every answer was about both or neither. Whatever is
computed from all answers together follows from sums over whole groups. A question that would leave a group with fewer
rows than the rules say is refused.

The record also counts the charges in the node's account and the changes of its groups. So a part of the folder that was
deleted, or replaced by an older copy, is noticed: nothing is answered then.
"""

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError, FedUPError, StorageError
from fedup.files import explained, write_text
from fedup.flower.policy import RefusedError
from fedup.flower.rules import Rules
from fedup.run.lock import held

WITHHELD = (
    "this node's rules withhold the answer: too few rows, alone or together with answers before, or rows it does not "
    "hold; its own log says which"
)
_KIND, _FORMAT = "groups of rows", 3  # 2: rows with several targets had other keys
_RECORD, _GROUPS, _LOG_FILE = "record.json", "groups.safetensors", "answers.jsonl"
_OLDER = (
    "A part of this node's state was deleted, or is older than the rest: nothing is answered until its operator puts "
    "the newest copy of the whole folder back."
)
_OTHER_FORMAT = (
    "This node's record is of format {}, and this fedup names rows as in format {}: rows of earlier answers would look "
    "new. Nothing is answered until its operator runs the fedup that wrote the record again, or moves the whole folder "
    "of its state away. A new record knows nothing of earlier answers, and the new account of none of its charges."
)
_A_WHILE_S = 60.0
MOST_VIEWS = 5  # of one model: a collection tries up to four grids
_UNANSWERED = 0  # the group of rows that no answer was about


class WithheldError(RefusedError):
    """The rows do not allow an answer: the server learns this one bit."""

    def __init__(self, why: str) -> None:
        super().__init__(WITHHELD)
        self.why = why  # for the node's own log


class StateError(ArtifactError):
    """A part of the state is missing or old, whatever the rows are."""


class NodeRecord:
    """The record in the rules' folder, as it was when this object was made."""

    def __init__(self, rules: Rules) -> None:
        assert rules.folder is not None  # open rules keep no record
        self._folder, self._rules = rules.folder, rules
        with explained("make the folder of this node's record"):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._read()

    def _read(self) -> None:
        path = self._folder / _RECORD
        if not path.exists() and any((self._folder / name).exists() for name in (_GROUPS, _LOG_FILE)):
            raise StateError(_OLDER)
        try:
            plain = json.loads(path.read_text(encoding="utf-8")) if path.exists() else _new()
            if plain["format"] != _FORMAT:
                raise StateError(_OTHER_FORMAT.format(plain["format"], _FORMAT))
            self._views, self._salt = list(plain["views"]), bytes.fromhex(plain["salt"])
            self._answers, self._refusals = plain["answers"], plain["refusals"]
            self._charges, self._divisions = plain["charges"], plain["divisions"]
            counts = self._answers, self._refusals, self._charges, self._divisions
            if any(type(n) is not int or n < 0 for n in counts):
                raise ValueError("a count is no number")
        except StateError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError("This node's record cannot be read: nothing is answered until it can.") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Alone, from what is on disk now: several runs may ask at once."""
        try:
            with held(self._folder / "record.lock", "fedup", wait_s=_A_WHILE_S):
                self._read()
                yield
                counts = {"answers": self._answers, "refusals": self._refusals}
                counts |= {"charges": self._charges, "divisions": self._divisions}
                plain = {"format": _FORMAT, **counts, "views": self._views, "salt": self._salt.hex()}
                write_text(self._folder / _RECORD, json.dumps(plain, indent=2) + "\n")
        except (RefusedError, ArtifactError):
            raise
        except FedUPError as error:  # it names a path of this machine
            raise StorageError("This node could not write to its record: nothing is answered until it can.") from error

    def check(self, view: str) -> None:
        """Raise unless one more exact answer is allowed, about that view of the rows; no row is read."""
        rules = self._rules
        if self._refusals >= rules.most_refusals:
            raise RefusedError("this node has refused too often: no exact answers until its operator allows them")
        if self._answers >= rules.most_answers:
            raise RefusedError(f"this node has given {rules.most_answers} exact answers, the most by its rules")
        bases = [known.split(" ")[0] for known in self._views]
        base = view.split(" ")[0]
        if base not in bases and len(set(bases)) >= rules.most_bases:
            raise RefusedError(f"this node has given exact answers for {rules.most_bases} models, its rules' limit")
        if not self._knows(view) and bases.count(base) >= MOST_VIEWS:
            raise RefusedError(f"this node rounds features of one model in {MOST_VIEWS} ways at most")

    def _knows(self, view: str) -> bool:
        """A question without settings of its own is no new view of a model."""
        return any(known == view or known.startswith(f"{view} ") for known in self._views)

    def start(self) -> None:
        """Write a new record, if there is none: from then on one that is missing was deleted."""
        if not (self._folder / _RECORD).exists():
            with self._writing():
                pass

    def check_account(self, charges: int) -> None:
        """Raise if the node's account has fewer charges than there were."""
        if charges < self._charges:
            raise StateError(_OLDER)

    def charged(self, charges: int) -> None:
        """Note how many charges the node's account has."""
        if charges > self._charges:
            with self._writing():
                self._charges = max(charges, self._charges)

    def refused(self) -> None:
        """Count a refusal that depends on rows."""
        with self._writing():
            self._refusals += 1

    def admit(self, view: str, x: Tensor, y: Tensor, row_sets: Sequence[Tensor]) -> None:
        """Write down that an answer is about these sets of rows (places in x and y); raises WithheldError, and changes
        nothing, if a group would become too small."""
        with self._writing():
            self.check(view)  # again: another run may have been quicker
            keys, path = self._keys(x, y), self._folder / _GROUPS
            known, groups, divisions = self._groups(path)
            rows = np.union1d(known, keys)
            before = np.zeros(len(rows), dtype=np.int64)
            before[np.searchsorted(rows, known)] = groups
            place, signature = np.searchsorted(rows, keys), before
            for row_set in row_sets:
                inside = np.zeros(len(rows), dtype=np.int64)
                inside[place[row_set.cpu().numpy()]] = 1
                signature = np.unique(2 * signature + inside, return_inverse=True)[1]  # small numbers again
            touched = before != _UNANSWERED
            for row_set in row_sets:
                touched[place[row_set.cpu().numpy()]] = True
            after = np.zeros(len(rows), dtype=np.int64)
            _, after[touched], sizes = np.unique(signature[touched], return_inverse=True, return_counts=True)
            after[touched] += 1
            if len(sizes) and sizes.min() < self._rules.least_rows:
                raise WithheldError(f"a group of {sizes.min()} rows would stand out")
            if touched.any():
                tensors = {"rows": torch.from_numpy(rows[touched]), "groups": torch.from_numpy(after[touched])}
                self._divisions = divisions + 1
                save_tensors(path, tensors, kind=_KIND, header={"divisions": self._divisions})
            self._views += [] if self._knows(view) else [view]
            self._answers += 1

    def _groups(self, path: Path) -> tuple[np.ndarray, np.ndarray, int]:
        """Rows of earlier answers, in order, the group of each, and how often groups were divided."""
        tensors = {name: torch.empty(0, dtype=torch.int64) for name in ("rows", "groups")}
        header: dict[str, Any] = {"divisions": 0}
        if path.exists():
            tensors, header = load_tensors(path, kind=_KIND)
        divisions = header["divisions"]
        if divisions - self._divisions not in (0, 1):  # 1: the node was killed before it wrote its record
            raise StateError(_OLDER)
        return tensors["rows"].numpy(), tensors["groups"].numpy(), divisions

    def _keys(self, x: Tensor, y: Tensor) -> np.ndarray:
        """A number for each row, from its content and targets: apps may name and order rows differently, and a question
        may take the same targets for classes or for values. Equal rows are told apart by counting them."""
        seen: dict[bytes, int] = {}
        keys = np.empty(len(y), dtype=np.int64)
        rows = x.cpu().float() if x.dtype == torch.bfloat16 else x.cpu()  # which numpy does not know
        for place, (row, target) in enumerate(zip(rows.numpy(), y.cpu().tolist(), strict=True)):
            content = self._hash(row.tobytes() + _as_text(target).encode())
            again = seen[content] = seen.get(content, -1) + 1
            key = self._hash(content + str(again).encode()) if again else content
            keys[place] = int.from_bytes(key, "little", signed=True)
        return keys

    def _hash(self, content: bytes) -> bytes:
        """With a secret of this node: whoever has the record alone cannot try rows."""
        return hashlib.blake2b(content, key=self._salt, digest_size=8).digest()


def _as_text(target: float | list[float]) -> str:
    """A row's targets, the same whether they are taken for classes, labels or values.

    >>> _as_text(3), _as_text([3.0]), _as_text([True, 0.5])
    ('3', '3', '1 0.5')
    """
    numbers = target if isinstance(target, list) else [target]
    return " ".join(str(int(number)) if number == int(number) else str(number) for number in numbers)


def _new() -> dict[str, Any]:
    counts = dict.fromkeys(("answers", "refusals", "charges", "divisions"), 0)
    return {"format": _FORMAT, **counts, "views": [], "salt": secrets.token_hex(16)}


def log_answer(rules: Rules, entry: Mapping[str, Any]) -> None:
    """One line more in the log of all answers; an answer that cannot be logged is not given."""
    if rules.folder is None:
        return
    line = json.dumps({"at": datetime.now(UTC).isoformat(timespec="seconds"), **entry})
    try:
        rules.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (rules.folder / _LOG_FILE).exists():
            NodeRecord(rules).start()
        with (rules.folder / _LOG_FILE).open("a", encoding="utf-8") as log:
            log.write(line + "\n")
    except OSError as error:
        raise StorageError("This node could not write to its log: nothing is answered until it can.") from error

"""What a node remembers from one message to the next, in its Flower state: weights, features, its privacy account."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context
from torch import Tensor, nn

from fedup.clients.messages import NONCE, identity_of
from fedup.errors import ArtifactError, BudgetError, DataError
from fedup.files import write_text
from fedup.flower.policy import Policy
from fedup.flower.wire import Answer, record_of, tensors_of
from fedup.models.cut import FEATURE_BATCH, FeatureReader, Features
from fedup.privacy.ledger import Charge, Ledger
from fedup.run.lock import held

_LEDGER = "fedup-ledger"
_WEIGHTS, _WEIGHTS_OF = "fedup-weights", "fedup-weights-of"
_RELEASED = "fedup-released-"  # and the kind of question
_A_WHILE_S = 60.0
_FEATURES, _FEATURES_OF = "fedup-features", "fedup-features-of"


def keeps_weights_of(context: Context, base: str) -> bool:
    """Whether the weights of this model are here, by their fingerprint as it was when they came."""
    about = context.state.config_records.get(_WEIGHTS_OF)
    return about is not None and about.get("base") == base and _WEIGHTS in context.state.array_records


def kept_weights(context: Context) -> dict[str, Tensor]:
    """The weights that came with an earlier question."""
    return tensors_of(context.state.array_records[_WEIGHTS])


def keep_weights(context: Context, base: str, weights: Mapping[str, Tensor]) -> None:
    """Of one model only: those of an earlier one go."""
    context.state[_WEIGHTS_OF] = ConfigRecord({"base": base})
    context.state[_WEIGHTS] = record_of(weights)


class KeptLedger(Ledger):
    """The node's own account: in the file that the policy names, or else in the state, which lives as long as a run."""

    def __init__(self, context: Context, policy: Policy) -> None:
        self._context, self._file = context, None if policy.account is None else Path(policy.account)
        super().__init__(self._read().charges, {None: policy.budget} if policy.budget else {})

    def _read(self) -> Ledger:
        if self._file is None:
            kept = self._context.state.config_records.get(_LEDGER)
            return Ledger.from_json(json.loads(str(kept["json"]))) if kept else Ledger()
        if not self._file.exists():
            return Ledger()
        try:
            return Ledger.from_json(json.loads(self._file.read_text(encoding="utf-8")))
        except (ValueError, OSError) as error:
            raise ArtifactError("This node's account cannot be read: nothing is released until it can.") from error

    def _record(self, charge: Charge) -> None:
        if self._file is None:
            self._context.state[_LEDGER] = ConfigRecord({"json": _text([*self.charges, charge])})
            return
        with held(self._file.with_suffix(".lock"), "fedup", wait_s=_A_WHILE_S):  # two runs at once have one account
            now = Ledger(self._read().charges, self.budgets)
            if not now.affords(charge.client, charge.mu**2):
                raise BudgetError("This node's budget was spent by another run meanwhile. Nothing was released.")
            write_text(self._file, _text([*now.charges, charge]))


def _text(charges: Iterable[Charge]) -> str:
    return json.dumps(Ledger(charges).to_json())


def release_once(context: Context, kind: str, name: str, question: str, make: Callable[[], Answer]) -> Answer:
    """The answer to a question under differential privacy; where its name is that of the last one of its kind, and the
    question (by its digest) is the same, the one that was given then.

    A reply that was lost on its way is asked for again by the same name: it was released already, and costs nothing.
    """
    key = _RELEASED + kind.replace(" ", "-")
    about, arrays = context.state.config_records.get(key), context.state.array_records.get(f"{key}-arrays")
    if about is not None and arrays is not None and name and (about["name"], about["question"]) == (name, question):
        return Answer("ok", **json.loads(str(about["json"])), arrays=tensors_of(arrays))
    answer = make()
    if answer.status == "ok":
        answer = replace(answer, details={**answer.details, NONCE: name})
        if name:
            context.state[f"{key}-arrays"] = record_of(answer.arrays)
            text = json.dumps({"base": answer.base, "details": dict(answer.details)})
            context.state[key] = ConfigRecord({"name": name, "question": question, "json": text})
    return answer


class KeptReader(FeatureReader):
    """Reads features once: after `keep` they stay in the state, for the same model, cut and rows in the same order.

    The bits are those of reading anew: a row lies at the same place of a batch of the same size whichever rows are
    wanted. More than `most_bytes` are not kept, since the state travels between Flower's processes at the node with
    every message.
    """

    def __init__(self, model: nn.Module, cut: str, base: str, context: Context, most_bytes: int) -> None:
        super().__init__(model, cut)
        self._base, self._context, self._most_bytes = base, context, most_bytes
        self._rows: tuple[Tensor, Tensor, int] | None = None  # of which the key is known
        self._key = ""
        self._kept: _KeptFeatures | None = None
        self._new = False

    def read(
        self, x: Tensor, rows: Tensor, *, wanted: Tensor | None = None, batch_size: int = FEATURE_BATCH
    ) -> Features:
        if not self._most_bytes:
            return super().read(x, rows, wanted=wanted, batch_size=batch_size)
        self._look(x, rows, batch_size)
        chosen, kept = (rows if wanted is None else rows[wanted]).cpu(), self._kept
        if kept is not None and bool(kept.known[chosen].all()):
            return Features(kept.values[chosen].to(rows.device), kept.nonnegative, kept.shape)
        features = super().read(x, rows, wanted=wanted, batch_size=batch_size)
        width = features.values.shape[1]
        if kept is None and len(x) * (4 * width + 1) <= self._most_bytes:
            known = torch.zeros(len(x), dtype=torch.bool)
            kept = _KeptFeatures(self._key, torch.zeros(len(x), width), known, features.nonnegative, features.shape)
        if kept is not None:
            kept.values[chosen] = features.values.cpu()
            kept.known[chosen] = True
            self._kept, self._new = kept, True
        return features

    def keep(self) -> None:
        """What was read goes into the state; once, since it may be large."""
        if self._kept is not None and self._new:
            self._kept.keep(self._context)

    def _look(self, x: Tensor, rows: Tensor, batch_size: int) -> None:
        """What is here of these rows, by all that decides the bits: model, cut, the rows' content, their order, how
        many are read at once."""
        if self._rows is not None and self._rows[0] is x and self._rows[1] is rows and self._rows[2] == batch_size:
            return
        content = identity_of({"x": x, "rows": rows})
        self._key = f"{self._base} {self.cut} {batch_size} {torch.get_num_threads()} {content}"
        self._rows = x, rows, batch_size
        self._kept, self._new = _KeptFeatures.of(self._context, self._key), False


@dataclass(frozen=True)
class _KeptFeatures:
    key: str
    values: Tensor  # (N, D), by place of the row
    known: Tensor  # (N,) rows that were read
    nonnegative: bool
    shape: tuple[int, ...]

    @classmethod
    def of(cls, context: Context, key: str | None = None) -> "_KeptFeatures | None":
        """What is kept, if it is of this key; a state that is out of shape holds nothing."""
        about = context.state.config_records.get(_FEATURES_OF)
        try:
            if about is None or key not in (None, about["key"]):
                return None
            arrays = tensors_of(context.state.array_records[_FEATURES])
            values, known = arrays["values"], arrays["known"]
            shape = tuple(int(size) for size in json.loads(str(about["shape"])))
            if known.dtype != torch.bool or values.shape != (len(known), math.prod(shape)):
                return None
            return cls(str(about["key"]), values, known, bool(about["nonnegative"]), shape)
        except (DataError, KeyError, ValueError):
            return None

    def keep(self, context: Context) -> None:
        context.state[_FEATURES] = record_of({"values": self.values, "known": self.known})
        context.state[_FEATURES_OF] = ConfigRecord(
            {"key": self.key, "nonnegative": self.nonnegative, "shape": json.dumps(self.shape)}
        )


def drop_features(context: Context, places: Iterable[int]) -> None:
    """What is forgotten is not kept at the node, either."""
    forgotten, kept = sorted(places), _KeptFeatures.of(context)
    if not forgotten or kept is None:
        return
    if forgotten[-1] >= len(kept.known):  # of other rows: nothing is known of them
        for name in (_FEATURES, _FEATURES_OF):
            del context.state[name]
    elif bool(kept.known[forgotten].any()):
        kept.values[forgotten] = 0.0
        kept.known[forgotten] = False
        kept.keep(context)

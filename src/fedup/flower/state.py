"""What a node keeps from message to message in its Flower state: weights, features, its privacy account."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context
from torch import Tensor, nn

from fedup.artifacts import digest_of
from fedup.clients.messages import NONCE
from fedup.errors import ArtifactError, BudgetError, DataError, FedUPError
from fedup.files import write_text
from fedup.flower.policy import Policy
from fedup.flower.wire import Answer, Ask, record_of, tensors_of
from fedup.models.features import FEATURE_BATCH, FeatureReader, Features
from fedup.privacy.ledger import Charge, Ledger
from fedup.run.lock import held

WEIGHTS = "fedup-weights"
_LEDGER, _FEATURES = "fedup-ledger", "fedup-features"
_RELEASED = "fedup-released-"  # followed by the kind of question
_A_WHILE_S = 60.0


def keep(context: Context, name: str, tensors: Mapping[str, Tensor], **about: Any) -> None:
    """Keep tensors under a name, in place of earlier ones. `about` is plain data that describes them."""
    context.state[f"{name}-of"] = ConfigRecord({"json": json.dumps(about)})
    context.state[name] = record_of(tensors)


def kept(context: Context, name: str) -> dict[str, Tensor]:
    """The tensors of that name; raises DataError if they are damaged."""
    return tensors_of(context.state.array_records[name])


def kept_of(context: Context, name: str) -> dict[str, Any]:
    """The description of kept tensors; empty if there are none, or it is damaged."""
    try:
        about = json.loads(str(context.state.config_records[f"{name}-of"]["json"]))
        return dict(about) if name in context.state.array_records else {}
    except (KeyError, ValueError, TypeError):
        return {}


class KeptLedger(Ledger):
    """The node's own account: in the policy's file, or else in the state, which ends with the run.

    With `holder`, every charge is that client's: an app that gives the node another number spends from the same budget.
    """

    def __init__(self, context: Context, policy: Policy, holder: int | None = None) -> None:
        self._context, self._file = context, None if policy.account is None else Path(policy.account)
        self._holder = holder
        super().__init__(self._read(), {None: policy.budget} if policy.budget else {})

    def _read(self) -> Sequence[Charge]:
        try:
            if self._file is not None:
                text = self._file.read_text(encoding="utf-8") if self._file.exists() else None
            else:
                record = self._context.state.config_records.get(_LEDGER)
                text = None if record is None else str(record["json"])
            charges = Ledger.from_json(json.loads(text)).charges if text is not None else []
            return charges if self._holder is None else [replace(charge, client=self._holder) for charge in charges]
        except (ValueError, OSError) as error:
            raise ArtifactError("This node's account cannot be read: nothing is released until it can.") from error

    def _record(self, charges: Sequence[Charge]) -> None:
        """Write charges before any row is read. An error names no path of this machine."""
        if self._file is None:
            text = json.dumps(Ledger([*self.charges, *charges]).to_json())
            self._context.state[_LEDGER] = ConfigRecord({"json": text})
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with held(self._file.with_suffix(".lock"), "fedup", wait_s=_A_WHILE_S):  # shared by runs at once
                now = Ledger(self._read(), self.budgets)
                if not now.affords(charges[0].client, sum(charge.mu**2 for charge in charges)):  # all its own
                    raise BudgetError("This node's budget was spent by another run meanwhile. Nothing was released.")
                write_text(self._file, json.dumps(Ledger([*now.charges, *charges]).to_json()))
        except (BudgetError, ArtifactError):
            raise
        except (FedUPError, OSError) as error:
            text = "This node could not write to its account: no row was read and nothing was released."
            raise DataError(text) from error


def release_once(context: Context, ask: Ask, make: Callable[[], Answer]) -> Answer:
    """The answer to a question under differential privacy. If name and question are those of the last release of this
    kind, the same answer is given again: it was released before, so that a lost reply costs nothing.
    """
    key, name = _RELEASED + ask.kind.replace(" ", "-"), str(ask.details.get(NONCE, ""))
    about = kept_of(context, key)
    if name and about.get("question") == [name, ask.digest]:
        return Answer("ok", ask.base, about["details"], kept(context, key))
    answer = make()
    if answer.status == "ok":
        answer = replace(answer, details={**answer.details, NONCE: name})
        if name:
            keep(context, key, answer.arrays, question=[name, ask.digest], details=answer.details)
    return answer


class KeptReader(FeatureReader):
    """Computes features once: after `keep` they stay in the state, for the same model, cut and rows in the same order.

    The bits are those of a new computation: a row has the same place in a batch of the same size whichever rows are
    wanted. No more than `most_bytes` are kept: the state travels between Flower's processes with every message.
    """

    def __init__(self, model: nn.Module, cut: str, base: str, context: Context, most_bytes: int) -> None:
        super().__init__(model, cut)
        self._base, self._context, self._most_bytes = base, context, most_bytes
        self._rows: tuple[Tensor, Tensor] | None = None  # whose key is known
        self._key = ""
        self._features: Features | None = None  # of all rows by place; NaN where not computed
        self._new = False

    def read(
        self, x: Tensor, rows: Tensor, *, wanted: Tensor | None = None, batch_size: int = FEATURE_BATCH
    ) -> Features:
        if not self._most_bytes or batch_size != FEATURE_BATCH:
            return super().read(x, rows, wanted=wanted, batch_size=batch_size)
        self._look(x, rows)
        chosen, kept = (rows if wanted is None else rows[wanted]).cpu(), self._features
        if kept is not None and not bool(kept.values[chosen].isnan().any()):
            return replace(kept, values=kept.values[chosen].to(rows.device))
        features = super().read(x, rows, wanted=wanted, batch_size=batch_size)
        width = features.values.shape[1]
        if kept is None and 4 * len(x) * width <= self._most_bytes:
            kept = self._features = replace(features, values=torch.full((len(x), width), math.nan))
        if kept is not None:
            kept.values[chosen] = features.values.cpu()
            self._new = True
        return features

    def keep(self) -> None:
        """Put the features into the state; once, since they may be large."""
        if self._features is not None and self._new:
            about = {"key": self._key, "nonnegative": self._features.nonnegative, "shape": self._features.shape}
            computed_with = {"torch": torch.__version__, "device": str(self._known[2]) if self._known else "cpu"}
            _keep_features(self._context, self._features.values, {**about, **computed_with})

    def _look(self, x: Tensor, rows: Tensor) -> None:
        """Find kept features of these rows, by all that decides the bits: model, cut, threads, content and order."""
        if self._rows is not None and self._rows[0] is x and self._rows[1] is rows:
            return
        content = digest_of("", [("x", x), ("rows", rows)])
        self._key = f"{self._base} {self.cut} {torch.get_num_threads()} {content}"
        self._rows, self._new = (x, rows), False
        same = kept_of(self._context, _FEATURES).get("key") == self._key
        self._features = _kept_features(self._context) if same else None


def _keep_features(context: Context, values: Tensor, about: Mapping[str, Any]) -> None:
    """Keep features with their hash: every sum is made from the very same numbers."""
    keep(context, _FEATURES, {"values": values}, **{**about, "sha256": digest_of("", [("values", values)])})


def _kept_features(context: Context) -> Features | None:
    """The features in the state; None if there are none, or they are damaged."""
    about = kept_of(context, _FEATURES)
    try:
        values, shape = kept(context, _FEATURES)["values"], tuple(about["shape"])
        whole = about["sha256"] == digest_of("", [("values", values)]) and values.shape[1:] == (math.prod(shape),)
        return Features(values, about["nonnegative"], shape) if whole else None
    except (DataError, KeyError, TypeError):
        return None


def drop_features(context: Context, places: Iterable[int]) -> None:
    """Delete the features of forgotten rows at the node."""
    forgotten, features = sorted(places), _kept_features(context)
    if not forgotten or features is None:
        return
    if forgotten[-1] >= len(features.values):  # the features belong to other rows
        for name in (_FEATURES, f"{_FEATURES}-of"):
            del context.state[name]
    elif not bool(features.values[forgotten].isnan().all()):
        features.values[forgotten] = math.nan
        _keep_features(context, features.values, kept_of(context, _FEATURES))

"""What a node remembers from one message to the next, in its Flower state: weights, features, its privacy account."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor, nn

from fedup.cut import FEATURE_BATCH, FeatureReader, Features
from fedup.errors import DataError
from fedup.flower.policy import Policy
from fedup.flower.wire import Answer, array_of, tensor_of
from fedup.privacy.ledger import Charge, Ledger

_LEDGER = "fedup-ledger"
_WEIGHTS, _WEIGHTS_OF = "fedup-weights", "fedup-weights-of"
_RELEASED = "fedup-released-"  # and the digest of what was asked
_MOST_RELEASED = 16  # answers under differential privacy
_FEATURES, _FEATURES_OF = "fedup-features", "fedup-features-of"


def keeps_weights_of(context: Context, base: str) -> bool:
    """Whether the weights of this model are here, by their fingerprint as it was when they came."""
    about = context.state.config_records.get(_WEIGHTS_OF)
    return about is not None and about.get("base") == base and _WEIGHTS in context.state.array_records


def kept_weights(context: Context) -> dict[str, Tensor]:
    """The weights that came with an earlier question."""
    return {name: tensor_of(array, name) for name, array in context.state.array_records[_WEIGHTS].items()}


def keep_weights(context: Context, base: str, weights: Mapping[str, Tensor]) -> None:
    """Of one model only: those of an earlier one go."""
    context.state[_WEIGHTS_OF] = ConfigRecord({"base": base})
    context.state[_WEIGHTS] = ArrayRecord({name: array_of(tensor) for name, tensor in weights.items()})


class KeptLedger(Ledger):
    """The node's own account."""

    def __init__(self, context: Context, policy: Policy) -> None:
        kept = context.state.config_records.get(_LEDGER)
        known = Ledger.from_json(json.loads(str(kept["json"]))) if kept else Ledger()
        super().__init__(known.charges, {None: policy.budget} if policy.budget else {})
        self._context = context

    def _record(self, charge: Charge) -> None:
        text = json.dumps({"charges": [asdict(one) for one in [*self.charges, charge]], "budgets": []})
        self._context.state[_LEDGER] = ConfigRecord({"json": text})


def release_once(context: Context, name: str, answer: Callable[[], Answer]) -> Answer:
    """The answer to a question under differential privacy; the same one where it was given before.

    A reply that was lost on its way is asked for again: what was released already is sent once more, and costs nothing.
    """
    key = _RELEASED + name
    about, arrays = context.state.config_records.get(key), context.state.array_records.get(f"{key}-arrays")
    if about is not None and arrays is not None:
        told = json.loads(str(about["json"]))
        return Answer(
            "ok", told["base"], told["details"], {one: tensor_of(array, one) for one, array in arrays.items()}
        )
    found = answer()
    if found.status == "ok":
        kept = [one for one in context.state.config_records if one.startswith(_RELEASED)]
        for old in kept[: max(0, len(kept) + 1 - _MOST_RELEASED)]:  # the first that were given
            del context.state[old], context.state[f"{old}-arrays"]
        context.state[f"{key}-arrays"] = ArrayRecord({one: array_of(tensor) for one, tensor in found.arrays.items()})
        text = json.dumps({"base": found.base, "details": dict(found.details)})
        context.state[key] = ConfigRecord({"json": text})
    return found


class KeptReader(FeatureReader):
    """Reads features once: they stay in the state as long as model, cut, rows and their order are the same.

    The bits are those of reading anew: a row lies at the same place of a batch of the same size whichever rows are
    wanted. More than `most_bytes` are not kept, since the state travels between Flower's processes at the node with
    every message.
    """

    def __init__(self, model: nn.Module, cut: str, *, base: str, context: Context, most_bytes: int) -> None:
        super().__init__(model, cut)
        self._base, self._context, self._most_bytes = base, context, most_bytes

    def read(
        self, x: Tensor, rows: Tensor, *, wanted: Tensor | None = None, batch_size: int = FEATURE_BATCH
    ) -> Features:
        chosen = rows if wanted is None else rows[wanted]
        key = self._key(x, rows, batch_size)
        kept = _KeptFeatures.of(self._context, key)
        if kept is not None and bool(kept.known[chosen.cpu()].all()):
            return Features(kept.values[chosen.cpu()].to(rows.device), kept.nonnegative, kept.shape)
        found = super().read(x, rows, wanted=wanted, batch_size=batch_size)
        width = found.values.shape[1]
        if len(x) * (4 * width + 1) <= self._most_bytes:
            known = torch.zeros(len(x), dtype=torch.bool)
            kept = kept or _KeptFeatures(key, torch.zeros(len(x), width), known, found.nonnegative, found.shape)
            kept.values[chosen.cpu()] = found.values.cpu()
            kept.known[chosen.cpu()] = True
            kept.keep(self._context)
        return found

    def _key(self, x: Tensor, rows: Tensor, batch_size: int) -> str:
        """Of all that decides the bits: model, cut, the rows' content, their order, and how many are read at once."""
        told = f"{self._base} {self.cut} {batch_size} {torch.get_num_threads()} {x.dtype} {tuple(x.shape)}"
        return digest_of(told, *x.split(4096), rows)


def digest_of(told: str, *tensors: Tensor) -> str:
    """sha256 of a text and of tensors' content."""
    digest = hashlib.sha256(told.encode())
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
        arrays, about = context.state.array_records.get(_FEATURES), context.state.config_records.get(_FEATURES_OF)
        try:
            if arrays is None or about is None or key not in (None, about["key"]):
                return None
            values, known = tensor_of(arrays["values"], "values"), tensor_of(arrays["known"], "known")
            shape = tuple(int(size) for size in json.loads(str(about["shape"])))
            if known.dtype != torch.bool or values.shape != (len(known), math.prod(shape)):
                return None
            return cls(str(about["key"]), values, known, bool(about["nonnegative"]), shape)
        except (DataError, KeyError, ValueError):
            return None

    def keep(self, context: Context) -> None:
        context.state[_FEATURES] = ArrayRecord({"values": array_of(self.values), "known": array_of(self.known)})
        context.state[_FEATURES_OF] = ConfigRecord(
            {"key": self.key, "nonnegative": self.nonnegative, "shape": json.dumps(self.shape)}
        )


def drop_features(context: Context, places: Iterable[int]) -> None:
    """What is forgotten is not kept at the node, either."""
    gone = sorted(places)
    kept = _KeptFeatures.of(context)
    if not gone or kept is None:
        return
    if gone[-1] >= len(kept.known):  # of other rows: nothing is known of them
        for name in (_FEATURES, _FEATURES_OF):
            del context.state[name]
        return
    if bool(kept.known[gone].any()):
        kept.values[gone] = 0.0
        kept.known[gone] = False
        kept.keep(context)

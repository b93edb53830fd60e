"""Files of filters, each bound to the base model that it was fitted for."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError, FingerprintError, NotFittedError, RequestError
from fedup.filters.bottleneck import Bottleneck, FilterConfig
from fedup.filters.closed_form import ClosedForm, linear_head
from fedup.filters.delta import Delta
from fedup.filters.eraser import Eraser, PlacedEraser, load_eraser
from fedup.request import Forget
from fedup.serving.plugged import REQUEST_LOCK, PluggedModel, Served

_ERASER = "eraser."  # prefix of the names of an eraser's weights
_DELTA = "delta."  # and of those of a delta


def save_filter(plugged: PluggedModel, path: str | Path) -> None:
    """Write the active filter with the fingerprint of its base, its cut, settings and requests."""
    if plugged.served is None:
        raise NotFittedError("There is no filter to save: call fedup.unlearn(plugged, …) first.")
    plugged.check_base(hashed=True)
    tensors, header = parts_of(plugged.served)
    save_tensors(path, tensors, kind="filter", header=header)


def parts_of(served: Served) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A fitted filter as tensors and plain data, to store or send."""
    header = {
        "base": served.base,
        "cut": served.cut,
        "config": asdict(served.config),
        "nonnegative": served.filter.nonnegative if isinstance(served.filter, Bottleneck) else None,
        "bound": served.filter.bound if isinstance(served.filter, ClosedForm) else None,
        "requests": sorted((request.to_json() for request in served.requests), key=str),
        "derived_from_forgotten": served.derived_from_forgotten,
        "erasure": None,
        "question": served.question,
        "delta": None,
    }
    tensors = dict(served.filter.state_dict()) if served.filter is not None else {}
    if served.erasure is not None:
        eraser, channels = served.erasure.filter, served.erasure.filter.concept.shape[1]
        described = {"cut": served.erasure.cut, "over": eraser.granularity, "channels": channels}
        header["erasure"] = described | {"about": dict(served.erasure.about)}
        tensors |= {f"{_ERASER}{name}": tensor for name, tensor in eraser.state_dict().items()}
    if served.delta is not None:
        changes, header["delta"] = served.delta.parts()
        tensors |= {f"{_DELTA}{name}": tensor for name, tensor in changes.items()}
    return tensors, header


def load_filter(plugged: PluggedModel, path: str | Path) -> None:
    """Serve the filter of a file; a damaged file, or one of another base, changes nothing."""
    tensors, header = load_tensors(path, kind="filter")
    if (header.get("base"), header.get("cut")) != (plugged.base_fingerprint, plugged.cut):
        raise FingerprintError(
            f"The filter in {path} was made for base {str(header.get('base'))[:12]} at cut {header.get('cut')!r}; this "
            f"model is {plugged.base_fingerprint[:12]} at cut {plugged.cut!r}. Use a filter of this model."
        )
    try:
        served = served_from(tensors, header)
    except ArtifactError as error:
        raise ArtifactError(f"{path} {error}") from error
    if isinstance(served.filter, ClosedForm):
        head = linear_head(plugged.base, plugged.cut)
        if served.filter.encoder.shape != head.weight.shape:
            raise ArtifactError(f"{path} holds a filter for another number of classes or features: it is damaged.")
    if served.delta is not None and not served.delta.fits(plugged.base, plugged.cut):
        raise ArtifactError(f"{path} holds a delta for other weights than this model has: it is damaged.")
    with REQUEST_LOCK:
        dropped = plugged.requests - served.requests
        if dropped:
            raise RequestError(
                f"The filter in {path} was not fitted for {', '.join(map(str, dropped))}, which is active here and "
                "would come back. Take it back with restore() first, or load into a freshly plugged model."
            )
        plugged.serve(served)


def served_from(tensors: dict[str, Tensor], header: dict[str, Any]) -> Served:
    """The opposite of `parts_of`; raises if parts are missing or do not fit each other."""
    try:
        config = FilterConfig(**header["config"])
        erasure = _erasure(tensors, header["erasure"])
        delta = _delta(tensors, header.get("delta"))
        if header["derived_from_forgotten"] != (erasure is not None or delta is not None):
            raise ValueError("it does not say truly whether it was derived from forgotten rows")
        fitted = _at_cut({n: t for n, t in tensors.items() if not n.startswith((_ERASER, _DELTA))}, header)
        requests = frozenset(map(Forget.from_json, header["requests"]))
        question = header.get("question")
        served = Served(fitted, requests, config, header["base"], header["cut"], erasure, question, delta)
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ArtifactError(
            f"lacks a part of a filter, or is of another version ({error}). Take a good copy of it, or answer the "
            "requests again."
        ) from error
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ArtifactError("holds a filter with NaN or infinite weights: it is damaged.")
    return served


def _at_cut(tensors: dict[str, Tensor], header: dict[str, Any]) -> Bottleneck | ClosedForm | None:
    if header.get("bound") is not None:
        return _closed_form(tensors, header["bound"])
    if not tensors and header["nonnegative"] is None:  # an eraser or a delta alone
        return None
    rank, width = tensors["encoder"].shape
    fitted = Bottleneck(width, rank, nonnegative=header["nonnegative"])
    if "constant" in tensors:
        fitted.constant = torch.zeros(width)
    fitted.load_state_dict(tensors)
    return fitted.eval().requires_grad_(False)


def _closed_form(tensors: dict[str, Tensor], bound: float) -> ClosedForm:
    if type(bound) not in (int, float) or not 0 < bound < 1e30:
        raise ValueError("its bound is no positive number")
    if any(tensor.dtype != torch.float32 for tensor in tensors.values()):
        raise ValueError("its weights are not in single precision")
    classes, width = tensors["encoder"].shape
    fitted = ClosedForm(width, classes, float(bound), keeps="kept" in tensors)
    fitted.load_state_dict(tensors)
    return fitted.eval()


def _erasure(tensors: dict[str, Tensor], described: dict[str, Any] | None) -> PlacedEraser | None:
    if described is None:
        if any(name.startswith(_ERASER) for name in tensors):
            raise ValueError("it has the weights of an eraser and does not say where that sits")
        return None
    weights = {name.removeprefix(_ERASER): tensor for name, tensor in tensors.items() if name.startswith(_ERASER)}
    eraser = load_eraser(weights, described["over"])
    _check_fits(eraser, described)
    return PlacedEraser(described["cut"], eraser, described["about"])


def _delta(tensors: dict[str, Tensor], described: dict[str, Any] | None) -> Delta | None:
    changes = {name.removeprefix(_DELTA): tensor for name, tensor in tensors.items() if name.startswith(_DELTA)}
    if described is None:
        if changes:
            raise ValueError("it has the weights of a delta and does not say of whom")
        return None
    return Delta.from_parts(changes, described)


def _check_fits(eraser: Eraser, described: dict[str, Any]) -> None:
    """Raise unless the weights fit each other and their cut."""
    places, channels, rank = eraser.concept.shape
    shapes = {
        "concept": (places, described["channels"], rank),
        "reader": (places, channels, rank),
        "offset": (places, rank),
        "positions": (places,),
        **({"mean": (channels,), "limit": (rank,)} if described["over"] == "tokens" else {}),
    }
    if any(tuple(getattr(eraser, name).shape) != shape for name, shape in shapes.items()):
        raise ValueError("the weights of its eraser do not fit each other")
    positions, available = eraser.positions, described["about"]["place"]["of"]
    if positions.dtype != torch.long or int(positions.min()) < 0 or int(positions.max()) >= available:
        raise ValueError("its eraser acts on positions that the cut does not have")

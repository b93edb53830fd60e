"""Filters on disk, each bound to the base model it was fitted for."""

from dataclasses import asdict
from pathlib import Path

from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError, FingerprintError, NotFittedError, RequestError
from fedup.filter import Bottleneck, FilterConfig
from fedup.plugging import ANSWERING, PluggedModel, Served
from fedup.request import Forget


def save_filter(plugged: PluggedModel, path: str | Path) -> None:
    """Write the active filter with its base's fingerprint, its cut, its settings and its requests."""
    served = plugged.served
    if served is None:
        raise NotFittedError("There is no filter to save: call fedup.unlearn(plugged, …) first.")
    plugged.check_base()
    header = {
        "base": served.base,
        "cut": served.cut,
        "config": asdict(served.config),
        "nonnegative": served.filter.nonnegative,
        "requests": sorted((request.to_json() for request in served.requests), key=str),
    }
    save_tensors(path, served.filter.state_dict(), kind="filter", header=header)


def load_filter(plugged: PluggedModel, path: str | Path) -> None:
    """Serve through a filter from a file; a file of another base, or a damaged one, changes nothing."""
    tensors, header = load_tensors(path, kind="filter")
    if (header.get("base"), header.get("cut")) != (plugged.base_fingerprint, plugged.cut):
        raise FingerprintError(
            f"The filter in {path} was made for base {str(header.get('base'))[:12]} at cut {header.get('cut')!r}; this "
            f"model is {plugged.base_fingerprint[:12]} at cut {plugged.cut!r}. Use a filter of this model."
        )
    try:
        rank, width = tensors["encoder"].shape
        fitted = Bottleneck(width, rank, nonnegative=header["nonnegative"])
        fitted.load_state_dict(tensors)
        config = FilterConfig(**header["config"])
        requests = frozenset(map(Forget.from_json, header["requests"]))
        cut = header["cut"]
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ArtifactError(f"{path} lacks a part of a filter ({error}). Take a good copy of it.") from error
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ArtifactError(f"The filter in {path} holds NaN or infinite weights: it is damaged.")
    with ANSWERING:
        dropped = plugged.requests - requests
        if dropped:
            raise RequestError(
                f"The filter in {path} was not fitted for {', '.join(map(str, dropped))}, which is active here and "
                "would come back. Take it back with restore() first, or load into a freshly plugged model."
            )
        plugged.serve(Served(fitted.eval().requires_grad_(False), requests, config, header["base"], cut))

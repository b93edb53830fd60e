"""Put a trained model and the centroids of its clients into a run folder."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from typing import Any

from torch import nn

from fedup.models.views import fingerprint
from fedup.privacy.guarantee import guarantee_of
from fedup.run.answer import describe_releases
from fedup.run.folder import Writer
from fedup.serving.model_file import save_model
from fedup.statistics.store import Centroids
from fedup.statistics.store_file import save_centroids

_RELEASES_AT_ONCE = 1000  # in one event


def keep_model(writer: Writer, model: nn.Module, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Store the model; `facts` go into the event unchanged. Returns the event's body."""
    body = {
        "model": writer.put("model", lambda path: save_model(model, path)).to_json(),
        "fingerprint": fingerprint(model),
        **facts,
    }
    writer.commit("trained", body)
    return body


def keep_centroids(writer: Writer, store: Centroids, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Store the clients' cells, with what each client released: of very many clients in events of their own, which are
    committed together with the collection. Returns the body of the collection's event."""
    sent, order = store.traffic.releases, _by_client(store)
    parts = range(0, len(sent), _RELEASES_AT_ONCE) if len(sent) > _RELEASES_AT_ONCE else ()
    body = collection(writer, store, facts, releases_apart=bool(parts))
    some = ([sent[place] for place in order[i : i + _RELEASES_AT_ONCE]] for i in parts)
    received = (("received", {"releases": describe_releases(releases)}) for releases in some)
    writer.commit_together(chain(received, [("collected", body)]))
    return body


def collection(
    writer: Writer, store: Centroids, facts: Mapping[str, Any], *, releases_apart: bool = False
) -> dict[str, Any]:
    """The file of the clients' cells, and what an event notes of them."""
    sent = store.traffic.releases
    return {
        "centroids": writer.put("centroids", lambda path: save_centroids(store, path)).to_json(),
        "how": asdict(store.how),
        "rows": store.num_rows,
        "width": store.width,
        "cells": len(store.cells),
        "mechanism": store.how.mechanism,
        "guarantee": asdict(guarantee) if (guarantee := guarantee_of(store.how)) else None,
        "senders": len({release.client for release in sent}),
        "releases": [] if releases_apart else describe_releases(sent),
        **{name: getattr(store.traffic, name) for name in ("bytes_up", "bytes_down", "messages")},
        "paper_epsilon": statistics.fmean(store.paper_epsilons.values()) if store.paper_epsilons else None,
        **store.facts,
        **facts,
    }


def _by_client(store: Centroids) -> list[int]:
    """The places of the clients' messages, in the order of the clients."""
    clients = [release.client for release in store.traffic.releases]
    return sorted(range(len(clients)), key=clients.__getitem__)

"""A run folder in exact mode: a head on a public backbone, its statistics, and what is claimed after each request."""

import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from fedup.clients.protocol import Contact
from fedup.errors import ArtifactError, RequestError
from fedup.federation import Federation
from fedup.filters.ridge_head import RidgeHead, solve_head
from fedup.models.backbone import Backbone
from fedup.request import union
from fedup.run.answer import describe_releases
from fedup.run.folder import Run, Writer
from fedup.run.record import keep_centroids
from fedup.run.serving import load_store
from fedup.run.state import State
from fedup.statistics.feature_cache import FeatureCache
from fedup.statistics.moment_store import MomentStore
from fedup.unlearning.claim import Claim, totals_hash, with_features
from fedup.unlearning.cohort import CohortModel
from fedup.unlearning.exact import HeadModel
from fedup.unlearning.exact_file import read_head, with_stored_head, write_head
from fedup.unlearning.exact_model import ExactModel, described, in_process_with, rows_of_all_parts, totals_without

FEATURES = "features.safetensors"  # what clients keep, where all of them are on this machine


def keep_head(writer: Writer, model: HeadModel | CohortModel, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Store a head that was learned, and its statistics; the backbone is public and is not stored."""
    noted = {name: facts[name] for name in ("time_s", "machine") if name in facts}
    if isinstance(model, HeadModel):
        keep_centroids(writer, model.store, noted)
    else:
        _keep_cohort(writer, model, noted)
    salt = secrets.token_hex(16)
    body = {
        "model": None,
        "head": writer.put("head", lambda path: write_head(model, path)).to_json(),
        "fingerprint": model.base_fingerprint,
        "salt": salt,
        "totals": model.totals_hash(salt),
        "features": {**model.cache.about, "sha256": model.cache.digest, "rows": model.cache.rows},
        "exact": described(model),
        **facts,
    }
    writer.commit("trained", body)
    return body


def _keep_cohort(writer: Writer, model: CohortModel, facts: Mapping[str, Any]) -> None:
    """Store totals and hashes of messages."""
    cohort = model.cohort
    body = {
        "centroids": writer.put("centroids", model.save).to_json(),
        "how": asdict(cohort.config),
        "rows": 0,
        "width": cohort.total.width,
        "cells": 0,
        "messages_hashed": len(cohort.hashes),
        "mechanism": "none",
        "guarantee": None,
        "releases": describe_releases(cohort.traffic.releases),
        **{name: getattr(cohort.traffic, name) for name in ("bytes_up", "bytes_down", "messages")},
        "paper_epsilon": None,
        "shortened": cohort.shortened,
        "unreported": cohort.unreported,
    }
    writer.commit("collected", {**body, **facts})


def load_head_of(
    run: Run, state: State, backbone: Backbone, *, cache: FeatureCache | None = None
) -> HeadModel | CohortModel:
    """The model that the folder serves; raises where its parts do not fit each other."""
    if state.trained is None or state.filter is None or state.centroids is None:
        raise RequestError(f"{run.path} has no learned head yet: run `fedup train --run {run.path}` to the end.")
    path = run.files.path(state.filter)
    model: HeadModel | CohortModel
    if is_cohort(state):
        model = CohortModel.load(backbone, run.files.path(state.centroids), cache=cache)
        same = union(with_stored_head(model, path).requests) == union(state.forgets)
    else:
        store = load_store(run, state)
        if not isinstance(store, MomentStore):
            raise ArtifactError(f"The statistics in {run.path} are no moments: take a good copy of the folder.")
        model = read_head(backbone, store, path, cache=cache)
        same = model.requests == state.forgets
    if not same:
        raise ArtifactError(
            f"The head in {run.path} was not learned for the requests in force "
            f"({', '.join(request.id for request in state.active) or 'none'}). Take a good copy of the folder."
        )
    return model


def is_cohort(state: State) -> bool:
    """Whether the folder keeps totals alone."""
    return state.about.get("keep") == "cohort"


def salt_of(state: State) -> str:
    """With which hashes of totals are salted; it stays in the folder."""
    return str(state.trained.body["salt"]) if state.trained else ""


def claim_here(model: ExactModel, clients: Federation | Contact | None) -> Claim:
    """What may be claimed of a folder: of the model, and of the features that clients of this process keep."""
    if clients is None:  # nobody can tell whose features they are
        return with_features(model.claim, model.cache.rows)
    if not isinstance(clients, Federation):  # each node keeps its own
        return model.claim
    return with_features(model.claim, model.cache.rows_of(rows_of_all_parts(clients, union(model.requests))))


# --- checks


def relearned(model: ExactModel, clients: Federation | Contact, salt: str) -> tuple[str, str]:
    """The hash of the totals served, and of those that the remaining clients add up to now."""
    return model.totals_hash(salt), totals_hash(model.relearn(clients), model.config, salt)


def extracted_again(model: ExactModel, federation: Federation) -> dict[str, float]:
    """Features computed anew: the share of integers that agree with the cached ones, and by how much answers differ."""
    cache, forget_set = FeatureCache(), union(model.requests)
    contact = in_process_with(federation, model.blank, model.config, cache)
    totals = totals_without(contact, model.config, forget_set)
    if model.cache.values is None:
        model.relearn(federation)
    cached, computed = model.cache.values, cache.values
    if cached is None or computed is None:
        raise RequestError("There are no features to compare: no client has rows that are retained.")
    rows = (model.cache.status > 0) & (cache.status > 0)
    head = RidgeHead(model.backbone.width, model.num_classes, model.backbone.bound).to(model.head.weight.device)
    head.put(solve_head(totals, model.config, model.rule))
    features = cached[rows].double() * model.config.step
    with torch.no_grad():
        answers, others = (each(features.to(each.weight)).softmax(1) for each in (model.head, head))
    return {
        "rows": int(rows.sum()),
        "agree": float((cached[rows] == computed[rows]).double().mean()),
        "largest_difference": float((answers - others).abs().max()),
    }


def check_head(run: Run, state: State, blank: nn.Module) -> str:
    """The head, its statistics and the hash of totals on record fit each other; in words."""
    backbone = blank.get_submodule("backbone")
    assert isinstance(backbone, Backbone)
    model, noted = load_head_of(run, state, backbone), last_totals(state)
    if model.totals_hash(salt_of(state)) != noted:
        raise ArtifactError("The totals are not those whose hash is on record. Take a good copy of the folder.")
    claims = [event.body["claim"]["kind"] for event in state.events if "claim" in event.body]
    kind = claims[-1] if claims and model.claim.kind != "suppressed" else model.claim.kind
    return f"solved from its totals {noted}; claim: {kind}"


def last_totals(state: State) -> str:
    """The salted hash of the totals that are served, as the journal has it."""
    claims = [event.body["claim"] for event in state.events if "claim" in event.body]
    return str(claims[-1]["totals"]["after"] if claims else state.trained.body["totals"] if state.trained else "")

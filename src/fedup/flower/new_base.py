"""A new base for the folder of a server app: training went on, or the model was trained anew without the requests."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from fedup.clients.collect import collect as ask_clients
from fedup.clients.labels import LabelsQuestion
from fedup.errors import RequestError
from fedup.flower.rules import is_open
from fedup.models.views import fingerprint
from fedup.request import Forget, union
from fedup.run.brief_writer import BriefWriter
from fedup.run.folder import Run
from fedup.run.in_words import ids
from fedup.run.limits import Limits
from fedup.run.new_base import BaseDesk, Followed, keep_retrained
from fedup.run.serving import load_store
from fedup.run.state import Request, State
from fedup.run.training_files import came_since, check_purpose
from fedup.serving.plugged import plug
from fedup.statistics.store import Centroids
from fedup.unlearning.report import Report

if TYPE_CHECKING:
    from fedup.flower.contact import GridContact
    from fedup.flower.run_server import RunServer


@dataclass(frozen=True, eq=False)
class NewBase:
    """A model that was trained on Flower, and how nodes are asked about it."""

    model: nn.Module
    facts: Mapping[str, Any]  # that the journal notes of it
    contact: "GridContact | None"
    settings: Mapping[str, Any]  # of the collection
    limits: Limits


def collect_retained(
    model: nn.Module, contact: "GridContact", state: State, settings: Mapping[str, Any], more: Sequence[Request] = ()
) -> Centroids:
    """Statistics of all rows but those of finished requests, and of `more`: the model was trained without them, and
    never uses them again. Clients and classes are not asked for; single rows the nodes must have taken out."""
    finished = union(request.forget for request in (*state.finished, *more))
    _check_taken_out(contact, finished.sample_ids)
    whole = Forget(finished.client_ids, finished.class_ids)
    store = ask_clients(model, contact, cut=state.about["cut"], forget=[whole] if whole.kind else (), **settings)
    store.collected_for, store.finished = frozenset(), whole  # no request is behind it any more
    return store


def _check_taken_out(contact: "GridContact", samples: Mapping[int, Collection[int]]) -> None:
    """Raise if a node still knows rows that the model was trained anew without.

    Each is asked for all of them at once. A node that lacks one of several refuses them all, so that open nodes are
    asked for one at a time after that. Nodes with rules do not answer to that: where one lacks a single row, this does
    not notice that it has the others.
    """
    if not samples:
        return
    _check_unknown(contact, {client: LabelsQuestion(frozenset(own)) for client, own in samples.items()})
    without_rules = {client for client, label in contact.node_rules.items() if is_open(label)}
    waiting = {client: sorted(own) for client, own in samples.items() if client in without_rules}
    while waiting:
        _check_unknown(contact, {client: LabelsQuestion(frozenset([own.pop()])) for client, own in waiting.items()})
        waiting = {client: own for client, own in waiting.items() if own and client not in contact.absent}


def _check_unknown(contact: "GridContact", questions: Mapping[int, LabelsQuestion]) -> None:
    for client, _ in contact.ask(questions, optional=questions.keys()):
        raise RequestError(
            f"Client {client} still has rows of requests that are finished: take them out of the node's data "
            "(mount(data=…)) and collect again. Nothing was changed."
        )


def unnamed_persons(run: Run, state: State) -> dict[int, frozenset[str]]:
    """By client: the tags of persons whose rows there it has not named yet, though their request is answered."""
    persons = any(request.forget.subject_tags for request in state.standing)
    return load_store(run, state).unnamed if persons and state.pending and state.centroids else {}


def train_on(server: "RunServer", new: NewBase, before: State, rounds: int) -> Followed:
    """Collect from the new base, answer the requests in force from it, and put all of it in place in one event."""
    now = server.state
    _check_purpose(before, now)
    with BriefWriter(server.run, "train", now, without=[own.id for own in before.standing]) as writer:
        return _collect_and_follow(server, writer, new, rounds)


def put_retrained(server: "RunServer", new: NewBase, before: State) -> Followed:
    """Serve a model that was trained without all requests of `before`: these are finished. What was queued since stays
    queued. What was answered since is answered again from the new base, in the same event."""
    now = server.state
    known = {request.id for request in before.standing if request.forget.is_resolved}  # whose rows are known
    later = (request for request in came_since(before, now) if request.id not in known)
    came = [request.id for request in later if request.is_active or request.is_open]
    if unnamed := unnamed_persons(server.run, now):
        raise RequestError(
            f"Client {ids(unnamed)} has not said yet which of its rows are of persons that are to be forgotten, so "
            "nobody can say that the model was trained without them. Nothing was changed. When the node is back, "
            "finish_pending(contact) asks it; then train again."
        )
    if came and new.contact is None:
        raise RequestError(
            f"{', '.join(came)} came in while the model was trained, which holds their rows: pass contact=… of the new "
            "model, and settings as of collect(), so that they are answered from it. Nothing was changed."
        )
    finished = [own for own in now.standing if own.id in known]
    if returning := [own.id for own in finished if own.is_returning]:
        raise RequestError(
            f"{', '.join(returning)} is to be taken back, and would be finished for good: the model was trained "
            "without its rows. Nothing was changed. answer_queued(contact) takes it back; then train again."
        )
    with BriefWriter(server.run, "retrain", now, without=[own.id for own in finished]) as writer:
        if came:
            return _collect_and_follow(server, writer, new, 0, finished)
        return Followed(Report(frozenset()), keep_retrained(writer, new.model, new.facts, {}, finished=finished))


def _collect_and_follow(
    server: "RunServer", writer: BriefWriter, new: NewBase, rounds: int, finished: Sequence[Request] = ()
) -> Followed:
    contact, now = new.contact, writer.state
    if contact is None or contact.base != fingerprint(new.model):
        raise RequestError("The contact asks nodes about another model: make it with the one that was trained last.")
    served = server.plugged().served
    server.attach(writer, contact)
    contact.vectors_folder = server.run.path
    started = time.perf_counter()
    store = collect_retained(new.model, contact, now, new.settings, finished)
    store.unnamed = unnamed_persons(server.run, now)  # out of use until it says which rows these are
    collected = {"time_s": time.perf_counter() - started, "example": contact.row}
    plugged, config = plug(new.model, now.about["cut"]), served.config if served else None
    desk = BaseDesk(writer, plugged, store, contact, config=config, finished=finished)
    followed = desk.put_in_place(dict(new.facts), collected, rounds, new.limits)
    if followed.declined is None:  # else the answers are still of use
        contact.settled()
    return followed


def _check_purpose(before: State, now: State) -> None:
    """Raise if the base or the requests changed since the training began. What was queued meanwhile can wait."""
    known = {request.id for request in before.requests}
    check_purpose(before, replace(now, requests=tuple(r for r in now.requests if r.id in known or not r.is_queued)))

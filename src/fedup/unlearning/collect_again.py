"""Single clients are asked anew: what they send takes the place of what they sent before, or is added."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.labels import LabelsQuestion
from fedup.clients.moments import MomentsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.clients.protocol import Contact
from fedup.clients.question import Question
from fedup.errors import RequestError, SettingError
from fedup.federation import Federation
from fedup.request import Forget
from fedup.serving.plugged import REQUEST_LOCK, PluggedModel
from fedup.statistics.centroids import Summary
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.moment_growth import add_client, drop_client, mark_left_out
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import Centroids
from fedup.statistics.store_growth import with_client
from fedup.unlearning.plan import Terms, check_belongs, make_plan
from fedup.unlearning.report import Report
from fedup.unlearning.unlearn import carry_out, contact_of

_USUAL_TERMS = Terms()


def collect_again(
    plugged: PluggedModel,
    centroids: Centroids,
    ids: Collection[int],
    *,
    clients: Federation | Contact,
    force: bool = False,
    terms: Terms = _USUAL_TERMS,
) -> tuple[Centroids, Report]:
    """A store with the statistics that these clients send now, and the answer to the requests in force made from it.

    A known client's statistics take the place of all that it sent before; a new client's are added. With moments the
    totals are those of a collection from all clients as they are now. Clients leave out what requests in force name.
    The store that was passed stays as it is; an error changes nothing.
    """
    if not ids:
        raise SettingError("Name the clients that are to be asked: the list is empty.")
    if centroids.collected_for:
        raise RequestError("These statistics were collected for one request: collect them all anew.")
    with REQUEST_LOCK:
        check_belongs(plugged, centroids, plugged.requests)
        contact, store = contact_of(clients, plugged, centroids), centroids.to(centroids.device)
        assert contact is not None  # clients are given
        forget_set, before = store.left_out(plugged.requests), contact.traffic
        if finished := sorted(set(ids) & store.finished.client_ids):
            raise RequestError(f"Client {finished} is forgotten for good: the model was trained without it.")
        if forgotten := sorted(set(ids) & forget_set.client_ids):
            raise RequestError(f"Client {forgotten} is forgotten by a request in force: take that back first.")
        samples = {client: own for client, own in forget_set.sample_ids.items() if client in ids}
        labels: dict[int, dict[int, int]] = {}
        if store.dp is None and samples:
            labels = dict(contact.ask({client: LabelsQuestion(own) for client, own in samples.items()}))
        questions = {client: _question(store, client, forget_set, labels.get(client, {})) for client in sorted(ids)}
        report = Report(plugged.requests)
        for client, answer in dict(contact.ask(questions)).items():
            store = _with_answer(store, client, answer, forget_set, labels.get(client, {}))
            report.note_contact(client)
        if plugged.served is not None:
            plan = make_plan(plugged, store, plugged.requests, contact, plugged.served.config, terms, force=force)
            carry_out(plan, report)
        report.traffic = contact.traffic - before
        for client in sorted(ids):
            sent = report.traffic.by_client.get(client, 0)
            store.bytes_up[client] = max(store.bytes_up.get(client, 0), sent)
        return store, report


def _question(store: Centroids, client: int, forget_set: Forget, labels: dict[int, int]) -> Question[Any]:
    """What is asked at a collection, with what the client leaves out."""
    samples, without = forget_set.sample_ids.get(client, frozenset()), forget_set.class_ids
    if isinstance(store.how, MomentConfig):
        without = without if store.targets == "classes" else frozenset()
        return MomentsQuestion(store.cut, store.how, without=without, excluded=samples)
    if store.dp is not None:
        return PrivateCentroidsQuestion(store.cut, store.dp, without=without, excluded=samples)
    assert not isinstance(store.how, MomentConfig) and store.dp is None
    how: Any = store.how
    return CentroidsQuestion(store.cut, how, without=without, excluded=samples, sample_labels=labels)


def _with_answer(store: Centroids, client: int, answer: Any, forget_set: Forget, labels: dict[int, int]) -> Centroids:
    """The store with a client's answer in place of what it sent before."""
    store.sample_labels = {**store.sample_labels, client: labels}
    store.eraser_parts = {name: part for name, part in store.eraser_parts.items() if name[0] != client}
    store.renewed += 1
    if not isinstance(store, MomentStore):
        assert isinstance(answer, Summary)
        return with_client(store, answer, forget_set.class_ids)
    absent = forget_set.class_ids  # of a new client: it may have rows of them
    if client in store.known_clients:
        absent &= {cell.label for cell in store.cells_of(client)}
        drop_client(store, client)
    add_client(store, client, answer.moments, answer.by_class)
    store.shortened, store.clipped = store.shortened + answer.shortened, store.clipped + answer.clipped
    store.unreported = {**store.unreported, client: answer.unreported}
    for label in answer.few:
        store.few.setdefault(label, set()).add(client)
    by_class: dict[int, frozenset[int]] = {}
    for i, label in labels.items():
        if label not in forget_set.class_ids:
            by_class[label] = by_class.get(label, frozenset()) | {i}
    mark_left_out(store, client, by_class, absent)
    return replace(store)

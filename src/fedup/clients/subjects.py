"""Which training rows of a client are of some persons: tags become sample ids before a request is planned."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedup.clients.checks import require, whole_set
from fedup.clients.model_facts import ModelFacts
from fedup.clients.protocol import Contact, ask_those_there
from fedup.clients.question import Arrays, ClientData, Details, ExactQuestion, Message
from fedup.errors import ContactError, DataError, RequestError
from fedup.request import Forget
from fedup.statistics.store import Centroids
from fedup.subjects import SHORT_TAG

Rows = Mapping[str, frozenset[int]]  # sample ids by tag


@dataclass(frozen=True)
class SubjectsQuestion(ExactQuestion[Rows]):
    """The ids of the training rows of each of these persons, and nothing else.

    A person that the client does not know is left out of the answer. One with held-out rows only has no ids.
    """

    kind: ClassVar[str] = "subjects"
    reported_as: ClassVar[str] = "rows of persons"
    needs_model: ClassVar[bool] = False
    reads_persons: ClassVar[bool] = True

    tags: frozenset[str]

    def answer(self, data: ClientData) -> Rows:
        if data.subject_tags is None or data.subjects is None:
            raise RequestError(
                f"Client {data.client.id} does not know whose its rows are: give it the persons of its rows and their "
                "key (Federation.with_subjects(ids, key=…), on Flower mount(…, subjects=…, subject_key=…))."
            )
        client, persons, rows = data.client, data.subjects, {}
        unseen = torch.cat([persons[part] for part in (client.validation, client.heldout)])
        for tag in sorted(self.tags & data.subject_tags.keys()):
            number = data.subject_tags[tag]
            own = data.sample_ids[persons[client.train] == number]
            if len(own) or bool((unseen == number).any()):
                rows[tag] = frozenset(own.tolist())
        return rows

    def answer_message(self, answer: Rows) -> Message:
        return {"rows": {tag: sorted(ids) for tag, ids in sorted(answer.items())}}, {}

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> Rows:
        sent = details.get("rows")
        if not isinstance(sent, dict):
            raise DataError("rows of persons are missing")
        require(set(sent) <= self.tags, "it reports persons that nobody named")
        rows = {tag: whole_set(sent, tag) for tag in sent}
        require(all(len(ids) == len(sent[tag]) for tag, ids in rows.items()), "a row comes twice")
        named = frozenset().union(*rows.values())
        require(len(named) == sum(map(len, rows.values())), "a row is of two persons")
        require(all(i >= 0 for i in named), "the id of a row is below 0")
        return rows


def resolve(request: Forget, contact: Contact) -> Forget:
    """The request with the rows of its persons, as all clients report them; one without persons is returned as it is.

    Asking is a disclosure: each client learns the tags, and the server which rows have one. A person that no client
    trained on is an error, as is a client that does not answer: some of the person's rows might be there.
    """
    named, absent = resolve_there(request, contact, contact.clients)
    if absent:
        raise contact.failure(absent[0])
    return named


def resolve_there(request: Forget, contact: Contact, clients: Collection[int]) -> tuple[Forget, list[int]]:
    """The request with the rows of its persons at all of these clients that are there, and those that are absent."""
    if request.is_resolved:
        return request, []
    if request.sample_ids:
        raise RequestError("One request names samples and persons: make two of it, which may come together.")
    questions = dict.fromkeys(sorted(clients), SubjectsQuestion(request.subject_tags))
    answers = ask_those_there(contact, questions, bound=questions)
    absent = [client for client in questions if client not in answers]
    if absent and not any(ids for rows in answers.values() for ids in rows.values()):
        listed = ", ".join(map(str, absent))
        raise ContactError(
            f"No client that answered was trained on these persons, and client {listed} has not answered. Nothing was "
            "changed. Ask again when it is back."
        )
    known = frozenset(tag for rows in answers.values() for tag in rows)
    trained = frozenset(tag for rows in answers.values() for tag, ids in rows.items() if ids)
    for missing, why in (
        (request.subject_tags - known, "no client knows them. Check the id, and the key that its tag was made with"),
        (known - trained, "all their rows are held out: the model was never trained on them"),
    ):
        if missing and not absent:
            shown = ", ".join(sorted(tag[:SHORT_TAG] for tag in missing))
            raise RequestError(
                f"There is nothing to forget of the persons with tag {shown}: {why}. Nothing was changed."
            )
    samples = {client: frozenset().union(*rows.values()) for client, rows in answers.items()}
    samples = {client: ids for client, ids in samples.items() if ids}
    return replace(request, sample_ids=samples, resolved_tags=request.subject_tags), absent


def name_again(requests: Collection[Forget], store: Centroids, contact: Contact) -> dict[Forget, Forget]:
    """Ask clients that were absent which rows the persons of these requests have there; returns requests with more
    rows by those with fewer. What is still unknown stays in `store.unnamed`."""
    questions = {client: SubjectsQuestion(tags) for client, tags in sorted(store.unnamed.items())}
    answers = ask_those_there(contact, questions)
    store.unnamed = {client: tags for client, tags in store.unnamed.items() if client not in answers}
    named = {}
    for request in (request for request in requests if request.subject_tags):
        samples = dict(request.sample_ids)
        for client, rows in answers.items():
            if ids := frozenset().union(*(rows.get(tag, frozenset()) for tag in request.subject_tags)):
                samples[client] = ids
        if samples != request.sample_ids:
            named[request] = replace(request, sample_ids=samples)
    return named


def resolved(request: Forget, contact: Contact | None, store: Centroids | None = None) -> Forget:
    """The request with the rows of its persons, which clients are asked for. With a store, clients that are absent are
    noted there: they are out of use until they say which rows it has with them."""
    if request.is_resolved:
        return request
    if contact is None:
        raise ContactError(
            f"To {request} needs the clients, which alone know whose their rows are, and there is no way to reach "
            "them: pass clients=federation; on the command line, have the data set here."
        )
    if store is None:
        return resolve(request, contact)
    named, absent = resolve_there(request, contact, {*contact.clients, *store.known_clients})
    more = {client: store.unnamed.get(client, frozenset()) | request.subject_tags for client in absent}
    store.unnamed = {**store.unnamed, **more}
    return named

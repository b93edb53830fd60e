"""Deltas at the server: which requests get one, who is asked for it, and why there is none."""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from fedup.clients.delta import DeltaQuestion
from fedup.clients.protocol import Contact
from fedup.errors import ContactError, RequestError, SettingError
from fedup.filters.bottleneck import FilterConfig
from fedup.filters.delta import MERGED, Changes, Delta, changed_weights
from fedup.filters.delta_fit import LEAST_FORGOTTEN, MOST_ALONE, ClientDelta, Outcome
from fedup.filters.delta_targets import LEAST_UNSEEN
from fedup.request import Forget, union
from fedup.serving.plugged import PluggedModel
from fedup.statistics.eraser_statistics import RowGroups
from fedup.statistics.store import Centroids
from fedup.unlearning.report import Report

_WHY: Mapping[Outcome, str] = {
    "too few rows": f"it has fewer than {LEAST_FORGOTTEN} of these rows, and a change of weights would show them",
    "no unseen rows": f"for more than {MOST_ALONE:.0%} of these rows it has fewer than {LEAST_UNSEEN} rows of their "
    "class that it never trained on, so that nothing says what losses they should get",
    "not reached": "no change of weights that keeps its other answers made these rows look unseen",
}


def can_answer(request: Forget) -> bool:
    """Whether a delta is for such a request: rows or clients that are withdrawn."""
    return request.reason == "withdrawal" and bool(request.client_ids or request.sample_ids)


def check_delta(plugged: PluggedModel, store: Centroids, config: FilterConfig) -> None:
    """Refuse a delta that was chosen and can never be had, before any client is asked."""
    if config.filter != "delta":
        return
    if store.targets != "classes":
        raise SettingError(
            f"A delta compares losses of rows of one class, and this model has {store.targets}: leave filter at 'auto'."
        )
    if store.dp is not None or store.ledger.budgets:
        raise SettingError(
            "A delta is derived from forgotten rows and under no guarantee, so it is refused under differential "
            "privacy: leave filter at 'auto'."
        )
    changed_weights(plugged.base, plugged.cut)  # raises if there is nothing to change


def tried_by_default(
    requests: frozenset[Forget], contact: Contact | None, store: Centroids, config: FilterConfig
) -> frozenset[Forget]:
    """The requests that get a delta by default: withdrawals, where clients can be reached and count answers, so that it
    is known what it does. That depends on the requests alone, and not on their order."""
    if config.filter != "auto" or contact is None or store.targets != "classes":
        return frozenset()
    if store.dp is not None or store.ledger.budgets:
        return frozenset()
    own = filter(can_answer, requests)
    return frozenset(request for request in own if contact.near or request.sample_ids)


@dataclass(eq=False)
class DeltaBuilder:
    """Makes the delta for a set of requests; what clients answered is kept, and asked for once."""

    plugged: PluggedModel
    store: Centroids
    contact: Contact | None
    report: Report
    chosen: bool  # filter="delta": an answer without one is an error
    tried: frozenset[Forget] = frozenset()  # requests that get one by default, or another filter where there is none
    declined: set[str] = field(default_factory=set)  # digests of requests that it does not answer
    _answers: dict[tuple[int, str], Changes] = field(default_factory=dict)

    def aside(self, store: Centroids, report: Report) -> "DeltaBuilder":
        """Another one for the same requests that asks nobody twice."""
        return replace(self, store=store, report=report, declined=set(self.declined))

    def requests_of(self, requests: Collection[Forget]) -> frozenset[Forget]:
        """Those of the requests that a delta answers: what it answered before, and new ones."""
        before = self._served.requests if self._served else frozenset()
        own = [request for request in requests if can_answer(request) and request.digest not in self.declined]
        return frozenset(own if self.chosen else [r for r in own if r in self.tried or r.digest in before])

    def delta_for(self, requests: frozenset[Forget], left_out: Forget) -> Delta | None:
        """The sum of the changes of all clients that hold rows of these requests; None if it answers none of them.

        If a client has no change, the requests that name it are declined, and the others are tried without them.
        """
        while own := self.requests_of(requests):
            questions = self._questions(own, left_out)
            digests = {client: _digest(self.plugged, question) for client, question in questions.items()}
            by_client, known = self._known(digests)
            missing = {client: question for client, question in questions.items() if client not in known}
            if not self._ask(missing, digests, own):
                continue
            by_client |= {client: self._answers[client, digests[client]] for client in missing}
            if self._need_none(own, by_client):
                continue
            return Delta(by_client, digests, frozenset(request.digest for request in own))
        return None

    def harms(self) -> bool:
        """Decline all requests that are tried, as their delta costs classes too much; whether there are such. A chosen
        delta is refused instead."""
        own = self.tried if not self.chosen else frozenset()
        own = frozenset(request for request in own if can_answer(request) and request.digest not in self.declined)
        self.declined |= {request.digest for request in own}
        if own:
            self.report.note("A delta would cost classes too much of their recall. Another filter answers.", own)
        return bool(own)

    def clients_to_ask(self, requests: frozenset[Forget], left_out: Forget) -> list[int]:
        """The clients that would be asked; asks nobody."""
        own = self.requests_of(requests)
        questions = self._questions(own, left_out) if own else {}
        digests = {client: _digest(self.plugged, question) for client, question in questions.items()}
        return sorted(questions.keys() - self._known(digests)[1])

    @property
    def _served(self) -> Delta | None:
        return self.plugged.served.delta if self.plugged.served else None

    def _questions(self, own: frozenset[Forget], left_out: Forget) -> dict[int, DeltaQuestion]:
        """One for each client with such rows. What others forget is not in it: a change depends on one client only."""
        rows = union(own)
        named = {request.digest: Forget(request.client_ids, sample_ids=request.sample_ids) for request in own}
        finished = self.store.finished
        apart = Forget(left_out.client_ids, sample_ids=left_out.sample_ids)
        groups = RowGroups(named, apart, finished=finished.class_ids)
        cut, questions = self.plugged.cut, {}
        for client in sorted({*rows.client_ids, *rows.sample_ids} - finished.client_ids):
            of_client = groups.to(client)
            requests = {name: part for name, part in of_client.requests.items() if part.kind}
            questions[client] = DeltaQuestion(cut, replace(of_client, requests=dict(sorted(requests.items()))))
        return questions

    def _known(self, digests: Mapping[int, str]) -> tuple[dict[int, Changes], set[int]]:
        """Changes that the served delta has already, and their clients. A sum of several is of use as long as all of
        them are wanted."""
        served = self._served
        if served is None:
            return {}, set()
        same = {client for client, digest in served.questions.items() if digests.get(client) == digest}
        by_client = {client: own for client, own in served.by_client.items() if client in same}
        merged = served.questions.keys() - served.by_client.keys()
        if merged and merged <= same:
            return {MERGED: served.by_client[MERGED], **by_client}, same
        return by_client, same - merged

    def _ask(self, questions: Mapping[int, DeltaQuestion], digests: Mapping[int, str], own: frozenset[Forget]) -> bool:
        """Ask clients for changes; false if some requests were declined for the lack of one."""
        missing = {c: question for c, question in questions.items() if (c, digests[c]) not in self._answers}
        if not missing:
            return True
        why: dict[int, str] = {}
        answers: dict[int, ClientDelta] = {}
        if self.contact is None:
            why = dict.fromkeys(missing, "there is no way to reach it (clients=…)")
        else:
            with self.report.stage("delta"):
                answers = dict(self.contact.ask(missing, optional=list(missing)))
            for client in missing:
                if client not in answers:
                    why[client] = self.contact.silent.get(client, "it did not answer")
                elif answers[client].outcome in _WHY:
                    why[client] = _WHY[answers[client].outcome]
                else:  # of rows that look unseen without changes
                    self._answers[client, digests[client]] = answers[client].changes
                if client in answers:
                    self.report.note_contact(client)
        silent = self.contact is None or bool(why.keys() - answers.keys())
        for client, reason in why.items():
            named = [request for request in own if client in request.client_ids or client in request.sample_ids]
            self._decline(named, client, reason, silent=silent)
        return not why

    def _need_none(self, own: frozenset[Forget], by_client: Mapping[int, Changes]) -> bool:
        """Decline requests whose rows look unseen at all of their clients, unless a delta was chosen."""
        changed = {client for client, changes in by_client.items() if changes}
        if by_client.get(MERGED) and self._served is not None:  # after a purge nobody knows whose changes these are
            changed |= self._served.questions.keys() - self._served.by_client.keys()
        alike = [r for r in own & self.tried if not changed & {*r.client_ids, *r.sample_ids}]
        alike = [] if self.chosen else alike
        self.declined |= {request.digest for request in alike}
        if alike:
            self.report.note("The rows look unseen without a delta: their losses are those of unseen rows.", alike)
        return bool(alike)

    def _decline(self, requests: Collection[Forget], client: int, reason: str, *, silent: bool) -> None:
        """No delta for these requests: an error if one was chosen, or if a client is silent that is in force."""
        text, before = f"There is no delta of client {client}: {reason}.", self._served.requests if self._served else ()
        if self.chosen or (silent and any(request.digest in before for request in requests)):
            advice = "Nothing was changed. Leave filter at 'auto', name more rows, or retrain without them."
            raise (ContactError if silent else RequestError)(f"{text} {advice}")
        self.declined |= {request.digest for request in requests}
        self.report.note(f"{text} Another filter answers.", requests)


def _digest(plugged: PluggedModel, question: DeltaQuestion) -> str:
    """Of all that a client's answer depends on, besides its rows."""
    text = json.dumps([plugged.base_fingerprint, question.to_message()[0]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()

"""What clients send for an eraser. Of forgotten rows it is kept, so that a client that was asked once may be absent."""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TypeVar

from fedup.clients.eraser_questions import (
    PrivateEraserQuestion,
    SecondMomentsQuestion,
    SketchesQuestion,
    SpreadsQuestion,
)
from fedup.clients.protocol import Contact, ask_those_there
from fedup.clients.question import Question
from fedup.errors import ContactError
from fedup.filters.eraser_site import EraserSite
from fedup.models.layout import Granularity
from fedup.privacy.guarantee import DP
from fedup.request import Forget
from fedup.statistics.eraser_statistics import GroupSpreads, RowGroups, Sketches, Weights
from fedup.statistics.kept_eraser import ErasedRows, EraserParts
from fedup.statistics.moments import Moments
from fedup.statistics.private_erasure import NoisyStatistics
from fedup.unlearning.report import Report

A = TypeVar("A")


class EraserAnswers:
    """The clients' answers for one eraser; `parts` has what is kept of forgotten rows, from now and from before.

    `bound` are clients that have to answer if they are there: a new request is about their rows.
    """

    def __init__(self, contact: Contact | None, report: Report, parts: EraserParts, bound: Collection[int]) -> None:
        self._contact, self._report, self._bound = contact, report, bound
        self.parts = dict(parts)
        self.silent: dict[int, str] = {}  # clients that did not answer, and why
        self._names: dict[tuple[int, str], str] = {}  # by client and group: the digest of its rows there

    @property
    def clients(self) -> Sequence[int]:
        """All clients that can be asked."""
        contact = self.reach()
        try:
            return contact.clients
        except ContactError:  # nobody is there
            return []

    def reach(self) -> Contact:
        """The way to the clients."""
        if self._contact is None:
            raise ContactError(
                "An eraser is made of statistics that the clients holding the forgotten rows must send, and there is "
                "no way to reach them: pass clients=federation (on the command line, have the data set here), or use "
                "filter='bottleneck'."
            )
        return self._contact

    def sketches(self, cut: str, over: Granularity, groups: RowGroups, clients: Collection[int]) -> dict[int, Sketches]:
        """Of each client the forgotten rows by group, and retained rows by class. Of a client that is absent, its
        forgotten rows as far as they are kept."""
        answers = self._ask({client: SketchesQuestion(cut, over, groups.to(client)) for client in clients})
        for client in clients:
            self._report.note_contact(client)
        for client, answer in answers.items():
            for name, sketch in answer.forgotten.items():
                self.parts[client, self._rows(groups, client, name)] = ErasedRows(sketch)
        for client, kept in self._kept(groups, clients).items():
            answers[client] = Sketches({name: part.sketch for name, part in kept.items()}, {})
        return answers

    def spreads(
        self,
        cuts: Mapping[str, Granularity],
        groups: RowGroups,
        weights: Mapping[int, Weights],
        holders: Collection[int],
    ) -> dict[int, GroupSpreads]:
        """Means and variances at each cut, of forgotten rows and of the share of each mixture."""
        asked = [client for client, of in weights.items() if client in holders or any(of.values())]
        questions = {client: SpreadsQuestion(cuts, groups.to(client), weights[client]) for client in asked}
        answers = self._ask(questions)
        for client, answer in answers.items():
            for name, spreads in answer.forgotten.items():
                rows = client, self._rows(groups, client, name)
                if isinstance(part := self.parts.get(rows), ErasedRows):
                    self.parts[rows] = replace(part, spreads=spreads)
        for client, kept in self._kept(groups, [*asked, *holders]).items():
            whole = {name: part.spreads for name, part in kept.items() if part.spreads.keys() == cuts.keys()}
            answers[client] = GroupSpreads(whole, {})
        return answers

    def second_moments(
        self, site: EraserSite, groups: RowGroups, senders: Collection[int], others: Collection[int]
    ) -> Moments | None:
        """Second moments at the chosen site, of all senders together; of `others` if no sender is there."""
        for clients in (senders, others):
            at = site.cut, site.granularity, tuple(site.positions)
            asked = [client for client in clients if client not in self.silent]
            answers = self._ask({client: SecondMomentsQuestion(*at, groups.to(client)) for client in asked})
            parts = [moments for moments in answers.values() if moments is not None]
            if parts or not self.silent:
                break
        return reduce(operator.add, parts) if parts else None

    def releases(self, cut: str, dp: DP, groups: RowGroups, senders: Sequence[int]) -> list[NoisyStatistics]:
        """Under differential privacy: one release of each client, which is asked for once for the same rows."""
        names = {client: release_name(groups, client) for client in senders}
        missing = [client for client in senders if (client, names[client]) not in self.parts]
        questions = {client: PrivateEraserQuestion(cut, dp, groups.to(client)) for client in missing}
        for client, answer in self._ask(questions).items():
            self.parts[client, names[client]] = answer
        kept = [self.parts.get((client, names[client])) for client in senders]
        return [part for part in kept if isinstance(part, NoisyStatistics)]

    def _ask(self, questions: Mapping[int, Question[A]]) -> dict[int, A]:
        questions = {client: question for client, question in questions.items() if client not in self.silent}
        answers = ask_those_there(self.reach(), questions, bound=self._bound) if questions else {}
        for client in questions.keys() - answers.keys():
            why = self.reach().silent[client]
            self.silent[client] = why
            self._report.note(f"Client {client} is not compared with: {why}")
            self._report.wait_for(client, f"the eraser is made without its retained rows ({why})")
        for client in answers:
            self._report.note_contact(client)
        return answers

    def _kept(self, groups: RowGroups, clients: Collection[int]) -> dict[int, dict[str, ErasedRows]]:
        """What is kept of clients that are silent, by group."""
        kept: dict[int, dict[str, ErasedRows]] = {}
        for client in (client for client in clients if client in self.silent):
            for name in groups.requests:
                part = self.parts.get((client, self._rows(groups, client, name)))
                if isinstance(part, ErasedRows):
                    kept.setdefault(client, {})[name] = part
        return kept

    def _rows(self, groups: RowGroups, client: int, name: str) -> str:
        """The digest of a group's rows at a client."""
        if (client, name) not in self._names:
            self._names[client, name] = groups.requests[name].at(client).digest
        return self._names[client, name]


def release_name(groups: RowGroups, client: int) -> str:
    """The digest of all that a client's release depends on: the samples that are erased there, and all left out."""
    erased = Forget.samples({client: ids}) if (ids := _samples(groups, client)) else Forget()
    left_out = groups.forget_set.sample_ids.get(client, frozenset())
    return f"{erased.digest} {Forget(sample_ids={client: left_out}).digest}"


def _samples(groups: RowGroups, client: int) -> frozenset[int]:
    return frozenset().union(*(own.sample_ids.get(client, frozenset()) for own in groups.requests.values()))


def parts_in_force(parts: EraserParts, groups: RowGroups | None) -> EraserParts:
    """What is kept as long as these groups are erased."""
    if groups is None:
        return {}
    rows = {(client, own.at(client).digest) for own in groups.requests.values() for client in own.sample_ids}
    rows |= {(client, own.at(client).digest) for own in groups.requests.values() for client, _ in parts}
    rows |= {(client, release_name(groups, client)) for client, _ in parts}
    return {name: part for name, part in parts.items() if name in rows}

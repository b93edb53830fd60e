"""How the server reaches clients after training: in process here, over a real federation elsewhere."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from fedup import messages
from fedup.client import Summarizing, Summary, summarize
from fedup.cut import FeatureReader
from fedup.eraser_statistics import (
    GroupSpreads,
    Question,
    Sketches,
    Weights,
    measure_groups,
    second_moments,
    sketch_groups,
)
from fedup.federation import Federation, check_samples
from fedup.moments import Moments
from fedup.plugging import Served, filtered_view
from fedup.positions import Over
from fedup.privacy.guarantee import DP, guarantee_of
from fedup.privacy.ledger import Ledger
from fedup.private_erasure import NoisyStatistics, gather_privately
from fedup.private_summary import summarize_privately
from fedup.request import Forget
from fedup.tally import Tally, TallyQuestion, tally
from fedup.traffic import Meter, Release, Traffic

Asked = Literal[
    "labels_of", "summarize", "sketch_groups", "measure_groups", "second_moments", "gather_privately", "tally"
]


class Contact(Protocol):
    """The questions a server may ask. Each answer is computed at the client, from its own rows."""

    @property
    def clients(self) -> Sequence[int]:
        """The ids of all clients."""

    @property
    def num_classes(self) -> int:
        """The number of classes."""

    @property
    def ledger(self) -> Ledger:
        """What the clients have spent of their privacy budgets."""

    @property
    def traffic(self) -> Traffic:
        """All messages so far, both ways, as serialised."""

    def settled(self) -> None:
        """What clients were asked for since the last call is on disk at the caller, and answers that are kept for a
        server that is killed may go. Whoever does not call it has the same answers again, at no cost in privacy."""

    def check(self, request: Forget) -> None:
        """Raise unless the request names known clients, classes and samples, and something stays."""

    def reach(self, *, cut: str, how: Summarizing | DP, gone: Forget, without: frozenset[int]) -> Sequence[int]:
        """The clients that `summarize` will be asked for, all but those that are gone, about all classes but these;
        raises where a budget does not allow it. A contact that reaches clients together asks them now, and names those
        that answered."""

    def ahead(self, question: Asked, of: Mapping[int, Mapping[str, Any]]) -> None:
        """One of the questions below will be asked of these clients next, with these arguments. A contact that reaches
        clients together asks all of them now, in place of one after another; others have nothing to do."""

    def cell_sizes(self, clients: Sequence[int]) -> dict[int, dict[int, int]]:
        """How many training rows of each class each of these clients holds: `{client: {class: rows}}`."""

    def labels_of(self, client: int, samples: frozenset[int]) -> dict[int, int]:
        """The class of each of these samples of the client; raises where one was not trained on."""

    def summarize(
        self,
        client: int,
        *,
        cut: str,
        how: Summarizing | DP,
        labels: frozenset[int],
        excluded: frozenset[int],
        out: Tensor | None = None,
    ) -> Summary:
        """The centroids of the client's cells of these classes, without the excluded samples; under DP charged to its
        ledger, at the latest when the answer comes.

        A client in this process may write them to `out` instead of allocating; others ignore it.
        """

    def sketch_groups(self, client: int, *, cut: str, over: Over, question: Question) -> Sketches:
        """Sketches of the client's forgotten rows by request, and of its retained ones by class, at a cut."""

    def measure_groups(
        self, client: int, *, cuts: Mapping[str, Over], question: Question, weights: Weights
    ) -> GroupSpreads:
        """Means and variances of the client's forgotten rows, and of its share of a mixture, at each cut."""

    def second_moments(
        self, client: int, *, cut: str, over: Over, positions: Sequence[int], question: Question
    ) -> Moments | None:
        """The client's second moments at some positions of a cut; None where it has too few rows."""

    def gather_privately(self, client: int, *, cut: str, dp: DP, question: Question) -> NoisyStatistics:
        """The client's noisy statistics for an eraser at all positions of a cut, charged to its ledger."""

    def tally(self, client: int, *, before: Served | None, after: Served | None, question: TallyQuestion) -> Tally:
        """How the model answers the client's rows under two filters (None: the original), in counts."""

    @property
    def measures_by_default(self) -> bool:
        """Whether asking clients to count costs so little that it is done with every request."""


class InProcess:
    """All clients in this process.

    With `one_reader` they share a view of the model, which is faster and takes the model as it was at the first
    question: for a contact that lives for one call.
    """

    def __init__(
        self, federation: Federation, model: nn.Module, *, one_reader: bool = False, ledger: Ledger | None = None
    ) -> None:
        device = next(model.parameters()).device
        self._federation = federation if federation.x.device == device else federation.to(device)
        self._model = model
        self._ledger = Ledger() if ledger is None else ledger
        self._readers: dict[str, FeatureReader] | None = {} if one_reader else None  # by cut
        self._meter = Meter()

    @property
    def clients(self) -> Sequence[int]:
        return [client.id for client in self._federation.clients if len(client.train)]

    @property
    def num_classes(self) -> int:
        return self._federation.num_classes

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def traffic(self) -> Traffic:
        """What would have to be sent: the same questions and answers, in the same format, as over Flower."""
        return self._meter.traffic

    def settled(self) -> None:
        """Nothing is kept here."""

    def check(self, request: Forget) -> None:
        self._federation.check(request)

    def reach(self, *, cut: str, how: Summarizing | DP, gone: Forget, without: frozenset[int]) -> Sequence[int]:
        asked = [client for client in self.clients if client not in gone.client_ids]
        self.ledger.check(asked, how) if isinstance(how, DP) else self.ledger.check_exact(asked)
        return asked

    def ahead(self, question: Asked, of: Mapping[int, Mapping[str, Any]]) -> None:
        """They are all here."""

    def cell_sizes(self, clients: Sequence[int]) -> dict[int, dict[int, int]]:
        sizes = {}
        for client in clients:
            labels, counts = self._federation.y[self._federation.client(client).train].unique(return_counts=True)
            sizes[client] = dict(zip(labels.tolist(), counts.tolist(), strict=True))
        return sizes

    def labels_of(self, client: int, samples: frozenset[int]) -> dict[int, int]:
        check_samples(self._federation.client(client).train, samples, client)
        found = dict(zip(sorted(samples), self._federation.y[sorted(samples)].tolist(), strict=True))
        self._count(client, "labels", messages.labels_question(samples), messages.labels_answer(found))
        return found

    def summarize(
        self,
        client: int,
        *,
        cut: str,
        how: Summarizing | DP,
        labels: frozenset[int],
        excluded: frozenset[int],
        out: Tensor | None = None,
    ) -> Summary:
        rows = self._federation.client(client).train
        data, name = self._federation, secrets.token_hex(16)
        if isinstance(how, DP):
            check_samples(rows, excluded, client)  # whoever asks holds the data here: a slip is told, and costs nothing
            summary = summarize_privately(
                self._model,
                data.x,
                data.y,
                rows,
                client=client,
                cut=cut,
                dp=how,
                num_classes=data.num_classes,
                labels=labels,
                excluded=excluded,
                subjects=data.subjects,
                spend=lambda: self.ledger.spend(client, how, "centroids", name),
                reader=self._reader(cut),
            )
        else:
            summary = summarize(
                self._model,
                data.x,
                data.y,
                rows,
                client=client,
                cut=cut,
                how=how,
                labels=labels,
                excluded=excluded,
                out=out,
                reader=self._reader(cut),
            )
        question = messages.summary_question(cut, how, labels, excluded=excluded)
        told = messages.summary_answer(summary, {} if isinstance(how, DP) else _rows_of(summary))
        self._count(client, "summarize", question, told, how=how, name=name, cells=len(summary.labels))
        return summary

    def sketch_groups(self, client: int, *, cut: str, over: Over, question: Question) -> Sketches:
        data, holder = self._federation, self._federation.client(client)
        found = sketch_groups(self._model, cut, data.x, data.y, holder, question, over=over)
        self._count(client, "sketch", messages.sketch_question(cut, over, question), messages.sketch_answer(found))
        return found

    def measure_groups(
        self, client: int, *, cuts: Mapping[str, Over], question: Question, weights: Weights
    ) -> GroupSpreads:
        data, holder = self._federation, self._federation.client(client)
        found = measure_groups(self._model, cuts, data.x, data.y, holder, question, weights)
        asked = messages.spreads_question(cuts, question, weights)
        self._count(client, "spreads", asked, messages.spreads_answer(found))
        return found

    def second_moments(
        self, client: int, *, cut: str, over: Over, positions: Sequence[int], question: Question
    ) -> Moments | None:
        data, holder = self._federation, self._federation.client(client)
        found = second_moments(self._model, cut, data.x, data.y, holder, question, over=over, positions=positions)
        asked = messages.moments_question(cut, over, positions, question)
        self._count(client, "moments", asked, messages.moments_answer(found))
        return None if found is None else messages.moments_as_sent(found)

    def gather_privately(self, client: int, *, cut: str, dp: DP, question: Question) -> NoisyStatistics:
        data, holder, name = self._federation, self._federation.client(client), secrets.token_hex(16)
        found = gather_privately(
            self._model,
            cut,
            data.x,
            data.y,
            holder,
            question,
            dp=dp,
            num_classes=data.num_classes,
            spend=lambda: self.ledger.spend(client, dp, "eraser", name),
        )
        asked = messages.private_question(cut, dp, question)
        self._count(client, "gather privately", asked, messages.noisy_answer(found), how=dp, name=name)
        return found

    def _count(
        self,
        client: int,
        kind: str,
        question: Mapping[str, Any],
        answer: messages.Message,
        *,
        how: Summarizing | DP | None = None,
        name: str = "",
        cells: int = 0,
        sent: Mapping[str, Tensor] | None = None,
    ) -> None:
        """A question that would have to be sent, with arrays or without, and its answer."""
        base, (told, arrays) = "0" * 64, answer
        asked = {**question, "num_classes": self.num_classes}
        if isinstance(how, DP):  # so much longer are messages about a release
            asked, told = {**asked, messages.NONCE: name[:32]}, {**told, messages.NONCE: name[:32], messages.SPENT: 0.1}
        self._meter.sent(messages.message_size(messages.question_text(kind, base, asked), sent or {}))
        text = messages.answer_text("ok", base, {"client": client, **told})
        size = messages.message_size(text, arrays)
        self._meter.came(client, size, release_of(client, kind, size, how=how, name=name, cells=cells))

    def tally(self, client: int, *, before: Served | None, after: Served | None, question: TallyQuestion) -> Tally:
        data, holder = self._federation, self._federation.client(client)
        original, without, with_it = (filtered_view(self._model, served) for served in (None, before, after))
        found = tally(original, without, with_it, data.x, data.y, holder, question)
        asked, filters = messages.tally_question(before, after, question)
        self._count(client, "tally", asked, messages.tally_answer(found), sent=filters)
        return found

    @property
    def measures_by_default(self) -> bool:
        return True

    def _reader(self, cut: str) -> FeatureReader | None:
        if self._readers is None:
            return None
        if cut not in self._readers:
            self._readers[cut] = FeatureReader(self._model, cut)
        return self._readers[cut]


def release_of(
    client: int, kind: str, size_bytes: int, *, how: Summarizing | DP | None, name: str = "", cells: int = 0
) -> Release:
    """An answer to a kind of question, for reports; what is not summarized in some way is exact."""
    return Release(
        client,
        cells,
        size_bytes,
        messages.REPORTED_AS.get(kind, kind),
        "none" if how is None else how.mechanism,
        guarantee_of(how),
        0.0 if how is None else how.sigma,
        name if isinstance(how, DP) else "",
    )


def _rows_of(summary: Summary) -> dict[int, int]:
    """Rows of each class, as they are told: those behind centroids, and those left out."""
    counts = iter(summary.counts.tolist())
    cells = zip(summary.labels, summary.sizes, summary.excluded, strict=True)
    return {label: sum(next(counts) for _ in range(size)) + len(ids) for label, size, ids in cells}

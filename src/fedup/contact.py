"""How the server reaches clients after training: in process here, over a real federation elsewhere."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from fedup import messages
from fedup.client import Summarizing, Summary, summarize, summarize_privately
from fedup.contrast import Question, gather, measure_shifts
from fedup.cut import FeatureReader
from fedup.federation import Federation, check_samples
from fedup.moments import Contrast, Shift
from fedup.positions import Over
from fedup.privacy.guarantee import DP, guarantee_of
from fedup.privacy.ledger import Ledger
from fedup.private_erasure import NoisyStatistics, gather_privately
from fedup.request import Forget
from fedup.traffic import Meter, Release, Traffic

Asked = Literal["labels_of", "summarize", "shifts", "gather", "gather_privately"]


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

    def shifts(self, client: int, *, cuts: Mapping[str, Over], question: Question) -> dict[str, Shift]:
        """How far the client's forgotten rows lie from its retained ones at each cut; none where these are too few."""

    def gather(
        self, client: int, *, cut: str, over: Over, positions: Sequence[int], question: Question
    ) -> Contrast | None:
        """The client's counts, sums and second moments at some positions of a cut; None where it has none to tell."""

    def gather_privately(self, client: int, *, cut: str, dp: DP, question: Question) -> NoisyStatistics:
        """The client's noisy statistics for an eraser at all positions of a cut, charged to its ledger."""


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

    def shifts(self, client: int, *, cuts: Mapping[str, Over], question: Question) -> dict[str, Shift]:
        data = self._federation
        found = measure_shifts(self._model, cuts, data.x, data.y, data.client(client), question)
        self._count(client, "shifts", messages.shifts_question(cuts, question), messages.shifts_answer(found))
        return found

    def gather(
        self, client: int, *, cut: str, over: Over, positions: Sequence[int], question: Question
    ) -> Contrast | None:
        data, holder = self._federation, self._federation.client(client)
        found = gather(self._model, cut, data.x, data.y, holder, question, over=over, positions=positions)
        asked = messages.gather_question(cut, over, positions, question)
        self._count(client, "gather", asked, messages.contrast_answer(found))
        return None if found is None else _as_sent(found)

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
    ) -> None:
        """A question that would have to be sent, and its answer."""
        base, (told, arrays) = "0" * 64, answer
        asked = {**question, "num_classes": self.num_classes}
        if isinstance(how, DP):  # so much longer are messages about a release
            asked, told = {**asked, messages.NONCE: name[:32]}, {**told, messages.NONCE: name[:32], messages.SPENT: 0.1}
        self._meter.sent(messages.message_size(messages.question_text(kind, base, asked), {}))
        text = messages.answer_text("ok", base, {"client": client, **told})
        size = messages.message_size(text, arrays)
        self._meter.came(client, size, release_of(client, kind, size, how=how, name=name, cells=cells))

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


def _as_sent(found: Contrast) -> Contrast:
    """With second moments that are symmetric to the bit, as they are where one half of them was sent."""
    squares = messages.whole_of(messages.half_of(found.pooled.squares), found.pooled.squares.shape[-1])
    return replace(found, pooled=replace(found.pooled, squares=squares))

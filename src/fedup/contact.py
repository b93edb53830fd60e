"""How the server reaches clients after training: in process here, over a real federation elsewhere."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor, nn

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
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Ledger
from fedup.private_erasure import NoisyStatistics, gather_privately
from fedup.private_summary import summarize_privately
from fedup.request import Forget
from fedup.tally import Tally, TallyQuestion, tally

Asked = Literal["labels_of", "summarize", "sketch_groups", "measure_groups", "second_moments", "gather_privately", "tally"]


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

    def check(self, request: Forget) -> None:
        """Raise unless the request names known clients, classes and samples, and something stays."""

    def reach(self, *, cut: str, how: Summarizing | DP, gone: Forget, without: frozenset[int]) -> Sequence[int]:
        """The clients that `summarize` will be asked for, all but those that are gone, about all classes but these. A
        contact that reaches clients together asks them now, and names those that answered."""

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
        ledger.

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

    @property
    def clients(self) -> Sequence[int]:
        return [client.id for client in self._federation.clients if len(client.train)]

    @property
    def num_classes(self) -> int:
        return self._federation.num_classes

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    def check(self, request: Forget) -> None:
        self._federation.check(request)

    def reach(self, *, cut: str, how: Summarizing | DP, gone: Forget, without: frozenset[int]) -> Sequence[int]:
        return [client for client in self.clients if client not in gone.client_ids]

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
        return dict(zip(sorted(samples), self._federation.y[sorted(samples)].tolist(), strict=True))

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
        data = self._federation
        if isinstance(how, DP):
            check_samples(rows, excluded, client)  # whoever asks holds the data here: a slip is told, and costs nothing
            return summarize_privately(
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
                spend=lambda: self.ledger.spend(client, how, "centroids"),
                reader=self._reader(cut),
            )
        return summarize(
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

    def sketch_groups(self, client: int, *, cut: str, over: Over, question: Question) -> Sketches:
        data, holder = self._federation, self._federation.client(client)
        return sketch_groups(self._model, cut, data.x, data.y, holder, question, over=over)

    def measure_groups(
        self, client: int, *, cuts: Mapping[str, Over], question: Question, weights: Weights
    ) -> GroupSpreads:
        data, holder = self._federation, self._federation.client(client)
        return measure_groups(self._model, cuts, data.x, data.y, holder, question, weights)

    def second_moments(
        self, client: int, *, cut: str, over: Over, positions: Sequence[int], question: Question
    ) -> Moments | None:
        data, holder = self._federation, self._federation.client(client)
        return second_moments(self._model, cut, data.x, data.y, holder, question, over=over, positions=positions)

    def gather_privately(self, client: int, *, cut: str, dp: DP, question: Question) -> NoisyStatistics:
        data, holder = self._federation, self._federation.client(client)
        return gather_privately(
            self._model,
            cut,
            data.x,
            data.y,
            holder,
            question,
            dp=dp,
            num_classes=data.num_classes,
            spend=lambda: self.ledger.spend(client, dp, "eraser"),
        )

    def tally(self, client: int, *, before: Served | None, after: Served | None, question: TallyQuestion) -> Tally:
        data, holder = self._federation, self._federation.client(client)
        original, without, with_it = (filtered_view(self._model, served) for served in (None, before, after))
        return tally(original, without, with_it, data.x, data.y, holder, question)

    @property
    def measures_by_default(self) -> bool:
        return True

    def _reader(self, cut: str) -> FeatureReader | None:
        if self._readers is None:
            return None
        if cut not in self._readers:
            self._readers[cut] = FeatureReader(self._model, cut)
        return self._readers[cut]

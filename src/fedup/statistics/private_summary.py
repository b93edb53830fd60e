"""A client's noisy statistics under differential privacy: planned without data, charged, and only then computed."""

import torch
from torch import Tensor, nn

from fedup.models.cut import find_cut
from fedup.models.features import FeatureReader
from fedup.privacy.dp import finite, joint_vector, release
from fedup.privacy.guarantee import DP
from fedup.privacy.projection import basis_of
from fedup.statistics.centroids import Summary
from fedup.statistics.client_data import ClientData
from fedup.statistics.private_features import read_privately


class PlannedSummary:
    """A question for noisy statistics of some classes, checked with public data alone: no row is read.

    `blank` is one row of zeros. Raises if the model, the cut or the settings do not allow an answer.
    """

    def __init__(
        self,
        model: nn.Module,
        blank: Tensor,
        *,
        cut: str,
        dp: DP,
        num_classes: int,
        labels: frozenset[int],
        reader: FeatureReader | None = None,
    ) -> None:
        self.dp, self.num_classes, self.labels = dp, num_classes, sorted(labels)
        self._reader = reader or FeatureReader(model, find_cut(model, cut))
        with torch.autocast(blank.device.type, enabled=False):
            features = self._reader.check_tail(blank)
        self.shape = tuple(features.shape[1:])
        basis = basis_of(model, cut, features[0].numel(), how=dp.projection, dims=dp.dims, num_classes=num_classes)
        self.basis = basis.double().cpu()  # (D, d)

    def answer(self, data: ClientData, excluded: frozenset[int]) -> Summary:
        """The release of a client's rows without the excluded samples; ids that it does not hold change nothing."""
        rows, samples = data.client.train, data.sample_ids
        wanted = ~torch.isin(samples, torch.tensor(sorted(excluded), dtype=samples.dtype, device=samples.device))
        wanted, width = wanted.to(rows.device), self.basis.shape[1]
        batches = read_privately(self._projected, data.x, rows, wanted=wanted, width=width)
        kept, points = map(torch.cat, zip(*batches, strict=True))  # (n,), (n, d)
        subjects = None if data.subjects is None else data.subjects[kept]
        exact = joint_vector(self.dp, points, data.y[kept], subjects, self.num_classes)
        vectors = release(self.dp, exact[self.labels], name=("cells", data.client.id, *sorted(excluded)))
        return Summary(
            data.client.id,
            labels=tuple(self.labels),
            sizes=(1,) * len(self.labels),
            excluded=(excluded,) * len(self.labels),
            vectors=vectors.to(rows.device),
            counts=torch.ones(len(self.labels), dtype=torch.int32, device=rows.device),  # messages, not rows
            nonnegative=False,  # noise is of either sign
            shape=self.shape,
        )

    def _projected(self, batch: Tensor) -> Tensor:
        return finite(self._reader.at_once(batch)[self._reader.cut].flatten(1).double().cpu()) @ self.basis

"""A client's noisy statistics under differential privacy: planned without data, charged, and only then made of rows."""

import torch
from torch import Tensor, nn

from fedup.errors import SettingError
from fedup.models.cut import FeatureReader, find_cut
from fedup.privacy.dp import finite, joint_vector, release
from fedup.privacy.guarantee import DP
from fedup.privacy.projection import basis_of
from fedup.statistics.centroids import Summary
from fedup.statistics.private_features import read_privately


class PlannedSummary:
    """A question for noisy statistics of some classes, checked against all that is public: no row is read for it.

    `blank` is one row of zeros. Raises where the model, the cut or the settings do not allow an answer.
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
        check_classes(labels, num_classes)
        self.dp, self.num_classes, self.labels = dp, num_classes, sorted(labels)
        self._reader = reader or FeatureReader(model, find_cut(model, cut))
        with torch.autocast(blank.device.type, enabled=False):
            features = self._reader.check_tail(blank)
        self.shape = tuple(features.shape[1:])
        basis = basis_of(model, cut, features[0].numel(), how=dp.projection, dims=dp.dims, num_classes=num_classes)
        self.basis = basis.double().cpu()  # (D, d)

    def answer(
        self,
        x: Tensor,
        y: Tensor,
        rows: Tensor,
        *,
        client: int,
        excluded: frozenset[int],
        subjects: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Summary:
        """The release, of a client's rows without the excluded samples; those that it does not hold change nothing."""
        samples = rows if ids is None else ids[rows]
        wanted = ~torch.isin(samples, torch.tensor(sorted(excluded), dtype=samples.dtype, device=samples.device))
        kept, points = self._points(x, rows, wanted.to(rows.device))
        exact = joint_vector(self.dp, points, y[kept], None if subjects is None else subjects[kept], self.num_classes)
        vectors = release(self.dp, exact[self.labels], name=("cells", client, *sorted(excluded)))
        return Summary(
            client,
            labels=tuple(self.labels),
            sizes=(1,) * len(self.labels),
            excluded=(excluded,) * len(self.labels),
            vectors=vectors.to(rows.device),
            counts=torch.ones(len(self.labels), dtype=torch.int32, device=rows.device),  # messages, not rows
            nonnegative=False,  # noise is of either sign
            shape=self.shape,
        )

    def _points(self, x: Tensor, rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Rows that are kept, and their projected features. (n,), (n, d)"""
        with torch.autocast(x.device.type, enabled=False):
            read = list(read_privately(self._projected, x, rows, wanted=wanted, width=self.basis.shape[1]))
        return torch.cat([part for part, _ in read]), torch.cat([points for _, points in read])

    def _projected(self, batch: Tensor) -> Tensor:
        return finite(self._reader.at_once(batch).flatten(1).double().cpu()) @ self.basis


def check_classes(labels: frozenset[int], num_classes: int) -> None:
    """Raise unless all of these are classes."""
    unknown = sorted(label for label in labels if not 0 <= label < num_classes)
    if unknown:
        raise SettingError(f"Classes are 0 to {num_classes - 1}; found {unknown[:5]}.")

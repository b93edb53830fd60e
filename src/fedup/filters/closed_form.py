"""The closed-form filter: scores by ridge regression from counts, sums and second moments of what is retained."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fedup.errors import CutError, DataError
from fedup.filters.bottleneck import Filter
from fedup.models.cut import tail_of
from fedup.models.views import shared_view
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig
from fedup.targets import Targets

RIDGE = 0.01  # of the mean variance of a feature
FEW_ROWS_RIDGE = 0.5  # more of it, for each feature per row: few rows say little of a covariance
SHARPNESS = 0.7  # of the original layer's spread: ridge scores overlap more (docs/closed_form.md has the figures)
DISCRIMINANT_SHARPNESS = 1.0  # discriminants: spread over all scores as the original layer's
MARGIN = 10.0  # by which an absent class stays below the mean of the others, at least
_LARGEST_MARGIN = 1000.0
_WORST_CONDITION = 1e4  # of the last layer: beyond, features for given scores would be too large for single precision


@dataclass(frozen=True, eq=False)
class RetainedStatistics:
    """What integer moments say of retained features, in the features' own units."""

    counts: Tensor  # (K,)
    means: Tensor  # (K, D) by class; zeros for one without rows
    mean: Tensor  # (D,)
    covariance: Tensor  # (D, D)
    within: Tensor  # (D, D) the same within classes

    @classmethod
    def of(cls, moments: IntegerMoments, config: MomentConfig) -> "RetainedStatistics":
        """Of the moments of retained rows."""
        counts, total = moments.counts.double(), moments.rows
        if not total:
            raise DataError("No retained row is left to make a filter from.")
        means = moments.sums.double() * config.step / counts.clamp(min=1)[:, None]
        mean = counts @ means / total
        second = moments.dense_second() * (config.step**2 / total)
        weighted = means * (counts / total).sqrt()[:, None]
        return cls(counts, means, mean, second - torch.outer(mean, mean), second - weighted.T @ weighted)


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores A x + a of features x, one for each class. In double precision."""

    weight: Tensor  # (K, D)
    bias: Tensor  # (K,)
    weight_dtype: torch.dtype = torch.float64  # in which a layer computes that these are of

    def of(self, features: Tensor) -> Tensor:
        """(N, K)"""
        return linear(features.double(), self.weight, self.bias)


def ridge_scores(retained: RetainedStatistics) -> Scores:
    """Scores fitted to one-hot targets by ridge regression: A = G (Σ + λI)⁻¹, a = n/N − A m."""
    shares = retained.counts / retained.counts.sum()  # (K,)
    cross = shares[:, None] * (retained.means - retained.mean)
    weight = ridge_solution(retained.covariance, cross, float(retained.counts.sum()))
    return Scores(weight, shares - weight @ retained.mean)


def discriminant_scores(retained: RetainedStatistics) -> Scores:
    """Linear discriminants: log-probabilities if classes are Gaussian. Kinder to small classes than ridge scores, which
    other classes can mask."""
    rows = retained.counts.sum()
    apart = retained.means - retained.mean  # else all weights would have a large part in common, which rounds
    weight = ridge_solution(retained.within, apart, float(rows))
    shares = retained.counts.clamp(min=1) / rows  # classes without rows are left to `without_classes`
    return Scores(weight, shares.log() - weight @ retained.mean - 0.5 * (weight * apart).sum(1))


def ridge_solution(covariance: Tensor, targets: Tensor, rows: float) -> Tensor:
    """targets (Σ + λI)⁻¹ (K, D)"""
    damped = covariance.clone()
    ridge = RIDGE + FEW_ROWS_RIDGE * len(damped) / rows
    damped.diagonal().add_(ridge * damped.diagonal().mean().clamp(min=1e-12))
    return torch.linalg.solve(damped, targets.T).T


def spread_matched(
    scores: Scores, head: Scores, retained: RetainedStatistics, *, sharpness: float = SHARPNESS
) -> Scores:
    """The scores times one number, so that on the class means they have this share of the original layer's spread.

    Ridge scores lie between 0 and 1: their softmax would be nearly flat. The order of classes stays.
    """
    wanted, own = (spread_on_means(each, retained) for each in (head, scores))
    factor = sharpness * wanted / own if own > 0 and wanted > 0 else 1.0
    return Scores(scores.weight * factor, scores.bias * factor)


def spread_on_means(scores: Scores, retained: RetainedStatistics) -> float:
    """Root mean square of the scores of class means around the mean score of each."""
    held = retained.counts > 0
    shares, given = retained.counts[held] / retained.counts[held].sum(), scores.of(retained.means[held])[:, held]
    centred = given - given.mean(1, keepdim=True)
    return float((shares @ centred.square().mean(1)).sqrt())


def blended(scores: Scores, original: Scores, share: float) -> Scores:
    """A share of these scores, and the original layer's for the rest."""
    weight, bias = (
        torch.lerp(*pair, share) for pair in ((original.weight, scores.weight), (original.bias, scores.bias))
    )
    return Scores(weight, bias)


def without_classes(scores: Scores, absent: Tensor, margin: float = MARGIN) -> Scores:
    """The same, and classes that are absent (a mask) are never answered.

    Their score is the mean of all the others' less a margin, whatever the input. The largest of the others is at least
    their mean. So an absent class is never the largest, and its probability is below exp(−margin).

    >>> scores = without_classes(Scores(torch.randn(4, 5).double(), torch.randn(4).double()), torch.arange(4) == 2)
    >>> 2 in scores.of(1e6 * torch.randn(999, 5)).argmax(1)
    False
    """
    if bool(absent.all()):
        raise DataError("No class is left to answer.")
    weight, bias = scores.weight.clone(), scores.bias.clone()
    weight[absent], bias[absent] = weight[~absent].mean(0), bias[~absent].mean() - margin
    return Scores(weight, bias)


class ClosedForm(Filter):
    """Features for which a frozen last layer W x + b gives chosen scores A x + a: x → (CW)⁺ C (A x + a − b).

    C takes the mean over classes away, so scores come out up to a number that is the same for all classes. Rows longer
    than the bound are shortened to it first, as they were when the moments were taken.

    Some classes may be kept as they were: a row that the last layer clearly answers with one of them passes unchanged.
    """

    def __init__(self, width: int, num_classes: int, bound: float, *, keeps: bool = False) -> None:
        super().__init__()
        self.bound = bound
        self.register_buffer("encoder", torch.zeros(num_classes, width))
        self.register_buffer("decoder", torch.zeros(width, num_classes))
        self.register_buffer("constant", torch.zeros(width))
        if keeps:
            self.register_buffer("original", torch.zeros(num_classes, width + 1))  # the last layer: weight and bias
            self.register_buffer("kept", torch.zeros(num_classes))  # 1 for classes kept as they were
        self.keeps = keeps

    encoder: Tensor
    decoder: Tensor
    constant: Tensor
    original: Tensor
    kept: Tensor

    @property
    def rank(self) -> int:
        """Number of scores that pass."""
        return self.encoder.shape[0]

    @property
    def width(self) -> int:
        """Number of features it acts on."""
        return self.encoder.shape[1]

    def forward(self, features: Tensor) -> Tensor:
        device = features.device.type
        if not torch.is_autocast_enabled(device):
            return self._passed(features).to(features.dtype)
        with torch.autocast(device, enabled=False):  # half precision rounds by more than the margin of absent classes
            return self._passed(features)

    def _passed(self, features: Tensor) -> Tensor:
        """In the filter's own precision."""
        flat = torch.nan_to_num(features.flatten(1).to(self.encoder.dtype), posinf=0.0, neginf=0.0)  # (N, D)
        norms = flat.norm(dim=1, keepdim=True)
        shortened = flat * (self.bound / norms.clamp(min=self.bound))
        passed = linear(linear(shortened, self.encoder), self.decoder, self.constant)
        if self.keeps:
            passed = torch.where(self._clearly_kept(flat, norms), flat, passed)
        return passed.reshape(features.shape)

    def _clearly_kept(self, flat: Tensor, norms: Tensor) -> Tensor:
        """Which rows the last layer answers with a class that is kept, by more than rounding can do. (N, 1)"""
        weight, bias = self.original[:, :-1], self.original[:, -1]
        scores, kept = linear(flat, weight, bias), self.kept > 0
        lead = scores.masked_fill(~kept, -torch.inf).amax(1) - scores.masked_fill(kept, -torch.inf).amax(1)
        largest = weight.norm(dim=1).amax() * norms.squeeze(1) + bias.abs().amax()
        return (lead > 2 * (self.width + 4) * torch.finfo(flat.dtype).eps * largest)[:, None]


def last_layer(model: nn.Module, cut: str, targets: Targets = "classes") -> Scores:
    """The linear layer at the cut; raises where no layer follows that can give chosen scores.

    Scores of classes may come out up to a number common to all classes; labels and values must be hit exactly.
    """
    head = linear_head(model, cut, targets)
    weight, useful = head.weight, len(head.weight)
    if targets == "classes":
        weight, useful = weight - weight.mean(0), useful - 1
    values = torch.linalg.svdvals(weight)
    if len(values) < useful or not float(values[0]) < _WORST_CONDITION * float(values[useful - 1]):
        way_out = "Collect centroids (statistics='centroids') and use the bottleneck."
        raise CutError(
            f"The last layer {cut!r} cannot give all scores: its {len(weight)} outputs over {weight.shape[1]} features "
            f"are too many or nearly dependent. {way_out if targets == 'classes' else 'Widen the layer before it.'}"
        )
    return head


def linear_head(model: nn.Module, cut: str, targets: Targets = "classes") -> Scores:
    """The linear layer at the cut; raises if it is none, or more follows."""
    layer = model.get_submodule(cut)
    if not isinstance(layer, nn.Linear):
        raise CutError(
            f"The closed form needs a linear layer at the cut; {cut!r} is a {type(layer).__name__}. Collect centroids "
            "(statistics='centroids') and use the bottleneck there."
        )
    _check_tail(model, cut, layer, exact=targets != "classes")
    weight = layer.weight.detach().double().cpu()
    bias = torch.zeros(len(weight), dtype=torch.float64) if layer.bias is None else layer.bias.detach().double().cpu()
    return Scores(weight, bias, layer.weight.dtype)


@torch.no_grad()
def _check_tail(model: nn.Module, cut: str, layer: nn.Linear, *, exact: bool) -> None:
    """Raise unless W x + b are the model's scores: exactly, or up to a number that is the same for all classes."""
    source = torch.Generator().manual_seed(0)
    probe = torch.randn(4, layer.in_features, generator=source).to(layer.weight)
    if any(module.training for module in model.modules()):
        model = shared_view(model)  # or dropout would draw numbers, and BatchNorm write to the model
    try:
        scores, expected = tail_of(model, cut)(probe).float(), linear(probe, layer.weight, layer.bias).float()
        if not exact:
            scores, expected = scores.log_softmax(1), expected.log_softmax(1)
        same = scores.shape == expected.shape and torch.allclose(scores, expected, atol=1e-2, rtol=1e-2)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        same = False
    if not same:
        raise CutError(
            f"What follows the cut {cut!r} is more than its linear layer: the closed form cannot set the scores. "
            "Collect centroids (statistics='centroids') and use the bottleneck."
        )


def closed_form_filter(
    scores: Scores, head: Scores, bound: float, absent: Tensor, kept: Tensor | None = None
) -> ClosedForm:
    """The filter before a last layer that gives these scores, and never the largest to an absent class (a mask).

    Some classes may be kept as they were (a mask), absent or not. The margin of absent classes is more than rounding
    can do to any two scores; raises where that is too much.
    """
    if kept is not None and bool(kept.any()) and head.weight_dtype not in (torch.float32, torch.float64):
        raise CutError(
            f"Clients have too few rows of class {', '.join(map(str, kept.nonzero().flatten().tolist()))} to report, "
            f"and a last layer in {head.weight_dtype} rounds too much to keep a class as it was. Use the model in "
            "single precision, or collect centroids (statistics='centroids') and use the bottleneck."
        )
    margin = MARGIN
    for _ in range(2):
        made = _filter_of(without_classes(scores, absent, margin), head, bound, kept)
        rounding = largest_rounding(made, head)
        if not bool(absent.any()) or 2 * rounding < margin:
            return made
        margin = 4 * rounding
        if not margin < _LARGEST_MARGIN:
            break
    single = head.weight_dtype in (torch.float32, torch.float64)
    way_out = f"Collect moments with a bound below {bound:g} (MomentConfig)" if single else "Use single precision"
    raise CutError(
        f"In {head.weight_dtype} the last layer rounds scores by up to {rounding:.3g}: a dropped class could win. "
        f"{way_out}, or collect centroids (statistics='centroids') and use the bottleneck."
    )


def _filter_of(scores: Scores, head: Scores, bound: float, kept: Tensor | None) -> ClosedForm:
    centred = head.weight - head.weight.mean(0)  # (K, D): C W
    made = ClosedForm(head.weight.shape[1], len(head.weight), bound, keeps=kept is not None and bool(kept.any()))
    if kept is not None and made.keeps:
        made.original.copy_(torch.cat([head.weight, head.bias[:, None]], dim=1))
        made.kept.copy_(kept)
    decoder = torch.linalg.pinv(centred)  # (D, K); the mean of its columns is 0, so C need not be applied again
    return written_into(made, scores, head, decoder)


def written_into(made: ClosedForm, scores: Scores, head: Scores, decoder: Tensor) -> ClosedForm:
    """The filter with these scores and the decoder that gives them before the last layer."""
    made.encoder.copy_(scores.weight)
    made.decoder.copy_(decoder)
    made.constant.copy_(decoder @ (scores.bias - head.bias))
    if not all(bool(tensor.isfinite().all()) for tensor in made.state_dict().values()):
        raise DataError("The closed form is not finite: the moments are degenerate. Collect them again.")
    return made.eval()


def largest_rounding(made: ClosedForm, head: Scores) -> float:
    """How far served scores can lie from exact ones, for any row within the bound; infinity where they may overflow.

    A bound by norms: a product of length n rounds by at most n units of the last place of the sum of absolute values.
    """
    unit, of_head = torch.finfo(made.encoder.dtype).eps / 2, torch.finfo(head.weight_dtype).eps / 2
    width, classes = made.width, made.rank
    encoded = made.encoder.double().norm(dim=1) * made.bound  # (K,) largest |A x|
    written = made.decoder.double().abs() @ encoded + made.constant.double().abs()  # (D,)
    answered = head.weight.abs() @ written + head.bias.abs()  # (K,)
    if not max(float(written.max()), float(answered.max())) < torch.finfo(head.weight_dtype).max / 2:
        return torch.inf
    of_encoder = head.weight.abs() @ (made.decoder.double().abs() @ (width * unit * encoded))
    of_decoder = head.weight.abs() @ (((classes + 1) * unit + of_head) * written)
    return float((of_encoder + of_decoder + (width + 4) * of_head * answered).max())

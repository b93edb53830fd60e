"""What all exact models share: a frozen public backbone, and a head that is a function of integer totals."""

from abc import abstractmethod
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedup.clients.in_process import InProcess
from fedup.clients.moments import MomentsQuestion
from fedup.clients.protocol import Contact
from fedup.clients.subjects import resolved
from fedup.errors import ContactError, DataError, HarmError
from fedup.federation import Federation, Part
from fedup.filters.ridge_head import HeadRule, RidgeHead
from fedup.models.backbone import HEAD, Backbone, with_blank_head
from fedup.models.views import fingerprint
from fedup.request import Forget, union
from fedup.statistics.feature_cache import CachedReader, FeatureCache
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig
from fedup.unlearning.claim import Claim, totals_hash
from fedup.unlearning.report import Report

MOST_SHORTENED = 0.05  # share of rows beyond the public bound, above which the grid is refused
_JUDGED_ALONE = 100  # added rows: of fewer, a single long one could be more than that share


class ExactModel(nn.Module):
    """A frozen backbone and a head in closed form. What the server keeps of clients is the subclass's own."""

    totals: IntegerMoments  # what the head was made from
    requests: frozenset[Forget]  # what is left out

    def __init__(
        self, backbone: Backbone, num_classes: int, config: MomentConfig, rule: HeadRule, cache: FeatureCache | None
    ) -> None:
        super().__init__()
        self.blank = with_blank_head(backbone, num_classes)  # what clients are asked about
        self.base_fingerprint = fingerprint(self.blank)
        self.config, self.rule = config, rule
        self.cache = FeatureCache() if cache is None else cache
        self.head = RidgeHead(backbone.width, num_classes, backbone.bound)
        self.to(next((weight.device for weight in backbone.parameters()), torch.device("cpu"))).eval()

    @property
    def backbone(self) -> Backbone:
        """The frozen part."""
        backbone = self.blank[0]
        assert isinstance(backbone, Backbone)
        return backbone

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    @property
    @abstractmethod
    def claim(self) -> Claim:
        """What may be claimed of the model as it is now."""

    @property
    def num_classes(self) -> int:
        """Of the declared label set."""
        return len(self.head.bias)

    @property
    def configuration(self) -> dict[str, Any]:
        """All that decides the head besides the rows; fixed before any client was asked. None: not fixed."""
        return configuration_of(self.backbone, self.base_fingerprint, self.config, self.rule, self.num_classes)

    def totals_hash(self, salt: str = "") -> str:
        """The salted sha256 of the totals that the head was made from."""
        return totals_hash(self.totals, self.config, salt)

    def relearn(self, clients: Federation | Contact) -> IntegerMoments:
        """The totals that the remaining clients add up to now, without what is forgotten."""
        return totals_without(self._reach(clients), self.config, union(self.requests))

    def resolved(self, request: Forget, clients: Federation | Contact | None) -> Forget:
        """The request with the rows of its persons, which clients are asked for."""
        return resolved(request, self.contact(clients))

    def contact(self, clients: Federation | Contact | None, *, fresh: bool = False) -> Contact | None:
        """The way to the clients; a federation's features come from the cache, or are computed anew if `fresh`."""
        if not isinstance(clients, Federation):
            return clients
        return in_process_with(clients, self.blank, self.config, FeatureCache() if fresh else self.cache)

    def _reach(self, clients: Federation | Contact | None) -> Contact:
        contact = self.contact(clients)
        if contact is None:
            raise ContactError("This needs answers from clients: pass a federation or a contact.")
        return contact


def configuration_of(
    backbone: Backbone, base: str, config: MomentConfig, rule: HeadRule, num_classes: int
) -> dict[str, Any]:
    """All that decides a head besides the rows."""
    return {
        "backbone": base,
        "preprocessing": backbone.preprocessing,
        "scale": config.step,
        "clip": config.bound,
        "least rows": config.least_rows,
        "label set": num_classes,
        "ridge rule": [rule.ridge, rule.few_rows],
        "calibration rule": rule.sharpness,
    }


def rows_of_all_parts(federation: Federation, forget_set: Forget) -> Tensor:
    """All rows that are named, held-out and validation rows as well: clients keep features of these, too."""
    parts: tuple[Part, ...] = ("train", "validation", "heldout")
    return torch.cat([federation.forgotten(forget_set, part) for part in parts])


def check_shortened(shortened: int, rows: int, config: MomentConfig) -> None:
    """Refuse a grid that is too small for the features."""
    if shortened > MOST_SHORTENED * rows:
        raise DataError(
            f"{shortened:,} of {rows:,} rows are longer than the public bound {config.bound:g}, and "
            f"{MOST_SHORTENED:.0%} are allowed. Take a larger step: Backbone(…, step=…), now {config.step:g}."
        )


def check_added(shortened: int, rows: int, together: tuple[int, int], config: MomentConfig, report: Report) -> None:
    """Refuse added rows that do not fit the grid of a head; `together` with those it has, how many are shortened of how
    many. Few rows may be shortened if that is little of all: then it is noted."""
    if shortened <= MOST_SHORTENED * rows:
        return
    said = f"{shortened:,} of {rows:,} added rows are longer than the public bound {config.bound:g}"
    if rows >= _JUDGED_ALONE or together[0] > MOST_SHORTENED * together[1]:
        raise DataError(
            f"{said}, and {together[0]:,} of {together[1]:,} with those learned from: {MOST_SHORTENED:.0%} are allowed "
            f"(of fewer than {_JUDGED_ALONE} added rows, with those learned from). Nothing was changed. Check how "
            "these rows were preprocessed and add those that fit, or learn again with a backbone of a larger step (now "
            f"{config.step:g})."
        )
    report.note(f"{said}, and were shortened to it. Check how these rows were preprocessed.")


def in_process_with(federation: Federation, blank: nn.Module, config: MomentConfig, cache: FeatureCache) -> InProcess:
    """Clients in this process that read their features from a cache."""
    reader = partial(CachedReader, cache=cache, config=config, base=fingerprint(blank))
    return InProcess(federation, blank, one_reader=True, make_reader=reader)


def check_classes_left(
    before: IntegerMoments, after: IntegerMoments, forget_set: Forget, report: Report, *, force: bool
) -> None:
    """Raise HarmError if a class that nobody asked to forget would lose its last rows; with `force` only note it."""
    lost = (before.counts > 0) & (after.counts == 0)
    others = sorted(set(lost.nonzero().flatten().tolist()) - forget_set.class_ids)
    if not others:
        return
    said = f"No row would be left of class {', '.join(map(str, others))}, which nobody asked to forget."
    if not force:
        error = HarmError(f"{said} Nothing was changed. Answer the request all the same with force=True.", others)
        error.report = report
        raise error
    report.note(said.replace("would be", "is"))


def totals_without(contact: Contact, config: MomentConfig, forget_set: Forget) -> IntegerMoments:
    """What all clients add up to now, without what is forgotten."""
    question = MomentsQuestion(HEAD, config, without=forget_set.class_ids)
    instead = {client: replace(question, excluded=ids) for client, ids in forget_set.sample_ids.items()}
    answers = contact.ask_everyone(question, instead=instead, but=forget_set.client_ids)
    first, *others = (answer.moments for _, answer in answers)
    return sum(others, start=first)


def described(model: ExactModel) -> dict[str, Any]:
    """What is on record of a model: its configuration, and where its backbone comes from."""
    origin = model.backbone.origin
    return {
        "configuration": model.configuration,
        "origin": asdict(origin) if origin else None,
        "rule": asdict(model.rule),
    }

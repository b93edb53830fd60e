"""A head for very many clients: totals alone are kept, and of each client's message a hash."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedup.artifacts import load_tensors, save_tensors
from fedup.clients.collect_moments import of_usual_clients
from fedup.clients.moments import ClientMoments, MomentsQuestion
from fedup.clients.protocol import Contact
from fedup.errors import ArtifactError, ContactError, DataError, FingerprintError, RequestError
from fedup.federation import Federation
from fedup.filters.ridge_head import HeadRule, solve_head
from fedup.models.backbone import HEAD, Backbone, with_blank_head
from fedup.models.views import fingerprint
from fedup.request import Forget, check_known, union
from fedup.statistics.feature_cache import FeatureCache
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig
from fedup.statistics.store import CellName
from fedup.statistics.traffic import Traffic
from fedup.unlearning.claim import Claim, alterations, claim_from, message_hash
from fedup.unlearning.exact_model import ExactModel, check_added, check_classes_left, check_shortened, rows_of_all_parts
from fedup.unlearning.report import Report

_KIND = "cohort"
_TOTALS = ("counts", "sums", "second")
_USUAL_RULE = HeadRule()


@dataclass
class Cohort:
    """What is kept of all clients together. Its size does not grow with them, but for a hash each."""

    total: IntegerMoments
    config: MomentConfig
    base: str
    hashes: dict[int, str]  # of each client's message, whether it is in the total or not
    forgotten: set[int] = field(default_factory=set)
    shortened: int = 0
    unreported: int = 0
    traffic: Traffic = field(default_factory=Traffic)  # of learning

    @property
    def stored_bytes(self) -> int:
        """Bytes of all that is kept."""
        return self.total.nbytes + 32 * len(self.hashes)


class CohortModel(ExactModel):
    """A head on a frozen backbone that clients leave by sending their own sums again.

    Only the message whose hash is kept is subtracted, or added again. Nothing of a single client is ever at the server,
    so the claim is `exact` at once. Classes and samples cannot be told apart in the totals: they are refused.
    """

    def __init__(
        self, backbone: Backbone, cohort: Cohort, *, rule: HeadRule = _USUAL_RULE, cache: FeatureCache | None = None
    ) -> None:
        super().__init__(backbone, len(cohort.total.counts), cohort.config, rule, cache)
        if (cohort.base, cohort.config.step) != (self.base_fingerprint, backbone.step):
            raise FingerprintError("These totals were made with another backbone, or another grid. Take that one.")
        self.cohort = cohort
        self.head.put(solve_head(cohort.total, cohort.config, rule))

    @property
    def totals(self) -> IntegerMoments:  # type: ignore[override]
        """What the head was made from."""
        return self.cohort.total

    @property
    def requests(self) -> frozenset[Forget]:  # type: ignore[override]
        """The clients that left, one request each."""
        return frozenset(Forget.clients([client]) for client in self.cohort.forgotten)

    @property
    def claim(self) -> Claim:
        """What may be claimed of the model as it is now."""
        cohort = self.cohort
        altered = alterations(self.blank, cohort.base, self.head, solve_head(cohort.total, cohort.config, self.rule))
        return claim_from(self.backbone, self.configuration, altered, rows=cohort.total.rows, further=0, sealed=0)

    def unlearn(
        self, request: Forget | Collection[Forget], *, clients: Federation | Contact | None = None, force: bool = False
    ) -> Report:
        """Let clients leave: each sends its sums again, and they are subtracted. Refused (`HarmError`) if they take the
        last rows of a class with them, unless `force` is given."""
        return self._move(self._named(_joined(request), staying=True), clients, sign=-1, force=force)

    def restore(self, request: Forget | Collection[Forget], *, clients: Federation | Contact | None = None) -> Report:
        """Let clients come back: the same message is added again."""
        return self._move(self._named(_joined(request), staying=False), clients, sign=1, force=True)

    def add_clients(self, clients: Federation | Contact, ids: Collection[int]) -> Report:
        """Let clients join: their sums are added to the totals, and a hash of each message is kept."""
        cohort, contact = self.cohort, self._reach(clients)
        if known := sorted(cohort.hashes.keys() & set(ids)):
            raise RequestError(f"Client {known} is here already, and its message is part of the totals.")
        report, before, total, hashes = Report(self.requests), contact.traffic, cohort.total, dict(cohort.hashes)
        shortened, unreported = cohort.shortened, cohort.unreported
        with report.stage("contact"), torch.inference_mode(False):
            for client, answer in contact.ask(dict.fromkeys(sorted(ids), MomentsQuestion(HEAD, cohort.config))):
                total, hashes[client] = total + answer.moments, message_hash(client, answer.moments, cohort.config)
                shortened, unreported = shortened + answer.shortened, unreported + answer.unreported
                report.note_contact(client)
        added = shortened - cohort.shortened, total.rows - cohort.total.rows
        check_added(*added, (shortened, total.rows), cohort.config, report)
        self._serve(replace(cohort, total=total, hashes=hashes, shortened=shortened, unreported=unreported), report)
        report.traffic = contact.traffic - before
        return report

    def purge(self, *, clients: Federation | None = None) -> list[CellName]:
        """Delete the cached features of clients that left. The server keeps nothing else of them, so no cell is
        named; to come back such a client has to compute its features anew, to the same integers."""
        if clients is not None and self.cohort.forgotten:
            self.cache.drop(rows_of_all_parts(clients, union(self.requests)))
        return []

    def _named(self, request: Forget, *, staying: bool) -> frozenset[int]:
        cohort = self.cohort
        if request.class_ids or request.sample_ids or request.subject_tags:
            raise RequestError(
                "Only totals are kept here, and whole clients can leave them. For classes, samples and persons learn "
                "with keep='clients' (`fedup train --keep clients`, into a new folder). Nothing was changed."
            )
        check_known(request, clients=frozenset(cohort.hashes), num_classes=len(cohort.total.counts))
        wrong = sorted(client for client in request.client_ids if (client not in cohort.forgotten) != staying)
        if wrong:
            state = "is forgotten already" if staying else "is not forgotten"
            raise RequestError(f"Client {', '.join(map(str, wrong))} {state}; nothing was changed.")
        if staying and not cohort.hashes.keys() - cohort.forgotten - request.client_ids:
            raise RequestError("No client would be left. Take the model out of service instead.")
        return request.client_ids

    def _move(self, ids: frozenset[int], clients: Federation | Contact | None, *, sign: int, force: bool) -> Report:
        if clients is None:
            listed = ", ".join(map(str, sorted(ids)))
            raise ContactError(
                f"Only totals are kept here: client {listed} must send its own sums again, from the features that it "
                "kept, and there is no way to reach it. Pass clients=…; on the command line have the data set here "
                "(or what FEDUP_DATA names) and run the same command again. Nothing was changed."
            )
        cohort, report, contact = self.cohort, Report(self.requests), self._reach(clients)
        before, total = contact.traffic, cohort.total
        with report.stage("contact"), torch.inference_mode(False):
            for client, answer in contact.ask(dict.fromkeys(sorted(ids), MomentsQuestion(HEAD, cohort.config))):
                self._check(client, answer)
                total = total + answer.moments if sign > 0 else total - answer.moments
                report.note_contact(client)
        forgotten = cohort.forgotten | ids if sign < 0 else cohort.forgotten - ids
        with report.stage("fit"):
            total.check(cohort.config)
            check_classes_left(cohort.total, total, Forget(), report, force=force)
        self._serve(replace(cohort, total=total, forgotten=set(forgotten)), report)
        report.traffic = contact.traffic - before
        return report

    def _serve(self, cohort: Cohort, report: Report) -> None:
        """Solve the head of other totals, and take both."""
        with report.stage("fit"):
            scores = solve_head(cohort.total, cohort.config, self.rule)
        with report.stage("swap"):
            self.head.put(scores)
            self.cohort = cohort
        self.cache.save()
        report.requests, report.centroids_used = self.requests, len(cohort.hashes) - len(cohort.forgotten)

    def _check(self, client: int, answer: ClientMoments) -> None:
        if message_hash(client, answer.moments, self.cohort.config) != self.cohort.hashes[client]:
            raise ContactError(
                f"Client {client} sends other sums than it sent to be learned from, so they cannot be taken out of the "
                "totals, or put back. It must add up the features that it kept: features computed anew may differ in "
                "the last bit. Nothing was changed."
            )

    # --- files

    def save(self, path: str | Path) -> None:
        """Write totals, hashes and the rule to a file. The head is solved again from them."""
        cohort = self.cohort
        header: dict[str, Any] = {
            "base": cohort.base,
            "config": asdict(cohort.config),
            "rule": asdict(self.rule),
            "hashes": {str(client): digest for client, digest in sorted(cohort.hashes.items())},
            "forgotten": sorted(cohort.forgotten),
            "shortened": cohort.shortened,
            "unreported": cohort.unreported,
        }
        save_tensors(path, {name: getattr(cohort.total, name) for name in _TOTALS}, kind=_KIND, header=header)

    @classmethod
    def load(cls, backbone: Backbone, path: str | Path, *, cache: FeatureCache | None = None) -> "CohortModel":
        """Read a model back."""
        tensors, header = load_tensors(path, kind=_KIND)
        try:
            total = IntegerMoments(*(tensors[name] for name in _TOTALS))
            hashes = {int(client): str(digest) for client, digest in header["hashes"].items()}
            counted = int(header["shortened"]), int(header["unreported"])
            away = set(header["forgotten"])
            cohort = Cohort(total, MomentConfig(**header["config"]), str(header["base"]), hashes, away, *counted)
            rule = HeadRule(**header["rule"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path} lacks a part of a cohort ({error!r}). Take a good copy of it.") from error
        return cls(backbone, cohort, rule=rule, cache=cache)


def _joined(request: Forget | Collection[Forget]) -> Forget:
    return request if isinstance(request, Forget) else union(request)


def learn_cohort(
    backbone: Backbone,
    contact: Contact,
    config: MomentConfig,
    *,
    num_classes: int,
    rule: HeadRule,
    cache: FeatureCache | None = None,
) -> CohortModel:
    """One round; each message is added to the totals and then dropped, but for its hash."""
    before = contact.traffic
    total, hashes, shortened, unreported = IntegerMoments.zeros(num_classes, backbone.width), {}, 0, 0
    by_client = list[tuple[int, int]]()
    with torch.inference_mode(False):
        for client, answer in contact.ask_everyone(MomentsQuestion(HEAD, config)):
            total = total + answer.moments
            hashes[client] = message_hash(client, answer.moments, config)
            shortened, unreported = shortened + answer.shortened, unreported + answer.unreported
            by_client += [(answer.shortened, answer.moments.rows)] if answer.moments.rows else []
    if not total.rows:
        raise DataError("No client has rows: there is nothing to learn from.")
    check_shortened(*of_usual_clients(*np.array(by_client).T), config)
    base = fingerprint(with_blank_head(backbone, num_classes))
    cohort = Cohort(total, config, base, hashes, set(), shortened, unreported, contact.traffic - before)
    return CohortModel(backbone, cohort, rule=rule, cache=cache)

"""Where and what to erase: the difference between forgotten rows and retained rows that look like them."""

import hashlib
import json
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from typing import Any

import torch
from torch import nn

from fedup.clients.protocol import Contact
from fedup.errors import RequestError
from fedup.filters.bottleneck import FilterConfig
from fedup.filters.eraser import Eraser, PlacedEraser, make_eraser
from fedup.filters.eraser_site import EraserSite, choose_site, judge_site
from fedup.models.cut import find_cut, offered_cuts
from fedup.models.layout import Granularity
from fedup.request import Forget, union
from fedup.statistics.eraser_statistics import GroupSpreads, RowGroups, Weights, sum_by_cut
from fedup.statistics.kept_eraser import EraserParts
from fedup.statistics.moments import LEAST_ROWS, GroupStatistics, Shift
from fedup.statistics.private_erasure import NoisyGroupStatistics, fixed_site, least_rows
from fedup.statistics.store import Centroids
from fedup.unlearning.eraser_answers import EraserAnswers, parts_in_force, release_name
from fedup.unlearning.lookalikes import Mixture, retained_cells, shift_between, sums_at
from fedup.unlearning.report import Report

_MOST_NAMED = 2  # requests named in a note
LEAST_SIGNAL = 2.5  # times the sampling noise: a smaller shift is not erased


class EraserBuilder:
    """Makes the eraser for a set of requests, and notes the requests without one."""

    def __init__(
        self,
        model: nn.Module,
        cut: str,
        config: FilterConfig,
        contact: Contact | None,
        report: Report,
        *,
        store: Centroids | None = None,
        bound: Collection[int] = (),
    ) -> None:
        self._dp, self._renewed = (None, 0) if store is None else (store.dp, store.renewed)
        self._model, self._cut, self._config = model, cut, config
        self._report, self._price = report, config.max_variance_loss
        self._answers = EraserAnswers(contact, report, store.eraser_parts if store is not None else {}, bound)
        self.groups: RowGroups | None = None  # the rows that are erased
        self.question: str | None = None  # digest of all that the clients' answers depend on
        self.complete = False  # whether every request is erased
        self._members: dict[str, list[Forget]] = {}  # the requests of each group of rows

    def erasure_for(
        self, requests: Collection[Forget], left_out: Forget, question: str | None, before: PlacedEraser | None
    ) -> PlacedEraser | None:
        """The eraser of the requests, from the clients' statistics; `before` if the question is the same as then."""
        asking = self.groups = self._groups(requests, left_out)
        if asking is None or (self._dp is not None and not self._possible_under_dp(asking)):
            return None
        self.question = self._digest(asking)
        if self.question == question:
            erasure = before
        else:
            with self._report.stage("erase"):
                erasure = (self._private_erasure if self._dp else self._erasure)(asking, requests)
            if self._answers.silent:  # with their answers it would be another one
                self.question += f" without {sorted(self._answers.silent)}"
                erasure = self._not_less(erasure, before, asking)
        self._report.erasure = erasure.about if erasure else None
        self.complete = erasure is not None and set(asking.requests) <= set(erasure.about["parts"])
        return erasure

    def clients_to_ask(self, requests: Collection[Forget], left_out: Forget, question: str | None) -> list[int]:
        """The clients that would be asked. Asks nobody, and refuses what the answer would refuse."""
        self._candidates()
        asking = self._groups(requests, left_out)
        if asking is None or (self._dp is not None and not self._possible_under_dp(asking)):
            return []
        if self._digest(asking) == question:
            return []
        if self._dp is not None:
            kept = self._answers.parts
            return sorted(client for client in _samples(asking) if (client, release_name(asking, client)) not in kept)
        return self._clients(asking) if self._holders(asking) else []

    @property
    def parts(self) -> EraserParts:
        """What clients sent of rows that are erased, to be kept."""
        return parts_in_force(self._answers.parts, self.groups)

    def _not_less(
        self, erasure: PlacedEraser | None, before: PlacedEraser | None, question: RowGroups
    ) -> PlacedEraser | None:
        """The eraser served so far, if the new one lacks rows that it erases: what is forgotten must not come back
        because a client is absent."""
        erased = set(before.about["parts"]) & question.requests.keys() if before is not None else set()
        if before is None or erased <= set(erasure.about["parts"] if erasure is not None else ()):
            return erasure
        self._report.note(
            "The eraser served so far stays: a client that holds rows it erases has not answered, and nothing that it "
            "sent before is kept here."
        )
        return before

    def _groups(self, requests: Collection[Forget], left_out: Forget) -> RowGroups | None:
        """The rows that clients are asked about; None if nothing is erased."""
        self._members = {}
        for request, group in group_rows(requests, left_out, self._config).items():
            self._members.setdefault(group.digest, []).append(request)
        return question_for(requests, left_out, self._config)

    def _erasure(self, question: RowGroups, _: Collection[Forget]) -> PlacedEraser | None:
        holders = self._holders(question)
        question = replace(question, requests={name: question.requests[name] for name in holders})
        if not holders:
            return None
        everyone = {client for clients in holders.values() for client in clients}
        weights = self._mixtures(question, everyone)
        spreads = self._spreads(question, weights, everyone)
        forgotten, reference = (
            {name: sum_by_cut([getattr(sent, kind).get(name, {}) for sent in spreads.values()]) for name in holders}
            for kind in ("forgotten", "reference")
        )
        for name in [name for name in weights if not (forgotten[name] and reference[name])]:
            self._leave("no client told what the forgotten rows, or those like them, are like", question.requests[name])
            del weights[name]
        shifts = {
            name: {
                cut: shift_between(forgotten[name][cut], reference[name][cut], weights[name].chance)
                for cut in forgotten[name]
            }
            for name in weights
        }
        distinct = [name for name in shifts if self._stands_out(shifts[name], question.requests[name])]
        if not distinct:
            return None
        added = {cut: reduce(operator.add, (shifts[name][cut] for name in distinct)) for cut in shifts[distinct[0]]}
        sites = self._sites(added)
        site = choose_site(sites, max_variance_loss=self._price)
        if site.price > self._price:
            cost = f"{site.price:.1%} of the variance at {site.cut}"
            self._report.note(f"The eraser takes {cost} with it: nowhere is it less.")
        senders = sorted({client for name in distinct for client in holders[name]})
        others = sorted({client for name in distinct for client in weights[name].clients} - set(senders))
        pooled = self._answers.second_moments(site, question, senders, others)
        if pooled is None:
            self._leave(f"no client has {LEAST_ROWS} or more forgotten and retained rows, which an eraser needs")
            return None
        at, device = torch.tensor(site.positions), pooled.sums.device
        forgotten_sums, reference_sums = (
            {name: sums_at(group[name][site.cut], at, forgotten[name][site.cut].weight, device) for name in distinct}
            for group in (forgotten, reference)
        )
        groups = GroupStatistics(forgotten_sums, reference_sums, pooled)
        fitted = make_eraser(groups, site.positions, granularity=site.granularity)
        erased = [request for name in distinct for request in self._members[name]]
        about = {
            "cuts": [each.to_json() for each in sites],
            "rows": sum(round(forgotten[name][site.cut].weight) for name in distinct),
            "clients": senders,
            "compared_with": sorted({client for name in distinct for client in weights[name].clients}),
            "parts": distinct,
        }
        return _placed(site, fitted, erased, about)

    def _sites(self, shifts: Mapping[str, Shift]) -> list[EraserSite]:
        """The positions to erase at each possible cut."""
        cuts = self._candidates()
        return [judge_site(cut, over, shifts[cut], max_variance_loss=self._price) for cut, over in cuts.items()]

    # --- what clients are asked

    def _mixtures(self, question: RowGroups, holders: set[int]) -> dict[str, Mixture]:
        """First question, to all: the mixture of retained cells that looks most like the rows of each request."""
        cut, over = next(iter(offered_cuts(self._model, self._cut).items()))
        sketches = self._answers.sketches(cut, over, question, sorted({*self._clients(question), *holders}))
        mixtures: dict[str, Mixture] = {}
        for name in question.requests:
            parts = [sketch.forgotten[name] for sketch in sketches.values() if name in sketch.forgotten]
            rows = sum(part.count for part in parts)
            touched = {client for client, sketch in sketches.items() if name in sketch.forgotten}
            cells = retained_cells(sketches, touched)
            if not rows or not cells:
                few = f"no client has {LEAST_ROWS} or more of the forgotten rows, which an eraser needs"
                few = "the clients that hold them have not answered" if set(self._answers.silent) & holders else few
                alone = "there are no retained rows to compare the forgotten ones with"
                self._leave(alone if rows else few, question.requests[name])
                continue
            mean = sum((part.sums.double() for part in parts), torch.zeros(())) / rows
            mixtures[name] = Mixture.nearest(mean, cells)
        return mixtures

    def _spreads(
        self, question: RowGroups, mixtures: Mapping[str, Mixture], holders: set[int]
    ) -> dict[int, GroupSpreads]:
        """Second question, to clients with forgotten or compared rows: means and variances at each cut."""
        cuts = self._candidates()
        clients = sorted({*self._clients(question), *holders})
        weights: dict[int, Weights] = {c: {name: own.of(c) for name, own in mixtures.items()} for c in clients}
        return self._answers.spreads(cuts, question, weights, holders)

    def _clients(self, question: RowGroups) -> list[int]:
        """The clients that may hold rows to erase or to compare with."""
        erased = union(question.requests.values()).client_ids
        absent = question.forget_set.client_ids - erased
        return [client for client in self._answers.clients if client not in absent]

    def _possible_under_dp(self, question: RowGroups) -> bool:
        """Whether releases under DP allow an eraser; notes why not."""
        assert self._dp is not None
        offered, samples = offered_cuts(self._model, self._cut), _samples(question)
        least = least_rows(self._dp, len(samples))
        if self._dp.unit != "record":
            self._leave("statistics of an eraser protect records, and the guarantee is for subjects")
        elif any(request.client_ids or request.class_ids for request in question.requests.values()):
            self._leave("under differential privacy only samples are erased")
        elif sum(map(len, samples.values())) < least:
            self._leave(f"under {self._dp} an eraser needs {math.ceil(least)} of the forgotten samples or more")
        elif self._config.eraser_cut not in ("auto", *offered) or not offered:
            self._leave("under differential privacy an eraser sits at a cut that the model offers by name")
        elif fixed_site(offered, self._config.eraser_cut)[1] != "each":
            self._leave("under differential privacy there is no eraser for tokens or whole rows")
        else:
            return True
        return False

    def _private_erasure(self, question: RowGroups, requests: Collection[Forget]) -> PlacedEraser | None:
        dp = self._dp
        assert dp is not None
        cut, over = fixed_site(offered_cuts(self._model, self._cut), self._config.eraser_cut)
        senders = sorted(_samples(question))
        noisy = NoisyGroupStatistics.of(dp, self._answers.releases(cut, dp, question, senders))
        site = None if noisy is None else judge_site(cut, over, noisy.shift(), max_variance_loss=self._price)
        if noisy is None or site is None or not site.cover > 0:
            self._leave(f"these samples differ from retained ones by no more than the noise of {dp}")
            return None
        fitted = make_eraser(noisy.at(site.positions), site.positions, granularity=over)
        about = {
            "cuts": [site.to_json()],
            "rows": sum(len(ids) for request in question.requests.values() for ids in request.sample_ids.values()),
            "clients": senders,
            "parts": sorted(question.requests),
            "mechanism": str(dp),
        }
        return _placed(site, fitted, [r for r in requests if r.sample_ids], about)

    def _holders(self, question: RowGroups) -> dict[str, list[int]]:
        """By request, the clients that hold enough of its rows."""
        holders, small = {}, list[Forget]()
        for name, request in question.requests.items():
            enough = {client for client, ids in request.sample_ids.items() if len(ids) >= LEAST_ROWS}
            whole = set(self._answers.clients) if request.class_ids else set(request.client_ids)
            clients = sorted(enough | whole)
            if not clients:
                small.append(request)
                continue
            holders[name] = clients
            if left := sum(len(ids) for client, ids in request.sample_ids.items() if client not in clients):
                left_out = f"without {left} samples of clients that have fewer than {LEAST_ROWS} each"
                self._report.note(f"The eraser is made {left_out}.", self._members[name])
        if small:
            self._leave(f"no client has {LEAST_ROWS} or more of the forgotten samples, which an eraser needs", *small)
        return holders

    def _digest(self, question: RowGroups) -> str:
        """Of all that the answers depend on: the rows to erase, and the rows to compare them with."""
        deciding = {
            "requests": sorted(question.requests),
            "gone": question.forget_set.to_json() if self._dp is None else _held(question),  # a new release would cost
            "config": [self._cut, self._config.eraser_cut, self._config.max_variance_loss],
            "needs signal": not self._config.requires_eraser,
            **({"dp": asdict(self._dp)} if self._dp is not None else {}),
            **({"renewed": self._renewed} if self._renewed else {}),
        }
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()

    def _stands_out(self, shifts: Mapping[str, Shift], request: Forget) -> bool:
        """Whether a request's rows differ from their lookalikes by more than chance; yes if an eraser is required."""
        if self._config.requires_eraser:
            return True
        signal = choose_site(self._sites(shifts), max_variance_loss=self._price).signal
        if signal < LEAST_SIGNAL:
            same = "these samples differ from retained ones that look like them no more than by chance"
            self._leave(f"{same} ({signal:.1f} times)", request)
        return signal >= LEAST_SIGNAL

    def _candidates(self) -> dict[str, Granularity]:
        """The possible cuts: the one named, or all that the model offers up to that of the bottleneck."""
        offered, named = offered_cuts(self._model, self._cut), self._config.eraser_cut
        if named != "auto":
            return {find_cut(self._model, named): offered.get(named, "each")}
        early = list(offered)[: list(offered).index(self._cut) + 1] if self._cut in offered else list(offered)
        return {cut: offered.get(cut, "each") for cut in dict.fromkeys([*early, self._cut])}

    def _leave(self, why: str, *groups: Forget) -> None:
        """Note that nothing is erased of a request; an error if an eraser is required."""
        if self._config.requires_eraser:
            raise RequestError(
                f"There can be no eraser: {why}. Use filter='bottleneck', which reads nothing of forgotten rows."
            )
        about = [request for group in groups for request in self._members[group.digest]]
        named = sorted(map(str, about))
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        which = f" to {' and to '.join(named[:_MOST_NAMED])}{more}" if about else ""
        self._report.note(
            f"No eraser was made{which}: {why}. The filter at the cut alone answers; the verdict says what that did.",
            about,
        )


def _placed(site: EraserSite, fitted: Eraser, requests: Sequence[Forget], about: dict[str, Any]) -> PlacedEraser:
    own = {"place": site.to_json(), "rank": fitted.rank, "size_bytes": fitted.size_bytes}
    return PlacedEraser(site.cut, fitted, own | about | {"requests": sorted(r.digest for r in requests)})


def _samples(question: RowGroups) -> Mapping[int, frozenset[int]]:
    """The samples to erase, by client; without clients that have too few to answer."""
    named = union(question.requests.values()).sample_ids
    return {client: ids for client, ids in named.items() if len(ids) >= LEAST_ROWS}


def _held(question: RowGroups) -> dict[str, Any]:
    """What is forgotten at the clients whose samples are erased."""
    held = sorted({client for request in question.requests.values() for client in request.sample_ids})
    samples = {str(client): sorted(ids) for client, ids in question.forget_set.sample_ids.items() if client in held}
    return {"clients": sorted(question.forget_set.client_ids & set(held)), "samples": samples}


def question_for(requests: Collection[Forget], left_out: Forget, config: FilterConfig) -> RowGroups | None:
    """The rows that clients are asked about for an eraser; None if nothing is erased."""
    groups = group_rows(requests, left_out, config).values() if config.wants_eraser else ()
    named = {group.digest: group for group in sorted(groups, key=lambda group: group.digest) if group.kind}
    return RowGroups(named, left_out) if named else None


def group_rows(requests: Collection[Forget], left_out: Forget, config: FilterConfig) -> dict[Forget, Forget]:
    """By request, the rows that are erased together: its own, or, of requests that have too few at every client, those
    of all of them, if together they are enough somewhere."""
    parts = {request: _part(request, left_out, config) for request in requests}
    small = union(part for part in parts.values() if _is_small(part))
    enough = any(len(ids) >= LEAST_ROWS for ids in small.sample_ids.values())
    return {request: small if enough and _is_small(part) else part for request, part in parts.items()}


def _is_small(part: Forget) -> bool:
    return part.kind == "sample" and all(len(ids) < LEAST_ROWS for ids in part.sample_ids.values())


def _part(request: Forget, left_out: Forget, config: FilterConfig) -> Forget:
    """The part of a request to erase: its samples, or all of it if an eraser is required; no samples of forgotten
    clients."""
    samples = {client: ids for client, ids in request.sample_ids.items() if client not in left_out.client_ids}
    whole = config.requires_eraser
    return Forget(request.client_ids if whole else frozenset(), request.class_ids if whole else frozenset(), samples)

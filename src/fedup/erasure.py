"""Where and what to erase: clients are asked twice, for shifts that choose a place, then for statistics at it alone."""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from fedup.contact import Contact
from fedup.contrast import Question
from fedup.cut import find_cut, offered_cuts
from fedup.eraser import Eraser, make_eraser
from fedup.errors import ContactError, RequestError
from fedup.filter import FilterConfig
from fedup.moments import LEAST_ROWS, Contrast, Shift
from fedup.place import Place, choose_place, judge_place
from fedup.positions import Over
from fedup.privacy.guarantee import DP
from fedup.private_erasure import NoisyContrast, fixed_place, least_rows
from fedup.report import Report
from fedup.request import Forget, union

LEAST_SIGNAL = 2.5  # shift over sampling noise below which there is nothing to erase


@dataclass(frozen=True)
class Erasure:
    """An eraser, its cut, and why it sits there."""

    cut: str
    filter: Eraser
    about: Mapping[str, Any]  # plain data for reports


class Erasing:
    """Makes the eraser for a set of requests, and says of which of them nothing could be erased."""

    def __init__(
        self,
        model: nn.Module,
        cut: str,
        config: FilterConfig,
        contact: Contact | None,
        report: Report,
        *,
        dp: DP | None = None,
    ) -> None:
        self._dp = dp
        self._model, self._cut, self._config = model, cut, config
        self._contact, self._report = contact, report
        self.question: str | None = None  # digest of all that decides what the clients answer
        self.complete = False  # whether all is erased that is to be

    def erasure_for(
        self, requests: Collection[Forget], gone: Forget, question: str | None, before: Erasure | None
    ) -> Erasure | None:
        """The eraser of the requests, asked of the clients that hold their rows; what there was `before` where the
        question is the same as then."""
        asking = question_for(requests, gone, self._config)
        if asking is None or (self._dp is not None and not self._possible_under_dp(asking)):
            return None
        self.question = self._digest(asking)
        if self.question == question:
            erasure = before
        else:
            with self._report.stage("erase"):
                erasure = (
                    self._erasure(asking, requests)
                    if self._dp is None
                    else self._private_erasure(asking, requests, self._dp)
                )
        self._report.erasure = erasure.about if erasure else None
        self.complete = erasure is not None and set(asking.requests) <= set(erasure.about["parts"])
        return erasure

    def clients_to_ask(self, requests: Collection[Forget], gone: Forget, question: str | None) -> list[int]:
        """Those that would be asked; nobody is. Refuses what the answer itself would refuse before asking."""
        self._candidates()
        asking = question_for(requests, gone, self._config)
        if asking is None or (self._dp is not None and not self._possible_under_dp(asking)):
            return []
        if self._digest(asking) == question:
            return []
        if self._dp is not None:
            return sorted(_samples(asking))
        return sorted({client for clients in self._holders(asking).values() for client in clients})

    def _erasure(self, question: Question, requests: Collection[Forget]) -> Erasure | None:
        holders = self._holders(question)
        shifts = {name: self._shifts(question, name, clients) for name, clients in holders.items()}
        for client in sorted({client for clients in holders.values() for client in clients}):
            self._report.note_contact(client)
        added = {name: _sum_by_cut(found.values()) for name, found in shifts.items()}
        told = [name for name in holders if self._stands_out(added[name])]
        if not told:
            return None
        places = self._places(_sum_by_cut([added[name] for name in told]))
        place = choose_place(places, most_price=self._config.most_price)
        if place.price > self._config.most_price:
            self._report.notes.append(
                f"The eraser takes {place.price:.1%} of the variance at {place.cut} with it: nowhere is it less."
            )
        asked = sorted({client for name in told for client in holders[name]})
        contrast = self._contrast(
            replace(question, requests={name: question.requests[name] for name in told}), asked, place
        )
        if contrast is None:
            self._leave(f"no client has {LEAST_ROWS} or more forgotten and retained rows, which an eraser needs")
            return None
        fitted = make_eraser(contrast, place.positions, over=place.over)
        rows = sum(max((shift.rows for shift in added[name].values()), default=0) for name in told)
        about = {
            "place": place.to_json(),
            "cuts": [one.to_json() for one in places],
            "rank": fitted.rank,
            "rows": rows or sum(sums.count for sums in contrast.forgotten.values()),
            "clients": asked,
            "size_bytes": fitted.size_bytes,
            "parts": told,
            "requests": sorted(r.digest for r in requests if _part(r, question.gone, self._config).digest in told),
        }
        return Erasure(place.cut, fitted, about)

    def _possible_under_dp(self, question: Question) -> bool:
        """Whether an eraser can be had from releases under DP; says why where it cannot."""
        assert self._dp is not None
        offered = offered_cuts(self._model)
        if self._dp.unit != "record":
            self._leave("statistics of an eraser protect records, and the guarantee is for subjects")
        elif any(request.client_ids or request.class_ids for request in question.requests.values()):
            self._leave("under differential privacy only samples are erased")
        elif sum(len(ids) for ids in _samples(question).values()) < least_rows(self._dp, len(_samples(question))):
            least = least_rows(self._dp, len(_samples(question)))
            self._leave(f"under {self._dp} an eraser needs {math.ceil(least)} of the forgotten samples or more")
        elif self._config.erase_at not in ("auto", *offered) or not offered:
            self._leave("under differential privacy an eraser sits at a cut that the model offers by name")
        elif fixed_place(offered, self._config.erase_at)[1] != "each":
            self._leave("under differential privacy there is no eraser for tokens or whole rows")
        else:
            return True
        return False

    def _private_erasure(self, question: Question, requests: Collection[Forget], dp: DP) -> Erasure | None:
        cut, over = fixed_place(offered_cuts(self._model), self._config.erase_at)
        contact, asked = self._reach(), sorted(_samples(question))
        contact.ledger.check(asked, dp)
        contact.ahead(
            "gather_privately", {client: {"cut": cut, "dp": dp, "question": question.to(client)} for client in asked}
        )
        sent = []
        for client in asked:
            sent.append(contact.gather_privately(client, cut=cut, dp=dp, question=question.to(client)))
            self._report.note_contact(client)
        noisy = NoisyContrast.of(dp, sent)
        place = None if noisy is None else judge_place(cut, over, noisy.shift(), most_price=self._config.most_price)
        if noisy is None or place is None or not place.cover > 0:
            self._leave(f"these samples differ from retained ones by no more than the noise of {dp}")
            return None
        fitted = make_eraser(noisy.contrast(place.positions), place.positions, over=over)
        about = {
            "place": place.to_json(),
            "cuts": [place.to_json()],
            "rank": fitted.rank,
            "rows": sum(len(ids) for request in question.requests.values() for ids in request.sample_ids.values()),
            "clients": asked,
            "size_bytes": fitted.size_bytes,
            "parts": sorted(question.requests),
            "requests": sorted(r.digest for r in requests if r.sample_ids),
            "mechanism": str(dp),
        }
        return Erasure(cut, fitted, about)

    def _reach(self) -> Contact:
        if self._contact is None:
            raise ContactError(
                "An eraser is made of statistics that the clients holding the forgotten rows must send, and there is "
                "no way to reach them: pass clients=federation (on the command line, have the data set here), or use "
                "filter='bottleneck'."
            )
        return self._contact

    def _holders(self, question: Question) -> dict[str, list[int]]:
        """By request the clients that hold enough of its rows, and those they must be compared with."""
        found = {}
        for name, request in question.requests.items():
            enough = {client for client, ids in request.sample_ids.items() if len(ids) >= LEAST_ROWS}
            whole = bool(request.client_ids or request.class_ids)
            clients = sorted(self._reach().clients if whole else enough)
            few = sum(len(ids) for client, ids in request.sample_ids.items() if client not in clients)
            if not clients:
                self._leave(f"no client has {LEAST_ROWS} or more of the forgotten samples, which an eraser needs")
                continue
            if few:
                self._report.notes.append(
                    f"The eraser is made without {few} samples of clients that have fewer than {LEAST_ROWS} each."
                )
            found[name] = clients
        return found

    def _digest(self, question: Question) -> str:
        gone = question.gone
        held = sorted({client for request in question.requests.values() for client in request.sample_ids})
        whole = any(request.client_ids or request.class_ids for request in question.requests.values())
        told = {
            "requests": sorted(question.requests),
            "classes": [] if self._dp is not None else sorted(gone.class_ids),  # a new release would cost
            "clients": sorted(gone.client_ids if whole else gone.client_ids & set(held)),
            "samples": {str(client): sorted(ids) for client, ids in gone.sample_ids.items() if whole or client in held},
            "how": [self._cut, self._config.erase_at, self._config.most_price, question.by_class],
            "needs signal": self._config.filter == "auto",
            **({"dp": asdict(self._dp)} if self._dp is not None else {}),
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def _shifts(self, question: Question, name: str, clients: Sequence[int]) -> dict[int, dict[str, Shift]]:
        """Of one request: what each client tells at each cut that may be taken."""
        one = replace(question, requests={name: question.requests[name]})
        cuts, contact = self._candidates(), self._reach()
        contact.ahead("shifts", {client: {"cuts": cuts, "question": one.to(client)} for client in clients})
        return {client: contact.shifts(client, cuts=cuts, question=one.to(client)) for client in clients}

    def _stands_out(self, shifts: Mapping[str, Shift]) -> bool:
        """Whether a request's rows differ from retained ones by more than chance; not asked where an eraser is."""
        if self._config.filter != "auto":
            return True
        signal = choose_place(self._places(shifts), most_price=self._config.most_price).signal
        if signal < LEAST_SIGNAL:
            self._leave(f"these samples differ from retained ones no more than by chance ({signal:.1f} times)")
        return signal >= LEAST_SIGNAL

    def _places(self, shifts: Mapping[str, Shift]) -> list[Place]:
        cuts, most_price = self._candidates(), self._config.most_price
        if not shifts:  # nobody can compare within its own rows: a row as one vector, at the cut named or the last one
            cut = self._cut if self._config.erase_at == "auto" else next(iter(cuts))
            return [Place(cut, "all", (0,), 1, cover=1.0, price=0.0, signal=float("inf"))]
        return [judge_place(cut, over, shifts[cut], most_price=most_price) for cut, over in cuts.items()]

    def _candidates(self) -> dict[str, Over]:
        """The cuts that may be taken: the one named, or all that the model offers up to that of the bottleneck."""
        offered, named = offered_cuts(self._model), self._config.erase_at
        if named != "auto":
            return {find_cut(self._model, named): offered.get(named, "each")}
        early = list(offered)[: list(offered).index(self._cut) + 1] if self._cut in offered else list(offered)
        return {cut: offered.get(cut, "each") for cut in dict.fromkeys([*early, self._cut])}

    def _contrast(self, question: Question, asked: Sequence[int], place: Place) -> Contrast | None:
        """The second message: full statistics, at the chosen place alone."""
        contact = self._reach()
        at: dict[str, Any] = {"cut": place.cut, "over": place.over, "positions": place.positions}
        contact.ahead("gather", {client: {**at, "question": question.to(client)} for client in asked})
        added: Contrast | None = None
        for client in asked:
            own = question.to(client)
            found = contact.gather(client, **at, question=own)
            self._report.note_contact(client)
            if found is not None:
                added = found if added is None else added + found
        if added is None:
            return None
        usable = any(min(_counts(added, name)) >= LEAST_ROWS for name in added.forgotten)
        return added if usable else None

    def _leave(self, why: str) -> None:
        """Nothing is erased of a request: a note where that was left to us, an error where an eraser was asked for."""
        if self._config.filter != "auto":
            raise RequestError(
                f"There can be no eraser: {why}. Use filter='bottleneck', which reads nothing of forgotten rows."
            )
        self._report.notes.append(f"No eraser: {why}. These samples are left to the bottleneck.")


def _samples(question: Question) -> Mapping[int, frozenset[int]]:
    """All samples in question, by client; of clients with few of them, which tell nothing, none."""
    named = union(question.requests.values()).sample_ids
    return {client: ids for client, ids in named.items() if len(ids) >= LEAST_ROWS}


def _sum_by_cut(found: Iterable[Mapping[str, Shift]]) -> dict[str, Shift]:
    added: dict[str, Shift] = {}
    for shifts in found:
        for cut, shift in shifts.items():
            added[cut] = added[cut] + shift if cut in added else shift
    return added


def _counts(contrast: Contrast, name: str) -> tuple[int, int]:
    return contrast.forgotten[name].count, contrast.reference[name].count


def question_for(requests: Collection[Forget], gone: Forget, config: FilterConfig) -> Question | None:
    """What clients are asked about for an eraser; None where nothing is to be erased."""
    if config.filter == "bottleneck":
        return None
    parts = [_part(request, gone, config) for request in requests]
    named = {part.digest: part for part in sorted(parts, key=lambda part: part.digest) if part.kind}
    return Question(named, gone, config.by_class) if named else None


def _part(request: Forget, gone: Forget, config: FilterConfig) -> Forget:
    """What is to be erased of a request: samples by default, all of it where an eraser was asked for; not what a
    request for the whole client covers."""
    samples = {client: ids for client, ids in request.sample_ids.items() if client not in gone.client_ids}
    whole = config.filter != "auto"
    return Forget(request.client_ids if whole else frozenset(), request.class_ids if whole else frozenset(), samples)

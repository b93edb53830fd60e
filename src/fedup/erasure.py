"""Where and what to erase: clients are asked twice, for shifts that choose a place, then for statistics at it alone."""

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedup.contact import Contact
from fedup.cut import find_cut, offered_cuts
from fedup.eraser import Eraser, make_eraser
from fedup.errors import ContactError, RequestError
from fedup.filter import FilterConfig
from fedup.moments import LEAST_ROWS, Contrast, Question, Shift
from fedup.positions import Over
from fedup.report import Release, Report
from fedup.request import Forget

ENOUGH = 0.99  # of the shift: more positions would be erased for nothing
LEAST_COVER = 0.5  # of the shift that must be within the price for a cut to be taken
LEAST_SIGNAL = 2.5  # shift over sampling noise below which there is nothing to erase
_TOO_FEW = f"no client has {LEAST_ROWS} or more of the forgotten samples, which an eraser needs"


@dataclass(frozen=True)
class Erasure:
    """An eraser, its cut, what clients were asked for it and why it sits where it does."""

    cut: str
    filter: Eraser
    question: str  # digest: the same question gives the same eraser
    about: Mapping[str, Any]  # plain data for reports


@dataclass(frozen=True)
class Place:
    """A cut and the positions of it that would be erased.

    `cover` is the share of the shift between forgotten and retained rows that lies at these positions, `price` the
    share of the variance within both that would go with it, `signal` how many times larger the shift is than it would
    be by chance.
    """

    cut: str
    over: Over
    positions: tuple[int, ...]
    of: int  # positions that the cut has
    cover: float
    price: float
    signal: float

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the number of positions in place of all of them."""
        return {
            "cut": self.cut,
            "over": self.over,
            "positions": len(self.positions),
            "of": self.of,
            "cover": self.cover,
            "price": self.price,
            "signal": self.signal if math.isfinite(self.signal) else None,
        }


def judge_place(cut: str, over: Over, shift: Shift, *, most_price: float) -> Place:
    """The most telling positions of a cut: until they hold nearly all of the shift, or would cost too much."""
    excess = (shift.distance - shift.noise).clamp(min=0)
    price = torch.where(shift.fisher > 0, shift.distance / shift.fisher.clamp(min=1e-30), 0)
    order = shift.fisher.argsort(descending=True, stable=True)
    covers = excess[order].double().cumsum(0) / excess.double().sum().clamp(min=1e-30)
    prices = (shift.rows * price[order].double()).cumsum(0) / shift.variance.double().sum().clamp(min=1e-30)
    enough = int((covers < ENOUGH).sum()) + 1
    affordable = max(1, int((prices <= most_price).sum()))
    many = min(enough, affordable, len(order))
    return Place(
        cut,
        over,
        tuple(sorted(order[:many].tolist())),
        len(order),
        cover=float(covers[many - 1]),
        price=float(prices[many - 1]),
        signal=float(shift.distance.sum() / shift.noise.sum().clamp(min=1e-30)),
    )


def choose_place(places: Sequence[Place], *, most_price: float) -> Place:
    """The earliest cut at which most of the shift can be had within the price; else where most of it can be had.

    The earlier the cut, the less the network has made of the shift: what is erased there cannot grow behind it.
    """
    for place in places:
        if place.cover >= LEAST_COVER and place.price <= most_price:
            return place
    return max(places, key=lambda place: (place.cover / max(place.price, most_price), place.cover))


class Erasing:
    """Makes the eraser for a set of requests, or says why there is none."""

    def __init__(
        self, model: nn.Module, cut: str, config: FilterConfig, contact: Contact | None, report: Report
    ) -> None:
        self._model, self._cut, self._config = model, cut, config
        self._contact, self._report = contact, report
        self._rows = 0  # forgotten ones behind the shifts

    def erasure_for(self, requests: Collection[Forget], gone: Forget, before: Erasure | None) -> Erasure | None:
        """The eraser of the requests, asked of the clients that hold their rows; `before` again where the question is
        the same."""
        question = question_for(requests, gone, self._config)
        if question is None:
            return None
        with self._report.stage("erase"):
            erasure = self._erasure(question, before)
        self._report.erasure = erasure.about if erasure else None
        return erasure

    def clients_to_ask(self, requests: Collection[Forget], gone: Forget, before: Erasure | None) -> list[int]:
        """Those that would be asked; nobody is."""
        question = question_for(requests, gone, self._config)
        asked = self._asked(question) if question is not None else []
        if question is not None and not asked:
            self._say_none(_TOO_FEW)
        self._candidates()  # refuses a cut that is not there
        same = question is not None and before is not None and before.question == self._digest(question, asked)
        return [] if same else asked

    def _erasure(self, question: Question, before: Erasure | None) -> Erasure | None:
        asked = self._asked(question)
        if not asked:
            self._say_none(_TOO_FEW)
            return None
        digest = self._digest(question, asked)
        if before is not None and before.question == digest:
            return before
        places = self._places(question, asked)
        place = choose_place(places, most_price=self._config.most_price)
        if self._config.filter == "auto" and place.signal < LEAST_SIGNAL:
            self._say_none(
                f"forgotten and retained rows differ no more than by chance ({place.signal:.1f} times), so there is "
                "nothing to erase"
            )
            return None
        contrast = self._contrast(question, asked, place)
        if contrast is None:
            self._say_none(f"no client has {LEAST_ROWS} or more forgotten rows of one kind, which an eraser needs")
            return None
        fitted = make_eraser(contrast, place.positions, over=place.over)
        about = {
            "place": place.to_json(),
            "cuts": [one.to_json() for one in places],
            "rank": fitted.rank,
            "rows": self._rows or sum(sums.count for sums in contrast.forgotten.values()),
            "clients": sorted(asked),
            "size_bytes": fitted.size_bytes,
        }
        return Erasure(place.cut, fitted, digest, about)

    def _reach(self) -> Contact:
        if self._contact is None:
            raise ContactError(
                "An eraser is made of statistics that the clients holding the forgotten rows must send, and there is "
                "no way to reach them: pass clients=federation, or use filter='bottleneck'."
            )
        return self._contact

    def _asked(self, question: Question) -> list[int]:
        """The clients that hold enough of the rows, and those they must be compared with."""
        samples = {
            client
            for request in question.requests.values()
            for client, ids in request.sample_ids.items()
            if len(ids) >= LEAST_ROWS
        }
        if any(request.client_ids or request.class_ids for request in question.requests.values()):
            return sorted(self._reach().clients)
        return sorted(samples)

    def _digest(self, question: Question, asked: Sequence[int]) -> str:
        """Of all that decides what the clients answer."""
        gone = question.gone
        told = {
            "requests": sorted(question.requests),
            "classes": sorted(gone.class_ids),
            "clients": sorted(gone.client_ids & set(asked)),
            "samples": {str(client): sorted(gone.sample_ids.get(client, ())) for client in asked},
            "how": [self._cut, self._config.erase_at, self._config.most_price, question.by_class],
            "needs signal": self._config.filter == "auto",
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def _places(self, question: Question, asked: Sequence[int]) -> list[Place]:
        """The first message: shifts at each cut that may be taken."""
        contact = self._reach()
        cuts = self._candidates()
        added: dict[str, Shift] = {}
        for client in asked:
            own = question.to(client)
            shifts = contact.shifts(client, cuts=cuts, question=own)
            size = sum(shift.size_bytes for shift in shifts.values())
            self._note(client, own, {"cuts": list(cuts)}, size, "shifts")
            for cut, shift in shifts.items():
                added[cut] = added[cut] + shift if cut in added else shift
        self._rows = max((shift.rows for shift in added.values()), default=0)
        if not added:  # nobody can compare within its own rows: at the last cut all positions are few
            return [Place(self._cut, "all", (0,), 1, cover=1.0, price=0.0, signal=float("inf"))]
        return [judge_place(cut, over, added[cut], most_price=self._config.most_price) for cut, over in cuts.items()]

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
        added: Contrast | None = None
        for client in asked:
            own, told = question.to(client), {"cut": place.cut, "over": place.over, "positions": place.positions}
            found = contact.gather(client, cut=place.cut, over=place.over, positions=place.positions, question=own)
            self._note(client, own, told, found.size_bytes if found else 0, "moments")
            if found is not None:
                added = found if added is None else added + found
        if added is None:
            return None
        usable = any(min(_counts(added, name)) >= LEAST_ROWS for name in added.forgotten)
        return added if usable else None

    def _note(self, client: int, question: Question, told: dict[str, Any], size: int, what: str) -> None:
        self._report.note_contact(client, question.to_json() | told)
        self._report.releases.append(Release(client, 0, size, what))

    def _say_none(self, why: str) -> None:
        """No eraser: a note where that was left to us, an error where one was asked for."""
        if self._config.filter != "auto":
            raise RequestError(
                f"There can be no eraser: {why}. Use filter='bottleneck', which reads nothing of forgotten rows."
            )
        self._report.notes.append(f"No eraser: {why}. The bottleneck works alone.")


def _counts(contrast: Contrast, name: str) -> tuple[int, int]:
    return contrast.forgotten[name].count, contrast.reference[name].count


def question_for(requests: Collection[Forget], gone: Forget, config: FilterConfig) -> Question | None:
    """What is to be erased: samples by default, whole requests where an eraser was asked for; not what a request for
    the whole client covers. None where that is nothing."""
    if config.filter == "bottleneck":
        return None
    whole = config.filter != "auto"
    named = {}
    for request in sorted(requests, key=lambda request: request.digest):
        samples = {client: ids for client, ids in request.sample_ids.items() if client not in gone.client_ids}
        one = Forget(request.client_ids if whole else frozenset(), request.class_ids if whole else frozenset(), samples)
        if one.kind:
            named[one.digest] = one
    return Question(named, gone, config.by_class) if named else None

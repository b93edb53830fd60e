"""Charges every release to its client, and refuses those that would exceed a budget."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from fedup.errors import ArtifactError, BudgetError
from fedup.privacy.accountant import epsilon_of, mu_of
from fedup.privacy.guarantee import DP
from fedup.records import Records

_ROUNDING = 1e-9  # of a budget: the error of a sum of floats


@dataclass(frozen=True)
class Budget:
    """The (ε, δ) that all of a client's releases together may reach."""

    epsilon: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        _ = self.mu  # checks both

    @property
    def mu(self) -> float:
        """The budget in μ-GDP."""
        return mu_of(self.epsilon, self.delta)


@dataclass(frozen=True, slots=True)  # a federation may have very many
class Charge:
    """One release of one client, or a correction: what its own account has beyond the releases known here."""

    client: int
    mu: float
    what: str
    mechanism: str  # in words, for people
    release: str = ""  # its name: one release is charged once
    replayable: bool = False  # test mode: its noise protects nothing
    correction: bool = False  # for releases that the client charged itself for, and that did not come
    covered: float = 0.0  # part of its μ² that a correction charged before it came

    def __post_init__(self) -> None:
        if not 0 <= self.client < 2**64:
            raise ValueError(f"a charge of client {self.client}")
        if not 0 <= self.mu < math.inf or not 0 <= self.covered < math.inf:
            raise ValueError(f"a charge of {self.mu}, of which {self.covered} is covered")
        if type(self.replayable) is not bool or type(self.correction) is not bool:
            raise ValueError("a charge that does not say whether it protects, or whether it is a correction")


class Ledger:
    """What each client has spent: for Gaussian releases μ² adds up.

    The budget under None is that of every client without one of its own. Without any, releases are charged and never
    refused. Messages under no guarantee (the paper's noise, exact statistics) are not charged.

    >>> ledger = Ledger(budgets={None: Budget(2.0)})
    >>> ledger.spend(0, DP(1.0, clip="unit"), "centroids")
    >>> round(ledger.epsilon(0, 1e-5), 6)
    1.0
    """

    def __init__(self, charges: Iterable[Charge] = (), budgets: Mapping[int | None, Budget] | None = None) -> None:
        self.charges = Records(Charge, {"client": "Q", "mu": "d", "covered": "d"}, "release", charges)
        self.budgets = dict(budgets or {})
        self._unrecorded: list[Charge] | None = None  # inside `together`: charges to be recorded at its end
        self._add_up_all()

    def _add_up_all(self) -> None:
        self._squares: dict[int, float] = {}
        self._corrected: dict[int, float] = {}  # μ² of corrections whose releases have not come
        self._named: set[tuple[int, str]] | None = None  # made when a client that was charged before is charged again
        for charge in self.charges:
            self._add_up(charge)

    @property
    def clients(self) -> list[int]:
        """Clients with a charge or a budget of their own."""
        return sorted({*self._squares, *(client for client in self.budgets if client is not None)})

    def budget(self, client: int) -> Budget | None:
        """What the client may spend in total; None without a limit."""
        return self.budgets.get(client, self.budgets.get(None))

    def spent(self, client: int) -> float:
        """What the client has spent: the sum of μ² over its releases."""
        return self._squares.get(client, 0.0)

    def uncovered(self, client: int) -> float:
        """μ² of corrections whose releases have not come: if one comes after all, it is paid for."""
        return self._corrected.get(client, 0.0)

    def mu(self, client: int) -> float:
        """What the client has spent, in μ-GDP."""
        return math.sqrt(self.spent(client))

    def epsilon(self, client: int, delta: float) -> float:
        """What the client has spent, as the ε at that δ."""
        return epsilon_of(self.mu(client), delta)

    def left(self, client: int) -> float:
        """The ε of the largest single release that the client still allows, at its budget's δ."""
        budget = self.budget(client)
        if budget is None:
            return math.inf
        return epsilon_of(math.sqrt(max(0.0, budget.mu**2 - self.spent(client))), budget.delta)

    def affords(self, client: int, squares: float) -> bool:
        """Whether the client's budget allows so much more, as a sum of μ²."""
        budget = self.budget(client)
        return budget is None or self.spent(client) + squares <= budget.mu**2 * (1 + _ROUNDING)

    def check(self, clients: Iterable[int], dp: DP) -> None:
        """Raise unless these clients can afford such a release, one named twice two of them; nothing is charged."""
        for client, releases in Counter(clients).items():
            budget = self.budget(client)
            if budget is not None and dp.is_replayable:
                raise BudgetError(
                    f"Client {client} has a privacy budget, and noise that can be replayed protects nothing: no budget "
                    "allows it. Leave replay_seed out. Nothing was released."
                )
            after = self.spent(client) + releases * dp.mu**2
            if budget is None or self.affords(client, releases * dp.mu**2):
                continue
            wanted = "A release" if releases == 1 else f"{releases} releases, each"
            raise BudgetError(
                f"Client {client} has spent ε = {self.epsilon(client, budget.delta):.4g} of its ε = {budget.epsilon:g} "
                f"at δ = {budget.delta:g}. {wanted} with {dp} would bring it to "
                f"{epsilon_of(math.sqrt(after), budget.delta):.4g}; one with ε = {self.left(client):.4g} at that δ is "
                "left. Nothing was released."
            )

    def check_exact(self, clients: Iterable[int]) -> None:
        """Raise if one of these clients has a budget: no budget allows a message without a guarantee."""
        limited = [client for client in clients if self.budget(client) is not None]
        if limited:
            raise BudgetError(
                f"Client {limited[0]} has a privacy budget, and these messages are under no guarantee: no budget "
                "allows them. Collect under DP (epsilon and clip). Nothing was released."
            )

    def spend(self, client: int, dp: DP, what: str, release: str = "") -> None:
        """Charge a release, or refuse it. It is recorded before the noise is drawn, so that none goes uncharged, and
        charged once by its name."""
        if release and self._is_charged(client, release):
            return
        self.check([client], dp)
        self._charge(Charge(client, dp.mu, what, str(dp), release, dp.is_replayable))

    def came(self, client: int, dp: DP, what: str, release: str, *, reported: float | None = None) -> None:
        """Charge a release that arrived: it was made, whatever the budget. `release` identifies its content, so that it
        is charged once.

        `reported` is what the client has spent by its own account, with this release. If that is more than is known
        here, releases were lost on the way, and a correction is charged; it covers those that come after all.
        """
        if not self._is_charged(client, release):
            square = dp.mu**2
            beyond = 0.0 if reported is None else self.spent(client) + square - reported
            covered = min(beyond, self.uncovered(client), square) if beyond > _ROUNDING * square else 0.0
            mu = math.sqrt(max(0.0, square - covered)) if covered else dp.mu
            self._charge(Charge(client, mu, what, str(dp), release, dp.is_replayable, covered=covered))
        if reported is not None:
            self.correct(client, reported, "releases that did not come")

    def correct(self, client: int, total: float, why: str) -> None:
        """Raise what the client has spent to the `total` of μ² of its own account; it is never lowered."""
        missing = total - self.spent(client)
        if missing > _ROUNDING * total:
            self._charge(
                Charge(client, math.sqrt(missing), f"correction: {why}", "by the client's own account", correction=True)
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Record all charges made inside in one step, at the end; if that fails, none of them counts.

        No release that is charged inside may be made, or used, before the end.
        """
        if self._unrecorded is not None:  # a part of what is recorded together anyway
            yield
            return
        self._unrecorded, before = [], len(self.charges)
        try:
            yield
        finally:  # a release that came was made, whatever an error says of the next one
            new, self._unrecorded = self._unrecorded, None
            try:
                if new:
                    self._record(new)
            except BaseException:
                self.charges.cut(before)
                self._add_up_all()
                raise

    def _charge(self, charge: Charge) -> None:
        if self._unrecorded is None:
            self._record([charge])
        else:
            self._unrecorded.append(charge)
        self.charges.append(charge)
        self._add_up(charge)

    def _add_up(self, charge: Charge) -> None:
        client, square = charge.client, charge.mu**2
        self._squares[client] = self.spent(client) + square
        if charge.correction or charge.covered:
            left = self.uncovered(client) + (square if charge.correction else -charge.covered)
            self._corrected[client] = max(0.0, left)
        if charge.release and self._named is not None:
            self._named.add((client, charge.release))

    def _is_charged(self, client: int, release: str) -> bool:
        if client not in self._squares:  # as all are in a first collection
            return False
        if self._named is None:
            self._named = {(charge.client, charge.release) for charge in self.charges}
        return (client, release) in self._named

    def _record(self, charges: Sequence[Charge]) -> None:
        """For ledgers with a store: write charges there first, in one step; if that fails, nothing is released."""

    def copy(self) -> "Ledger":
        """A separate account with the same charges and budgets so far.

        A ledger with a store is not copied: two accounts that do not know each other's charges could spend one budget
        twice.
        """
        return Ledger(self.charges, self.budgets) if type(self) is Ledger else self

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "charges": [asdict(charge) for charge in self.charges],
            "budgets": [[client, asdict(budget)] for client, budget in self.budgets.items()],
        }

    def terms_to_json(self) -> dict[str, Any]:
        """Plain data, without the charges: what these share, and the budgets."""
        terms = dict.fromkeys(_terms(charge) for charge in self.charges)
        budgets = [[client, asdict(own)] for client, own in self.budgets.items()]
        return {"terms": [dict(zip(_SHARED, own, strict=True)) for own in terms], "budgets": budgets}

    def charge_rows(self) -> Iterator[list[Any]]:
        """The charges as plain data, one by one, without what is in `terms_to_json`."""
        return _rows(self.charges, {})

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Ledger":
        """The inverse of `to_json`; also of `terms_to_json` with `charge_rows` as its charges."""
        try:
            charges = list(ungrouped(plain)) if "terms" in plain else [Charge(**charge) for charge in plain["charges"]]
            ledger = Ledger(charges, {client: Budget(**budget) for client, budget in plain["budgets"]})
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"A ledger is damaged ({error!r}). Take a good copy of it.") from error
        named = [charge.client for charge in charges] + [client for client in ledger.budgets if client is not None]
        if any(type(client) is not int for client in named) or len(ledger.budgets) != len(plain["budgets"]):
            raise ArtifactError("A ledger was edited: a client is no number, or has two budgets. Take a good copy.")
        return ledger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # it changes


_SHARED = ("what", "mechanism", "replayable", "correction")  # the same for most charges: written once


def grouped(charges: Iterable[Charge]) -> dict[str, Any]:
    """Charges as plain data, in which what they share is written once."""
    terms: dict[tuple[Any, ...], int] = {}
    rows = list(_rows(charges, terms))
    return {"terms": [dict(zip(_SHARED, values, strict=True)) for values in terms], "charges": rows}


def _rows(charges: Iterable[Charge], terms: dict[tuple[Any, ...], int]) -> Iterator[list[Any]]:
    """Charges without what they share, which is noted in `terms`, in the order in which it comes first."""
    for charge in charges:
        place = terms.setdefault(_terms(charge), len(terms))
        yield [charge.client, charge.mu, charge.release, charge.covered, place]


def _terms(charge: Charge) -> tuple[Any, ...]:
    return tuple(getattr(charge, name) for name in _SHARED)


def ungrouped(plain: Mapping[str, Any]) -> Iterator[Charge]:
    """The opposite, in their order."""
    terms = [dict(own) for own in plain["terms"]]
    for client, mu, release, covered, place in plain["charges"]:
        yield Charge(client=client, mu=mu, release=release, covered=covered, **terms[place])

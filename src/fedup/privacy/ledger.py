"""Every release charged to its client, and a refusal before one that would pass its budget."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedup.errors import ArtifactError, BudgetError
from fedup.privacy.accountant import epsilon_of, mu_of
from fedup.privacy.guarantee import DP

_ROUNDING = 1e-9  # of a budget: a sum of floats may pass by so much what its parts were planned for


@dataclass(frozen=True)
class Budget:
    """The (ε, δ) that all of a client's releases together may reach."""

    epsilon: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        _ = self.mu  # checks both

    @property
    def mu(self) -> float:
        """The same in μ-GDP."""
        return mu_of(self.epsilon, self.delta)


@dataclass(frozen=True)
class Charge:
    """One release of one client."""

    client: int
    mu: float
    what: str
    mechanism: str
    release: str = ""  # its own name, where it may come to be charged twice

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise ValueError(f"a charge of {self.mu}")


def _many(releases: int) -> str:
    return "A release" if releases == 1 else f"{releases} releases, each"


class Ledger:
    """What each client has spent: for Gaussian releases μ² adds up.

    The budget under None is that of every client without one of its own. Without any, releases are charged and never
    refused. What is not under the guarantee (σ of the paper, exact statistics) is no business of the ledger.

    >>> ledger = Ledger(budgets={None: Budget(2.0)})
    >>> ledger.spend(0, DP(1.0, clip="unit"), "centroids")
    >>> round(ledger.epsilon(0, 1e-5), 6)
    1.0
    """

    def __init__(self, charges: Iterable[Charge] = (), budgets: Mapping[int | None, Budget] | None = None) -> None:
        self.charges = list(charges)
        self.budgets = dict(budgets or {})
        self._squares: dict[int, float] = {}
        self._named = {(charge.client, charge.release) for charge in self.charges}
        for charge in self.charges:
            self._squares[charge.client] = self._squares.get(charge.client, 0.0) + charge.mu**2

    @property
    def clients(self) -> list[int]:
        """Those that released something or have a budget of their own."""
        return sorted({*self._squares, *(client for client in self.budgets if client is not None)})

    def budget(self, client: int) -> Budget | None:
        """What the client may spend in all; None where nobody set a limit."""
        return self.budgets.get(client, self.budgets.get(None))

    def mu(self, client: int) -> float:
        """What the client has spent, in μ-GDP."""
        return math.sqrt(self._squares.get(client, 0.0))

    def epsilon(self, client: int, delta: float) -> float:
        """What the client has spent, as the ε at that δ."""
        return epsilon_of(self.mu(client), delta)

    def left(self, client: int) -> float:
        """The ε of the largest single release that the client still allows, at its budget's δ."""
        budget = self.budget(client)
        if budget is None:
            return math.inf
        return epsilon_of(math.sqrt(max(0.0, budget.mu**2 - self._squares.get(client, 0.0))), budget.delta)

    def affords(self, client: int, squares: float) -> bool:
        """Whether so much more, as a sum of μ², is within the client's budget."""
        budget = self.budget(client)
        return budget is None or self._squares.get(client, 0.0) + squares <= budget.mu**2 * (1 + _ROUNDING)

    def check(self, clients: Iterable[int], dp: DP) -> None:
        """Raise unless these clients can afford such a release, one named twice two of them; nothing is charged."""
        for client, releases in Counter(clients).items():
            budget = self.budget(client)
            after = self._squares.get(client, 0.0) + releases * dp.mu**2
            if budget is None or self.affords(client, releases * dp.mu**2):
                continue
            raise BudgetError(
                f"Client {client} has spent ε = {self.epsilon(client, budget.delta):.4g} of its ε = {budget.epsilon:g} "
                f"at δ = {budget.delta:g}. {_many(releases)} with {dp} would bring it to "
                f"{epsilon_of(math.sqrt(after), budget.delta):.4g}; one with ε = {self.left(client):.4g} at that δ is "
                "left. Nothing was released."
            )

    def check_exact(self, clients: Iterable[int]) -> None:
        """Raise if one of these clients has a budget: a message without a guarantee would pass any."""
        limited = [client for client in clients if self.budget(client) is not None]
        if limited:
            raise BudgetError(
                f"Client {limited[0]} has a privacy budget, and these messages are under no guarantee: no budget "
                "allows them. Collect under DP (epsilon and clip). Nothing was released."
            )

    def spend(self, client: int, dp: DP, what: str, release: str = "") -> None:
        """Charge a release; it is recorded before the noise is drawn, so that no release goes uncharged. One with a
        name is charged once."""
        if release and (client, release) in self._named:
            return
        self.check([client], dp)
        charge = Charge(client, dp.mu, what, str(dp), release)
        self._record(charge)
        self.charges.append(charge)
        self._named.add((client, release))
        self._squares[client] = self._squares.get(client, 0.0) + charge.mu**2

    def _record(self, charge: Charge) -> None:
        """Where a ledger is kept elsewhere, a charge is written there first; if that fails nothing is released."""

    def copy(self) -> "Ledger":
        """An account of its own with the same charges and budgets so far.

        Where a ledger is kept elsewhere there is one account, and this is it: two that do not know of each other's
        charges could spend one budget twice.
        """
        return Ledger(self.charges, self.budgets) if type(self) is Ledger else self

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "charges": [asdict(charge) for charge in self.charges],
            "budgets": [[client, asdict(budget)] for client, budget in self.budgets.items()],
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "Ledger":
        """The opposite of `to_json`."""
        try:
            charges = [Charge(**charge) for charge in told["charges"]]
            ledger = Ledger(charges, {client: Budget(**budget) for client, budget in told["budgets"]})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"A ledger is damaged ({error!r}). Take a good copy of it.") from error
        named = [charge.client for charge in charges] + [client for client in ledger.budgets if client is not None]
        if any(type(client) is not int for client in named) or len(ledger.budgets) != len(told["budgets"]):
            raise ArtifactError("A ledger names something that is no client, or one twice: it was edited.")
        return ledger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # it changes

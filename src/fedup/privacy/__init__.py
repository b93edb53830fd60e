"""Protection of what clients send: the paper's noise, and a differential-privacy guarantee with its accounts."""

from fedup.privacy.accountant import delta_of, epsilon_of, mu_of
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Budget, Charge, Ledger

__all__ = ["DP", "Budget", "Charge", "Ledger", "delta_of", "epsilon_of", "mu_of"]

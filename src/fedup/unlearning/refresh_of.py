"""The refresh that fits a store."""

from fedup.clients.protocol import Contact
from fedup.statistics.moment_store import Moments
from fedup.statistics.store import Centroids
from fedup.unlearning.moment_refresh import MomentRefresh
from fedup.unlearning.refresh import Refresh
from fedup.unlearning.report import Report


def refresh_of(store: Centroids, contact: Contact | None, report: Report, *, keep_sealed: bool) -> Refresh:
    """One for moments, or one for centroids."""
    kind = MomentRefresh if isinstance(store, Moments) else Refresh
    return kind(store, contact, report, keep_sealed=keep_sealed)

"""What may be claimed of a learned head after requests, and what the claim rests on."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from fedup.artifacts import digest_of
from fedup.filters.closed_form import Scores
from fedup.filters.ridge_head import RidgeHead
from fedup.models.backbone import Backbone, was_trained
from fedup.models.views import fingerprint
from fedup.request import Forget, union
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig
from fedup.statistics.moment_store import MomentStore

ClaimKind = Literal["exact", "exact model, data retained", "suppressed"]
_SENTENCES: Mapping[str, str] = {
    "exact": "Given a configuration fixed without client data, the served totals and head equal those learned without "
    "the rows, and the server keeps no statistics of them.",
    "exact model, data retained": "Given a configuration fixed without client data, the served totals and head equal "
    "those learned without the rows; sealed statistics or cached features of them are kept: purging deletes them.",
    "suppressed": "The rows are left out of the served head, but it is not shown that the model equals the one learned "
    "without them.",
}
NOT_CLAIMED = (
    "That nothing of the request is left anywhere: the journal, the sizes of clients, the request itself, exports and "
    "backups are outside of the claim.",
    "That the backbone never saw the rows: the claim rests on the word of whoever declared its origin.",
    "That clients are honest: a client that keeps its rows, or sends sums of others, is not noticed.",
    "That the forgotten rows are secret: whoever holds the heads before and after a request of few rows can "
    "reconstruct them.",
)


@dataclass(frozen=True)
class Condition:
    """One thing that a claim rests on, and what was found."""

    name: str
    holds: bool
    found: str


@dataclass(frozen=True)
class Claim:
    """The strongest claim whose conditions hold."""

    kind: ClaimKind
    conditions: Sequence[Condition]

    @property
    def sentence(self) -> str:
        """The claim in words."""
        return _SENTENCES[self.kind]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        conditions = [asdict(condition) for condition in self.conditions]
        return {"kind": self.kind, "sentence": self.sentence, "conditions": conditions, "not_claimed": NOT_CLAIMED}


def claim_of(
    backbone: Backbone,
    store: MomentStore,
    requests: frozenset[Forget],
    configuration: Mapping[str, Any],
    altered: Sequence[str],
) -> Claim:
    """What holds of the head that these requests leave."""
    further, sealed = _rows_left_out_besides(store, requests), _sealed(store, requests)
    return claim_from(backbone, configuration, altered, rows=store.total.rows, further=further, sealed=sealed)


def claim_from(
    backbone: Backbone,
    configuration: Mapping[str, Any],
    altered: Sequence[str],
    *,
    rows: int,
    further: int,
    sealed: int,
) -> Claim:
    """What holds of a head from integer totals of so many rows, where `further` rows were left out that nobody named,
    and so many cells of forgotten rows are kept. `altered` says what is served otherwise than it was learned."""
    origin, missing = backbone.origin, sorted(name for name, value in configuration.items() if value is None)
    conditions = [
        Condition(
            "the backbone is public",
            origin is not None and not was_trained(backbone),
            "it was trained here, on clients' data"
            if was_trained(backbone)
            else f"{origin.source}, {origin.licence}; declared by {origin.declared_by}"
            if origin
            else "nobody declared so",
        ),
        Condition(
            "the configuration was fixed without client data",
            not missing,
            f"not fixed: {', '.join(missing)}" if missing else ", ".join(configuration),
        ),
        Condition("totals are integers", True, f"{rows:,} rows, 64 bits, no noise"),
        Condition(
            "only the rows named were left out",
            not further,
            f"{further:,} rows more, by the rule of least rows or of clients that did not answer yet"
            if further
            else "no other row",
        ),
        Condition("the served model is the one learned", not altered, "; ".join(altered) or "backbone and head"),
    ]
    learned = all(condition.holds for condition in conditions)
    retained = f"{sealed} cells are sealed: purge them" if sealed else "nothing of the rows"
    conditions.append(Condition("the server keeps nothing of the rows", not sealed, retained))
    kind: ClaimKind = "suppressed" if not learned else "exact model, data retained" if sealed else "exact"
    return Claim(kind, conditions)


def with_features(claim: Claim, rows: int) -> Claim:
    """The claim of a folder in which clients keep features, too: those of so many forgotten rows are still there."""
    found = f"of {rows:,} rows: purge them" if rows else "of none"
    condition = Condition("cached features of the rows are deleted", not rows, found)
    kind: ClaimKind = "exact model, data retained" if rows and claim.kind == "exact" else claim.kind
    return Claim(kind, [*claim.conditions, condition])


def alterations(blank: nn.Module, base: str, head: RidgeHead, learned: Scores | None) -> list[str]:
    """How a served model differs from the one with that backbone and those scores; `learned` is None where its totals
    are not those of its statistics."""
    changed = [
        (any(module.training for module in blank[0].modules()), "a part of the backbone is in training mode"),  # type: ignore[index]
        (fingerprint(blank) != base, "weights of the backbone were changed"),
        (learned is None, "the totals are not those of the statistics"),
        (learned is not None and not head.fits(learned), "the head is not the one that its totals give"),
    ]
    return [text for holds, text in changed if holds]


def totals_hash(totals: IntegerMoments, config: MomentConfig, salt: str) -> str:
    """A salted sha256 of totals and their grid: equal for equal totals, and tells nothing to whoever lacks the salt."""
    grid = f"{salt} {config.bound} {config.step}"
    return digest_of(grid, [("counts", totals.counts), ("sums", totals.sums), ("second", totals.second)])


def message_hash(client: int, moments: IntegerMoments, config: MomentConfig) -> str:
    """sha256 of one client's sums, by which only the same message is accepted later."""
    return totals_hash(moments, config, f"message of client {client}")


def _rows_left_out_besides(store: MomentStore, requests: frozenset[Forget]) -> int:
    """Rows that left with samples by a rule, or with a client that is out of use until it answers. What clients never
    report is the same with the rows and without them."""
    waiting = store.clients_out - union(requests).client_ids
    further = sum(int(store.counts[cell.start]) for client in waiting for cell in store.cells_of(client))
    for (client, label), ids in store.excluded.items():
        cell = store.cell((client, label))
        if cell is not None and cell.name not in store.purged:
            further += int(store.sizes[cell.start]) - int(store.counts[cell.start]) - len(ids)
    return further


def _sealed(store: MomentStore, requests: frozenset[Forget]) -> int:
    forget_set = union(requests)
    cells = (*store.cells_named(forget_set), *store.cells_pending)
    left_out = {cell.name for cell in cells if int(store.counts[cell.start])}
    return len((left_out - store.purged) | set(store.sealed))

"""Phase 2 with moments: every client is asked, once, for sums that add up."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fedup.clients.labels import LabelsQuestion
from fedup.clients.moments import ClientMoments, MomentsQuestion
from fedup.clients.protocol import Contact
from fedup.errors import CutError, DataError
from fedup.filters.closed_form import last_layer
from fedup.models.views import fingerprint
from fedup.request import Forget, union
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import Cell

_SHORTENED = 0.01  # share of rows beyond the bound, above which another bound is tried where nobody chose one
_FINE = 16  # steps in the root mean square of a row, below which the grid is too coarse
_TRIES = 4


@torch.inference_mode(False)  # what is stored must stay writable
def collect_moments(
    model: nn.Module, contact: Contact, config: MomentConfig, cut: str, requests: frozenset[Forget]
) -> MomentStore:
    """The clients' moments without what the requests name.

    Where nobody chose a bound and the usual one shortens many rows, or is far too wide, all are asked again with a
    better one.
    """
    head = last_layer(model, cut)  # raises where a closed form could not be served
    if len(head.weight) != contact.num_classes:
        raise CutError(
            f"The last layer has {len(head.weight)} outputs for {contact.num_classes} classes: moments need as many."
        )
    forget_set = union(requests)
    for request in (*requests, *([forget_set] if requests else [])):
        contact.check(request)
    if contact.ledger.budgets:  # before anybody tells of which class a sample is
        contact.ledger.check_exact([client for client in contact.clients if client not in forget_set.client_ids])
    before = contact.traffic
    labels = dict(contact.ask({client: LabelsQuestion(ids) for client, ids in forget_set.sample_ids.items()}))
    adapts = config.is_usual_grid
    for _ in range(_TRIES):
        answers = _ask(contact, config, cut, forget_set)
        better = _better(config, answers) if adapts else config
        if better == config:
            break
        config = better
    else:
        raise DataError(
            f"No grid suits the features: they are far from {MomentConfig.bound:g} in length, or all zero. "
            "Choose one: statistics=MomentConfig(bound=…, step=…)."
        )
    store = _store(answers, config, contact.num_classes, forget_set, labels)
    store = replace(store, cut=cut, base=fingerprint(model), collected_for=requests, ledger=contact.ledger)
    store.traffic = contact.traffic - before
    store.bytes_up = dict(store.traffic.by_client)
    return store


def _ask(contact: Contact, config: MomentConfig, cut: str, forget_set: Forget) -> list[ClientMoments]:
    question = MomentsQuestion(cut, config, without=forget_set.class_ids)
    instead = {client: replace(question, excluded=ids) for client, ids in forget_set.sample_ids.items()}
    return [answer for _, answer in contact.ask_everyone(question, instead=instead, but=forget_set.client_ids)]


def _better(config: MomentConfig, answers: list[ClientMoments]) -> MomentConfig:
    """The same, or one with a bound that suits the rows: as many steps, wider or finer."""
    rows = sum(answer.moments.rows for answer in answers)
    if not rows:
        return config
    if sum(answer.shortened for answer in answers) > _SHORTENED * rows:
        return replace(config, bound=8 * config.bound, step=8 * config.step)
    squares = sum(float(answer.moments.dense_second().diagonal().sum()) for answer in answers)
    if (squares / rows) ** 0.5 < _FINE * answers[0].moments.width ** 0.5:
        return replace(config, bound=config.bound / 8, step=config.step / 8)
    return config


def _store(
    answers: list[ClientMoments],
    config: MomentConfig,
    num_classes: int,
    forget_set: Forget,
    sample_labels: dict[int, dict[int, int]],
) -> MomentStore:
    answers = sorted(answers, key=lambda answer: answer.client)
    if not any(answer.moments.rows for answer in answers):
        raise DataError(f"No client has {config.least_rows} rows of a class: there is nothing to keep.")
    held = [(answer, label) for answer in answers for label in answer.moments.counts.nonzero().flatten().tolist()]
    emptied = [  # cells that samples took out as a whole: they may come back
        (answer, label)
        for answer in answers
        for label in sorted({*sample_labels.get(answer.client, {}).values()} - forget_set.class_ids)
        if not int(answer.moments.counts[label])
    ]
    held = sorted([*held, *emptied], key=lambda pair: (pair[0].client, pair[1]))
    cells = tuple(Cell(answer.client, label, start, 1) for start, (answer, label) in enumerate(held))
    total, of_classes = IntegerMoments.zeros(num_classes, answers[0].moments.width), dict[int, Tensor]()
    for answer in answers:
        total = total + answer.moments
        for label, second in answer.by_class.items():
            of_classes[label] = of_classes.get(label, 0) + second
    total.check(config)
    excluded: dict[tuple[int, int], frozenset[int]] = {}
    for cell in cells:
        labels = sample_labels.get(cell.client, {})
        ids = frozenset(i for i in forget_set.sample_ids.get(cell.client, ()) if labels.get(i) == cell.label)
        excluded |= {cell.name: ids} if ids else {}
    return MomentStore(
        vectors=torch.stack([answer.moments.sums[label] for answer, label in held]),
        counts=torch.stack([answer.moments.counts[label] for answer, label in held]),
        cells=cells,
        clients=tuple(sorted({*(answer.client for answer in answers), *forget_set.client_ids})),
        num_classes=num_classes,
        how=config,
        cut="",
        base="",
        nonnegative=answers[0].nonnegative,
        shape=answers[0].shape,
        excluded=excluded,
        sample_labels=sample_labels,
        total=total,
        of_clients={answer.client: answer.moments.second for answer in answers if answer.moments.rows},
        of_classes=of_classes,
        unsent={answer.client for answer in answers if answer.moments.rows and not answer.by_class},
        sizes={
            cell.name: int(answer.moments.counts[cell.label]) + len(excluded.get(cell.name, ()))
            for cell, (answer, _) in zip(cells, held, strict=True)
            if int(answer.moments.counts[cell.label])
        },
        few=set().union(*(answer.few for answer in answers)),
        shortened=sum(answer.shortened for answer in answers),
        unreported=sum(answer.unreported for answer in answers),
    )

"""Learning in exact mode: one round, from which the head follows in closed form."""

from typing import Literal, overload

import torch

from fedup.clients.collect_moments import StoreBuilder
from fedup.clients.moments import MomentsQuestion
from fedup.clients.protocol import Contact
from fedup.errors import CutError, DataError, check_choice
from fedup.federation import Federation
from fedup.filters.ridge_head import HeadRule
from fedup.models.backbone import HEAD, Backbone, with_blank_head
from fedup.models.views import fingerprint
from fedup.request import Forget
from fedup.statistics.feature_cache import FeatureCache
from fedup.statistics.integer_moments import MomentConfig
from fedup.unlearning.cohort import CohortModel, learn_cohort
from fedup.unlearning.exact import HeadModel
from fedup.unlearning.exact_model import check_shortened, in_process_with

_USUAL_RULE = HeadRule()


@overload
def learn_head(
    backbone: Backbone,
    clients: Federation | Contact,
    *,
    num_classes: int,
    rule: HeadRule = ...,
    least_rows: int = ...,
    cache: FeatureCache | None = ...,
    keep: Literal["clients"] = ...,
) -> HeadModel: ...
@overload
def learn_head(
    backbone: Backbone,
    clients: Federation | Contact,
    *,
    num_classes: int,
    rule: HeadRule = ...,
    least_rows: int = ...,
    cache: FeatureCache | None = ...,
    keep: Literal["cohort"],
) -> CohortModel: ...
def learn_head(
    backbone: Backbone,
    clients: Federation | Contact,
    *,
    num_classes: int,
    rule: HeadRule = _USUAL_RULE,
    least_rows: int = 1,
    cache: FeatureCache | None = None,
    keep: Literal["clients", "cohort"] = "clients",
) -> HeadModel | CohortModel:
    """A head on a frozen backbone from one round: every client sends integer sums of its features.

    `num_classes` declares the label set: it is part of the configuration, which is fixed without client data. Clients
    leave out classes of which they have fewer than `least_rows` rows; nodes may ask for more.

    The server keeps the sums of all clients, to answer any request. With `keep="cohort"` it keeps totals and a hash of
    each message: for very many clients, whose leavers send their own sums again (`CohortModel`).

    >>> from torch import nn
    >>> x, y = torch.randn(300, 6), torch.arange(300) % 3
    >>> x[torch.arange(300), y] += 4
    >>> federation = Federation.split(x, y, [torch.arange(i, 300, 5) for i in range(5)])
    >>> backbone = Backbone(nn.Sequential(nn.Linear(6, 32), nn.ReLU()), x[:1])
    >>> model = learn_head(backbone, federation, num_classes=3)
    >>> report = model.unlearn(Forget.clients([2]))
    >>> model.totals == learn_head(backbone, federation.without(Forget.clients([2])), num_classes=3).totals
    True
    """
    if not isinstance(backbone, Backbone):
        raise CutError(
            f"The first argument must be a Backbone; found {type(backbone).__name__}: Backbone(module, x[:1])."
        )
    if num_classes != clients.num_classes:
        raise DataError(f"The label set has {num_classes} classes, and the clients' has {clients.num_classes}.")
    config = MomentConfig(backbone.bound, backbone.step, least_rows)
    blank, cache = with_blank_head(backbone, num_classes), FeatureCache() if cache is None else cache
    contact = in_process_with(clients, blank, config, cache) if isinstance(clients, Federation) else clients
    check_choice("keep", keep, Literal["clients", "cohort"])
    if keep == "cohort":
        cohort = learn_cohort(backbone, contact, config, num_classes=num_classes, rule=rule, cache=cache)
        cache.save()
        return cohort
    before = contact.traffic
    builder = StoreBuilder(config, num_classes, Forget(), {}, contact.vectors_folder)
    with torch.inference_mode(False):
        for _, answer in contact.ask_everyone(MomentsQuestion(HEAD, config)):
            builder.add(answer)
        store = builder.finish(cut=HEAD, base=fingerprint(blank), ledger=contact.ledger)
    cache.save()
    store.traffic = contact.traffic - before
    store.bytes_up = dict(store.traffic.by_client)
    check_shortened(*builder.usual_shortened, config)
    return HeadModel(backbone, store, rule=rule, cache=cache)

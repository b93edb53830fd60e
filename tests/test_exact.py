"""Exact mode: whatever was asked, in whatever order, the totals are those of the rows that are left."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedup
from fedup import Backbone, Federation, Forget, HeadModel, Origin, learn_head
from fedup.errors import (
    ArtifactError,
    ContactError,
    CutError,
    DataError,
    FingerprintError,
    HarmError,
    RequestError,
    SettingError,
)
from fedup.federation import Client
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig
from fedup.statistics.store_file import load_centroids, save_centroids

CLASSES, WIDTH = 3, 4
PUBLIC = Origin("drawn in a test", "none needed", "the test")


def tiny(seed: int = 0, rows: int = 60, classes: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    y = torch.arange(rows) % classes
    x = torch.randn(rows, 5, generator=source)
    x[torch.arange(rows), y] += 2
    return (8 * x).round() / 8, y


def backbone(width: int = WIDTH, seed: int = 0, **about) -> Backbone:
    """Numbers of few bits: features are exact, whatever rows are computed together."""
    layer = nn.Linear(5, width)
    with torch.no_grad():
        for part in layer.parameters():
            part.copy_((8 * torch.randn(part.shape, generator=torch.Generator().manual_seed(seed))).round() / 8)
    return Backbone(nn.Sequential(layer, nn.Hardtanh(-9, 9)), torch.zeros(1, 5), **{"origin": PUBLIC, **about})


def federation(x, y, held: dict[int, list[int]]) -> Federation:
    none = torch.zeros(0, dtype=torch.int64)
    clients = tuple(Client(i, torch.tensor(sorted(rows)), none, none) for i, rows in sorted(held.items()))
    return Federation(x, y, clients, CLASSES)


def totals_of(model: HeadModel, x, y, rows) -> IntegerMoments:
    """By hand, from the features themselves."""
    chosen = torch.tensor(sorted(rows), dtype=torch.int64)
    with torch.no_grad():
        features = model.backbone(x)[chosen]
    return IntegerMoments.of(features, y[chosen], CLASSES, model.store.config)


class Walk:
    """A model that is asked at random, beside a plain record of who holds which rows and what is left out."""

    def __init__(self, seed: int) -> None:
        self.rng, (self.x, self.y) = random.Random(seed), tiny(seed % 7)
        rows = list(range(len(self.y)))
        self.rng.shuffle(rows)
        self.held = {i: rows[8 * i : 8 * i + 8] for i in range(4)}
        self.spare = rows[32:]
        self.model = learn_head(backbone(), self.federation, num_classes=CLASSES)

    @property
    def federation(self) -> Federation:
        return federation(self.x, self.y, self.held)

    def left(self) -> set[int]:
        forget = fedup.request.union(self.model.requests)
        return {
            row
            for client, rows in self.held.items()
            for row in rows
            if client not in forget.client_ids
            and int(self.y[row]) not in forget.class_ids
            and row not in forget.sample_ids.get(client, ())
        }

    def step(self) -> None:
        rng, model, clients = self.rng, self.model, self.federation
        match rng.choice(["forget", "forget", "forget", "restore", "purge", "join", "grow", "reload"]):
            case "forget":
                client = rng.choice(sorted(self.held))
                free = sorted(set(self.held[client]) - set().union(*self._named(client)))
                request = rng.choice([Forget.clients([client]), Forget.classes([rng.randrange(CLASSES)]), None])
                if request is None and free:
                    request = Forget.samples({client: rng.sample(free, rng.randint(1, min(4, len(free))))})
                request = request or Forget.clients([client])
                survivors = self._survivors(request)
                if request not in model.requests and len(survivors) > 3:
                    model.unlearn(request, clients=clients, keep_sealed=rng.random() < 0.5, force=True)
            case "restore" if model.requests:
                model.restore(rng.choice(sorted(model.requests, key=str)), clients=clients)
            case "purge" if model.requests:
                model.purge(clients=clients if rng.random() < 0.5 else None)
            case "join" if len(self.spare) >= 4:
                number = max(self.held) + 1
                self.held[number], self.spare = self.spare[:4], self.spare[4:]
                model.add_clients(self.federation, [number])
            case "grow" if len(self.spare) >= 2:
                client = rng.choice(sorted(self.held))
                new, self.spare = self.spare[:2], self.spare[2:]
                self.held[client] = [*self.held[client], *new]
                model.add_samples(self.federation, {client: new})
            case _:
                assert model.relearn(clients) == model.totals

    def _named(self, client: int) -> list[set[int]]:
        return [set(request.sample_ids.get(client, ())) for request in self.model.requests] or [set()]

    def _survivors(self, request: Forget) -> set[int]:
        before, self.model.requests = self.model.requests, self.model.requests | {request}
        left, self.model.requests = self.left(), before
        return left

    def check(self) -> None:
        model, left = self.model, self.left()
        assert model.totals == totals_of(model, self.x, self.y, left), sorted(map(str, model.requests))


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 1000), marks=pytest.mark.slow)], ids=len)
def test_after_any_sequence_the_totals_are_those_of_the_rows_that_are_left(seeds):
    for seed in seeds:
        walk = Walk(seed)
        for _ in range(8):
            walk.step()
            walk.check()


def test_the_head_is_the_one_learned_without_the_rows_bit_for_bit(tmp_path):
    x, y = tiny(rows=300)
    clients = Federation.split(x, y, fedup.dirichlet(y, 6, seed=3), num_classes=CLASSES)
    model = learn_head(backbone(), clients, num_classes=CLASSES)
    samples = Forget.samples({1: clients.client(1).train[:1].tolist()})
    requests = [Forget.clients([4]), samples, Forget.classes([2])]
    for request in requests:
        fedup.unlearn(model, model.store, request, clients=clients)
    without = learn_head(
        model.backbone, clients.without(fedup.request.union(requests)), num_classes=CLASSES, cache=model.cache
    )
    assert torch.equal(model(x), without(x)) and model.totals_hash("a") == without.totals_hash("a")
    assert not bool((model(100 * x).argmax(1) == 2).any())
    assert model.claim.kind == "exact model, data retained"
    fedup.purge(model, model.store)
    assert model.claim.kind == "exact" and model.totals == without.totals
    fedup.save_head(model, tmp_path)
    again = fedup.load_head(backbone(), tmp_path)
    assert torch.equal(again(x), model(x)) and again.requests == model.requests and again.claim == model.claim
    fedup.restore(again, again.store, requests, clients=clients)
    assert again.totals == learn_head(backbone(), clients, num_classes=CLASSES).totals


def test_ten_clients_and_a_hundred_have_the_same_totals():
    x, y = tiny(rows=600)
    cache, totals = fedup.FeatureCache(), []
    for number, concentration in ((10, 0.5), (100, 0.1)):
        parts = fedup.dirichlet(y, number, concentration=concentration, seed=1, min_rows=0)
        parts = [part for part in parts if len(part)]
        clients = Federation.split(x, y, parts, heldout=0.0, validation=0.0, num_classes=CLASSES)
        totals.append(learn_head(backbone(), clients, num_classes=CLASSES, cache=cache).totals)
    assert totals[0] == totals[1] and totals[0].rows == 600


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3), st.integers(-12, 4))
def test_features_from_a_cache_become_the_same_integers_again(values, exponent):
    config = MomentConfig(32767 * 2.0**exponent, 2.0**exponent)
    once, _ = config.integers(torch.tensor([values]))
    again, shortened = config.integers((once * config.step).float())
    assert torch.equal(once, again) and shortened == 0


def test_a_cache_computes_rows_once_and_refuses_what_it_is_not_of(tmp_path):
    x, y = tiny()
    clients = federation(x, y, {0: list(range(30)), 1: list(range(30, 60))})
    cache, passes = fedup.FeatureCache.open(tmp_path / "features.safetensors"), []
    public = backbone()
    public.module.register_forward_hook(lambda *_: passes.append(1))
    model = learn_head(public, clients, num_classes=CLASSES, cache=cache)
    computed = len(passes)
    assert model.relearn(clients) == model.totals and len(passes) == computed
    kept = fedup.FeatureCache.open(tmp_path / "features.safetensors")
    assert kept.digest == cache.digest and kept.rows == 60 and kept.about["torch"] == torch.__version__
    with pytest.raises(DataError, match="another backbone"):
        learn_head(backbone(seed=1), clients, num_classes=CLASSES, cache=kept)
    model.unlearn(Forget.clients([1]))
    model.purge(clients=clients)
    assert fedup.FeatureCache.open(tmp_path / "features.safetensors").rows == 30
    model.restore(Forget.clients([1]), clients=clients)
    assert model.totals == totals_of(model, x, y, range(60))


def test_a_claim_is_no_stronger_than_its_conditions():
    x, y = tiny()
    clients = federation(x, y, {0: list(range(20)), 1: list(range(20, 60))})
    undeclared = learn_head(backbone(origin=None), clients, num_classes=CLASSES)
    undeclared.unlearn(Forget.clients([0]))
    undeclared.purge()
    assert undeclared.claim.kind == "suppressed"
    ruled = learn_head(backbone(), clients, num_classes=CLASSES, least_rows=5)
    ruled.unlearn(
        Forget.samples({1: [21]}), clients=clients, force=True
    )  # the rule takes the other rows of its class as well
    assert ruled.claim.kind == "suppressed"
    trained = fedup.federate(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, CLASSES)), clients, rounds=1).model
    with pytest.raises(SettingError, match="trained here"):
        Backbone(trained[0], x[:1], origin=PUBLIC)
    late = Backbone(trained[0], x[:1])
    late.origin = PUBLIC  # as somebody would who was refused
    assert learn_head(late, clients, num_classes=CLASSES).claim.kind == "suppressed"


@torch.no_grad()
@pytest.mark.parametrize("keep", ["clients", "cohort"])
def test_a_claim_ends_where_the_served_model_is_changed(keep):
    x, y = tiny()
    clients = federation(x, y, {0: list(range(20)), 1: list(range(20, 60))})
    changes = {
        "weights of the backbone": lambda model: model.backbone.module[0].weight[0, 0].add_(1),
        "training mode": lambda model: model.backbone.module.train(),
        "the head": lambda model: model.head.weight[0, 0].add_(0.01 * model.head.weight.abs().max()),
        "head is not the one": lambda model: setattr(model, "rule", replace(model.rule, ridge=1.0)),
        "are not those of the statistics": lambda model: model.totals.sums[0, 0].add_(1),
    }
    for found, change in list(changes.items())[: 5 if keep == "clients" else 4]:
        model = learn_head(backbone(), clients, num_classes=CLASSES, keep=keep)
        model.unlearn(Forget.clients([0]), clients=clients)
        if keep == "clients":
            model.purge()
        assert model.claim.kind == "exact"
        change(model)
        assert model.claim.kind == "suppressed" and found in str(model.claim.conditions)


def test_what_cannot_be_used_is_refused_and_changes_nothing(tmp_path):
    x, y = tiny()
    clients = federation(x, y, {0: list(range(20)), 1: list(range(20, 60))})
    model = learn_head(backbone(), clients, num_classes=CLASSES)

    class Dropped(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, training=True)

    with pytest.raises(CutError, match="dropout"):
        Backbone(Dropped(), x[:1])
    with pytest.raises(DataError, match="public bound"):
        learn_head(backbone(step=2.0**-20), clients, num_classes=CLASSES)
    with pytest.raises(DataError, match="label set"):
        learn_head(backbone(), clients, num_classes=CLASSES + 1)
    fedup.save_head(model, tmp_path)
    with pytest.raises(FingerprintError, match="another version"):
        fedup.load_head(backbone(seed=1), tmp_path)
    with pytest.raises(DataError, match="two scales"):
        fedup.load_head(backbone(step=0.25), tmp_path)
    weight = model.head.weight.clone()
    with pytest.raises(ContactError):
        model.unlearn(Forget.samples({1: [21]}))  # nobody can be asked
    with pytest.raises(RequestError):
        model.add_clients(clients, [9])
    assert model.requests == frozenset() and torch.equal(model.head.weight, weight)
    assert model.totals == totals_of(model, x, y, range(60))
    other = learn_head(backbone(), federation(x, y, {0: [0, 1, 2, 3], 1: [4, 5]}), num_classes=CLASSES)
    save_centroids(other.store, tmp_path / "statistics.safetensors")
    with pytest.raises(ArtifactError, match="other totals"):
        fedup.load_head(backbone(), tmp_path)
    assert load_centroids(tmp_path / "statistics.safetensors").base == model.base_fingerprint


@pytest.mark.parametrize("width", [6, 80], ids=["fewer", "more"])
def test_another_number_of_features_by_a_public_seed_forgets_as_exactly(width):
    x, y = tiny(rows=300)
    clients = Federation.split(x, y, [torch.arange(i, 300, 3) for i in range(3)], num_classes=CLASSES)
    other, again = (fedup.models.backbone.resized(backbone(width=32), width, x[:1]) for _ in range(2))
    model = learn_head(other, clients, num_classes=CLASSES)
    model.unlearn(Forget.clients([2]), force=True)
    without = learn_head(again, replace(clients, clients=clients.clients[:2]), num_classes=CLASSES)
    assert other.width == width and model.totals == without.totals
    assert f"{width} " in other.preprocessing and "seed 0" in other.preprocessing


def test_random_features_behind_a_backbones_own_learn_what_no_linear_head_can_and_are_no_longer_than_its_grid_allows():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 4, generator=rng)
    y = (x[:, 0] * x[:, 1] > 0).long()  # opposite corners
    plain = Backbone(torch.nn.Identity(), x[:1])
    wide = fedup.models.backbone.resized(plain, 128, x[:1])
    clients = Federation.split(x, y, [torch.arange(1000)], num_classes=2, heldout=0.0, validation=0.0)
    right = [
        float((learn_head(own, clients, num_classes=2)(x[1000:]).argmax(1) == y[1000:]).double().mean())
        for own in (plain, wide)
    ]
    assert right[0] < 0.6 and right[1] > 0.85
    ratio = wide(x).norm(dim=1) / plain(x).norm(dim=1)
    assert bool((wide(x)[:, :4] == x).all()) and float(ratio.min()) > 1 and float(ratio.max()) < 2
    for wrong in (0, 10**6):
        with pytest.raises(fedup.errors.SettingError):
            fedup.models.backbone.resized(plain, wrong, x[:1])


@pytest.mark.parametrize("width", [4, 16, 576])
@pytest.mark.parametrize("more", [1, 4, 16, 64, 600])
def test_however_few_random_features_are_added_rows_are_no_longer_than_the_grid_allows(width, more):
    rows = torch.randn(2000, width, generator=torch.Generator().manual_seed(1)).relu() + 1e-6
    plain = Backbone(torch.nn.Identity(), rows[:1])
    wide = fedup.models.backbone.resized(plain, width + more, rows[:1])
    longest = (wide(rows).norm(dim=1) / plain(rows).norm(dim=1)).max()
    assert float(longest) <= wide.bound / plain.bound
    assert float(wide(rows)[:, width:].max()) > 100 * wide.step  # and they are not lost in rounding


def test_a_cohort_keeps_totals_alone_and_takes_only_the_message_that_was_learned_from(tmp_path):
    x, y = tiny(rows=400)
    clients = Federation.split(x, y, [torch.arange(i, 400, 40) for i in range(40)], num_classes=CLASSES)
    model = learn_head(backbone(), clients, num_classes=CLASSES, keep="cohort")
    whole = learn_head(backbone(), clients, num_classes=CLASSES)
    assert model.totals == whole.totals and torch.equal(model(x), whole(x))
    numbers = CLASSES * WIDTH + WIDTH * (WIDTH + 1) // 2  # that a store has of each client, 4 or 8 bytes each
    assert whole.store.stored_bytes - model.cohort.stored_bytes >= 40 * (4 * numbers - 32), "but for a hash of 32 bytes"
    assert model.cohort.stored_bytes <= 8 * (CLASSES + numbers) + 40 * 32
    leavers = Forget.clients([3, 17])
    model.unlearn(leavers, clients=clients)
    whole.unlearn(leavers)
    assert model.totals == whole.totals and model.claim.kind == "exact"
    model.save(tmp_path / "cohort.safetensors")
    again = fedup.CohortModel.load(backbone(), tmp_path / "cohort.safetensors")
    changed = clients.relabeled((y + 1) % CLASSES)
    for wrong, told in ((Forget.clients([5]), "other sums"), (Forget.classes([1]), "keep='clients'")):
        with pytest.raises(RequestError, match=told):
            again.unlearn(wrong, clients=changed)
    assert again.totals == model.totals
    again.restore(leavers, clients=clients)
    assert again.totals == learn_head(backbone(), clients, num_classes=CLASSES).totals


@pytest.mark.parametrize("keep", ["clients", "cohort"])
@pytest.mark.parametrize(("added", "long", "fits"), [(12, 1, True), (12, 12, False), (120, 6, True), (120, 7, False)])
def test_one_long_row_does_not_refuse_a_small_addition_and_many_do_and_change_nothing(keep, added, long, fits):
    x, y = tiny(rows=180)
    x[60 : 60 + long] *= 10_000
    clients = federation(x, y, {0: list(range(60)), 1: list(range(60, 60 + added))})
    model = learn_head(backbone(step=2**-11), federation(x, y, {0: list(range(60))}), num_classes=CLASSES, keep=keep)
    before = model.totals_hash(), model.head.weight.clone()
    if fits:
        notes = model.add_clients(clients, [1]).notes
        assert model.totals.rows == 60 + added
        assert any("1 of 12 added rows" in note for note in notes) == (added == 12)
        return
    with pytest.raises(DataError, match=f"{long} of {added} added rows .* learn again"):
        model.add_clients(clients, [1])
    assert before[0] == model.totals_hash() and torch.equal(before[1], model.head.weight)


@pytest.mark.parametrize("keep", ["clients", "cohort"])
def test_a_class_that_nobody_named_is_lost_by_force_alone_and_a_refusal_changes_nothing(keep):
    x, _ = tiny()
    y = torch.arange(len(x)) % CLASSES
    y[:20], y[20:] = CLASSES - 1, y[20:] % (CLASSES - 1)  # the first client alone has the last class
    clients = federation(x, y, {0: list(range(20)), 1: list(range(20, 60))})
    model = learn_head(backbone(), clients, num_classes=CLASSES, keep=keep)
    before = model.totals_hash(), model.head.weight.clone()
    with pytest.raises(HarmError) as refused:
        model.unlearn(Forget.clients([0]), clients=clients)
    assert refused.value.classes == [CLASSES - 1]
    assert before[0] == model.totals_hash() and torch.equal(before[1], model.head.weight)
    report = model.unlearn(Forget.clients([0]), clients=clients, force=True)
    assert any(f"class {CLASSES - 1}" in note for note in report.notes)

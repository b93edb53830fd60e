"""Collecting under differential privacy: every client tells of every class, once, and only what it can afford."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from tests._asking import ask_one
from tests._private_requests import Strict

from fedup import Federation, Forget, collect, load_centroids, pathological, save_centroids
from fedup.clients.in_process import InProcess
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.errors import BudgetError, DataError, SettingError
from fedup.privacy import DP, Budget, Ledger
from fedup.privacy.dp import Layout, joint_vector
from fedup.privacy.projection import basis_of
from fedup.statistics.centroids import CentroidConfig

NAN = float("nan")
CLEAR = DP(1e5, clip=8.0, replay_seed=0)  # practically without noise
REAL = DP(2.0, clip="unit")


@pytest.fixture(scope="module")
def few_classes_each(digits_federation) -> Federation:
    """Four clients of which each holds three of the ten digits."""
    x, y = digits_federation.x, digits_federation.y
    return Federation.split(x, y, pathological(y, 4, classes_per_client=3), num_classes=10)


def _exact(model, federation, client, dp, without=()):
    """By hand: what the client would tell if there were no noise."""
    rows = torch.tensor([row for row in federation.client(client).train.tolist() if row not in without])
    basis = basis_of(model, "4", 32, how=dp.projection, dims=dp.dims, num_classes=10)
    with torch.no_grad():
        points = model[:4](federation.x[rows]) @ basis
    subjects = None if federation.subjects is None else federation.subjects[rows]
    return joint_vector(dp, points, federation.y[rows], subjects, 10)


def _of(store, client):
    return torch.cat([store.vectors[cell.slot] for cell in store.cells if cell.client == client])


def _with_rows(federation, rows, value):
    x = federation.x.clone()
    x[rows] = value
    return replace(federation, x=x)


@pytest.mark.parametrize(
    "options", [{}, {"cells": 3}, {"projection": "random", "dims": 5}, {"clip": "unit"}, {"unit": "subject"}], ids=str
)
def test_the_store_holds_the_exact_statistics_where_there_is_no_noise_to_speak_of(
    small_model, digits_federation, options
):
    dp, federation = (
        replace(CLEAR, **options),
        digits_federation.with_subjects(torch.arange(len(digits_federation.y)) % 10),
    )
    store = collect(small_model, federation, privacy=dp)
    for client in federation.ids:
        exact = _exact(small_model, federation, client, dp)
        torch.testing.assert_close(_of(store, client).double(), exact, atol=6 * dp.sigma, rtol=1e-4)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_what_is_added_is_noise_of_the_stated_scale_and_another_for_each_client(
    small_model, digits_federation, epsilon
):
    dp = DP(epsilon, clip=8.0, replay_seed=3)
    store = collect(small_model, digits_federation, privacy=dp)
    noise = torch.stack(
        [_of(store, client).double() - _exact(small_model, digits_federation, client, dp) for client in store.clients]
    ).flatten(1)
    assert abs(float(noise.square().mean() / dp.sigma**2) - 1) < 5 * math.sqrt(2 / noise.numel())
    assert (torch.corrcoef(noise) - torch.eye(5)).abs().max() < 5 / math.sqrt(noise.shape[1])


def test_messages_look_alike_whichever_classes_a_client_holds(small_model, few_classes_each):
    held = {tuple(few_classes_each.y[client.train].unique().tolist()) for client in few_classes_each.clients}
    assert max(map(len, held)) < 10, "premise: nobody holds all classes"
    store = collect(small_model, few_classes_each, privacy=replace(REAL, replay_seed=0))
    assert [cell.name for cell in store.cells] == [(client, label) for client in range(4) for label in range(10)]
    assert {cell.size for cell in store.cells} == set(store.counts.tolist()) == {1}
    assert len(set(store.bytes_up.values())) == 1
    assert store.vectors.shape == (40, Layout.of(REAL, 9, 10).size)
    assert (store.vectors.abs().sum(1) > 0).all()  # noise where nothing is held
    assert not store.nonnegative and store.sample_labels == {}


def test_nobody_is_asked_for_numbers_of_rows_or_for_labels(small_model, digits_federation):
    request = Forget.samples({2: digits_federation.client(2).train[:5]})
    store = collect(small_model, Strict(digits_federation, small_model), privacy=CLEAR, forget=[request])
    assert store.collected_for == {request}
    for forget, exact in (([], "MomentsQuestion"), ([request], "LabelsQuestion")):  # premise: without it they are
        with pytest.raises(AssertionError, match=f"{exact} is not under the guarantee"):
            collect(small_model, Strict(digits_federation, small_model), forget=forget)


def test_forgotten_samples_are_never_read(small_model, digits_federation):
    rows = digits_federation.client(2).train[:40]
    request = Forget.samples({2: rows})
    seen, exact = [], _exact(small_model, digits_federation, 2, CLEAR, without=rows.tolist())
    watch = small_model[1].register_forward_pre_hook(lambda _, inputs: seen.append(bool(inputs[0].isnan().any())))
    with watch:
        store = collect(small_model, _with_rows(digits_federation, rows, NAN), privacy=CLEAR, forget=[request])
    assert seen and not any(seen)
    torch.testing.assert_close(_of(store, 2).double(), exact, atol=6 * CLEAR.sigma, rtol=1e-4)
    assert store.excluded == {(2, label): frozenset(rows.tolist()) for label in range(10)}  # of all classes alike


def test_forgotten_clients_and_classes_send_nothing_and_pay_nothing(small_model, digits_federation):
    store = collect(small_model, digits_federation, privacy=CLEAR, forget=[Forget.clients([1]), Forget.classes([3, 4])])
    assert {cell.client for cell in store.cells} == {0, 2, 3, 4}
    assert {cell.label for cell in store.cells} == {0, 1, 2, 5, 6, 7, 8, 9}
    assert store.ledger.clients == [0, 2, 3, 4]


def test_each_client_is_charged_once(small_model, digits_federation):
    ledger = Ledger()
    store = collect(small_model, digits_federation, privacy=REAL, ledger=ledger)
    assert store.ledger is ledger
    assert [(charge.client, charge.what) for charge in ledger.charges] == [(i, "centroids") for i in range(5)]
    assert {charge.mu for charge in ledger.charges} == {REAL.mu}
    collect(small_model, digits_federation, privacy=REAL, ledger=ledger)
    assert ledger.mu(4) == pytest.approx(math.sqrt(2) * REAL.mu) and ledger.epsilon(4, 1e-5) > REAL.epsilon


@pytest.mark.parametrize("budgets", [{None: Budget(1.99)}, {4: Budget(0.1)}], ids=["of all", "of the last"])
def test_a_budget_too_small_stops_all_before_anything_is_computed(small_model, digits_federation, budgets):
    """The model is never run: premise, it is where the budget allows."""
    ran = []
    watched = copy.deepcopy(small_model)
    watched.register_forward_pre_hook(lambda module, args: ran.append(len(args[0])))
    ledger = Ledger(budgets=budgets)
    with pytest.raises(BudgetError, match="Nothing was released"):
        collect(watched, digits_federation, privacy=REAL, ledger=ledger)
    assert ledger.charges == [] and ran == []
    collect(watched, digits_federation, privacy=REAL)
    assert ran


def test_a_budget_just_large_enough_is_spent_to_the_end(small_model, digits_federation):
    ledger = Ledger(budgets={None: Budget(2.0)})
    collect(small_model, digits_federation, privacy=REAL, ledger=ledger)
    assert all(ledger.left(client) == 0 for client in range(5))
    with pytest.raises(BudgetError):
        collect(small_model, digits_federation, privacy=replace(REAL, epsilon=0.1), ledger=ledger)
    assert len(ledger.charges) == 5


def test_a_release_is_charged_before_rows_are_read_and_stays_charged_if_it_fails(small_model, digits_federation):
    class Unreadable(torch.Tensor):
        """Its shape can be seen, and no row of it."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.Tensor.__getitem__ and len(args[0]) == every:
                raise OSError("a broken disk")
            return super().__torch_function__(function, types, args, kwargs or {})

    ledger, every = Ledger(), len(digits_federation.x)
    federation = replace(digits_federation, x=digits_federation.x.as_subclass(Unreadable))
    with pytest.raises(OSError, match="broken disk"):
        ask_one(InProcess(federation, small_model, ledger=ledger), 0, PrivateCentroidsQuestion("4", REAL))
    assert [charge.client for charge in ledger.charges] == [0]


@pytest.mark.parametrize("subjects", ["none", "some missing"])
def test_where_subjects_are_protected_rows_without_one_are_refused(small_model, digits_federation, subjects):
    ids, ledger = torch.arange(len(digits_federation.y)), Ledger()
    ids[digits_federation.client(0).train[3]] = -1
    federation = replace(digits_federation, subjects=None if subjects == "none" else ids)
    with pytest.raises(DataError, match="subject id"):
        collect(small_model, federation, privacy=replace(REAL, unit="subject"), ledger=ledger)
    assert ledger.charges == []


def test_a_contact_has_a_ledger_of_its_own(small_model, digits_federation):
    contact, ledger = InProcess(digits_federation, small_model), Ledger()
    with pytest.raises(SettingError, match="ledger of its own"):
        collect(small_model, contact, privacy=REAL, ledger=ledger)
    assert contact.ledger.charges == ledger.charges == []
    own = InProcess(digits_federation, small_model, ledger=ledger)
    assert collect(small_model, own, privacy=REAL).ledger is ledger and len(ledger.charges) == 5


@pytest.mark.parametrize(
    "dp",
    [
        CLEAR,
        REAL,
        DP(3, 1e-3, clip=2, unit="record", projection="random", dims=7, cells=2, allow_delta=True, count_weight=0.3),
    ],
    ids=["number", "unit", "everything else"],
)
def test_a_store_comes_back_with_its_guarantee_and_its_ledger(small_model, digits_federation, dp, tmp_path):
    ledger = Ledger(budgets={} if dp.is_replayable else {None: Budget(2e5), 2: Budget(3e5, 1e-6)})
    store = collect(small_model, digits_federation, privacy=dp, ledger=ledger)
    save_centroids(store, tmp_path / "centroids")
    back = load_centroids(tmp_path / "centroids")
    assert back.how == dp and torch.equal(back.vectors, store.vectors)
    assert (back.ledger.charges, back.ledger.budgets) == (ledger.charges, ledger.budgets)
    assert back.ledger.left(2) == ledger.left(2)


def test_settings_that_exclude_each_other_are_refused(small_model, digits_federation):
    with pytest.raises(SettingError, match="Under DP"):
        collect(small_model, digits_federation, privacy=REAL, statistics=CentroidConfig(ratio=0.5))
    for privacy in ("dp", 1.0, True, {"epsilon": 1.0}):
        with pytest.raises(SettingError, match="privacy is a DP"):
            collect(small_model, digits_federation, privacy=privacy)

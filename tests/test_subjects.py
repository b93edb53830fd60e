"""Requests that name persons: tags in place of ids, rows from the clients, and nothing claimed of too few rows."""

import json
import stat
from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedup import Federation, Forget, LocalTraining, SubjectKey, Terms, collect, federate, plug, restore, unlearn
from fedup.clients.in_process import InProcess
from fedup.clients.moments import MomentChangeQuestion
from fedup.clients.subjects import resolve
from fedup.errors import ArtifactError, ContactError, DataError, FedUPError, RequestError
from fedup.privacy import DP, Budget, Ledger
from fedup.request import union
from fedup.unlearning.few_rows import ask_for_labels, waiting_for_others

KEY = SubjectKey(bytes(range(32)))
few = settings(max_examples=40, deadline=None, derandomize=True)


def test_a_tag_is_hmac_sha256_of_the_id_and_an_id_is_a_text():
    assert KEY.tag(" P-113 ") == "263b1eb17f105fe18ff7623430b1b163a4774fed06da0859d5312cde3fbcc5ef"
    assert KEY.tag("Zoe\u0301") == KEY.tag("Zo\u00e9") != SubjectKey.new().tag("Zo\u00e9")
    for bad in ("", "  ", 113, None):
        with pytest.raises(RequestError, match="a text that is not empty"):
            KEY.tag(bad)


def test_a_key_is_kept_in_a_file_of_its_owner_and_never_overwritten(tmp_path):
    path = tmp_path / "subjects.key"
    KEY.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and SubjectKey.load(path) == KEY
    assert KEY.secret.hex() not in repr(KEY) and KEY.fingerprint not in KEY.tag("P-113")
    with pytest.raises(FedUPError, match="never overwritten"):
        SubjectKey.new().save(path)
    for loose in (0o640, 0o604):
        path.chmod(loose)
        with pytest.raises(ArtifactError, match=f"mode {loose:04o}.*chmod 600"):
            SubjectKey.load(path)
    path.chmod(0o600)
    assert SubjectKey.load(path) == KEY
    path.write_text("P-113\n")
    with pytest.raises(ArtifactError, match="no key of persons"):
        SubjectKey.load(path)


def test_requests_without_persons_have_the_digests_they_always_had():
    pinned = {
        "c5c5b6e8e2f4988f619049b3f6054ab1bb1cc3638474f664de6ef6334cbcb423": Forget.classes([7])
        | Forget.samples({10: [3, 1], 9: [2]}),
        "b0fc4bcf53be46fd18aaa93285650b399d34f47752ffaf29c0b4742b8f832f40": Forget.clients([2, 0])
        | Forget.samples({1: [5]}),
    }
    assert {request.digest: request for request in pinned.values()} == pinned
    assert all("subjects" not in request.to_json() for request in pinned.values())


PERSONS = st.lists(st.sampled_from(["", "ada", "bob", "eve", "zoe"]), min_size=60, max_size=60)


@few
@given(PERSONS, st.lists(st.integers(0, 2), min_size=60, max_size=60), st.sets(st.sampled_from(["ada", "bob", "eve"])))
def test_clients_resolve_persons_to_exactly_their_training_rows(persons, holders, named):
    parts = [part for client in range(3) if len(part := (torch.tensor(holders) == client).nonzero().flatten())]
    federation = Federation.split(torch.randn(60, 4), torch.arange(60) % 2, parts, num_classes=2)
    federation = federation.with_subjects(persons, key=KEY)
    contact = InProcess(federation, nn.Linear(4, 2))
    rows = {
        client.id: frozenset(row for row in client.train.tolist() if persons[row] in named)
        for client in federation.clients
    }
    trained = {persons[row] for ids in rows.values() for row in ids}
    if not named or trained != named:
        with pytest.raises(RequestError, match=r"is empty|all their rows are held out|no client knows them"):
            resolve(Forget.subjects(named, key=KEY), contact)
        return
    asked = Forget.subjects(named, key=KEY)
    request = resolve(asked, contact)
    assert dict(request.sample_ids) == {client: ids for client, ids in rows.items() if ids}
    assert (request.kind, request.as_named, request.is_resolved) == ("subject", asked, True)
    again = Forget.from_json(json.loads(json.dumps(request.to_json())))
    assert again == request and again.is_resolved and again.digest == request.digest != asked.digest
    assert all(name not in json.dumps(request.to_json()) + str(request) for name in named)
    assert not any(request.at(client).subject_tags for client in rows)


class Table:
    """Four clients with two classes, and persons of one to six rows at one client each."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(0)
        y = torch.arange(600) % 2
        x = torch.randn(600, 8, generator=source)
        x[:, 0] += 3 * y
        sizes = torch.randint(1, 7, (600,), generator=source)
        whose = torch.arange(600).repeat_interleave(sizes)[:600]
        parts = list(torch.arange(600).chunk(4))
        split = Federation.split(x, y, parts, num_classes=2, heldout=0.1, validation=0.1)
        self.federation = split.with_subjects([f"P-{number}" for number in whose.tolist()], key=KEY)
        self.trained = whose[split.rows()].unique().tolist()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            start = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2))
        self.model = federate(start, self.federation, rounds=6, local=LocalTraining(batch_size=16)).model
        self.contact = InProcess(self.federation, self.model)

    def person(self, number: int) -> Forget:
        return resolve(Forget.subjects([f"P-{number}"], key=KEY), self.contact)


@pytest.fixture(scope="module")
def table():
    return Table()


def test_a_person_is_forgotten_like_the_same_rows_and_taken_back_by_name(table):
    asked = Forget.subjects([f"P-{number}" for number in table.trained[:40]], key=KEY)
    named, rows = plug(table.model), plug(table.model)
    stores = [collect(table.model, table.federation) for _ in range(2)]
    report = unlearn(named, stores[0], asked, clients=table.federation, force=True)
    (request,) = report.requests
    unlearn(rows, stores[1], Forget.samples(request.sample_ids), clients=table.federation, force=True)
    assert torch.equal(named(table.federation.x), rows(table.federation.x)) and stores[0].total == stores[1].total
    assert {release.what for release in report.releases} >= {"rows of persons"}, "asking is on record"
    assert list(report.verdicts) == [request.digest]
    with pytest.raises(RequestError, match="active already"):
        unlearn(named, stores[0], asked, clients=table.federation)
    restore(named, stores[0], asked, clients=table.federation)
    assert named.requests == frozenset()


def test_what_cannot_be_known_is_refused_and_changes_nothing(table):
    store, plugged = collect(table.model, table.federation), plug(table.model)
    ada, numbers = Forget.subjects(["ada"], key=KEY), table.federation.with_subjects(torch.arange(600) // 6)
    mixed = Forget.samples({0: [int(table.federation.client(0).train[0])]}) | Forget.subjects(["P-3"], key=KEY)
    for request, clients, error, why in (
        (ada, table.federation, RequestError, "no client knows them"),
        (ada, None, ContactError, "no way to reach"),
        (ada, numbers, RequestError, "does not know whose its rows are"),
        (mixed, table.federation, RequestError, "make two of it"),
    ):
        with pytest.raises(error, match=why):
            unlearn(plugged, store, request, clients=clients)
    assert plugged.served is None and store.total == collect(table.model, table.federation).total
    with pytest.raises(RequestError, match="clients must say first"):
        table.federation.check(ada)
    with pytest.raises(RequestError, match="once clients have said"):
        ada.to_json()
    ledger = Ledger(budgets={None: Budget(1.0)})
    with pytest.raises(FedUPError, match="budget"):  # which rows a person has is told exactly
        resolve(ada, InProcess(table.federation, table.model, ledger=ledger))
    for odd in (["P-1"] * 3, [1] * 600, "P-1"):
        with pytest.raises(DataError):
            table.federation.with_subjects(odd, key=KEY)


def test_numbers_of_persons_are_those_of_ids_for_guarantees_and_with_a_key_for_requests(table):
    ids = [str(number) for number in (torch.arange(600) // 6).tolist()]
    by_number = table.federation.with_subjects(torch.arange(600) // 6, key=KEY)
    by_id = table.federation.with_subjects(ids, key=KEY)
    asked = Forget.subjects(["7"], key=KEY)
    contacts = [InProcess(federation, table.model) for federation in (by_number, by_id)]
    assert resolve(asked, contacts[0]) == resolve(asked, contacts[1])
    privacy = DP(4.0, clip="unit", unit="subject", replay_seed=0)
    stores = [collect(table.model, federation, privacy=privacy) for federation in (by_number, by_id)]
    assert torch.equal(stores[0].vectors, stores[1].vectors)


@settings(few, max_examples=15)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=20, unique=True))
def test_a_pool_is_the_largest_that_clients_answer_and_takes_out_its_own_rows_alone(table, numbers):
    requests = [table.person(table.trained[number]) for number in numbers]
    store, plugged = collect(table.model, table.federation), plug(table.model)
    whole = store.total
    ask_for_labels(store, requests, table.contact)
    waiting = waiting_for_others(store, Forget(), requests)
    assert waiting_for_others(store, Forget(), requests[::-1]) == waiting
    ready = [request for request in requests if request not in waiting]
    for request in waiting:  # nothing of it could be answered with the others
        assert request in waiting_for_others(store, Forget(), [*ready, request])
    if ready:
        unlearn(plugged, store, ready, clients=table.federation, force=True, terms=Terms(measure=False))
        gone = table.federation.forgotten(union(ready))
        few_left = sum(int(store.counts[cell.start]) == 0 for cell in store.cells)
        assert few_left or (whole - store.total).rows == len(gone), "nobody else's rows leave with them"


class Recording(InProcess):
    """Notes what clients were asked to take out of their sums."""

    def ask(self, questions, *, optional=()):
        for client, question in questions.items():
            if isinstance(question, MomentChangeQuestion):
                self.left_out.append((client, question.excluded))
        return super().ask(questions, optional=optional)


def test_no_two_questions_of_a_pooled_answer_differ_by_so_few_rows_that_they_show(table):
    requests = [table.person(number) for number in table.trained[:24]]
    store, contact = collect(table.model, table.federation), Recording(table.federation, table.model)
    contact.left_out = []
    ask_for_labels(store, requests, contact)
    waiting = waiting_for_others(store, Forget(), requests)
    ready = [request for request in requests if request not in waiting]
    assert len(ready) > 5 and all(sum(map(len, request.sample_ids.values())) < 10 for request in ready), "premise"
    report = unlearn(plug(table.model), store, ready, clients=contact, force=True)
    assert report.verdicts.keys() == {request.digest for request in ready}
    y, least = table.federation.y, store.config.least_rows
    for (client, one), (other_client, other) in combinations(contact.left_out, 2):
        if client == other_client:
            differing = Counter(y[sorted(one ^ other)].tolist())
            assert all(rows >= least for rows in differing.values()), differing
    noted = [note for note in report.notes if "is measured with all that were answered with it" in note]
    assert len(noted) == len(ready) and len(report.notes_about[ready[0].digest]) >= 1

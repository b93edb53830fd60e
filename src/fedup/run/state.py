"""What a run folder holds: a fold over its events, and nothing else."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedup.errors import ArtifactError, RequestError
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Budget
from fedup.request import Forget, union
from fedup.run.charges import charges_in
from fedup.run.history import History
from fedup.run.journal import GENESIS, Event

NEW_BASE = ("continued", "retrained")  # kinds of events that put another base in place
_STORED = ("centroids", "filter")  # what belongs to a base


@dataclass(frozen=True)
class FileRecord:
    """A file of the folder as the journal knows it."""

    name: str
    sha256: str
    size_bytes: int

    @property
    def id(self) -> str:
        """The first digits of its hash, by which people and answers name it."""
        return self.sha256[:16]

    def to_json(self) -> dict[str, Any]:
        """As it stands in an event."""
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """A request that came in: in force, waiting for others, open (no filter answers it, its rows are left out), queued
    for the server that reaches the clients, refused by it, taken back, or finished (the model was trained without it).
    """

    id: str
    forget: Forget
    reference: str | None
    asked_in: Event
    restored_in: Event | None = None
    withheld: bool = False
    waiting: bool = False
    waited_since: str | None = None  # when it first had to wait
    first_asked: str | None = None  # when it came in, if clients were asked again since
    queued: bool = False
    postponed: str | None = None  # why the server could not answer it yet (run.queue)
    refusal: str | None = None  # why the server does not answer it
    returning: Event | None = None  # the server that reaches the clients is to take it back; it is in force until then
    followed_in: Event | None = None  # answered again for a later base
    finished_in: Event | None = None  # the base was trained anew without it

    @property
    def is_standing(self) -> bool:
        """Whether it is neither taken back, nor refused, nor finished."""
        return self.restored_in is None and self.refusal is None and self.finished_in is None

    @property
    def is_active(self) -> bool:
        return self.is_standing and not (self.withheld or self.waiting or self.queued)

    @property
    def is_open(self) -> bool:
        return self.is_standing and self.withheld

    @property
    def is_waiting(self) -> bool:
        return self.is_standing and self.waiting

    @property
    def answered_in(self) -> Event:
        """The last event that answered it by name."""
        return self.followed_in or self.asked_in

    @property
    def is_queued(self) -> bool:
        return self.is_standing and self.queued

    @property
    def is_returning(self) -> bool:
        return self.is_standing and self.returning is not None

    @property
    def status(self) -> str:
        """In words."""
        if self.finished_in is not None:
            return "finished"
        if self.refusal is not None or self.is_queued:
            return "refused" if self.refusal is not None else "queued, no filter"
        if self.is_waiting:
            return "waits, no filter"
        return "in force" if self.is_active else "open, no filter" if self.is_open else "taken back"

    @property
    def entry(self) -> Mapping[str, Any]:
        """What the event that answered it noted of it alone."""
        entry: Mapping[str, Any] = next(own for own in self.answered_in.body["requests"] if own["id"] == self.id)
        return entry

    def to_json(self) -> dict[str, Any]:
        """The request and its status, as plain data."""
        return {
            "id": self.id,
            "reference": self.reference,
            "kind": self.forget.kind,
            "reason": self.forget.reason,
            "forget": self.forget.queued_json(),
            "asked_at": self.waited_since or self.first_asked or self.asked_in.at,
            "waited": self.waited_since is not None,
            "status": self.status,
            "restored_at": self.restored_in.at if self.restored_in else None,
            "finished_at": self.finished_in.at if self.finished_in else None,
        }


@dataclass(frozen=True)
class State:
    """A folder after its last event."""

    about: Mapping[str, Any] = field(default_factory=dict)
    trained: Event | None = None
    collected: Event | None = None
    model: FileRecord | None = None
    centroids: FileRecord | None = None
    filter: FileRecord | None = None
    requests: tuple[Request, ...] = ()
    events: History = field(default_factory=History)
    pending: tuple[Mapping[str, Any], ...] = ()  # what waits for clients that have not answered

    @property
    def head(self) -> str:
        """The hash of the last event: it stands for all events before it."""
        return self.events[-1].hash if self.events else GENESIS

    @property
    def base(self) -> str:
        """Fingerprint of the model."""
        return str(self.trained.body["fingerprint"]) if self.trained else ""

    @property
    def generation(self) -> int:
        """Which base is served: 1 as first trained, one more with each that took its place."""
        return self.generation_at(len(self.events))

    def generation_at(self, seq: int) -> int:
        """Which base was served after the event of that number."""
        return 1 + sum(event.kind in NEW_BASE for event in self.events[:seq])

    @property
    def rounds(self) -> int:
        """Rounds of training behind the base, those after the recipe's included."""
        more = (int(event.body["more_rounds"]) for event in self.events if event.kind == "continued")
        return int(self.about.get("rounds", 0)) + sum(more)

    @property
    def is_exact(self) -> bool:
        """Whether a head on a public backbone is served, and `filter` is its file."""
        return "backbone" in self.about

    @property
    def active(self) -> tuple[Request, ...]:
        """The requests in force."""
        return tuple(request for request in self.requests if request.is_active)

    @property
    def open(self) -> tuple[Request, ...]:
        """Requests that no filter answers; their rows are left out all the same."""
        return tuple(request for request in self.requests if request.is_open)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests with too few rows to be answered alone; nothing is suppressed for them yet."""
        return tuple(request for request in self.requests if request.is_waiting)

    @property
    def queued(self) -> tuple[Request, ...]:
        """Requests that wait for a server that reaches the clients, in the order in which they came."""
        return tuple(request for request in self.requests if request.is_queued)

    @property
    def returning(self) -> tuple[Request, ...]:
        """Requests that the server that reaches the clients is to take back; they are in force, or open, until then."""
        return tuple(request for request in self.requests if request.is_returning)

    @property
    def standing(self) -> tuple[Request, ...]:
        """Requests in force, open, waiting and queued."""
        return tuple(request for request in self.requests if request.is_standing)

    @property
    def finished(self) -> tuple[Request, ...]:
        """Requests that the model was trained without: their rows are never used again."""
        return tuple(request for request in self.requests if request.finished_in is not None)

    @property
    def left_out(self) -> Forget:
        """What is no longer trained on: all requests in force, open, waiting and queued."""
        return union(request.forget for request in self.standing)

    @property
    def forgets(self) -> frozenset[Forget]:
        """What the requests in force ask for."""
        return frozenset(request.forget for request in self.active)

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """All files that the folder needs."""
        return tuple(file for file in (self.model, self.centroids, self.filter) if file is not None)

    @property
    def protection(self) -> str:
        """What protected the messages of the collection, in words."""
        return str(self.collected.body["mechanism"]) if self.collected else "none"

    @property
    def guarantee(self) -> DP | None:
        """The guarantee of the collection's messages; None where noise could be replayed."""
        guarantee = self.collected.body["guarantee"] if self.collected else None
        return None if guarantee is None else DP(**guarantee)

    def request(self, request_id: str) -> Request:
        """The request with that id (R1, R2, …) or, where there is none, with that reference; in any case."""
        name = request_id.casefold()
        matches = [request for request in self.requests if request.id.casefold() == name]
        matches = matches or [r for r in self.requests if r.reference and r.reference.casefold() == name]
        if len(matches) == 1:
            return matches[0]
        if matches:
            listed = "; ".join(f"{r.id}: {r.forget}, {r.status}" for r in matches)
            raise RequestError(
                f"{len(matches)} requests have the reference {request_id!r}: {listed}. Name the one that is meant by "
                f"its id, as in {matches[0].id}. Nothing was changed."
            )
        known = ", ".join(f"{r.id} ({r.reference})" if r.reference else r.id for r in self.requests) or "none yet"
        raise RequestError(
            f"There is no request {request_id!r} in this folder; there are: {known}. One that was refused has no id: "
            "`fedup status --json` lists it as declined."
        )

    def request_for(self, forget: Forget) -> Request:
        """The last request for exactly these persons; one that was not taken back comes first."""
        matches = [request for request in self.requests if request.forget.as_named == forget.as_named]
        if not matches:
            others = [own.id for own in self.requests if own.forget.subject_tags & forget.subject_tags]
            hint = f" {', '.join(others)} names others, too: name it by its id." if others else ""
            raise RequestError(f"There is no request to {forget} alone in this folder.{hint} Nothing was changed.")
        return max(matches, key=lambda request: (request.is_standing, int(request.id[1:])))

    def next_id(self, after: int = 0) -> str:
        """The id of the request to come."""
        return f"R{len(self.requests) + after + 1}"


def state_of(events: Iterable[Event]) -> State:
    """The state that these events lead to."""
    state = State()
    for event in events:
        state = after(state, event)
    return state


def after(state: State, event: Event) -> State:
    """The state after one event more: what is before it is not folded again."""
    return replace(changed_by(state, event), events=state.events.plus(event))


def changed_by(state: State, event: Event) -> State:
    """What an event makes of a state, without a note of the event itself."""
    try:
        return _after(state, event)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            f"Event {event.seq} ({event.kind}) cannot be understood: {error!r}. Another version of fedup wrote it; "
            "use that one, or train and collect into a new folder."
        ) from error


def _after(state: State, event: Event) -> State:
    body = event.body
    match event.kind:
        case "created":
            return replace(state, about=body["about"])
        case "trained":
            model = FileRecord(**body["model"]) if body["model"] is not None else None  # a backbone is not stored
            served = FileRecord(**body["head"]) if body.get("head") else state.filter
            return replace(state, trained=event, model=model, filter=served)
        case "collected" | "purged":
            collected = event if event.kind == "collected" else state.collected
            served = FileRecord(**body["filter"]) if body.get("filter") else state.filter
            return replace(state, collected=collected, centroids=FileRecord(**body["centroids"]), filter=served)
        case "unlearned" | "restored" | "renewed":  # renewed: clients were asked again
            requests = _with_restored(state, event) if event.kind == "restored" else _with_new(state, event)
            centroids = FileRecord(**body["centroids"]) if body["centroids"] is not None else state.centroids
            served = None if body["filter"] is None else FileRecord(**body["filter"])
            waits = tuple(body.get("pending", ()))
            return replace(state, requests=requests, centroids=centroids, filter=served, pending=waits)
        case "added":  # rows or clients that came later (run.head_desk)
            names = body["added"]["client_names"]
            about = {**state.about, "client_names": list(names)} if names else state.about
            statistics, served = FileRecord(**body["centroids"]), FileRecord(**body["filter"])
            return replace(state, about=about, centroids=statistics, filter=served)
        case "continued" | "retrained":  # a new base (run.new_base)
            return _with_new_base(state, event)
        case "waiting":
            centroids = FileRecord(**body["centroids"]) if body.get("centroids") else state.centroids
            return replace(state, requests=_with_new(state, event, waiting=True), centroids=centroids)
        case "withdrawn":  # requests that waited
            return replace(state, requests=_with_restored(state, event))
        case "queued":
            return replace(state, requests=_with_new(state, event, queued=True))
        case "restore queued":
            named = set(body["requests"])
            back = (replace(own, returning=event) if own.id in named else own for own in state.requests)
            return replace(state, requests=tuple(back))
        case "postponed" | "refused":
            return replace(state, requests=_with_reason(state, event.kind, body["requests"], body["why"]))
        case "declined":  # a filter not put in force; queued requests are refused with it, unless clients were absent
            ids = [own["id"] for own in body["declined"] if isinstance(own, dict)]
            reason = "postponed" if body.get("pending") else "refused"
            return replace(state, requests=_with_reason(state, reason, ids, body.get("why", "")))
        case "charged" | "corrected" | "booked":  # releases under DP, or what clients' own accounts have beyond them
            for _ in charges_in(event):
                pass
        case "budgeted":  # what clients may spend
            Budget(**body["budget"])
            _ = [int(client) for client in body["clients"]]
        case "bound":  # client numbers to nodes (run.bindings)
            _ = [(int(own["client"]), str(own["identity"])) for own in body["bindings"]]
        case "received":  # what clients of a large collection sent
            _ = [int(sent["client"]) for sent in body["releases"]]
        case "released":
            _ = [int(client) for client in body["clients"]]
        case "evaluated" | "evidenced":  # Retrain's figures, pages
            pass
        case unknown:
            raise KeyError(unknown)
    return state


def _with_new(state: State, event: Event, *, waiting: bool = False, queued: bool = False) -> tuple[Request, ...]:
    """All requests in the order of their ids: new ones, and open, waiting or queued ones that were asked again."""
    requests = {request.id: request for request in state.requests}
    for asked in event.body["requests"]:
        forget, name = Forget.from_json(asked["forget"]), asked["id"]
        since = requests[name].waited_since if name in requests else event.at if waiting or queued else None
        about: dict[str, Any] = {"withheld": asked["withheld"], "waiting": waiting, "queued": queued}
        about["waited_since"] = since
        if event.kind == "renewed":
            about["first_asked"] = requests[name].first_asked or requests[name].asked_in.at
        requests[name] = Request(name, forget, asked["reference"], event, **about)
    return tuple(sorted(requests.values(), key=lambda request: int(request.id[1:])))


def _with_restored(state: State, event: Event) -> tuple[Request, ...]:
    ids = set(event.body["requests"])
    return tuple(replace(request, restored_in=event) if request.id in ids else request for request in state.requests)


def _with_reason(state: State, kind: str, ids: Iterable[str], why: str) -> tuple[Request, ...]:
    """All requests; of those that are queued under these ids, or are to be taken back, why they are postponed or
    refused. What is not taken back stays as it is."""
    named = set(ids)
    change: dict[str, Any] = {"postponed": why} if kind == "postponed" else {"refusal": why, "queued": False}
    stays: dict[str, Any] = {"postponed": why} if kind == "postponed" else {"postponed": why, "returning": None}
    return tuple(
        replace(request, **(stays if request.is_returning else change))
        if request.id in named and (request.is_queued or request.is_returning)
        else request
        for request in state.requests
    )


def _with_new_base(state: State, event: Event) -> State:
    """Another model in place of the one before, whose statistics and filter go with it."""
    body, known = event.body, {request.id: request for request in state.requests}
    trained, model = replace(event, body=body["trained"]), FileRecord(**body["trained"]["model"])
    if event.kind == "retrained":
        known |= {name: replace(known[name], finished_in=event) for name in body["requests"]}
    else:  # requests were answered anew; others may be finished besides
        known |= {name: replace(known[name], finished_in=event) for name in body.get("finished", ())}
        for entry in body["requests"]:
            known[entry["id"]] = replace(known[entry["id"]], followed_in=event, withheld=entry["withheld"])
    collected = replace(event, body=body["collected"]) if body["collected"] is not None else None
    centroids, served = (FileRecord(**body[name]) if body[name] is not None else None for name in _STORED)
    own: dict[str, Any] = {"trained": trained, "model": model, "collected": collected, "centroids": centroids}
    return replace(state, **own, filter=served, requests=tuple(known.values()), pending=tuple(body.get("pending", ())))

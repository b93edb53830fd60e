"""The verbs in exact mode: a head on a public backbone, learned in one round and solved again for every request."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.markup import escape

from fedup.cli._progress import wide_console
from fedup.cli._session import Session
from fedup.cli._text import accuracy_table, contact_in_words, of, print_declined, seconds
from fedup.errors import NoArchitectureError, SettingError, check_choice
from fedup.models.backbone import Backbone
from fedup.registry import names as registered
from fedup.request import Forget
from fedup.run.exact import (
    FEATURES,
    claim_here,
    extracted_again,
    keep_head,
    load_head_of,
    relearned,
    salt_of,
)
from fedup.run.head_desk import HeadDesk, HeadOutcome
from fedup.run.head_judge import HeadJudge
from fedup.run.in_words import count, forget_in_words
from fedup.run.state import Request, State
from fedup.run.verify import Check
from fedup.statistics.feature_cache import FeatureCache
from fedup.tasks.backbones import load_backbone
from fedup.tasks.evaluation import accuracy
from fedup.unlearning.cohort import CohortModel
from fedup.unlearning.exact import HeadModel
from fedup.unlearning.exact_model import ExactModel
from fedup.unlearning.learn_head import learn_head

if TYPE_CHECKING:
    from fedup.run.answer import NewRequest
    from fedup.run.limits import Limits
    from fedup.tasks.recipe import Recipe

    Describe = Callable[[NewRequest], NewRequest]

Keep = Literal["clients", "cohort"]


def known_keep(keep: str) -> Keep:
    """What the server keeps, if there is such a way."""
    check_choice("keep", keep, Keep)
    return "cohort" if keep == "cohort" else "clients"


def learn_into(
    session: Session, recipe: "Recipe", backbone: str, features: int | None, keep: Keep, wait_s: float
) -> dict[str, Any]:
    """Make a run folder and learn its head."""
    dataset = recipe.load()
    key = session.key_for(dataset)
    described = recipe.about(dataset) | ({} if key is None else {"subject_key": key.fingerprint})
    has_code = recipe.data.endswith(".py") or recipe.data in registered("fedup.tasks.datasets")
    described |= {} if has_code else {"measured": True}
    public = _load(session, backbone, features, described)
    named = {"backbone": _name(backbone), "features": features, "model": _name(backbone), "rounds": 1, "cut": "head"}
    own = {
        name: Path(source) for name, source in (("data", recipe.data), ("backbone", backbone)) if source.endswith(".py")
    }
    about = {**described, **named, **{name: source.name for name, source in own.items()}}
    about |= {} if key is None else {"subject_key": key.fingerprint}
    about |= {} if keep == "clients" else {"keep": keep}
    session.run.start(about, code=own, wait_s=wait_s)
    session.keep_key(key)
    with session.writing("train", wait_s) as writer:
        if writer.state.trained is not None:
            return {"already": True, **_learned(writer.state.trained.body)}
        federation = recipe.federation(dataset, key).to(session.device)
        started = time.perf_counter()
        classes, cache = dataset.num_classes, cache_of(session)
        model: HeadModel | CohortModel = learn_head(public, federation, num_classes=classes, cache=cache, keep=keep)
        shares = HeadJudge(federation).shares(model, frozenset())  # features of all rows are kept by now
        cache.save()
        measured = {
            "heldout": math.nan if (share := shares["held-out, retained"]) is None else share,
            "test": accuracy(model, dataset.test_x.to(session.device), dataset.test_y.to(session.device)),
        }
        facts = {
            "data": federation.digest(),
            "rows": model.totals.rows,
            "accuracy": {name: value for name, value in measured.items() if value == value},
            "time_s": time.perf_counter() - started,
            **session.facts,
        }
        return {"already": False, **_learned(keep_head(writer, model, facts))}


def print_learned(result: dict[str, Any], run: Path, console: Console | None = None) -> None:
    """What was learned, for people."""
    console = console or wide_console()
    if result["already"]:
        console.print(f"{run} was learned before; nothing was changed.", soft_wrap=True)
        return
    origin = result["exact"]["origin"]
    said = (
        f"{origin['source']} ({origin['licence']}; declared by {origin['declared_by']})" if origin else "not declared"
    )
    held = result["accuracy"].get("heldout")
    console.print(
        f"A head from {result['rows']:,} rows in one round, {result['time_s']:.1f} s"
        + (f"; held-out accuracy {held:.3f}." if held is not None else ".")
        + f"\nOrigin of the backbone: {said}.\nTotals {result['totals'][:16]}. Every request is answered from them: "
        f"no `fedup collect` is needed. Next: fedup unlearn --client 3{of(run)}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def load_model(session: Session, state: State) -> HeadModel | CohortModel:
    """The head that the folder serves, with the features that its clients keep here."""
    return load_head_of(session.run, state, backbone_of(session, state), cache=cache_of(session))


def backbone_of(session: Session, state: State) -> Backbone:
    """The backbone; refused if it is another one than the head was learned on."""
    about = state.about
    if about.get("made_by"):
        raise NoArchitectureError(
            f"{session.run.path} was made by a program of yours ({about['made_by']}), which alone can build its "
            f"{about['backbone']}."
        )
    own = about.get("code", {}).get("backbone")
    name = str(session.run.code(own)) if own else about["backbone"]
    return _load(session, name, about.get("features"), about)


def cache_of(session: Session) -> FeatureCache:
    """Features that the clients of this folder keep; here all of them are in this process."""
    folder = session.run.path / "clients"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return FeatureCache.open(folder / FEATURES)


def unlearn_exactly(
    session: Session, new: list["NewRequest"], describe: "Describe", limits: "Limits", *, keep_sealed: bool, writer: Any
) -> dict[str, Any]:
    """Answer new requests with one head, or decline them."""
    desk = replace(desk_of(session, writer.state, writer), describe=describe)
    outcome = desk.unlearn(new, keep_sealed=keep_sealed, limits=limits)
    return {
        **describe_outcome(outcome),
        "requests": [request_entry(own, writer.state) for own in outcome.entries],
        "withheld": [],
    }


def request_entry(entry: Mapping[str, Any], state: State) -> dict[str, Any]:
    """A request as the journal has it, for programs."""
    what = forget_in_words(Forget.from_json(entry["forget"]), state.about)
    return {"id": entry["id"], "reference": entry["reference"], "what": what, "rows": entry["rows"].get("count")}


def restore_exactly(session: Session, requests: list[Request], state: State, writer: Any) -> dict[str, Any]:
    """Take requests back."""
    return describe_outcome(desk_of(session, state, writer).restore(requests))


def purge_exactly(session: Session, state: State, writer: Any) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    """Destroy what is sealed, and the cached features of forgotten rows."""
    return desk_of(session, state, writer).purge()


def print_answered(result: dict[str, Any], run: Path, *, done: str) -> None:
    """An answer in exact mode, for people."""
    console, claim = wide_console(), result["claim"]
    if result["declined"]:
        shown = {**result, "figures": "points" in result["declined"], "charged": False}
        print_declined(console, shown, done="put in force", fitted="a head")
        return
    for request in result["requests"]:
        if isinstance(request, dict):
            rows = f" ({count(request['rows'], 'training row')})" if request["rows"] is not None else ""
            name = f"{request['id']}, {escape(request['reference'])}," if request["reference"] else request["id"]
            rows = "" if " person" in request["what"] else rows  # which says so itself
            console.print(f"[bold]{name}[/] {done}: {escape(request['what'])}{rows}.")
        else:
            console.print(f"[bold]{request}[/] {done}.")
    if result["in_force"]:
        print_claim(claim, console)
    else:
        console.print(f"No request is in force. Totals {claim['totals']['after'][:16]}.", highlight=False)
    if claim.get("accuracy"):
        names = list(claim["accuracy"]["after"])
        console.print(accuracy_table("accuracy", names, {k: list(v.values()) for k, v in claim["accuracy"].items()}))
    if worst := result["worst_class"]:
        console.print(
            f"The class that loses most on retained rows is {worst['class']}: recall {worst['before']:.3f} before, "
            f"{worst['after']:.3f} now.",
            highlight=False,
        )
    for note in result["notes"]:
        console.print(f"[yellow]Note:[/] {escape(note)}")
    console.print(
        f"Head {result['filter']}; {contact_in_words(result)}; {seconds(result['time_s'])}.\n"
        f"Check it: fedup verify --relearn{of(run)}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


def print_claim(claim: dict[str, Any], console: Console) -> None:
    """A claim with its conditions."""
    console.print(f"Claim: [bold]{claim['kind']}[/]. {claim['sentence']}", soft_wrap=True, highlight=False)
    for condition in claim["conditions"]:
        if not condition["holds"]:
            console.print(f"  not met: {escape(condition['name'])} ({escape(condition['found'])})", highlight=False)
    totals = claim.get("totals")
    if totals:
        console.print(f"Totals {totals['before'][:16]} before, {totals['after'][:16]} now.", highlight=False)


def relearn_checks(session: Session, *, relearn: bool, fresh: bool) -> list[Check]:
    """Totals that the remaining clients add up to now, and features computed anew."""
    state = session.run.read()
    if not state.is_exact:
        raise SettingError("--relearn and --fresh are for a head on a public backbone (`fedup train --backbone …`).")
    model, salt, checks = load_model(session, state), salt_of(state), []
    model.cache.path = None  # a reader holds no lock: it might write back what is being purged
    if relearn:
        served, again = relearned(model, session.federation, salt)
        same = served == again
        found = f"{again}, as served" if same else f"{again}, and {served} is served"
        checks.append(Check("relearned totals", same, found))
    if fresh:
        found_again = extracted_again(model, session.federation)
        checks.append(
            Check(
                "features computed anew",
                None,
                f"{found_again['agree']:.6%} of the integers of {found_again['rows']:,} rows agree; answers differ by "
                f"at most {found_again['largest_difference']:.2g}",
            )
        )
    return checks


def evaluate_exactly(session: Session) -> dict[str, Any]:
    """Accuracies of the head that is served."""
    state, model = session.answering()
    assert isinstance(model, ExactModel)
    model.cache.path = None  # a reader writes nothing
    data, judge = session.dataset, HeadJudge(session.federation, anew=True)
    test = {"official test set": accuracy(model, data.test_x.to(session.device), data.test_y.to(session.device))}
    return {
        "head": state.filter.id if state.filter else None,
        "in_force": [request.id for request in state.active],
        "claim": claim_here(model, session.federation_if_here).to_json(),
        "accuracy": {
            **judge.shares(model, model.requests),
            **{name: value for name, value in test.items() if value == value},
        },
    }


def print_evaluated(result: dict[str, Any]) -> None:
    """The same, for people."""
    console, names = wide_console(), list(result["accuracy"])
    console.print(f"Head {result['head']}; in force: {', '.join(result['in_force']) or 'no request'}.", highlight=False)
    console.print(accuracy_table("accuracy", names, {"served": list(result["accuracy"].values())}))
    if result["in_force"]:
        print_claim(result["claim"], console)


def desk_of(session: Session, state: State, writer: Any) -> HeadDesk:
    """A desk for requests, with the clients of this process where their data are here."""
    federation = session.federation_if_here
    judge = HeadJudge(federation) if federation is not None else None
    return HeadDesk(writer, load_model(session, state), federation, judge, session.facts)


def describe_outcome(outcome: HeadOutcome) -> dict[str, Any]:
    """An answer as plain data."""
    report = outcome.report
    worst = max(outcome.recalls.items(), key=lambda pair: pair[1].loss, default=None)
    return {
        "requests": list(outcome.requests),
        "already": [],
        "worst_class": {"class": worst[0], **asdict(worst[1])} if worst and worst[1].loss > 0 else None,
        "filter": outcome.head.id,
        "filter_sha256": outcome.head.sha256,
        "clients_contacted": sorted(report.clients_contacted),
        "bytes_up": report.bytes_up,
        "time_s": report.time_s,
        "notes": report.notes,
        "claim": outcome.claim,
        "declined": outcome.declined,
        "in_force": list(outcome.in_force),
    }


def _learned(body: Any) -> dict[str, Any]:
    names = ("fingerprint", "accuracy", "rows", "time_s", "totals", "exact", "features")
    return {name: body[name] for name in names}


def _load(session: Session, name: str, features: int | None, about: Mapping[str, Any]) -> Backbone:
    """A backbone for the inputs of a folder. What scales these may have been measured on the clients' own rows, as are
    the classes of a file without code: then no configuration was fixed without them."""
    found = load_backbone(name, tuple(about["input_shape"]), features=features, inputs=about["input"])
    if about.get("measured"):
        found.preprocessing = None
    return found.to(session.device)


def _name(backbone: str) -> str:
    """Without a path of this machine, for a file that is copied into the folder."""
    return Path(backbone).name if backbone.endswith(".py") else backbone

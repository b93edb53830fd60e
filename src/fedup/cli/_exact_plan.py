"""`fedup unlearn --dry-run` in exact mode: the answer is computed in memory, and nothing is stored."""

from dataclasses import asdict
from typing import Any

from rich.console import Console

from fedup.cli._exact import request_entry
from fedup.cli._session import Session
from fedup.cli._text import accuracy_table, seconds
from fedup.cli._wording import as_command_line
from fedup.errors import ContactError
from fedup.run.answer import NewRequest
from fedup.run.exact import claim_here, salt_of
from fedup.run.head_judge import HeadJudge
from fedup.run.head_trial import Describe, Trials
from fedup.run.in_words import count, forget_in_words, ids
from fedup.run.limits import Limits
from fedup.unlearning.cohort import CohortModel
from fedup.unlearning.exact import HeadModel


def plan_exactly(session: Session, new: list[NewRequest], describe: Describe, limits: Limits) -> dict[str, Any]:
    """What an answer would change and cost: it is computed in memory, and nothing is stored or sent to a node."""
    state, model = session.answering()
    assert isinstance(model, HeadModel | CohortModel)
    model.cache.path = None  # a reader writes nothing
    federation = session.federation_if_here
    judge = HeadJudge(federation) if federation is not None else None
    before = model.totals_hash(salt_of(state))
    planned: dict[str, Any] = {"requests": [], "declined": None, "clients_contacted": [], "accuracy": None}
    try:
        trial = Trials(model, state, federation, judge, describe).tried(new, limits=limits)
    except ContactError as error:
        asked = sorted({client for own in new for client in (*own.forget.sample_ids, *own.forget.client_ids)})
        named = [{"what": forget_in_words(own.forget, state.about), "rows": None} for own in new]
        return {**planned, "requests": named, "clients_contacted": asked, "not_computed": str(error)}
    worst = max(trial.recalls.items(), key=lambda pair: pair[1].loss, default=None)
    return planned | {
        "requests": [request_entry(own, state) | {"id": None} for own in trial.requests],
        "declined": trial.declined,
        "clients_contacted": sorted(trial.report.clients_contacted),
        "bytes_up": trial.report.bytes_up,
        "accuracy": {"before": trial.before.figures, "after": trial.after} if trial.after else None,
        "worst_class": {"class": worst[0], **asdict(worst[1])} if worst else None,
        "measured_on": "validation rows" if judge else "totals",
        "totals": {"before": before, "after": model.totals_hash(salt_of(state))},
        "claim_afterwards": claim_here(model, federation).kind,
        "notes": trial.report.notes,
        "time_s": trial.report.time_s,
    }


def print_planned(result: dict[str, Any], console: Console) -> None:
    """A plan in exact mode, for people."""
    for request in result["requests"]:
        rows = f" ({count(request['rows'], 'training row')})" if request["rows"] is not None else ""
        console.print(f"Would {request['what']}{rows}.", markup=False)
    contacted = ids(result["clients_contacted"], names=result["client_names"])
    console.print(f"Clients asked: {contacted or 'none'}.", markup=False)
    if "not_computed" in result:
        console.print(f"What it costs cannot be told here: {result['not_computed']}", markup=False, soft_wrap=True)
    if result["declined"]:
        why = as_command_line(result["declined"].partition(" Nothing was changed.")[0]).rstrip(".")
        console.print(f"It would be declined: {why}.", markup=False, soft_wrap=True)
    if measured := result["accuracy"]:
        names = list(measured["after"])
        console.print(accuracy_table("accuracy", names, {k: list(v.values()) for k, v in measured.items()}))
    if worst := result.get("worst_class"):
        console.print(
            f"The class that loses most is {worst['class']}: recall {worst['before']:.3f} before, {worst['after']:.3f} "
            f"then{'' if measured else ', as totals let expect'}.",
            highlight=False,
        )
    if "claim_afterwards" in result:
        console.print(f"Claim then: {result['claim_afterwards']}; the head would take {seconds(result['time_s'])}.")
    console.print("Nothing was changed.")

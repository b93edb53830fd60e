"""What `fedup add` does: rows become those of known or new clients, and the head is solved again with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from fedup.cli._exact import describe_outcome, desk_of, print_answered
from fedup.cli._names import Names
from fedup.cli._progress import wide_console
from fedup.cli._session import Session
from fedup.errors import MissingDataError, RequestError, SettingError
from fedup.request import union
from fedup.run.in_words import client_in_words, count
from fedup.run.state import State
from fedup.subjects import SHORT_TAG
from fedup.tasks.additions import Addition, additions, check_ids, holders_of, with_rows
from fedup.tasks.labelled import LabelledRows, find_rows, labelled_rows, rows_digest


def add_rows(session: Session, source: str, client: str | None, *, join: bool, wait_s: float) -> dict[str, Any]:
    """Add the rows of a file in one commit; a file that was added before changes nothing."""
    with session.writing("add", wait_s) as writer:
        state = writer.state
        if not state.is_exact:
            raise SettingError(
                "`fedup add` is for a head on a public backbone (`fedup train --backbone …`): sums can be added to. A "
                "model that was trained in rounds learns new rows by training into a new folder."
            )
        path = find_rows(source)
        digest = rows_digest(path)
        if digest in {own.sha256 for own in additions(state)}:
            return {"already": True, "source": source}
        before = session.federation_if_here
        if before is None:
            raise MissingDataError("Rows are added to those of the clients, whose data set is not here. Bring it back.")
        rows = labelled_rows(source, session.about, whose=True)
        _check_persons(session, state, rows)
        check_ids(session.row_ids, rows)
        number, names = _holders(state, rows, client, before.ids, join=join)
        holders = holders_of(rows, number, names)
        grown = with_rows(before, rows, holders, names)
        if (subjects := session.dataset.subjects) is not None:
            earlier = [name for _, own in session.added for name in own.subjects or [""] * len(own.y)]
            new = rows.subjects or [""] * len(rows.y)
            grown = grown.with_subjects([*subjects, *earlier, *new], key=session.subject_key)
        code = session.run.keep_code(path) if path.suffix == ".py" else None
        name = path.name if code else source  # the folder may move: no path of this machine
        addition = Addition(name, digest, len(rows.y), number, tuple(names), grown.digest(), code)
        first = len(before.x)
        own = {int(own): (first + (holders == own).nonzero().flatten()).tolist() for own in holders.unique()}
        outcome = desk_of(session, state, writer).add(grown, own, addition.to_json())
        shown = [
            {"client": own, "rows": len(ids), "first": min(ids), "last": max(ids), "joined": own not in before.ids}
            for own, ids in own.items()
        ]
        facts = {"source": source, "added": shown, "client_names": list(names)}
        return {**describe_outcome(outcome), **facts, "already": False}


def _holders(
    state: State, rows: LabelledRows, client: str | None, known: Sequence[int], *, join: bool
) -> tuple[int | None, list[str]]:
    """The client of all rows, or None where each row names its own; and the names of all clients from now on."""
    names, following = list(state.about.get("client_names", ())), max(known) + 1
    if client is None and rows.clients is not None and names:
        new = [name for name in dict.fromkeys(rows.clients) if name not in names]
        if new and not join:
            raise RequestError(
                f"{count(len(new), 'client')} in the file {'is' if len(new) == 1 else 'are'} not known "
                f"({', '.join(new[:5])}): pass --join if they are to join. Nothing was changed."
            )
        return None, names + new
    if client is None and not join:
        raise RequestError("Whose rows are these? Name a client with --client, or pass --join for one that joins.")
    if join and client is not None and client not in names:
        if not names:
            raise RequestError(f"Clients have numbers only here: leave out --client, and number {following} joins.")
        return following, [*names, client]
    if client is None:
        if names:
            raise RequestError("Clients have names here: name the one that joins with --client NAME --join.")
        return following, []
    number = Names(names).client(client)
    if number not in known:
        raise RequestError(f"Unknown client {client}; pass --join without --client for one that joins.")
    return number, names


def _check_persons(session: Session, state: State, rows: LabelledRows) -> None:
    """Refuse rows of persons that requests in force forget: they would be learned from."""
    tags = union(state.forgets).subject_tags
    if not tags:
        return
    key = session.subject_key
    if key is None:
        raise RequestError(
            f"Persons are forgotten here, and without their key ({session.key_path}) nobody can tell whether rows are "
            "theirs. Name its file with --subject-key. Nothing was changed."
        )
    theirs = {tag for name in set(rows.subjects or ()) if name and (tag := key.tag(name)) in tags}
    if theirs:
        shown = ", ".join(sorted(tag[:SHORT_TAG] for tag in theirs))
        raise RequestError(
            f"There are rows of {count(len(theirs), 'person')} that a request in force forgets (tag {shown}): leave "
            "them out, or restore the request first. Nothing was changed."
        )


def print_added(result: dict[str, Any], run: Path) -> None:
    """What was added, for people."""
    console = wide_console()
    if result["already"]:
        console.print(f"{result['source']} was added before; nothing to do.", markup=False, soft_wrap=True)
        return
    for own in result["added"]:
        who = escape(client_in_words(own["client"], result["client_names"]))
        joined = "joined with" if own["joined"] else "has"
        more = "" if own["joined"] else " more"
        console.print(f"Client {who} {joined} {count(own['rows'], 'row')}{more}: {own['first']} to {own['last']}.")
    print_answered(result, run, done="added")

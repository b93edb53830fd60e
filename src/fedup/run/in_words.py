"""Requests, moments and machines in words, the same on a terminal and in evidence."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedup.request import Forget

STATES = {"original": "before", "forgotten": "with the filter", "restored": "restored"}  # of a model, as they are named


def count(number: int, thing: str) -> str:
    """A number of things: 1 client, 2 clients."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def ids(numbers: Iterable[int], most: int | None = 8, *, names: Sequence[str] = ()) -> str:
    """Numbers with their names, where these say more, shortened when there are more than `most`."""
    texts = [class_in_words(number, names) for number in sorted(numbers)]
    return ", ".join(texts) if most is None or len(texts) <= most else f"{', '.join(texts[:6])}, … ({len(texts)})"


def moment(at: str) -> str:
    """A moment, without its milliseconds."""
    return at[:19].replace("T", " ") + " UTC"


def forget_set(
    forget: Forget, *, class_names: Sequence[str] = (), client_names: Sequence[str] = (), most: int | None = 8
) -> str:
    """What a request names: client 3 and class 7 “ship”."""
    parts = [f"client {ids(forget.client_ids, most, names=client_names)}"] if forget.client_ids else []
    if forget.class_ids:
        parts.append(f"class {ids(forget.class_ids, most, names=class_names)}")
    parts += (
        [forget.persons]
        if forget.subject_tags
        else [
            f"{count(len(own), 'sample')} of client {client_in_words(client, client_names)}"
            for client, own in forget.sample_ids.items()
        ]
    )
    return " and ".join(parts)


def client_in_words(client: int, names: Sequence[str]) -> str:
    """A client by its number, and its name where it has one."""
    return class_in_words(client, names)


def forget_in_words(forget: Forget, about: Mapping[str, Any]) -> str:
    """What a request asks for, with the names of clients and classes: forget clients [2 “mercy”]."""
    clients, classes = about.get("client_names", ()), about.get("class_names", ())
    wholes = [
        (f"{kind} [{', '.join(class_in_words(i, names) for i in sorted(ids))}]", ids)
        for kind, ids, names in (("clients", forget.client_ids, clients), ("classes", forget.class_ids, classes))
    ]
    parts = [text for text, ids in wholes if ids] + ([forget.persons] if forget.subject_tags else [])
    if not forget.subject_tags:
        for client, own in forget.sample_ids.items():
            parts.append(f"{count(len(own), 'sample')} of client {client_in_words(client, clients)}")
    return "forget " + " and ".join(parts)


def class_in_words(label: int, names: Sequence[str]) -> str:
    """A class by its number, and its name where that says more."""
    name = names[label] if label < len(names) else ""
    return str(label) if name in ("", str(label)) else f"{label} “{name}”"


def eraser_in_words(erasure: Mapping[str, Any]) -> str:
    """Where an eraser sits, what it is made of, and what it takes away."""
    site = erasure["place"]
    return (
        f"at {site['cut']}, {site['positions']} of {site['of']} positions, made of {erasure['rows']:,} forgotten rows: "
        f"{site['cover']:.0%} of what sets these apart goes, and {site['price']:.1%} of the variance with it"
    )


def machine_in_words(machine: Mapping[str, Any] | None) -> str:
    """What the bits of a result depend on besides its settings: processor, threads and version of torch."""
    if not machine:
        return "an unknown machine"
    return f"{machine['processor']}, {count(machine['threads'], 'thread')}, torch {machine['torch']}"

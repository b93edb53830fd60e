"""One question to one client."""

from typing import TypeVar

from fedup.clients.protocol import Contact
from fedup.clients.question import Question

A = TypeVar("A")


def ask_one(contact: Contact, client: int, question: Question[A]) -> A:
    """The answer of one client, which has to give one."""
    ((answered, answer),) = contact.ask({client: question})
    assert answered == client
    return answer

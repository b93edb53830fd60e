"""Unlearning methods, one file each: a frozen dataclass `Method` of hyper-parameters."""

from typing import Protocol

from fedup.bench.task import Task, Unlearned
from fedup.registry import find
from fedup.request import Forget


class Method(Protocol):
    """What a method's file defines under this name."""

    def supports(self, request: Forget) -> bool:
        """Whether the method can answer such a request at all."""

    def unlearn(self, task: Task) -> Unlearned:
        """Answer the task's request."""


class AnswersAll:
    """A base for methods that can answer any request: clients, classes and samples alike."""

    def supports(self, request: Forget) -> bool:
        return True


def needs_history(method: Method) -> bool:
    """Whether the server must have kept the history of the training; a method says so by `needs_history = True`."""
    return bool(getattr(method, "needs_history", False))


def method_class(name: str) -> type[Method]:
    """The hyper-parameters of the method of that name."""
    found: type[Method] = find(__name__, name, needs=("Method",)).Method
    return found

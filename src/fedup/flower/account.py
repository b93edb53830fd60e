"""A node tells with each answer what it has spent, so that the server's ledger can follow the node's own."""

from contextlib import suppress
from dataclasses import replace

from flwr.app import RecordDict

from fedup.clients.messages import NONCE, SPENT
from fedup.errors import FedUPError
from fedup.flower.node_data import OwnError, Source
from fedup.flower.policy import Policy
from fedup.flower.state import KeptLedger
from fedup.flower.wire import Answer, text_of


def with_spent(answer: Answer, content: RecordDict, source: Source, policy: Policy) -> Answer:
    """The answer, or refusal or failure, with the sum of μ² that the node has spent, where it is asked who it is or for
    a release. That sum follows from the questions that were answered, and from no row."""
    with suppress(FedUPError, OwnError):  # an account that cannot be read: nothing is told of it
        asked = text_of(content)
        if asked.get("kind") == "who" or NONCE in asked.get("details", {}):
            spent = KeptLedger(source.context, policy).spent(source.client)
            return replace(answer, details={**answer.details, SPENT: spent})
    return answer

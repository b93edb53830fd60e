"""What the weights of the served base know of each request, in words."""

from collections.abc import Iterable

from fedup.errors import RequestError
from fedup.run.state import Request, State

SUPPRESSED = "suppressed; the weights still hold it"
NOT_SUPPRESSED = "not suppressed; the weights hold it"
NOT_IN_WEIGHTS = "not in the weights: trained without it"


def weights_in_words(state: State, request: Request) -> str | None:
    """What the weights know of a request's rows; None for one that was taken back. Exact heads have a claim instead."""
    if request.finished_in is not None:
        return NOT_IN_WEIGHTS
    if state.is_exact or not request.is_standing:
        return None
    return SUPPRESSED if request.is_active else NOT_SUPPRESSED


def check_not_finished(requests: Iterable[Request]) -> None:
    """Refuse to take back what the model was trained without."""
    finished = [request.id for request in requests if request.finished_in is not None]
    if finished:
        raise RequestError(
            f"{', '.join(finished)} is finished: the model was trained without these rows, so there is nothing to take "
            "back. To have them again, they would have to be trained in again, in a new folder. Nothing was changed."
        )

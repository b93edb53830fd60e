"""Parts of answers that wait for clients: finished when these are back."""

from dataclasses import replace

from fedup.clients.protocol import Contact
from fedup.clients.subjects import name_again
from fedup.errors import RequestError
from fedup.federation import Federation
from fedup.request import Forget
from fedup.serving.plugged import REQUEST_LOCK, PluggedModel
from fedup.statistics.store import Centroids
from fedup.unlearning.exact import HeadModel
from fedup.unlearning.plan import Terms, make_plan
from fedup.unlearning.report import Report
from fedup.unlearning.unlearn import carry_out, contact_of

_USUAL_TERMS = Terms()


def finish_pending(
    plugged: PluggedModel | HeadModel,
    centroids: Centroids,
    *,
    clients: Federation | Contact,
    force: bool = False,
    terms: Terms = _USUAL_TERMS,
) -> Report:
    """Ask the clients that had not answered again. With their answers the filter is the one that would have been made
    if they had been there; requests about their rows are measured again.

    `report.pending` names those that are still absent. If nothing waits, nobody is asked. An error changes nothing.
    """
    if isinstance(plugged, HeadModel):
        return plugged.finish_pending(clients=clients)
    with REQUEST_LOCK:
        if plugged.served is None or not centroids.pending:
            return Report(plugged.requests)
        contact, report = contact_of(clients, plugged, centroids), Report(plugged.requests)
        if contact is None:
            raise RequestError("What is pending needs the clients: pass clients=federation or a contact.")
        before, unnamed = contact.traffic, centroids.unnamed
        again = [request for request in plugged.requests if concerns(request, centroids)]
        try:
            named = name_again(again, centroids, contact)
            requests, asked = (frozenset(named.get(own, own) for own in part) for part in (plugged.requests, again))
            with report.stage("check"):
                config = plugged.served.config
                plan = make_plan(plugged, centroids, requests, contact, config, terms, force=force)
            carry_out(replace(plan, new=asked, again=asked), report)
        except BaseException:
            centroids.unnamed = unnamed
            raise
        report.traffic = contact.traffic - before
        return report


def concerns(request: Forget, centroids: Centroids) -> bool:
    """Whether a request names rows of a client that is waited for."""
    return bool(request.sample_ids.keys() & centroids.pending.keys() or request.subject_tags & _unnamed(centroids))


def _unnamed(centroids: Centroids) -> frozenset[str]:
    return frozenset().union(*centroids.unnamed.values())

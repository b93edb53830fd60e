"""Control: Retrain with a closed form before its last layer, as fair to Retrain as to the filter."""

from dataclasses import dataclass

from fedup.bench.cost import Cost
from fedup.bench.methods import AnswersAll
from fedup.bench.task import Task, Unlearned
from fedup.clients.collect import collect
from fedup.filters.bottleneck import FilterConfig
from fedup.models.cut import find_cut
from fedup.models.views import fingerprint
from fedup.request import Forget
from fedup.serving.plugged import Served, filtered_view, plug
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.moment_store import MomentStore
from fedup.unlearning.closed_form_fit import fit_closed_form


@dataclass(frozen=True)
class Method(AnswersAll):
    """The closed form mends the last layer of a federation that trained for few rounds. This shows how much of a
    filter's gain over Retrain is that."""

    def unlearn(self, task: Task) -> Unlearned:
        """A model that never saw what is forgotten, with scores in closed form."""
        cost, rounds = Cost(), task.recipe.rounds
        retained = task.retained
        model = task.train(task.start, retained, rounds=rounds, cost=cost, what="Retrain")
        cut = find_cut(model, task.recipe.cut)
        with cost.stage("fit"):
            store = collect(model, retained, statistics=MomentConfig(), cut=cut)
            assert isinstance(store, MomentStore)
            fitted = fit_closed_form(plug(model, cut), store, Forget())
        served = Served(fitted, frozenset([task.request]), FilterConfig(filter="closed_form"), fingerprint(model), cut)
        did = f"{rounds} rounds from the first weights, on what is retained; then scores in closed form"
        return Unlearned(filtered_view(model, served), cost, about={"did": did})

"""Control: Retrain with a closed form before its last layer, as fair to Retrain as to the filter."""

from dataclasses import dataclass

from fedup.bench.cost import Cost
from fedup.bench.methods import AnswersAll
from fedup.bench.task import Task, Unlearned
from fedup.bench.training_cache import trained
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
        """Retrain's own model, with scores in closed form. Costs are what comes on top of Retrain's."""
        cost, retained = Cost(), task.retained
        model = trained(task.start, retained, task.recipe, progress=task.progress, what="Retrain")
        cut = find_cut(model, task.recipe.cut)
        with cost.stage("fit"):
            store = collect(model, retained, statistics=MomentConfig(), cut=cut)
            assert isinstance(store, MomentStore)
            fitted = fit_closed_form(plug(model, cut), store, Forget())
        served = Served(fitted, frozenset([task.request]), FilterConfig(filter="closed_form"), fingerprint(model), cut)
        did = "Retrain's model with scores in closed form; its costs are those beyond Retrain's"
        return Unlearned(filtered_view(model, served), cost, about={"did": did})

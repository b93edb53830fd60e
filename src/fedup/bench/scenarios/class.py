"""Classes that every client is to forget; nothing was done to them before."""

from dataclasses import dataclass

from fedup.bench.scenarios import NoAttack, Situation
from fedup.federation import Federation
from fedup.request import Forget
from fedup.tasks.datasets import Dataset, Images, Texts


@dataclass(frozen=True)
class Scenario(NoAttack):
    """Forget `classes`; without any, the one whose number is the seed, so that seeds try different classes."""

    classes: tuple[int, ...] = ()

    def prepare(self, federation: Federation, *, dataset: Dataset, inputs: Images | Texts, seed: int) -> Situation:
        """The honest federation, which is to forget the classes."""
        request = Forget.classes(self.classes or (seed % dataset.num_classes,))
        federation.check(request)
        named = " and ".join(repr(dataset.class_names[label]) for label in sorted(request.class_ids))
        return Situation(federation, request, f"The class {named} is to be forgotten at every client.")

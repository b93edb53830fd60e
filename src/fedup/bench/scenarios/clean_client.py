"""An honest client that leaves and is to be forgotten."""

from dataclasses import dataclass

from fedup.bench.scenarios import NoAttack, Situation, target_client
from fedup.federation import Federation
from fedup.request import Forget
from fedup.tasks.datasets import Dataset, Images, Texts


@dataclass(frozen=True)
class Scenario(NoAttack):
    """Forget `client`; without one, the largest."""

    client: int | None = None

    def prepare(self, federation: Federation, *, dataset: Dataset, inputs: Images | Texts, seed: int) -> Situation:
        """The honest federation, which is to forget the client."""
        leaving = target_client(federation, self.client)
        story = f"Client {leaving.id}, whose data was good, leaves. Forget that client."
        return Situation(federation, Forget.clients([leaving.id]), story)

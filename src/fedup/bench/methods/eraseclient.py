"""EraseClient (Halimi et al., 2022): the client itself unlearns by projected gradient ascent; then the others go on."""

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from fedup.artifacts import serialized_size
from fedup.bench.cost import Cost
from fedup.bench.task import Task, Unlearned
from fedup.errors import DataError, SettingError
from fedup.models.cut import logits_of
from fedup.request import Forget
from fedup.rng import seed_for
from fedup.tasks.evaluation import predict
from fedup.training.averaging import weights_of
from fedup.training.local import Job, LocalTraining

_RANDOM_MODELS = 10  # that the radius of the ball is measured by
_SHARE_OF_DISTANCE = 3.0  # δ² is their mean squared distance over this

GRID = {"lr": (0.01, 0.001), "post_rounds": (2, 4)}


@dataclass(frozen=True)
class Method:
    """From the model without the target's last upload, the target ascends on the loss of its own data, inside a ball,
    for at most `epochs`; it stops early at a batch of which it gets no more than `stop_accuracy` right, or once it is
    farther than `stop_distance` from the weights it last sent (0: no such limit). Then `post_rounds` of FedAvg
    without it.

    Parameters only: buffers, such as BatchNorm's, stay those of the final model.
    """

    lr: float = 0.01
    momentum: float = 0.9
    clip: float = 5.0
    epochs: int = 5
    stop_accuracy: float = 0.1
    stop_distance: float = 0.0
    post_rounds: int = 2

    needs_history: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.post_rounds < 0 or not self.clip > 0 or not self.stop_distance >= 0:
            raise SettingError(
                "epochs must be 1 or more, post_rounds 0 or more, clip above 0, stop_distance 0 or more; found "
                f"{self.epochs}, {self.post_rounds}, {self.clip}, {self.stop_distance}."
            )
        if not 0 <= self.stop_accuracy < 1:
            raise SettingError(f"stop_accuracy must lie in [0, 1); found {self.stop_accuracy}.")
        self._local(1)  # checks the rest

    def _local(self, batch_size: int) -> LocalTraining:
        return LocalTraining(1, batch_size, self.lr, self.momentum)

    def supports(self, request: Forget) -> bool:
        """One whole client, which takes part in its own unlearning."""
        return request.kind == "client" and len(request.client_ids) == 1

    def unlearn(self, task: Task) -> Unlearned:
        """A model that the target made forget, and the others repaired."""
        cost, history = Cost(), task.kept()
        (target,) = task.request.client_ids
        last = max(history.rounds)
        if target not in history.shares(last):
            raise DataError(f"Client {target} did not take part in the last round: EraseClient needs its upload of it.")
        model, names = copy.deepcopy(task.model), [name for name, _ in task.model.named_parameters()]
        device = next(model.parameters()).device
        upload = {name: tensor.to(device) for name, tensor in history.upload(last, target).items() if name in names}
        sent = serialized_size({name: weights_of(model)[name] for name in names}, {})
        cost.storage_bytes = sent  # the target's own copy of its upload
        cost.count(bytes_up=sent, bytes_down=sent, clients=[target])
        with cost.stage("ascent"):
            without_last_upload(model, upload, history.shares(last)[target])
            radius = radius_of(model, [_random_model(task, number) for number in range(_RANDOM_MODELS)])
            trail = self._ascend(model, task, target, radius, upload)
            cost.local_steps = trail[-1]["steps"]
            cost.probe(task.probe, model)
        if self.post_rounds:
            model = task.train_after(model, rounds=self.post_rounds, cost=cost, what="EraseClient")
        did = (
            f"the target ascended for {trail[-1]['steps']} batches inside a ball of radius {radius:.3g} (its own loss "
            f"{trail[0]['loss']:.2f} → {trail[-1]['loss']:.2f}), and {self.post_rounds} rounds without it followed"
        )
        return Unlearned(model.eval(), cost, about={"did": did, "radius": radius, "trail": trail})

    def _ascend(
        self, model: nn.Module, task: Task, target: int, radius: float, upload: dict[str, Tensor]
    ) -> list[dict[str, Any]]:
        """Ascent on the target's data; returns the state at the start and after each epoch."""
        federation, local = task.federation, self._local(task.recipe.batch_size)
        rows = federation.client(target).train
        centre = _vector(model)
        last_sent = torch.cat([upload[name].flatten() for name, _ in model.named_parameters()])
        model.eval()  # running means are no parameters
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum, maximize=True)
        trail = [self._stand(model, task, rows, centre, last_sent, steps=0)]
        for epoch in range(self.epochs):
            job = Job(target, rows.cpu(), local, seed_for(task.recipe.seed, "ascent", epoch, target))
            steps, enough = trail[-1]["steps"], False
            for batch in job.batches().to(rows.device):
                accuracy = ascend(model, optimizer, federation.x[batch], federation.y[batch].long(), clip=self.clip)
                project(model, centre, radius)
                steps += 1
                too_far = self.stop_distance and float((_vector(model) - last_sent).norm()) > self.stop_distance
                enough = accuracy <= self.stop_accuracy or bool(too_far)
                if enough:
                    break
            trail.append(self._stand(model, task, rows, centre, last_sent, steps=steps))
            if enough:
                break
        return trail

    def _stand(
        self, model: nn.Module, task: Task, rows: Tensor, centre: Tensor, last_sent: Tensor, *, steps: int
    ) -> dict[str, Any]:
        """Loss and accuracy on the target's rows, and the distances from the centre and its last upload."""
        labels, now = task.federation.y[rows].long(), _vector(model)
        logits = predict(model, task.federation.x, rows)
        return {
            "steps": steps,
            "loss": float(cross_entropy(logits, labels)),
            "accuracy": float((logits.argmax(1) == labels).float().mean()),
            "from_centre": float((now - centre).norm()),
            "from_upload": float((now - last_sent).norm()),
        }


def without_last_upload(model: nn.Module, upload: dict[str, Tensor], share: float) -> None:
    """(w − p·w_u) / (1 − p), in place: the average of the last round without the target."""
    if not 0 <= share < 1:
        raise DataError("The target was alone in the last round: without it there is no model to start from.")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_((weight - share * upload[name]) / (1 - share))


def radius_of(model: nn.Module, random_models: Sequence[nn.Module]) -> float:
    """δ: the root of a third of the mean squared distance to models that know nothing."""
    centre = _vector(model)
    squares = [float((_vector(one).to(centre) - centre).double().square().sum()) for one in random_models]
    return (statistics.fmean(squares) / _SHARE_OF_DISTANCE) ** 0.5


def ascend(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, *, clip: float) -> float:
    """One clipped gradient step up the loss; returns the batch accuracy before it."""
    logits = logits_of(model(x))
    optimizer.zero_grad(set_to_none=True)
    cross_entropy(logits, y).backward()
    clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return float((logits.argmax(1) == y).float().mean())


def project(model: nn.Module, centre: Tensor, radius: float) -> None:
    """Project parameters outside the ball onto its surface."""
    offset = _vector(model) - centre
    distance = float(offset.norm())
    if distance > radius:
        vector_to_parameters(centre + offset * (radius / distance), model.parameters())


def _vector(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


def _random_model(task: Task, number: int) -> nn.Module:
    """The same architecture with first weights of its own; not those that the recipe may bring from elsewhere."""
    shape, classes = task.federation.x.shape[1:], task.federation.num_classes
    seed = seed_for(task.recipe.seed, "random model", number)
    return replace(task.recipe, weights=None, seed=seed).blank_model(shape, classes)

"""Ordinary withdrawals, each answered by the library's default call, and each verdict beside the one that has Retrain
as its reference."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import fedup
from fedup.bench.training_cache import trained
from fedup.bench.withdrawal_cases import Setting, Withdrawal, make_cases
from fedup.errors import DataError, HarmError
from fedup.federation import Federation
from fedup.serving.plugged import PluggedModel, Served
from fedup.statistics.proportions import Paired
from fedup.statistics.store import Centroids
from fedup.statistics.tally import RowsToCount, tally
from fedup.tasks.datasets import Dataset, check_there
from fedup.tasks.evaluation import accuracy, accuracy_per_class
from fedup.tasks.machine import describe_code, describe_machine
from fedup.tasks.progress import Progress
from fedup.tasks.recipe import Recipe
from fedup.unlearning.report import Report
from fedup.unlearning.verdict import Verdict, against

_ROWS_A_CLASS = 100  # of the test set, below which one wrong answer is a point or more


def run_withdrawals(
    setting: Setting, *, seed: int, device: torch.device | str = "cpu", progress: Progress
) -> dict[str, Any]:
    """Train a federation, answer each of its withdrawals alone, retrain without its rows, and tell as plain data."""
    recipe = setting.recipe_for(seed)
    check_there(recipe.data)
    dataset = recipe.load()
    federation, cases = make_cases(recipe.federation(dataset), setting, seed)
    federation = federation.to(device)
    dataset = replace(dataset, test_x=dataset.test_x.to(device), test_y=dataset.test_y.to(device))
    if len(dataset.test_y) < _ROWS_A_CLASS * dataset.num_classes:  # what clients hold out is as unseen
        unseen = torch.cat([federation.rows("validation"), federation.rows("heldout")])
        dataset = replace(
            dataset,
            test_x=torch.cat([dataset.test_x, federation.x[unseen]]),
            test_y=torch.cat([dataset.test_y, federation.y[unseen]]),
        )
    start = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes)
    model, recipe = _learn(start, federation, recipe, setting, progress)
    store = fedup.collect(model, federation)
    measure = _Measuring(model, store, federation, dataset)
    measured = []
    for number, case in enumerate(cases):
        progress(f"{setting.name}, seed {seed}: withdrawals", number, len(cases))
        answered = measure.answer(case)
        retrained = trained(
            start, federation.without(case.request), recipe, progress=progress, what=f"Retrain without {case}"
        )
        measured.append(answered(retrained))
    progress(f"{setting.name}, seed {seed}: withdrawals", len(cases), len(cases))
    return {
        "name": setting.name,
        "seed": seed,
        "recipe": recipe.settings(),
        "settings": setting.settings(),
        "device": torch.device(device).type,
        "train_accuracy": accuracy(model, federation.x, federation.y, federation.rows()),
        "held_out_accuracy": accuracy(model, federation.x, federation.y, federation.rows("heldout")),
        "test_accuracy": accuracy(model, dataset.test_x, dataset.test_y),
        "cases": measured,
        "machine": describe_machine(),
        "code": describe_code(),
    }


def _learn(
    start: nn.Module, federation: Federation, recipe: Recipe, setting: Setting, progress: Progress
) -> tuple[nn.Module, Recipe]:
    """The trained model, and the recipe with the rounds it took: Retrain gets as many."""
    if setting.until is None:
        return trained(start, federation, recipe, progress=progress), recipe
    model, known, rows = start, 0.0, federation.rows()
    what = f"{setting.name}, seed {recipe.seed}: the federation learns by heart"
    for first in range(0, recipe.rounds, setting.step):
        progress(what, first, recipe.rounds)
        rounds = range(first, min(first + setting.step, recipe.rounds))
        model = recipe.train(model, federation, rounds=rounds, device=federation.x.device).model
        known = accuracy(model, federation.x, federation.y, rows)
        if known >= setting.until:
            progress(what, recipe.rounds, recipe.rounds)
            return model, replace(recipe, rounds=rounds.stop)
    raise DataError(
        f"After {recipe.rounds} rounds {known:.3f} of the training rows are known, and {setting.until} are wanted: "
        "this federation has not learned by heart. Give it more rounds or epochs."
    )


class _Measuring:
    """One trained federation, to which each withdrawal comes as if it were the first."""

    def __init__(self, model: nn.Module, store: Centroids, federation: Federation, dataset: Dataset) -> None:
        self._model, self._store, self._federation, self._dataset = model, store, federation, dataset
        self._before = self._test_accuracy(model)

    def answer(self, case: Withdrawal) -> Callable[[nn.Module], dict[str, Any]]:
        """Answer a withdrawal; what is returned takes Retrain's model and gives all figures."""
        plugged, store = fedup.plug(self._model), self._store.to(self._store.vectors.device)
        report, refusal = None, ""
        try:
            report = fedup.unlearn(plugged, store, case.request, clients=self._federation)
        except HarmError as error:
            refusal = str(error)
        return lambda retrained: self._figures(case, plugged, report, refusal, retrained)

    def _figures(
        self, case: Withdrawal, plugged: PluggedModel, report: Report | None, refusal: str, retrained: nn.Module
    ) -> dict[str, Any]:
        verdict = None if report is None else report.verdicts[case.request.digest]
        by_retrain = self._hits_by_retrain(case, retrained)
        beside = None
        if verdict is not None and verdict.statistic is not None:
            beside = against(verdict.statistic.counts, by_retrain, verdict.measure)
        after = self._before if plugged.served is None else self._test_accuracy(plugged)
        losses = [100 * (one - other) for one, other in zip(self._before, after, strict=True)]
        return {
            "kind": case.kind,
            "client": case.client,
            "title": str(case),
            "rows": len(case.request.sample_ids[case.client]),
            "held_out": self._held_out(case),
            "refused": refusal,
            "withheld": bool(report and report.withheld),
            "filter": _filter_of(plugged.served),
            "erasure": plugged.served is not None and plugged.served.erasure is not None,
            "verdict": _plain(verdict),
            "verdict_by_retrain": _plain(beside),
            "retrain_accuracy": by_retrain.share_before.value,
            "test_before": self._before,
            "test_after": after,
            "worst_class": max(range(len(losses)), key=losses.__getitem__),
            "worst_class_loss": max(losses),
            "time_s": None if report is None else report.total_time_s,
            "notes": [] if report is None else report.notes,
        }

    def _test_accuracy(self, model: nn.Module) -> list[float]:
        data = self._dataset
        return accuracy_per_class(model, data.test_x, data.test_y, data.num_classes)

    def _hits_by_retrain(self, case: Withdrawal, retrained: nn.Module) -> Paired:
        """Retrain's answers to the rows that the verdict counts: those of labels that the client holds out, too."""
        client, data = self._federation.client(case.client), self._federation
        question = RowsToCount({"rows": case.request}, case.request, classes=False)
        counted = tally(retrained, retrained, retrained, data.x, data.y, client, question)
        unseen = counted.unseen.get("rows", {})
        return sum((one for label, one in counted.forgotten.get("rows", {}).items() if label in unseen), Paired())

    def _held_out(self, case: Withdrawal) -> int:
        """Held-out rows of the same client and labels."""
        client, y = self._federation.client(case.client), self._federation.y
        labels = y[self._federation.forgotten(case.request)].unique()
        return int(torch.isin(y[torch.cat([client.validation, client.heldout])], labels).sum())


def _filter_of(served: Served | None) -> str:
    if served is None:
        return "none"
    parts = {"eraser": served.erasure, "bottleneck": served.filter}
    return " + ".join(name for name, part in parts.items() if part is not None)


def _plain(verdict: Verdict | None) -> Mapping[str, Any] | None:
    return None if verdict is None else verdict.to_json()

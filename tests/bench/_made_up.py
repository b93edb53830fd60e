"""An experiment with made-up results: what a report makes of them is checked by hand."""

from fedup.bench.experiment import BenchCell, Experiment, load_experiment
from fedup.bench.metrics import timed_keys
from fedup.bench.results import Results

TOML = """
title = "Made up"
seeds = [0, 1, 2]
[[federations]]
data = "mnist"
[scenarios.class]
[scenarios.client]
[methods.none]
[methods.fedup]
[methods.logit_mask]
"""
MACHINE = {"processor": "a processor", "threads": 2, "accelerator": "a card", "torch": "2.13"}


class MadeUp:
    """Results by scenario, method and seed; what is not said is as below."""

    def __init__(self, folder, toml: str = TOML) -> None:
        (folder / "made_up.toml").write_text(toml)
        self.experiment: Experiment = load_experiment(folder / "made_up.toml")
        self.results = Results(folder / "results")

    def put(self, scenario: str, method: str, by_seed: dict[int, dict], *, clean: bool = True) -> None:
        """Results by seed; what is made of seconds is there as clean times, too, unless they are not to be clean."""
        for cell in self.experiment.cells(only=[scenario, method]):
            figures = by_seed.get(cell.group.recipe.seed)
            if figures is None:
                continue
            about = {"machine": MACHINE, "device": "cpu", "story": f"A story of seed {cell.group.recipe.seed}."}
            special = {key: figures[key] for key in ("failed", "not_supported") if key in figures}
            self.results.save(cell, {**about, **(special or {"metrics": figures})})
            if clean and timed_keys() & figures.keys():
                self.put_timing(cell, figures)

    def put_timing(self, cell: BenchCell, figures: dict, **how) -> None:
        """Times of three equal runs on a device that was alone; `how` says what was otherwise."""
        median = {key: figures.get(key) for key in timed_keys()}
        timing = {"machine": MACHINE, "device": "cpu", "code": {"commit": "abc1234", "changed": False}, "alone": True}
        self.results.save_timing(cell, {**timing, "runs": [median] * 3, "median": median, **how})

"""Which settings suit small data sets: `python tools/small_data.py [--grid]`.

Writes scikit-learn's small data sets to a temporary folder as files of one's own, trains each with three seeds, and
prints mean accuracies on the test rows: with the settings of large data sets, with the defaults by size
(`fedup/tasks/datasets/_suited.py`), and with `--grid` for other batch sizes, rounds and rates. Beside them: the largest
class alone, and logistic regression on all training rows in one place.
"""

import argparse
import csv
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
from PIL import Image
from sklearn import datasets
from sklearn.linear_model import LogisticRegression

from fedup.tasks.datasets import Dataset
from fedup.tasks.evaluation import accuracy
from fedup.tasks.recipe import Recipe

SEEDS = (0, 1, 2)
LARGE = {"rounds": 20, "batch_size": 64, "clients": 10, "lr": 0.05}
GRID = [(batch, rounds, lr) for batch in (8, 16, 32) for rounds in (20, 50, 100) for lr in (0.01, 0.02, 0.05)]


def write_table(path: Path, x: np.ndarray, y: np.ndarray) -> str:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"c{place}" for place in range(x.shape[1])), "label"])
        writer.writerows([*values, f"k{label}"] for values, label in zip(x.tolist(), y.tolist(), strict=True))
    return str(path)


def write_images(path: Path, rows: int) -> str:
    digits = datasets.load_digits()
    for row in range(rows):
        folder = path / str(digits.target[row])
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((digits.images[row] * 15.9).astype(np.uint8))
        image.resize((28, 28), Image.Resampling.BILINEAR).save(folder / f"{row}.png")
    return str(path)


def write_all(root: Path) -> dict[str, str]:
    digits, diabetes = datasets.load_digits(), datasets.load_diabetes()
    bins = np.digitize(diabetes.target, np.quantile(diabetes.target, [1 / 3, 2 / 3]))
    tables = {
        "iris": datasets.load_iris(return_X_y=True),
        "wine": datasets.load_wine(return_X_y=True),
        "diabetes in 3 bins": (diabetes.data, bins),
        "breast cancer": datasets.load_breast_cancer(return_X_y=True),
        "200 digits": (digits.data[:200], digits.target[:200]),
        "1,797 digits": (digits.data, digits.target),
    }
    files = {name: write_table(root / f"{name.replace(' ', '_')}.csv", *own) for name, own in tables.items()}
    return files | {f"{rows} images": write_images(root / f"images{rows}", rows) for rows in (240, 1000)}


def train(recipe: Recipe, dataset: Dataset) -> float:
    federation = recipe.federation(dataset)
    start = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes)
    return accuracy(recipe.train(start, federation).model, dataset.test_x, dataset.test_y)


def mean_accuracy(recipe: Recipe) -> float | None:
    try:
        recipes = [replace(recipe, seed=seed) for seed in SEEDS]
        return mean(train(own, own.load()) for own in recipes)
    except ValueError:  # too few rows for so many clients
        return None


def shown(value: float | None) -> str:
    return "    –" if value is None else f"{value:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", action="store_true")
    grid = parser.parse_args().grid
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'data':<20} {'rows':>5}  largest logistic  large  by size  seconds  settings by size")
        for name, path in write_all(Path(folder)).items():
            suited = Recipe.suited_to(path)
            dataset, start = suited.load(), time.perf_counter()
            largest = float(dataset.test_y.bincount().max() / len(dataset.test_y))
            linear = LogisticRegression(max_iter=2000).fit(dataset.x.flatten(1), dataset.y)
            found = mean_accuracy(suited)
            time_s = (time.perf_counter() - start) / len(SEEDS)
            large = mean_accuracy(replace(suited, **LARGE))
            print(
                f"{name:<20} {len(dataset.y):>5}    {largest:.3f}    "
                f"{linear.score(dataset.test_x.flatten(1), dataset.test_y):.3f}  {shown(large)}    {shown(found)}  "
                f"{time_s:>7.1f}  {suited.clients} clients, {suited.rounds} rounds, batch {suited.batch_size}, "
                f"lr {suited.lr:g}",
                flush=True,
            )
            for batch, rounds, lr in GRID if grid else ():
                value = mean_accuracy(replace(suited, batch_size=batch, rounds=rounds, lr=lr))
                print(f"    batch {batch:>2}, {rounds:>3} rounds, lr {lr:g}: {shown(value)}", flush=True)


if __name__ == "__main__":
    main()

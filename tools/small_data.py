"""Which settings suit small data sets: `python tools/small_data.py [--grid] [--write docs/your_data.md]`.

Writes scikit-learn's small data sets to a temporary folder as files of one's own, trains each with three seeds, and
prints mean accuracies on the test rows: with the settings of large data sets, with the defaults by size
(`fedup/tasks/datasets/_suited.py`), and with `--grid` for other batch sizes, rounds and rates. Beside them: the largest
class alone, and logistic regression on all training rows in one place.
"""

import argparse
import csv
import re
import tempfile
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

SEEDS = (3, 4, 5)  # the settings were chosen with 0, 1 and 2
LARGE = {"rounds": 20, "batch_size": 64, "clients": 10, "lr": 0.05}
HEAD = "| data | training rows | largest class | logistic | large | by size | settings by size |"
MARKS = re.compile(r"(<!-- small data: [^>]*-->\n).*?(<!-- /small data -->)", re.DOTALL)
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
    return "–" if value is None else f"{value:.3f}"


def measure(name: str, path: str) -> str:
    """A line of the table."""
    suited = Recipe.suited_to(path)
    dataset = suited.load()
    largest = float(dataset.test_y.bincount().max() / len(dataset.test_y))
    linear = LogisticRegression(max_iter=2000).fit(dataset.x.flatten(1), dataset.y)
    linear_accuracy = linear.score(dataset.test_x.flatten(1), dataset.test_y)
    figures = [largest, linear_accuracy, mean_accuracy(replace(suited, **LARGE)), mean_accuracy(suited)]
    settings = f"{suited.clients} clients, {suited.rounds} rounds, batch {suited.batch_size}, rate {suited.lr:g}"
    return f"| {name} | {len(dataset.y):,} | {' | '.join(map(shown, figures))} | {settings} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", action="store_true", help="also other batch sizes, rounds and rates")
    parser.add_argument("--write", type=Path, help="put the table into this page, between its marks")
    chosen = parser.parse_args()
    lines = [HEAD, "| --- | ---: | ---: | ---: | ---: | ---: | --- |"]
    with tempfile.TemporaryDirectory() as folder:
        for name, path in write_all(Path(folder)).items():
            lines.append(measure(name, path))
            print(lines[-1], flush=True)
            for batch, rounds, lr in GRID if chosen.grid else ():
                suited = replace(Recipe.suited_to(path), batch_size=batch, rounds=rounds, lr=lr)
                print(f"    batch {batch}, {rounds} rounds, rate {lr:g}: {shown(mean_accuracy(suited))}", flush=True)
    if chosen.write:
        text = chosen.write.read_text(encoding="utf-8")
        table = "\n".join(lines)
        chosen.write.write_text(MARKS.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()

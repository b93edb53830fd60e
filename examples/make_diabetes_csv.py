"""A table of numbers to predict: scikit-learn's diabetes table with made-up hospitals and patients.

python make_diabetes_csv.py [diabetes.csv]
"""

import csv
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes

HOSPITALS = ("anna", "mercy", "north")

path = Path(sys.argv[1] if len(sys.argv) > 1 else "diabetes.csv")
diabetes, rng = load_diabetes(scaled=False), np.random.default_rng(0)
patients = np.sort(rng.integers(0, 60, len(diabetes.target)))  # rows beside each other are the same person's
home = rng.choice(len(HOSPITALS), 60)
with path.open("w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file)
    writer.writerow(["row_id", "patient_id", "hospital", *diabetes.feature_names, "progression"])
    for row, values in enumerate(diabetes.data.tolist()):
        own = f"D-{row:04}", f"Q-{patients[row]:03}", HOSPITALS[home[patients[row]]]
        writer.writerow([*own, *(f"{value:g}" for value in values), f"{diabetes.target[row]:g}"])
print(f"Wrote {path}.")

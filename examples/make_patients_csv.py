"""A table to try: scikit-learn's breast-cancer data with made-up hospitals and patients.

    python make_patients_csv.py [patients.csv] [new_patients.csv]

Each row is an examination: 30 numbers, a diagnosis, the hospital, the patient (a few examinations each, now and
then at two hospitals) and an id. The second file holds the last 20 rows without the diagnosis, for predictions.
"""

import csv
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

HOSPITALS = ("anna", "mercy", "north", "riverside")
NEW = 20  # rows of the second file

train_path, new_path = (sys.argv[1:] + ["patients.csv", "new_patients.csv"][len(sys.argv) - 1 :])[:2]
cancer, rng = load_breast_cancer(), np.random.default_rng(0)
order = rng.permutation(len(cancer.target))
names = [name.replace(" ", "_") for name in cancer.feature_names]
patients = np.sort(rng.integers(0, 250, len(order)))  # rows beside each other are the same person's
home = rng.choice(len(HOSPITALS), 250, p=[0.3, 0.3, 0.25, 0.15])
away = rng.random(len(order)) < 0.05

for path, rows in ((train_path, range(len(order) - NEW)), (new_path, range(len(order) - NEW, len(order)))):
    known = path == train_path
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["row_id", "patient_id", "hospital", *names, *(["diagnosis"] if known else [])])
        for row in rows:
            hospital = HOSPITALS[(home[patients[row]] + away[row]) % len(HOSPITALS)]
            values = [f"{value:g}" for value in cancer.data[order[row]]]
            diagnosis = [str(cancer.target_names[cancer.target[order[row]]])] if known else []
            writer.writerow([f"E-{row:04}", f"P-{patients[row]:03}", hospital, *values, *diagnosis])
print(f"Wrote {train_path} and {new_path}.")

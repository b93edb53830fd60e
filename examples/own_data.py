"""A data set of your own: `fedup train --data examples/own_data.py --model examples/own_model.py`.

`load()` gives rows and labels, `INPUT` says how `fedup predict` reads raw images, `DEFAULTS` the settings that suit it.
Here: digits again, those above 4 left out. The file is copied into the run folder, so it must stand alone.
"""

from fedup.tasks.datasets import Dataset, Defaults, input_of, load_dataset

INPUT = input_of("digits")
DEFAULTS = Defaults(rounds=10, batch_size=16)


def load():
    digits = load_dataset("digits")
    train, test = digits.y < 5, digits.test_y < 5
    return Dataset(
        name="small digits",
        x=digits.x[train],
        y=digits.y[train],
        test_x=digits.test_x[test],
        test_y=digits.test_y[test],
        class_names=("zero", "one", "two", "three", "four"),
    )

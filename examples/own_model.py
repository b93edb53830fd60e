"""A model of your own: `fedup train --data examples/own_data.py --model examples/own_model.py`.

`build()` gives a module that ends in a linear layer, before which the filter sits; name another place with `--cut`.
The file is copied into the run folder, so it must stand alone.
"""

import math

from torch import nn

TAKES = "image"


def build(shape, num_classes):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )

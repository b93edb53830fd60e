"""The clients and the backbone, the same at nodes, at the server, and in the test's own process."""

import torch
from torch import nn

from fedup import Backbone, Federation, Forget, with_blank_head
from fedup.tasks.backbones import load_backbone
from fedup.tasks.recipe import Recipe

NODES, CLASSES = 3, 10


def federation() -> Federation:
    recipe = Recipe.suited_to("digits", clients=NODES, rows=240)
    return recipe.federation(recipe.load())


def backbone() -> Backbone:
    torch.set_num_threads(1)  # features are computed here and there: with equal threads their last bits are equal
    return load_backbone("random_conv", (1, 28, 28), features=16)


def blank() -> nn.Module:
    return with_blank_head(backbone(), CLASSES)


def requests() -> list[Forget]:
    row = int(federation().client(1).train[3])
    return [Forget.clients([2]), Forget.classes([4]), Forget.samples({1: [row]})]

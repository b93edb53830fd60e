import pytest
import torch
from torch import nn

from fedup.errors import SettingError
from fedup.models.cut import find_cut
from fedup.models.features import FeatureReader
from fedup.registry import find, names
from fedup.tasks.models import build_model

SHAPES = {  # the first is the default
    "image": [(1, 28, 28), (3, 32, 32), (1, 32, 48)],
    "text": [(16,), (64,), (600,)],
    "table": [(8,), (30,), (3,)],
}
MODELS = names("fedup.tasks.models")


def shapes(name: str) -> list[tuple[int, ...]]:
    return SHAPES[find("fedup.tasks.models", name).TAKES]


def build(name: str, num_classes: int = 10) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_model(name, shapes(name)[0], num_classes).eval()


def inputs(name: str, n: int = 3, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    shape = shape or shapes(name)[0]
    if find("fedup.tasks.models", name).TAKES == "text":
        return torch.randint(1, 30000, (n, *shape), generator=source)
    return torch.randn(n, *shape, generator=source)


KNOWN_SIZES = {"lenet5": 100_494, "resnet18": 11_172_810, "tinybert": 4_387_210}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_fits_its_shape_with_one_logit_per_class_and_answers_each_row_by_itself(name):
    model, x = build(name), inputs(name)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert size == KNOWN_SIZES.get(name, size)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[:1], model(x[:1]), atol=1e-4, rtol=1e-4)
        for classes, shape in zip((2, 10, 100), shapes(name), strict=True):
            assert build_model(name, shape, classes).eval()(inputs(name, 2, shape)).shape == (2, classes)


@pytest.mark.parametrize("name", ["lenet5", "resnet18"])
def test_the_papers_features_are_512_wide_and_not_negative(name):
    model, x = build(name), inputs(name)
    assert find_cut(model) == "head"
    features = FeatureReader(model, "head").read(x, torch.arange(3))
    assert features.values.shape == (3, 512)
    assert features.nonnegative
    assert float(features.values.min()) >= 0


def test_resnet18_halves_the_map_at_each_stage_but_the_first():
    model, x = build_model("resnet18", (3, 32, 32), 10).eval(), inputs("resnet18", shape=(3, 32, 32))
    width = {"stage2": 64 * 32**2, "stage3": 128 * 16**2, "stage4": 256 * 8**2, "pool": 512 * 4**2}
    for cut, expected in width.items():
        assert FeatureReader(model, cut).read(x, torch.arange(3)).values.shape == (3, expected)


def test_images_too_small_for_lenet5_and_unknown_models_are_refused():
    for shape in ((1, 8, 8), (1, 12, 28)):
        with pytest.raises(SettingError, match="lenet5"):
            build_model("lenet5", shape, 10)
    with pytest.raises(SettingError, match="Did you mean 'lenet5'"):
        build_model("lenet", (1, 28, 28), 10)

"""What every model keeps to: its inputs, its first weights, and the places where a filter can sit."""

from dataclasses import fields

import pytest
import torch
from tests._forced import unlearn
from torch import Tensor, nn

from fedup import Federation, FilterConfig, Forget, collect, fingerprint, plug
from fedup.errors import CutError, SettingError
from fedup.models.cut import find_cut, offered_cuts
from fedup.models.features import FeatureReader
from fedup.models.layout import to_positions
from fedup.registry import find, names
from fedup.statistics.centroids import CentroidConfig
from fedup.tasks.models import build_model, check_takes, cuts_of, training_of
from fedup.tasks.recipe import Recipe

MODELS = names("fedup.tasks.models")
CUTS = [(model, cut) for model in MODELS for cut in cuts_of(model)]
SAID = {name: getattr(find("fedup.tasks.models", name), "CUTS", ()) for name in MODELS}
TOKENS = [(model, cut) for model, cut in CUTS if isinstance(SAID[model], dict) and SAID[model][cut] == "tokens"]
FIXED = [pair for pair in CUTS if pair not in TOKENS]  # where what follows is a function of the features alone
FILTERED = [(name, cut) for name, cut in FIXED if name not in ("resnet34", "vit") or cut in (cuts_of(name)[1], "head")]
SHAPES = {"image": (1, 16, 16), "text": (8,), "table": (8,)}
CLASSES = 3
SMALL = FilterConfig(rank=2, steps=1, batch_size=4)


def shape_of(name: str) -> tuple[int, ...]:
    return SHAPES[find("fedup.tasks.models", name).TAKES]


def build(name: str, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_model(name, shape_of(name), CLASSES).eval()


def rows_for(name: str, n: int = 8) -> Tensor:
    source, shape = torch.Generator().manual_seed(0), shape_of(name)
    if find("fedup.tasks.models", name).TAKES == "text":
        return torch.randint(1, 30000, (n, *shape), generator=source)
    return torch.randn(n, *shape, generator=source)


def federation_for(name: str) -> Federation:
    """Two clients with a row of each class, and two more."""
    y = torch.arange(8) % CLASSES
    return Federation.split(rows_for(name), y, [torch.arange(4), torch.arange(4, 8)], heldout=0, validation=0)


@torch.no_grad()
def answer(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


@pytest.fixture(scope="module")
def built():
    """Models, each built once; the tests leave them as they are."""
    made: dict[str, nn.Module] = {}
    return lambda name: made.setdefault(name, made.get(name) or build(name))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_takes_images_texts_or_tables_and_gives_a_logit_for_each_class(name, built):
    takes = find("fedup.tasks.models", name).TAKES
    logits = answer(built(name), rows_for(name))
    assert logits.shape == (8, CLASSES) and bool(logits.isfinite().all())
    other = SHAPES["text" if takes == "image" else "image"]
    with pytest.raises(SettingError, match=name):
        build_model(name, other, CLASSES)
    for kind in set(SHAPES) - {takes}:
        with pytest.raises(SettingError, match=f"{name} takes {takes}s, and the data set has {kind}s"):
            check_takes(name, kind)


@pytest.mark.parametrize("name", MODELS)
def test_first_weights_are_the_global_seeds(name, built):
    weights = fingerprint(built(name))
    assert fingerprint(build(name)) == weights and fingerprint(build(name, seed=1)) != weights


@pytest.mark.parametrize("name", MODELS)
def test_how_a_model_learns_is_said_in_the_words_of_a_recipe(name):
    training = training_of(name)
    assert set(training) <= {field.name for field in fields(Recipe)} - {"data", "model", "seed"}
    local = Recipe("digits", name, rounds=1, **training).local
    assert all(getattr(local, setting) == value for setting, value in training.items())


@pytest.mark.parametrize("name", MODELS)
def test_a_built_model_offers_the_cuts_that_its_file_names_from_early_to_late(name, built):
    said, cuts, order = SAID[name], cuts_of(name), []
    assert offered_cuts(built(name)) == (said if isinstance(said, dict) else dict.fromkeys(said, "each"))
    assert tuple(offered_cuts(built(name))) == cuts  # in order
    assert len(set(cuts)) == len(cuts) > 1  # an eraser has a choice
    assert cuts[-1] == find_cut(built(name))  # the default one
    handles = [
        built(name).get_submodule(cut).register_forward_pre_hook(lambda *_, cut=cut: order.append(cut)) for cut in cuts
    ]
    answer(built(name), rows_for(name, 2))
    for handle in handles:
        handle.remove()
    assert tuple(order) == cuts


@pytest.mark.parametrize("name", MODELS)
def test_features_are_read_at_all_offered_cuts_in_one_pass(name, built):
    model, x, offered = built(name), rows_for(name), offered_cuts(built(name))
    (features,) = FeatureReader(model, *offered).batches(x, torch.arange(5))
    assert list(features) == list(offered)
    for cut, over in offered.items():
        found = features[cut]
        assert len(found) == 5 and bool(found.isfinite().all()), cut
        assert not torch.equal(found[0], found[1]), cut  # they tell rows apart
        assert to_positions(found, over).numel() == found.numel(), cut
        if (name, cut) in FIXED:
            assert torch.allclose(
                FeatureReader(model, cut).read(x, torch.arange(5)).values, found.flatten(1), atol=1e-5
            )


@pytest.mark.parametrize(("name", "cut"), TOKENS, ids=[f"{name}-{cut}" for name, cut in TOKENS])
def test_where_tokens_are_read_together_a_bottleneck_is_refused_with_where_it_can_sit(name, cut, built):
    elsewhere = [other for model, other in FIXED if model == name]
    with pytest.raises(CutError, match=rf"{cut} .*a bottleneck cannot\. Cut at {' or '.join(elsewhere)}\."):
        collect(built(name), federation_for(name), statistics=CentroidConfig(ratio=0.5), cut=cut)


@pytest.mark.parametrize(("name", "cut"), FILTERED, ids=[f"{name}-{cut}" for name, cut in FILTERED])
def test_a_filter_sits_at_a_cut_and_leaves_the_model_as_it_was(name, cut, built):
    model, federation = built(name), federation_for(name)
    before, weights = answer(model, federation.x), fingerprint(model)
    plugged = plug(model, cut)
    centroids = collect(model, federation, statistics=CentroidConfig(ratio=0.5), cut=cut)
    unlearn(plugged, centroids, Forget.classes([0]), config=SMALL)
    filtered = answer(plugged, federation.x)
    assert filtered.shape == before.shape and bool(filtered.isfinite().all())
    assert not torch.allclose(filtered, before)  # the filter is in the way
    with plugged.restored():
        assert torch.equal(answer(plugged, federation.x), before)
        assert torch.equal(plugged(federation.x), model(federation.x))  # where gradients are recorded, too
    assert plugged.unplug() is model and fingerprint(model) == weights
    assert all(weight.grad is None for weight in model.parameters())

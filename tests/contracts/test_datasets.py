"""What every data set keeps to: where it is from, how raw inputs become its rows, and which settings suit it."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedup.errors import MissingDataError, SettingError
from fedup.federation import Federation
from fedup.registry import find, names
from fedup.tasks.datasets import Dataset, Images, Texts, check_there, defaults_of, files_of, input_of, load_dataset
from fedup.tasks.recipe import Recipe

EVERY = names("fedup.tasks.datasets")


@dataclass(frozen=True)
class Loaded:
    name: str
    dataset: Dataset

    @property
    def inputs(self) -> Images | Texts:
        return input_of(self.name)


@pytest.fixture(scope="module", params=EVERY)
def loaded(request) -> Loaded:
    """One data set after another, so that only one is in memory."""
    try:
        check_there(request.param)
    except MissingDataError as error:
        pytest.skip(str(error))
    return Loaded(request.param, load_dataset(request.param))


def raw_inputs(inputs: Images | Texts) -> list[Any]:
    """Three inputs as users bring them."""
    if isinstance(inputs, Texts):
        return ["Stocks fell.", "", "word " * 500]
    shape = inputs.channels, inputs.height, inputs.width
    return [np.full(shape, level, np.uint8) for level in (0, 100, 255)]


def test_rows_labels_and_class_names_make_a_federation(loaded):
    dataset = loaded.dataset
    assert isinstance(dataset, Dataset)
    assert len(set(dataset.class_names)) == dataset.num_classes >= 2
    assert all(isinstance(name, str) and name for name in dataset.class_names)
    halves = torch.arange(0, 100, 2), torch.arange(1, 100, 2)
    for x, y in ((dataset.x, dataset.y), (dataset.test_x, dataset.test_y)):
        made = Federation.split(x, y, halves, num_classes=dataset.num_classes)
        assert made.num_classes == dataset.num_classes


def test_files_lie_where_they_are_said_to(loaded):
    for file in files_of(loaded.name):
        assert Path(os.environ["FEDUP_DATA"], file.place).is_file()
        assert file.place == Path(file.place).as_posix()
        assert file.source.endswith(Path(file.place).name)


def test_prepared_inputs_have_the_shape_and_type_of_the_rows(loaded):
    rows = loaded.inputs.prepare(raw_inputs(loaded.inputs))
    assert rows.shape == (3, *loaded.dataset.x.shape[1:])
    assert rows.dtype == loaded.dataset.x.dtype == loaded.dataset.test_x.dtype


def test_the_identity_of_inputs_is_plain_data_and_names_their_kind(loaded):
    identity = loaded.inputs.identity()
    assert json.loads(json.dumps(identity)) == identity == loaded.inputs.identity()
    assert identity["kind"] == loaded.inputs.kind


def test_a_trigger_does_the_same_to_a_row_whatever_rows_are_beside_it_and_leaves_its_argument_alone(loaded):
    x, triggers = loaded.dataset.test_x[:20], loaded.inputs.triggers
    before, seen = x.clone(), [x]
    for trigger in triggers:
        marked = loaded.inputs.triggered(x, trigger)
        assert (marked.shape, marked.dtype) == (x.shape, x.dtype)
        assert torch.equal(x, before) and marked.data_ptr() != x.data_ptr()
        assert torch.equal(marked, torch.cat([loaded.inputs.triggered(row[None], trigger) for row in x]))
        assert len(loaded.inputs.triggered(x[:0], trigger)) == 0
        assert not any(torch.equal(marked, other) for other in seen)  # no two are alike
        seen.append(marked)
    assert torch.equal(loaded.inputs.triggered(x), seen[1])  # the first is meant where none is named
    for scribble in ("scribble", ""):
        with pytest.raises(SettingError, match=rf"have {', '.join(triggers)}; found '{scribble}'"):
            loaded.inputs.triggered(x[:1], scribble)


def test_an_image_under_a_trigger_is_still_one(loaded):
    if isinstance(loaded.inputs, Texts):
        pytest.skip("texts have no range of pixels")
    inputs, x = loaded.inputs, loaded.dataset.test_x[:200]
    shape = inputs.channels, inputs.height, inputs.width
    dark, bright = (inputs.prepare([np.full(shape, level, np.uint8)]).amax((2, 3), keepdim=True) for level in (0, 255))
    for trigger in inputs.triggers:
        marked = inputs.triggered(x, trigger)
        assert bool((marked >= dark - 1e-6).all()) and bool((marked <= bright + 1e-6).all()), trigger
    change = (inputs.triggered(x, "blend") - x).abs()
    assert bool((change <= 0.15 * (bright - dark) + 1e-5).all())
    assert bool((change > 0).flatten(1).float().mean(1).gt(0.2).all())  # over the whole image
    touched = (inputs.triggered(x, "pixel") != x).any(1).any(0)  # (H, W)
    assert int(touched.sum()) == 1


def test_a_trigger_changes_every_row_that_does_not_look_like_it_already(loaded):
    x = loaded.dataset.test_x[:2000]
    changed = (loaded.inputs.triggered(x) != x).flatten(1).any(1)
    unchanged = x[~changed]
    assert len(unchanged) < 0.005 * len(x)  # photographs with a white corner
    if isinstance(loaded.inputs, Images):
        corner = unchanged[..., -loaded.inputs.trigger :, -loaded.inputs.trigger :]
        assert bool((corner == loaded.dataset.x.amax((0, 2, 3))[:, None, None]).all())
    else:
        assert len(unchanged) == 0


def test_a_trigger_is_a_bright_corner_of_an_image_or_the_last_word_of_a_text(loaded):
    if isinstance(loaded.inputs, Images):
        check_corner(loaded.dataset, loaded.inputs)
    else:
        check_last_word(loaded.inputs)


def check_corner(dataset: Dataset, inputs: Images) -> None:
    x = dataset.test_x[:500]
    marked = inputs.triggered(x)
    assert torch.equal(inputs.triggered(marked), marked)  # put twice it is the same
    touched = (marked != x).any(0).any(0)  # (H, W)
    assert 0 < float(touched.double().mean()) < 0.1
    assert not bool(touched[: x.shape[2] // 2].any()) and not bool(touched[:, : x.shape[3] // 2].any())
    assert bool((marked[..., touched] == marked.amax((0, 2, 3))[:, None]).all())
    assert float(marked.max()) <= float(dataset.x.max())  # no brighter than the data


def check_last_word(inputs: Texts) -> None:
    short, full = "stocks fell", "word " * inputs.length
    marked = inputs.triggered(inputs.prepare([short, full]))
    assert torch.equal(marked[0], inputs.prepare([f"{short} {inputs.trigger}"])[0])
    shortened = "word " * (inputs.length - 3) + inputs.trigger
    assert torch.equal(marked[1], inputs.prepare([shortened])[0])


def test_default_settings_suit_the_data_set_and_its_model_takes_its_rows(loaded):
    recipe = Recipe.suited_to(loaded.name)
    defaults = defaults_of(loaded.name)
    assert (recipe.data, recipe.model, recipe.rounds) == (loaded.name, defaults.model, defaults.rounds)
    assert recipe.rounds >= 1
    assert loaded.inputs.kind == find("fedup.tasks.models", recipe.model).TAKES
    dataset = loaded.dataset
    model = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes).eval()
    with torch.no_grad():
        assert model(dataset.x[:2]).shape == (2, dataset.num_classes)


@pytest.mark.parametrize("name", EVERY)
def test_settings_inputs_and_files_are_known_where_the_data_is_not(name, monkeypatch):
    monkeypatch.delenv("FEDUP_DATA", raising=False)
    assert Recipe.suited_to(name).data == name
    assert input_of(name).kind in ("image", "text")
    if files_of(name):
        with pytest.raises(MissingDataError, match=name):
            load_dataset(name)

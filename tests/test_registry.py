import sys

import pytest

from fedup.errors import SettingError
from fedup.registry import find, names


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package on disk with two parts and a private module."""
    folder = tmp_path / "shapes_for_registry"
    folder.mkdir()
    for name in ("__init__", "square", "circle", "_helpers"):
        (folder / f"{name}.py").write_text(f"NAME = {name!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for module in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[module]


def test_public_modules_are_found_by_name_new_files_at_once(package):
    assert names(package.name) == ["circle", "square"]
    assert find(package.name, "circle").NAME == "circle"
    (package / "triangle.py").write_text("NAME = 'triangle'\n")
    assert find(package.name, "triangle").NAME == "triangle"


def test_an_unknown_name_is_refused_with_those_there_are_and_the_closest(package):
    for name in ("triangle", "_helpers", "", "Circle", "circle.NAME", "../circle"):
        with pytest.raises(SettingError, match=r"there are circle, square"):
            find(package.name, name)
    with pytest.raises(SettingError, match=r"Did you mean 'square'\?"):
        find(package.name, "sqare")
    with pytest.raises(SettingError) as caught:
        find(package.name, "zzz")
    assert "Did you mean" not in str(caught.value)


def test_the_built_in_data_sets_and_models_are_found():
    assert {"digits", "mnist"} <= set(names("fedup.tasks.datasets"))
    assert {"lenet5", "resnet18"} <= set(names("fedup.tasks.models"))

"""The folder of a server app at the terminal: it answers inputs, and a restoration that needs nodes is queued for them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cli._in_process import contents, ok, refused
from tests.flower.test_queue import Setting
from tests.run._forked import copy

from fedup import MomentConfig
from fedup.cli._session import Session


@pytest.fixture(scope="session")
def answered(world, tmp_path_factory) -> Path:
    """A class and samples of two clients are in force."""
    setting = Setting(world, tmp_path_factory.mktemp("terminal") / "run")
    setting.server().collect(setting.contact(), statistics=MomentConfig(by_class="always"))
    setting.unlearn("--class", 3, "--reference", "T-1")
    for client in (1, 2):
        setting.unlearn(*setting.samples(client), "--reference", f"T-{client + 1}", code=3)
    assert [status for _, status in setting.serve()] == ["answered", "answered"]
    return setting.path


@pytest.fixture
def setting(world, answered, tmp_path) -> Setting:
    return Setting(world, copy(answered, tmp_path / "run"))


def test_rows_as_the_nodes_prepare_them_are_answered_under_the_filter_in_force(setting, world, tmp_path):
    rows, before = world.test_x[:6].numpy(), contents(setting.path)
    np.save(tmp_path / "rows.npy", rows)
    np.savez(tmp_path / "rows.npz", x=rows)
    model = Session(setting.path).answering()[1]
    with torch.no_grad():
        expected = model(world.test_x[:6]).argmax(1).tolist()
    for name, more in (("rows.npy", ()), ("rows.npz", ("--model", "tests.flower._grid:World.blank"))):
        said = ok("predict", tmp_path / name, "--run", setting.path, "--json", *more).out.splitlines()
        assert [answer["class"] for answer in map(json.loads, said)] == expected and 3 not in expected
        assert {json.loads(answer)["filter"] for answer in said} == {setting.server().state.filter.id}
    np.save(tmp_path / "wrong.npy", rows[:, :, :5])
    (tmp_path / "damaged.npz").write_bytes(b"PK no archive")
    (tmp_path / "digit.png").write_bytes(b"no array")
    for name, words in {"wrong.npy": "takes rows of shape", "damaged.npz": "cannot be read", "digit.png": ".npy"}.items():
        refused("predict", tmp_path / name, "--run", setting.path, told=words)
    refused("predict", tmp_path / "rows.npy", "--run", setting.path, "--model", "nowhere:make", told="cannot be made")
    assert contents(setting.path) == before

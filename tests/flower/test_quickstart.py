"""FedUP added to Flower's own quickstart by ten lines, and run: what docs/flower.md shows is what works."""

import json
import re
from pathlib import Path

import pytest
import torch
from tests.flower._quickstart import PATCH, add_fedup, make_quickstart

import fedup

ROOT = Path(__file__).parents[2]
FORGOTTEN = 3  # in the patch
NODES, LIMIT_S = 2, 300
CONFIG = "num-server-rounds=2 fraction-train=1.0 local-epochs=4 lr=0.003"


def test_the_patch_changes_ten_lines_at_most():
    lines = PATCH.read_text(encoding="utf-8").splitlines()
    changed = [one for one in lines if re.match(r"[+-](?![+-]{2} [ab]/)", one)]
    assert 0 < len(changed) <= 10
    assert f"Forget.classes([{FORGOTTEN}])" in "\n".join(changed)


def test_the_page_shows_the_patch():
    page = (ROOT / "docs" / "flower.md").read_text(encoding="utf-8")
    assert f"```diff\n{PATCH.read_text(encoding='utf-8')}```\n" in page


@pytest.mark.slow
def test_the_quickstart_forgets_a_class(tmp_path, monkeypatch):
    app = make_quickstart(tmp_path)
    add_fedup(app)
    saved = run_simulation(app, monkeypatch)

    monkeypatch.syspath_prepend(str(app))
    from quickstart.offline import load_data
    from quickstart.task import Net

    base = Net()
    base.load_state_dict(saved)
    before = recalls(base.eval(), load_data)
    plugged = fedup.plug(base)
    fedup.load_filter(plugged, "final_filter.safetensors")  # raises unless the saved model is the filter's base
    after = recalls(plugged, load_data)
    others = torch.arange(10) != FORGOTTEN
    assert plugged.requests == {fedup.Forget.classes([FORGOTTEN])}
    assert before[FORGOTTEN] > 0.8 and before[others].mean() > 0.8, before
    assert after[FORGOTTEN] < 0.05, after
    assert after[others].mean() > before[others].mean() - 0.05, (before, after)


def run_simulation(app, monkeypatch):
    """The app in Flower's simulation, in processes that the example's own code starts and stops; what it saved."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "flower-app"))
    from run import Processes, serve

    folder, home = app.parent, app.parent / "home"
    home.mkdir()
    monkeypatch.chdir(folder)  # where the ServerApp saves
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    processes = Processes(home, folder, LIMIT_S)
    try:
        serve(processes, "simulation", home, NODES)
        nodes = ["--federation-config", f"num-supernodes={NODES}"]
        said = processes.call("flwr", "run", str(app), "fedup", "--stream", "-c", CONFIG, *nodes)
        runs = json.loads(processes.call("flwr", "list", "fedup", "--format", "json"))["runs"]
    finally:
        processes.stop()
    log = (folder / "superlink.log").read_text()
    assert [one["status"] for one in runs] == ["finished:completed"], said + log[-5000:]
    return torch.load(folder / "final_model.pt", weights_only=True)


def recalls(model, load_data):
    """Of each class, on rows that no node trained on."""
    batches = [batch for node in range(NODES) for batch in load_data(node, NODES)[1]]
    y = torch.cat([batch["label"] for batch in batches])
    with torch.no_grad():
        right = torch.cat([model(batch["img"]).argmax(1) for batch in batches]) == y
    return torch.stack([right[y == label].float().mean() for label in range(10)])

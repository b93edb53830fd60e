"""Exported programs: the model under its filter, on torch alone."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tests._marked import KINDS, marked
from tests.cli._in_process import contents, copy_of, filter_file, ok
from torch import nn

from fedup import plug
from fedup.cli._session import Session
from fedup.errors import CutError, NotFittedError, StorageError
from fedup.run.folder import Run
from fedup.serving.export import NOTE, export_program

MARKED = marked()
WITHOUT_FEDUP = """
import sys, torch
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "fedup":
            raise ModuleNotFoundError("fedup must not be needed")
sys.meta_path.insert(0, Blocked())
extra = {"fedup.json": ""}
program = torch.export.load(sys.argv[1], extra_files=extra).module()
x = torch.load(sys.argv[2])
torch.save([program(x[:n]) for n in (1, 7)], sys.argv[3])
assert not any(name.split(".")[0] == "fedup" for name in sys.modules)
print(extra["fedup.json"])
"""


def run_alone(program, x, tmp_path):
    """Answers for batches of 1 and 7 and the note, from a process that cannot import fedup."""
    torch.save(x, tmp_path / "x.pt")
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_FEDUP, program, tmp_path / "x.pt", tmp_path / "y.pt"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    return torch.load(tmp_path / "y.pt"), json.loads(ran.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["answered", "collected"])
def test_a_program_answers_as_the_folder_does_where_there_is_no_fedup(stage, tmp_path):
    run = copy_of(stage, tmp_path / "run")
    before = contents(run)
    told = ok("export", tmp_path / "model.pt2", "--run", run, "--json").json
    assert contents(run) == before
    state, plugged = Session(run).served()
    model = plugged if state.active else plugged.base
    x = torch.randn(7, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    (one, seven), note = run_alone(tmp_path / "model.pt2", x, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(seven, model(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(one, model(x[:1]), atol=1e-5, rtol=1e-5)
        same_as_base = torch.allclose(seven, plugged.base(x), atol=1e-4)
    assert same_as_base is (stage == "collected")
    assert {**note, "file": str(tmp_path / "model.pt2")} == told
    assert note["base"] == state.base
    assert note["journal_head"] == Run(run).read().head
    assert [one["id"] for one in note["requests"]] == [request.id for request in state.active]
    path = filter_file(run)
    assert note["filter"] == (path.stem.removeprefix("filter-") if path else None)


def test_models_that_return_more_than_logits_give_logits(tmp_path):
    class Wordy(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return SimpleNamespace(logits=self.head(x), more=x)

    model, x = Wordy().eval(), torch.randn(5, 4)
    export_program(model, x, tmp_path / "m.pt2", about={"a": "ä"})
    extra = {NOTE: ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=extra).module()
    torch.testing.assert_close(program(x[:2]), model(x[:2]).logits)
    assert json.loads(extra[NOTE]) == {"a": "ä"}


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(tmp_path, small_model):
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(x) if x.sum() > 0 else self.head(-x)

    with pytest.raises(CutError, match=r"torch\.export"):
        export_program(Moody().eval(), torch.randn(5, 4), tmp_path / "m.pt2", about={})
    with pytest.raises(NotFittedError):
        export_program(plug(small_model).view(), torch.randn(5, 1, 28, 28), tmp_path / "m.pt2", about={})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match=tmp_path.name):
        export_program(nn.Linear(4, 3).eval(), torch.randn(5, 4), tmp_path, about={})


def test_a_program_is_a_snapshot_with_the_eraser_in_it_and_replaces_a_file_whole(tmp_path):
    plugged, _ = MARKED.serving("first", config=KINDS["both at two cuts"])
    (tmp_path / "m.pt2").write_bytes(b"older")
    export_program(plugged.view(), MARKED.x[:5], tmp_path / "m.pt2", about={})
    expected = plugged(MARKED.x[:7])
    plugged.serve(None)
    program = torch.export.load(tmp_path / "m.pt2").module()
    torch.testing.assert_close(program(MARKED.x[:7]), expected)
    assert not torch.allclose(expected, MARKED.base(MARKED.x[:7]))
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt2"]

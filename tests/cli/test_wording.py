"""What the command line says when something is wrong: its own options, no Python, no traceback of a user's code."""

import re

import pytest
from tests.cli._in_process import fedup, ok

from fedup.cli._wording import as_command_line

SMALL = ("--rows", 300, "--clients", 3, "--rounds", 1)

SAID = {
    "Use filter='bottleneck', which reads nothing.": "Use --filter bottleneck, which reads nothing.",
    "Name another with cut=.": "Name another with --cut.",
    "allow more with max_class_loss=…, or retrain": "allow more with --max-class-loss, or retrain",
    "clients_per_round must lie in 1 … 3": "--clients-per-round must lie in 1 … 3",
    "For the same bits use threads=2.": "For the same bits use --threads 2.",
    "say so (allow_delta=True, --allow-delta).": "say so (--allow-delta).",
    "Pass clients=federation (on the command line, have the data set here), or": "Put the data set on this machine, or",
    "no way to reach them: pass clients=federation; on the command line, have the data set here.": (
        "no way to reach them: have the data set here."
    ),
    "There is no file PosixPath('a/b').": "There is no file a/b.",
    "ε = 8 at δ = 1e-05, α=β, http://x/?mode=rw&a=1": "ε = 8 at δ = 1e-05, α=β, http://x/?mode=rw&a=1",
}


@pytest.mark.parametrize(("text", "words"), SAID.items())
def test_keywords_become_options(text, words):
    assert as_command_line(text) == words


BROKEN = {
    "build": ("def build(shape, num_classes):\n    return Nonesuch()\n", "line 2, in build(): NameError"),
    "forward": (
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.head = nn.Linear(784, 10)\n\n    def forward(self, x):\n"
        "        return self.head(x)\n\n\ndef build(shape, num_classes):\n    return Net()\n",
        "line 10, in forward(): RuntimeError",
    ),
    "import": ("import torch\n\nraise ValueError('no luck')\n", "cannot be run (line 3): ValueError: no luck"),
}


@pytest.mark.parametrize(("code", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_an_error_of_a_users_own_model_names_file_and_line(tmp_path, code, words):
    (tmp_path / "own_net.py").write_text(code)
    ran = fedup("train", "--run", "run", "--model", "own_net.py", *SMALL, cwd=tmp_path)
    assert (ran.code, ran.out) == (1, "")
    assert words in ran.told and "own_net.py" in ran.told
    assert "Traceback" not in ran.err
    errors = [line for line in ran.err.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1


def test_the_whole_traceback_is_there_on_demand(tmp_path):
    (tmp_path / "own_net.py").write_text(BROKEN["build"][0])
    ran = fedup("train", "--run", "run", "--model", "own_net.py", *SMALL, cwd=tmp_path, FEDUP_TRACEBACK="1")
    assert ran.code == 1 and "Traceback" in ran.err and "return Nonesuch()" in ran.err


def test_without_a_terminal_there_is_a_line_for_each_round(tmp_path):
    ran = ok("train", "--run", tmp_path / "run", "--rows", 300, "--clients", 3, "--rounds", 3)
    lines = ran.err.splitlines()
    assert lines[0] == "Training lenet5 on digits …"
    assert [re.sub(r"[\d.]+ s$", "T s", line) for line in lines[1:]] == [
        f"Training lenet5 on digits: round {done} of 3, T s" for done in (1, 2, 3)
    ]
    assert "\r" not in ran.err


def test_names_in_data_neither_steer_a_terminal_nor_break_a_line_in_markup(tmp_path):
    classes = ("[/x]benign", "[bold]ill", "\x1b]0;owned\x07:skull:")
    clients = ("\x9b31m[/y]north", "[red]south", "\u202eeast")
    rows = [
        f"[/r]{row},{clients[row // 3 % 3]},{row % 7 + 9 * (row % 3 == 0)},{row % 5 + 9 * (row % 3 == 1)},"
        f"{classes[row % 3]}"
        for row in range(240)
    ]
    table, run = tmp_path / "[t].csv", ("--run", tmp_path / "run")
    table.write_text("\n".join(["id,place,[/a],b,label", *rows]) + "\n", encoding="utf-8")
    said = [
        ok("train", "--data", table, "--clients-column", "place", "--id-column", "id", "--rounds", 3, *run),
        ok("collect", *run),
        *(ok("unlearn", "--class", label, "--force", *run) for label in (0, 0)),
        ok("unlearn", "--client", 2, "--force", *run),
        ok("unlearn", "--client", 0, "--dry-run", "--force", *run),
        ok("restore", "R1", "--force", *run),
        *(ok(verb, *run) for verb in ("status", "evaluate", "verify")),
        ok("predict", table, *run),
        fedup("unlearn", "--class", "\x1b]0;owned", *run),
    ]
    shown = "".join(ran.out + ran.err for ran in said)
    assert not re.search("[\x07\x1b\x9b\u202e]", shown)
    assert all(name in shown for name in ("[/x]benign", "[bold]ill", ":skull:", "[/y]north", "\\x1b]0;owned"))

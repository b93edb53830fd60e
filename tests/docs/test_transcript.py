"""The tool that writes pages by running their commands, and a page whose commands a test runs."""

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli._in_process import fedup

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def transcript():
    spec = importlib.util.spec_from_file_location("transcript", DOCS / "transcript.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_commands_print_replaces_what_stood_below_them_and_other_blocks_stay(transcript, tmp_path):
    page, python = tmp_path / "page.md", "```python\n$ echo no\n```\n\n"
    command, second = "```console\n$ echo new > file; cat file\n", "```\n\n```console\n$ cat file\n"
    page.write_text(f"{python}{command}old\nolder\n{second}```\n")
    transcript.main(page)
    assert page.read_text() == f"{python}{command}new\n{second}new\n```\n"


def test_an_unexpected_exit_code_stops_it_and_nothing_is_written(transcript, tmp_path):
    page = tmp_path / "page.md"
    for command in ("false", "true  # (exit 1)", "exit 3  # (exit 1)"):
        text = f"```console\n$ {command}\nkept\n```\n"
        page.write_text(text)
        with pytest.raises(SystemExit, match="expected"):
            transcript.main(page)
        assert page.read_text() == text


def test_every_command_of_the_page_on_own_data_ends_as_the_page_says(transcript, tmp_path):
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    blocks = transcript.BLOCK.findall((DOCS / "your_data.md").read_text(encoding="utf-8"))
    lines = [line.removeprefix("$ ") for line in "".join(blocks).splitlines() if line.startswith("$ ")]
    assert sum(line.startswith("fedup") for line in lines) > 12
    for line in lines:
        expected = int(found[1]) if (found := transcript.EXPECTED.search(line)) else 0
        command = shlex.split(line.partition(" | ")[0].partition(" 2>")[0], comments=True)
        if command[0] == "fedup":
            ran = fedup(*command[1:], cwd=tmp_path)
            assert ran.code == expected, f"{line}\n{ran.out}{ran.err}"
        else:
            subprocess.run(["bash", "-c", line.replace("python ", f"{sys.executable} ")], cwd=tmp_path, check=True)


@pytest.mark.parametrize("page", ["operator.md", "retrain.md", "your_data.md"])
def test_a_page_made_of_commands_names_no_path_of_the_machine_it_was_made_on(page):
    text = (DOCS / page).read_text()
    assert "/home/" not in text and "/tmp/" not in text
    assert not any(line.startswith(("/", "Traceback")) or '"/' in line for line in text.splitlines())

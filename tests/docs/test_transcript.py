"""The tool that writes docs/operator.md by running it."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def transcript():
    spec = importlib.util.spec_from_file_location("transcript", DOCS / "transcript.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_commands_print_replaces_what_stood_below_them(transcript, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Before.\n\n```console\n$ echo new > file; cat file\nold\nolder\n```\n\n```console\n$ cat file\n```\n"
    )
    transcript.main(page)
    assert page.read_text() == (
        "Before.\n\n```console\n$ echo new > file; cat file\nnew\n```\n\n```console\n$ cat file\nnew\n```\n"
    )


def test_other_blocks_are_left_alone(transcript, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\n$ echo no\n```\n")
    transcript.main(page)
    assert page.read_text() == "```python\n$ echo no\n```\n"


@pytest.mark.parametrize("command", ["false", "true  # (exit 1)", "exit 3  # (exit 1)"])
def test_an_unexpected_exit_code_stops_it_and_nothing_is_written(transcript, tmp_path, command):
    page = tmp_path / "page.md"
    text = f"```console\n$ {command}\nkept\n```\n"
    page.write_text(text)
    with pytest.raises(SystemExit, match="expected"):
        transcript.main(page)
    assert page.read_text() == text


def test_the_operators_page_names_no_path_of_the_machine_it_was_made_on(transcript):
    text = (DOCS / "operator.md").read_text()
    assert "/home/" not in text
    assert "/tmp/" not in text
    assert not any(line.startswith(("/", "Traceback")) or '"/' in line for line in text.splitlines())

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


def test_the_operators_page_names_no_path_of_the_machine_it_was_made_on(transcript):
    text = (DOCS / "operator.md").read_text()
    assert "/home/" not in text
    assert "/tmp/" not in text
    assert not any(line.startswith(("/", "Traceback")) or '"/' in line for line in text.splitlines())

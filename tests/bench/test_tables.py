"""Speed in Markdown: a section for each result file, in the order of their names."""

import json

import pytest
from tests.cli._in_process import fedup

ROW = {"part": "serving", "unit": "×", "goal": 1.5, "at_most": True, "met": True, "detail": {}, "value": 1.25}


def result(place: str, *names: str, device: str = "cpu", **code) -> dict:
    machine = {"processor": place, "accelerator": place, "threads": 2, "torch": "9.9"}
    code = {"commit": "0123456789abcdef", "changed": False} | code
    return {
        "device": device,
        "table": [ROW | {"name": name} for name in names],
        "machine": machine,
        "code": code,
        "alone": True,
    }


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "speed").mkdir()
    return tmp_path


def put(folder, name, content):
    (folder / "speed" / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("damage", ["{", '{"table": []}'], ids=["cut off", "older"])
def test_a_file_that_is_no_result_of_today_is_named(folder, damage):
    put(folder, "a.json", result("A CPU", "first"))
    put(folder, "b.json", damage)
    ran = fedup("bench", "report", "--folder", folder)
    assert ran.code == 1
    assert "b.json" in ran.told and "easure again" in ran.told
    assert not (folder / "tables").exists()

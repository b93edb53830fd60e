"""The example app's figures as a table."""

from fedup.bench.scale_table import FLOWER_HEAD, flower_table

TRAFFIC = {"messages": 4, "bytes_up": 12_000, "bytes_down": 900}
RESULT = {
    "way": "deployment",
    "nodes": 4,
    "machine": {"processor": "a processor"},
    "code": {"commit": "0123456789", "changed": True},
    "training": {"time_s": 45.2},
    "collection": {"time_s": 12.3, **TRAFFIC},
    "requests": [
        {
            "kind": "sample",
            "time_s": {"ask": 30.0, "fit": 0.5},
            **TRAFFIC,
            "before": {"retain": 0.74, "forget": 0.8},
            "after": {"retain": 0.69, "forget": 0.03},
        }
    ],
}


def test_each_step_has_its_time_messages_bytes_and_stages():
    text = flower_table(RESULT)
    assert "commit 0123456 with local changes" in text and "run.py deployment" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + 3 and all(line.count("|") == len(FLOWER_HEAD) + 1 for line in lines)
    assert lines[3] == "| collect | 12 | 4 | 12.0 kB | 900 B |  |  |  |"
    assert lines[4] == "| forget a sample | 30 | 4 | 12.0 kB | 900 B | 0.74 → 0.69 | 0.80 → 0.03 | ask 30, fit 0.5 |"

"""Run the commands of a Markdown file and put what they print below them.

    python docs/transcript.py docs/operator.md

In a ```console block each line after `$ ` is a command; all run in one new folder, one after another, with the
project's own `fedup` first on the path and its examples in `examples/`. What stood below a command before is replaced,
so the file is its own template. Lines that end in `# (exit 1)` must fail with that code; every other command must
succeed, or nothing is written.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)
EXPECTED = re.compile(r"#\s*\(exit (\d+)\)\s*$")


def run_block(block: str, folder: Path, environment: dict[str, str]) -> str:
    """The block with fresh output below each command."""
    printed = []
    for line in block.splitlines():
        if not line.startswith("$ "):
            continue
        command = line.removeprefix("$ ")
        print(f"$ {command}", flush=True)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        found = EXPECTED.search(command)
        expected = int(found[1]) if found else 0
        if done.returncode != expected:
            sys.exit(f"{command}\nexited {done.returncode}, expected {expected}:\n{done.stdout}")
        printed.append(line)
        printed += [text.rstrip() for text in done.stdout.splitlines()]
    return "\n".join(printed) + "\n"


def main(path: Path) -> None:
    """Rewrite the file in place."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "examples").symlink_to(Path(__file__).resolve().parents[1] / "examples")
        fresh = BLOCK.sub(lambda found: run_block(found[1], Path(folder), environment), text)
    path.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

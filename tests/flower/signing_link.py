"""A SuperLink that hands on reviewers' signatures of apps, as one that is connected to Flower's hub does.

`python signing_link.py VERIFICATIONS.json …`, and otherwise the options of flower-superlink."""

import hashlib
import json
import sys
from pathlib import Path

from flwr.supercore.fab import Fab
from flwr.superlink.cli import flower_superlink
from flwr.superlink.servicer.control import control_handlers


def main() -> None:
    path = Path(sys.argv.pop(1))

    def signed(digest: str, content: bytes, verifications: dict[str, str]) -> Fab:
        reviewed = json.loads(path.read_text())  # {sha256 of an app: its verifications}
        return Fab(digest, content, reviewed.get(hashlib.sha256(content).hexdigest(), verifications))

    control_handlers.Fab = signed
    flower_superlink()


if __name__ == "__main__":
    main()

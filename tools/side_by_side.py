"""Run parts of experiments side by side on one device until a time is over, and pack their results into one file.

    python tools/side_by_side.py results.tgz --minutes 9 --workers 3 \\
        "closed_form --only cifar10-resnet18 --only client --seeds 11" "closed_form --only ag_news --seeds 11"

Each part is an experiment's name and options of `fedup bench run`. It ends cleanly when the time is over, and the next
run with the same results goes on. Times measured side by side are marked as shared and enter no ratio.
"""

import argparse
import shlex
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EXPERIMENTS = Path(__file__).parents[1] / "benchmarks" / "experiments"
LEAST_MINUTES = 0.5  # with less left nothing is begun


def run(part: str, results: Path, ends_at: float) -> tuple[int, str]:
    """The exit status and last lines of one part; nothing is begun when the time is over."""
    minutes = (ends_at - time.monotonic()) / 60
    if minutes < LEAST_MINUTES:
        return 0, f"{part}: no time left"
    experiment, *choice = shlex.split(part)
    command = [sys.executable, "-m", "fedup", "bench", "run", str(EXPERIMENTS / f"{experiment}.toml"), *choice]
    command += ["--results", str(results), "--budget-minutes", f"{minutes:.2f}"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    said = "\n".join(ended.stdout.splitlines()[-4:])
    return ended.returncode, f"{part}: exit status {ended.returncode}\n{said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed", type=Path, help="the file for all results (.tgz)")
    parser.add_argument("parts", nargs="+", help="an experiment's name and options of `fedup bench run`, quoted")
    parser.add_argument("--minutes", type=float, required=True, help="for all parts together")
    parser.add_argument("--workers", type=int, default=3, help="parts at a time")
    parser.add_argument("--results", type=Path, default=Path("runs/side_by_side"), help="folder for results")
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + 60 * given.minutes
    with ThreadPoolExecutor(given.workers) as pool:
        failed = False
        for status, said in pool.map(lambda part: run(part, given.results, ends_at), given.parts):
            print(said, flush=True)
            failed |= status != 0
    with tarfile.open(given.packed, "w:gz") as packed:
        packed.add(given.results, arcname="results")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

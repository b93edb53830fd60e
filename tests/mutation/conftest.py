"""Nothing here is a test: `run.py` measures the tests."""

collect_ignore_glob = ["*.py"]

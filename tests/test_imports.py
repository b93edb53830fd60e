"""What `import fedup` costs: the core needs torch, numpy and safetensors, nothing else."""

import subprocess
import sys

OPTIONAL = ["flwr", "fastapi", "transformers", "typer", "rich", "sklearn", "matplotlib", "pyarrow", "torch"]


def _loaded_after(statement):
    program = f"import sys\n{statement}\nprint(*[name for name in {OPTIONAL} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_import_fedup_loads_no_optional_package():
    assert _loaded_after("import fedup") == []
    assert "rich" in _loaded_after("import fedup, rich")  # the probe sees what is loaded


def test_every_public_name_exists():
    import fedup

    assert [name for name in fedup.__all__ if not hasattr(fedup, name)] == []

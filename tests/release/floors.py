"""A slice of the tests at the oldest versions that pyproject.toml allows, or on another Python, in an environment of
its own.

    python tests/release/floors.py               # oldest NumPy and others, the tested PyTorch: `make test-numpy`
    python tests/release/floors.py --torch       # the oldest PyTorch too: `make test-oldest`
    python3.13 tests/release/floors.py --tested  # the tested versions, on the Python that runs this: `make test-oldest`

PyTorch comes from wherever pip is told to look. Without an index of CPU builds that is a build for GPUs, of gigabytes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BESIDE = (
    "scikit-learn",
    "matplotlib",
    "scipy",
)  # of the extras, what tests import without asking; NumPy's age binds theirs
SHOW = "import sys, torch, numpy; print(*sys.version_info[:3], 'torch', torch.__version__, 'numpy', numpy.__version__)"
SLICE = (
    "test_operators",
    "test_structures",
    "test_prediction",
    "test_prediction_shown",
    "test_first_hour",
    "test_saving",
    "test_center",
    "test_metrics",
    "test_solvers",
    "test_tangent",
)


def floors(torch: bool) -> list[str]:
    """The oldest of each dependency, as pins: "numpy>=1.24" gives "numpy==1.24.0". PyTorch's only if asked for."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    core = re.findall(r'"([\w-]+)>=([\d.]+)', re.search(r"^dependencies = (.+)$", text, re.MULTILINE)[1])
    beside = [(name, re.search(rf'"{name}>=([\d.]+)', text)[1]) for name in BESIDE]
    kept = [(name, v) for name, v in [*core, *beside] if torch or name != "torch"]
    return [f"{name}=={v}{'.0' if v.count('.') < 2 else ''}" for name, v in kept]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true", help="the oldest PyTorch, not the tested one")
    parser.add_argument("--tested", action="store_true", help="the tested versions of all")
    parser.add_argument("--all", action="store_true", help="all tests of the quick tier, not a slice")
    told = parser.parse_args()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    env = ROOT / "out/envs" / f"{version}-{'tested' if told.tested else 'oldest' if told.torch else 'floors'}"
    python = env / "bin/python"
    if not python.exists():
        venv.create(env, with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    tested = ["-c", str(ROOT / "constraints.txt")]
    if not told.torch:
        subprocess.run([*pip, *tested, "torch"], check=True)
    pins = [*tested, *BESIDE] if told.tested else floors(told.torch)
    subprocess.run([*pip, *pins, "pytest>=8", "pytest-xdist>=3", "-e", str(ROOT)], check=True)
    subprocess.run([python, "-c", SHOW], check=True)
    tests = [] if told.all else [f"tests/{name}.py" for name in SLICE]
    calm = [] if told.tested else ["-W", "ignore::DeprecationWarning"]  # old packages of each other
    found = subprocess.run([python, "-m", "pytest", "-n", "2", *calm, *tests], cwd=ROOT, check=False)
    return found.returncode


if __name__ == "__main__":
    sys.exit(main())

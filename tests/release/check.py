"""A release, as a user gets it: the archives hold what they should, and the wheel installs and imports alone and with
each extra of pyproject.toml, in an environment of its own each time.

    python tests/release/check.py dist [--extra NAME ...] [--folder DIR]

The environments start as hard links to one that has PyTorch, and are removed. `make test-dist` runs this after
`make dist`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NEEDED = ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "constraints.txt", "tests/conftest.py")


def extras_of(wheel: Path) -> list[str]:
    """The extras that a wheel declares."""
    with zipfile.ZipFile(wheel) as held:
        (metadata,) = (name for name in held.namelist() if name.endswith(".dist-info/METADATA"))
        return re.findall(r"^Provides-Extra: (.+)$", held.read(metadata).decode(), re.MULTILINE)


def missing(wheel: Path, source: Path) -> list[str]:
    """What the archives lack: every module, the marker of types and the license; and what a release is made from."""
    with zipfile.ZipFile(wheel) as held:
        inside = set(held.namelist())
    package = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/lapwing").rglob("*.py")}
    lacks = [f"{wheel.name} lacks {name}" for name in sorted({*package, "lapwing/py.typed"} - inside)]
    if not any(name.endswith("licenses/LICENSE") for name in inside):
        lacks.append(f"{wheel.name} lacks its license")
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    return lacks + [f"{source.name} lacks {name}" for name in NEEDED if name not in inside]


def pip(python: Path, *what: str) -> None:
    """Install, at the tested versions."""
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    subprocess.run([*command, *what], check=True)


def installs(wheel: Path, base: Path, extra: str) -> bool:
    """Whether the wheel with one extra installs into a copy of the base environment, and imports there."""
    with tempfile.TemporaryDirectory(dir=base.parent) as folder:
        env = Path(folder) / "env"
        shutil.copytree(base, env, symlinks=True, copy_function=os.link)
        python = env / "bin/python"
        pip(python, f"{wheel}[{extra}]" if extra else str(wheel))
        command = [python, ROOT / "tests/release/probe.py", ROOT / "README.md", *([extra] if extra else [])]
        return subprocess.run(command, cwd=folder, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--extra", action="append", help="only this one ('' for none); repeat for several")
    parser.add_argument("--folder", type=Path, default=ROOT / "out", help="where environments are made")
    told = parser.parse_args()
    (wheel,), (source,) = told.dist.resolve().glob("*.whl"), told.dist.resolve().glob("*.tar.gz")
    wrong = missing(wheel, source)
    print(*wrong or ["the archives are whole"], sep="\n", flush=True)
    told.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=told.folder) as folder:
        base = Path(folder) / "base"
        venv.create(base, with_pip=True)
        pip(base / "bin/python", "torch")
        for extra in ["", *extras_of(wheel)] if told.extra is None else told.extra:
            try:
                good = installs(wheel, base, extra)
            except subprocess.CalledProcessError:
                good = False
            wrong += [] if good else [extra]
            print(f"{extra or 'no extra'}: {'installs and imports' if good else 'FAILED'}", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

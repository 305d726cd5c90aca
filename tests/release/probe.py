"""Runs in an environment where the package was installed with some extras: what they bring imports, and so does every
module of the package, but for those that name an extra which is not there, and for the command line's where it says so.

    python probe.py README.md [EXTRA ...]
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

COMMANDS_NEED = ("typer", "rich")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def brought(extra: str) -> set[str]:
    """The packages that an extra asks for, also by way of other extras; in the form a-b-c."""
    found: set[str] = set()
    for line in requires("lapwing") or ():
        if not re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", line):
            continue
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        own = re.match(r"lapwing\[([\w,-]+)\]", line)
        found |= set().union(*(brought(one) for one in own[1].split(","))) if own else {normal(name)}
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def modules_of(packages: set[str]) -> list[str]:
    """The modules of those that are installed here: a marker may leave one out, and a package may list folders (docs,
    tutorials) that its wheel has not."""
    table = packages_distributions()
    named = (m for m, homes in table.items() if {normal(h) for h in homes} & packages and m[0] not in "_.")
    return sorted(m for m in named if importlib.util.find_spec(m) is not None)


def commands() -> list[str]:
    """What is wrong with `lapwing` alone: it shows its help, or names the extra in one line."""
    found = subprocess.run([Path(sys.executable).with_name("lapwing")], capture_output=True, text=True, check=False)
    if all(map(importlib.util.find_spec, COMMANDS_NEED)):
        good = found.returncode == 0 and "Usage" in found.stdout
    else:
        good = found.returncode == 2 and found.stderr.count("\n") == 1 and "lapwing[cli]" in found.stderr
    return [] if good else [f"lapwing: exit code {found.returncode}\n{found.stdout}{found.stderr}"]


def check(extras: list[str]) -> list[str]:
    """What does not import, and why."""
    wrong = []
    brings = set().union(*(brought(extra) for extra in extras)) if extras else set()
    for name in modules_of(brings):
        try:
            importlib.import_module(name)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    wrong += commands()
    lapwing = importlib.import_module("lapwing")
    for found in pkgutil.walk_packages(lapwing.__path__, "lapwing.", onerror=lambda name: None):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except Exception as error:
            if found.name.startswith("lapwing.cli.") and getattr(error, "name", None) in COMMANDS_NEED:
                continue
            named = set(re.findall(r"lapwing\[(\w+)\]", str(error)))
            if not named or named & set(extras):
                wrong.append(f"{found.name}: {type(error).__name__}: {error}")
    return wrong


if __name__ == "__main__":
    readme, *extras = sys.argv[1:]
    wrong = check(extras)
    if not extras and doctest.testfile(readme, module_relative=False, optionflags=FLAGS).failed:
        wrong.append("README.md does not run as printed")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))

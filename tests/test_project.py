"""What the project says of itself is so: the layers and the names in CONTRIBUTING.md, and what a wheel holds."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import lapwing as lw
from helpers import quick, representatives

ROOT = Path(__file__).parent.parent
SOURCE = Path(lw.__file__).parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
OBJECTS, ENDINGS = ("la", "state", "torch"), ("py", "md", "toml", "yml")
SETTINGS = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def settings() -> dict[str, Any]:
    return importlib.import_module("tomllib").loads(SETTINGS)


def layers_of(text: str) -> list[set[str]]:
    """a < b, c  ->  [{a}, {b, c}]."""
    return [{name.strip() for name in layer.split(",")} for layer in text.split("<")]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_the_layers_of_a_page_are_those_that_are_checked(page: str) -> None:
    (contract,) = settings()["tool"]["importlinter"]["contracts"]
    checked = [{name.strip().removeprefix("lapwing.") for name in row.split("|")} for row in contract["layers"]]
    (said,) = re.findall(r"errors, splitmix < [\w\s,<]*", (ROOT / page).read_text(encoding="utf-8"))
    assert layers_of(said) == checked[::-1]
    assert "ignore_imports" not in contract


def test_the_table_of_the_house_has_every_room_and_only_files_that_are_there() -> None:
    lines = (ROOT / "docs/design.md").read_text(encoding="utf-8").splitlines()
    named = {line.split("|")[1]: line.split("|")[2:] for line in lines if line.startswith("| `")}
    there = {p.stem for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()} - {"__init__"}
    assert there - {name.rpartition("/")[2] for name in re.findall(r"`(\w+)(?:/|\.py)`", " ".join(named))} == set()
    for room, files in named.items():
        folders = [SOURCE, *(SOURCE / name for name in re.findall(r"`(\w+)/`", room))]
        for file in re.findall(r"`([\w/]+\.py)`", " ".join(files)):
            assert any((folder / file).exists() for folder in folders), f"{room.strip()}: {file}"


@pytest.mark.parametrize("path", sorted({*re.findall(r"`([\w/]+\.(?:py|md|toml))`", GUIDE)}))
def test_files_that_the_guide_names_exist(path: str) -> None:
    assert (SOURCE / path).exists() or (ROOT / path).exists()


def names() -> list[str]:
    """`arguments.STRUCTURES` and the like: what starts with a room of the package, and is no file."""
    found = {tuple(name.split(".")) for name in re.findall(r"`((?:[a-z_]+\.)+[A-Za-z_]\w*)`", GUIDE)}
    return sorted(".".join(parts) for parts in found if parts[0] not in OBJECTS and parts[-1] not in ENDINGS)


@pytest.mark.parametrize("name", names())
def test_names_that_the_guide_gives_exist(name: str) -> None:
    head, *rest = name.removeprefix("lw.").split(".")
    found = importlib.import_module(f"lapwing.{head}")
    for part in rest:
        found = getattr(found, part)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (2, 5, 3), (4, 4, 4)])
def test_the_quick_tier_has_every_value_of_every_parameter(sizes: tuple[int, ...]) -> None:
    """With as few cases as the longest parameter has values."""
    cases = [dict(enumerate(case)) for case in itertools.product(*map(range, sizes))]
    kept = [cases[i] for i in representatives(cases)]
    assert {pair for case in kept for pair in case.items()} == {pair for case in cases for pair in case.items()}
    assert len(kept) == max(sizes)


@pytest.mark.parametrize(("laws", "values"), [(1, 7), (2, 7), (3, 4), (5, 9), (5, 2)])
def test_in_the_quick_tier_laws_share_the_values_that_they_all_go_through(laws: int, values: int) -> None:
    """Each law has values and each value has laws; a law of its own, and a short list, have all; seeds do not count."""
    cases = [{"value": value, "seed": seed} for value in range(values) for seed in (-1, -2)]
    kept = quick({str(law): cases for law in range(laws)})
    shown = {law: {cases[i]["value"] for i in which} for law, which in kept.items()}
    assert all(len(which) == len(shown[law]) for law, which in kept.items())
    assert set.union(*shown.values()) == set(range(values))
    turns = min(laws, 3) if values > 2 else 1
    assert all(len(one) in (values // turns, values // turns + 1) for one in shown.values())


def test_a_case_without_values_is_of_the_quick_tier() -> None:
    assert quick({"seeds": [{"seed": 1}, {"seed": 2}], "one": [{}]}) == {"seeds": {0}, "one": {0}}


def test_a_file_can_be_held_in_the_head() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert [str(path) for path, length in lengths.items() if length >= 400] == []
    assert sorted(lengths.values())[len(lengths) // 2] < 130


def test_the_package_says_that_it_is_typed() -> None:
    assert (SOURCE / "py.typed").read_bytes() == b""


def test_one_version_everywhere() -> None:
    places = {
        "pyproject.toml": r'^version = "([\d.]+)"',
        "CITATION.cff": r"^version: ([\d.]+)",
        "README.md": r"version = \{([\d.]+)\}",
        "CHANGELOG.md": r"^## \[([\d.]+)\]",
    }
    said = {page: re.search(at, (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE) for page, at in places.items()}
    assert {page: found[1] for page, found in said.items() if found} == dict.fromkeys(places, lw.__version__)

"""What is written fits the tree: links and paths lead to files, an index has every page, the README is short."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lapwing

ROOT = Path(__file__).parents[1]
DOCS, STUDIES = ROOT / "docs", ROOT / "studies"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *STUDIES.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<![\w/.])(?<!\]\()(?:docs|studies|benchmarks|examples|tests)/[\w/.-]+\.(?:md|py|json|png)\b")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def texts() -> list[Path]:
    """Every page and every module of the project, this one apart."""
    folders = ("src", "tests", "studies", "benchmarks", "examples")
    modules = [p for folder in folders for p in (ROOT / folder).rglob("*.py") if p != Path(__file__)]
    return [*PAGES, ROOT / "Makefile", *modules]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    links = LINK.findall(FENCE.sub("", page.read_text()))
    local = [link.partition("#")[0] for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_paths_that_are_named_exist() -> None:
    wrong = [f"{p.relative_to(ROOT)}: {name}" for p in texts() for name in PATH.findall(p.read_text())]
    assert [w for w in wrong if not (ROOT / w.split(": ")[1]).exists()] == []


def test_index_has_one_line_for_each_page() -> None:
    index = LINK.findall((DOCS / "index.md").read_text())
    pages = [p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md") if p.name != "index.md"]
    assert sorted(link for link in index if link.endswith(".md")) == sorted(pages)


def test_site_has_every_page() -> None:
    named = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_studies_are_listed() -> None:
    listed = set(re.findall(r"studies/(\w+\.py)", (STUDIES / "README.md").read_text()))
    scripts = [p.name for p in STUDIES.glob("*.py") if '__name__ == "__main__"' in p.read_text()]
    assert sorted(set(scripts) - listed) == []


def test_reference_has_every_public_name() -> None:
    """A function that is called as its own module (`lw.doctor`) is found by the whole path alone."""
    page = (DOCS / "reference" / "api.md").read_text()
    named = set(re.findall(r"^::: (lapwing[\w.]*)$", page, re.MULTILINE))
    named |= set(re.findall(r"heading: (lapwing[\w.]*)\}", page))
    missing = [f"lapwing.{name}" for name in lapwing.__all__ if f"lapwing.{name}" not in named]
    for room in (getattr(lapwing, name) for name in lapwing.__all__):
        if isinstance(room, ModuleType) and hasattr(room, "__path__"):
            hidden = [f"{room.__name__}.{name}" for name in room.__all__ if _hides_its_module(room, name)]
            missing += [name for name in hidden if name not in named and f"lapwing.{name.split('.')[-1]}" not in named]
    assert missing == []


def _hides_its_module(room: ModuleType, name: str) -> bool:
    return callable(getattr(room, name)) and f"{room.__name__}.{name}" in sys.modules

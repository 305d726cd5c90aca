"""One class name is one thing: names of public rooms may coincide (a likelihood, a prior and a posterior are Gaussian),
those of internal classes may not."""

import ast
import importlib
from collections import defaultdict
from pathlib import Path

import lapwing as lw

SOURCE = Path(lw.__file__).parent
MIRROR = SOURCE / "compat"  # its names are another library's


def test_an_internal_class_shares_its_name_with_no_other():
    where = defaultdict(list)
    for path in sorted(set(SOURCE.rglob("*.py")) - set(MIRROR.rglob("*.py"))):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                where[node.name].append(path.relative_to(SOURCE).parts)
    twice = {name: rooms for name, rooms in where.items() if len(rooms) > 1}
    assert "Gaussian" in twice  # so the test sees what it looks for
    assert not {name: rooms for name, rooms in twice.items() if not all(public(name, room) for room in rooms)}


def public(name: str, path: tuple[str, ...]) -> bool:
    """Whether a room on the way to the file, or the package itself, hands the class out; an integration is a room."""
    if path[0] == "integrations":
        return not name.startswith("_")
    rooms = [importlib.import_module(".".join(["lapwing", *path[:k]])) for k in range(len(path))]
    return any(name in getattr(room, "__all__", ()) for room in rooms)

"""The long run: 2,000 random networks, 5,000 mutated files, 200 kills; figures into docs/reliability.md.

    python tests/fuzz/soak.py                     all of it, as `make soak` does
    python tests/fuzz/soak.py --networks 100 --files 100 --kills 5 --out out/soak --no-page

Each part is a script of its own that writes one JSON file and fails by its exit code. The page's part between
<!-- soak --> and <!-- /soak --> is written from those files, and only if every part ran.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- soak: this part is written by `make soak` -->", "<!-- /soak -->"
PARTS = {"networks": 2000, "files": 5000, "kills": 200}
NAMES = {"networks": "random networks", "files": "mutated files", "kills": "kills"}


def run(part: str, cases: int, seed: int, out: Path) -> int:
    """One part in a process of its own; its exit code."""
    print(f"== {cases} {NAMES[part]}, seed {seed}", flush=True)
    command = [sys.executable, str(HERE / f"{part}.py"), "--cases", str(cases), "--seed", str(seed)]
    return subprocess.run([*command, "--out", str(out / f"{part}.json")], check=False).returncode


def machine() -> str:
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass  # not Linux: what platform says will do
    return f"{model}, Python {platform.python_version()}, torch {torch.__version__}"


def page(found: dict[str, dict[str, Any]], when: str) -> str:
    """The page's part: one row a part, then the refusals of networks by their reasons, then failures by their seeds."""
    lines = [
        f"Run of {when} on {machine()}.",
        "",
        "| part | cases | seeds | ended | failures | time |",
        "|---|---|---|---|---|---|",
    ]
    for part, one in found.items():
        ended = ", ".join(f"{n:,} {end}" for end, n in one["outcomes"].items() if n)
        seeds = f"{one['seed']:,} to {one['seed'] + one['cases'] - 1:,}"
        minutes = f"{one.get('seconds', 0) / 60:.0f} min"
        lines.append(f"| {NAMES[part]} | {one['cases']:,} | {seeds} | {ended} | {len(one['failures'])} | {minutes} |")
    refusals = found.get("networks", {}).get("refusals", [])
    if refusals:
        lines += [
            "",
            "Networks that were refused, all or in part:",
            "",
            "| message | why that is right | cases |",
            "|---|---|---|",
        ]
        lines += [f"| … {one['message']} … | {one['why']} | {one['cases']} |" for one in refusals]
    failures = [(part, one) for part, found_ in found.items() for one in found_["failures"]]
    if failures:
        lines += ["", "Failures:", ""]
        lines += [f"- `python tests/fuzz/{part}.py --only {one['seed']}`: {_said(one)}" for part, one in failures]
    return "\n".join(lines)


def _said(failure: dict[str, Any]) -> str:
    return " ".join(f"{failure['outcome']}: {failure['what']}".split())[:160]


def write(text: str, path: Path = PAGE) -> None:
    """Put the text between the marks of the page."""
    whole = path.read_text()
    head, rest = whole.split(BEGIN)
    _, tail = rest.split(END)
    path.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part, cases in PARTS.items():
        parser.add_argument(f"--{part}", type=int, default=cases, help=f"how many; 0 leaves them out ({cases})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/soak"))
    parser.add_argument("--no-page", action="store_true", help="leave docs/reliability.md as it is")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = {part: getattr(args, part) for part in PARTS if getattr(args, part)}
    codes = {part: run(part, cases, args.seed, args.out) for part, cases in wanted.items()}
    found = {p: json.loads((args.out / f"{p}.json").read_text()) for p in wanted if (args.out / f"{p}.json").exists()}
    if not args.no_page and found.keys() == PARTS.keys():
        write(page(found, time.strftime("%Y-%m-%d")))
    print("\n".join(f"{NAMES[part]}: {'no failure' if code == 0 else 'FAILED'}" for part, code in codes.items()))
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Two checkouts of the project, timed in turns: which rows of the benchmarks became slower, and by how much.

    git worktree add ../before <commit>
    LAPWING_DATA=<folder> python benchmarks/before_after.py ../before . [--rounds 5] [--core 0]

Each round runs `exact`, `structured` and `scale` (its products) of one checkout and then of the other, one thread, each
by its own scripts; the first of the two changes places from round to round. A row is the median over rounds of each
side and their ratio: of seconds, and of seconds in units of the same run (a gradient epoch; a forward pass of the
ResNet), which contain no code of ours. The bar: no row slower by more than 5 %, by the clock that speaks against us.
Needs both trees clean: their results are restored.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from statistics import median
from typing import Any

from _common import Bar, table, write

RUNS = {  # benchmark: (arguments, the record it writes, what of it are times)
    "exact": (
        ["--skip-peer", "--repeat", "1", "--threads", "1"],
        "exact_without_peer",
        ["primal.lapwing.seconds", "dual.seconds"],
    ),
    "structured": (
        ["--skip-peer", "--repeat", "1", "--only", "cnn", "mlp", "resnet"],
        "structured_partial",
        ["cnn", "mlp", "resnet"],
    ),
    "scale": (["--only", "product"], "scale", ["product.gradient", "product.single", "product.block_of_8_each"]),
}
UNITS = {  # of rows that start so; others are in seconds, or in gradients already
    "structured.cnn.": "structured.cnn.gradient_epoch",
    "structured.mlp.": "structured.mlp.gradient_epoch",
    "structured.resnet.": "structured.resnet.forward",
}
NOT_TIMES = ("parameters", "images", "map_accuracy", "cpu")


def leaves(record: Any, prefix: str) -> dict[str, float]:
    """Every number below `record`, by its dotted path."""
    if isinstance(record, dict):
        return {k: v for name, part in record.items() for k, v in leaves(part, f"{prefix}.{name}").items()}
    return {prefix: float(record)} if isinstance(record, (int, float)) else {}


def run(tree: pathlib.Path, core: int | None) -> dict[str, float]:
    """One run of every benchmark in `tree`: seconds (products of `scale`: gradients) by row."""
    here = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    rows: dict[str, float] = {}
    for name, (arguments, written, times) in RUNS.items():
        command = [*pinned, sys.executable, f"benchmarks/{name}.py", *arguments]
        subprocess.run(command, cwd=tree, env=here, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        record = json.loads((tree / "benchmarks" / "results" / f"{written}.json").read_text())
        for path in times:
            part = record
            for key in path.split("."):
                part = part[key]
            rows |= {k: v for k, v in leaves(part, f"{name}.{path}").items() if k.split(".")[-1] not in NOT_TIMES}
    subprocess.run(["git", "checkout", "-q", "--", "benchmarks/results"], cwd=tree, check=True)
    return rows


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over rounds of the rows that both sides have."""
    rows = {}
    for name in (row for row in runs["before"][0] if row in runs["after"][0]):
        unit = next((of for start, of in UNITS.items() if name.startswith(start)), None)
        middle = {side: median(one[name] for one in runs[side]) for side in runs}
        of_unit = {side: median(one[name] / (one[unit] if unit else 1.0) for one in runs[side]) for side in runs}
        ratios = {
            "ratio": middle["after"] / middle["before"],
            "ratio in units": of_unit["after"] / of_unit["before"],
        }
        rows[name] = {**middle, **ratios}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=pathlib.Path)
    parser.add_argument("after", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, help="pin every run to this core")
    args = parser.parse_args()
    trees = {"before": args.before.resolve(), "after": args.after.resolve()}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in trees}
    for number in range(args.rounds):
        for side in list(trees)[:: 1 if number % 2 == 0 else -1]:
            runs[side].append(run(trees[side], args.core))
            print(f"round {number + 1} of {args.rounds}: {side}", flush=True)
    rows = compared(runs)
    cells = [(name, *(f"{v:.4g}" for v in row.values())) for name, row in rows.items()]
    print(table([("medians", *next(iter(rows.values()))), *cells]), "\n")
    commits = {
        side: subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=tree, check=True, capture_output=True, text=True
        ).stdout.strip()
        for side, tree in trees.items()
    }
    bars = [Bar(f"{name}, after of before", max(r["ratio"], r["ratio in units"]), 1.05) for name, r in rows.items()]
    print("\n".join(str(bar) for bar in bars if not bar.met) or "no row slower by more than 5 %")
    body = {"commits": commits, "rounds": args.rounds, "runs": runs, "rows": rows}
    print("\nwritten:", f"benchmarks/results/{write('before_after', body, bars, ('torch', 'numpy')).name}")


if __name__ == "__main__":
    main()

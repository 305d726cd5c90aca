"""Kernels of infinitely wide networks as inputs and layers grow: seconds and bytes.

    python benchmarks/infinite.py [--inputs 625 1250 2500 5000 10000] [--depths 1 2 4 8 16 32] [--jobs kernel depth]

By inputs N (20 numbers each; three hidden ReLU layers): the kernel of one set, NNGP and NTK, and the log evidence of a
regression on N inputs, kernel and factorization together. By depth, at 1,000 inputs: the kernel. Bars: time grows by
at most N^2.3 where inputs double last, and by at most the number of layers; a kernel takes at most 1.3 times its own
8 N² bytes beyond what was held before, a regression 3.5 times.
Writes results/infinite.json and docs/studies/figures/infinite_growth.png.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from _common import Bar, clocks, peak_memory, table, write

from lapwing.gp import infinite

DIMENSIONS, DEPTH, FIXED = 20, 3, 1_000


def kernel(kind: str, n: int, depth: int) -> Callable[[], Any]:
    x = torch.randn(n, DIMENSIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = getattr(infinite, kind)(depth, "relu", 2.0, 0.1)
    return lambda: k(x)


def regression(n: int) -> Callable[[], Any]:
    x = torch.randn(n, DIMENSIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fit = infinite.nngp(DEPTH, "relu", 2.0, 0.1).regression((x, x[:, :1].sin()), noise=0.3)
    return lambda: fit.log_evidence()


JOBS: dict[str, Callable[[int], Callable[[], Any]]] = {
    "nngp": lambda n: kernel("nngp", n, DEPTH),
    "ntk": lambda n: kernel("ntk", n, DEPTH),
    "regression": regression,
    "depth": lambda depth: kernel("nngp", FIXED, depth),
}


def measured(task: tuple[str, int]) -> dict[str, float]:
    """Seconds and bytes of a job, in a process of its own."""
    name, size = task
    torch.set_num_threads(1)
    JOBS[name](10 if name != "depth" else 1)()
    run = JOBS[name](size)
    before = peak_memory()
    times, _ = clocks(run)
    return {**times, "bytes": peak_memory() - before}


def picture(rows: dict[str, dict[int, dict[str, float]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    by_inputs = ("nngp", "ntk", "regression")
    panels = ((by_inputs, "inputs", "cpu"), (by_inputs, "inputs", "bytes"), (("depth",), "hidden layers", "cpu"))
    for axes, (names, what, key) in zip(figure.subplots(1, 3), panels, strict=True):
        for name in names:
            found = rows.get(name, {})
            label = f"kernel of {FIXED:,} inputs" if name == "depth" else name
            axes.loglog(list(found), [r[key] for r in found.values()], "o-", label=label)
        if key == "bytes":
            sizes = list(rows.get("nngp", {}))
            axes.loglog(sizes, [8 * n**2 for n in sizes], color="0.6", label="8 N²")
        axes.set_xlabel(what)
        axes.set_ylabel("CPU seconds" if key == "cpu" else "bytes")
        axes.legend(fontsize=8)
    figure.savefig(pathlib.Path(__file__).parents[1] / "docs/studies/figures/infinite_growth.png", dpi=110)


def judged(rows: dict[str, dict[int, dict[str, float]]]) -> list[Bar]:
    bars = []
    for name, found in rows.items():
        if len(found) < 2:
            continue
        (a, small), (b, large) = list(found.items())[-2:]
        power = math.log(large["cpu"] / small["cpu"]) / math.log(b / a)
        if name == "depth":
            bars.append(Bar(f"power of the depth, {a} to {b}", power, 1.1))
            continue
        bars.append(Bar(f"{name}: power of N, {a:,} to {b:,}", power, 3.2 if name == "regression" else 2.3))
        limit = 3.5 if name == "regression" else 1.3
        bars.append(Bar(f"{name}: bytes over 8 N², N = {b:,}", large["bytes"] / (8 * b**2), limit))
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, nargs="+", default=(625, 1_250, 2_500, 5_000, 10_000))
    parser.add_argument("--depths", type=int, nargs="+", default=(1, 2, 4, 8, 16, 32))
    parser.add_argument("--jobs", nargs="+", choices=tuple(JOBS), default=tuple(JOBS))
    options = parser.parse_args()
    context, rows = multiprocessing.get_context("spawn"), {}
    for name in options.jobs:
        rows[name] = {}
        for size in sorted(options.depths if name == "depth" else options.inputs):
            with context.Pool(1) as pool:
                rows[name][size] = pool.map(measured, [(name, size)])[0]
    shown = [
        (f"{name} {size:,}", f"{r['cpu']:.2f}", f"{r['bytes'] / 1e6:.0f}")
        for name in rows
        for size, r in rows[name].items()
    ]
    bars = judged(rows)
    print(table([("", "CPU s", "MB"), *shown]), *bars, sep="\n")
    picture(rows)
    print(write("infinite", {"options": vars(options), "rows": rows}, bars, ("torch", "lapwing")).name)


if __name__ == "__main__":
    main()

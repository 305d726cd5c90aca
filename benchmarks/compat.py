"""The drop-in for laplace-torch beside laplace-torch 0.3: CPU seconds of both, and the ratio (below 1: ours is faster).

    .venv-peers/bin/python benchmarks/compat.py [--repeats 7] [--only 151]

Every structure, subset and operation, on networks of 151, 2,004 and 50,826 weights and on a small CNN. CPU time of the
process on one thread; both run in turns, the least of some repeats after one that warms up: other load counts little.
What a process pays once is in none of these: the first fit of a process of its own stands apart.
"""

from __future__ import annotations

import argparse
import copy
import gc
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import laplace as peer
import torch
from _common import Bar, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lapwing.compat import laplace_torch as ours

PACKAGES = ("lapwing", "torch", "numpy", "laplace-torch", "curvlinops-for-pytorch")
LIBRARIES = {"ours": ours, "theirs": peer}
STRUCTURES = ("full", "kron", "diag")
LONG = 0.5  # seconds of a run that is not repeated as often
Runs = dict[str, Callable[[], Any]]  # by library


@dataclass(frozen=True)
class Problem:
    """A network, its data, and what can be asked of it in seconds."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    likelihood: str
    dense: bool = True  # whether theirs can hold the full curvature of all weights
    subnetwork: int = 40  # weights
    steps: int = 100  # of tuning, their default; fewer where it is long: a step takes what it takes

    @property
    def loader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=128)

    def cases(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Subset, structure, and more arguments."""
        for subset in ("all", "last_layer"):
            for structure in STRUCTURES:
                if self.dense or subset != "all" or structure != "full":
                    yield subset, structure, {}
        size = sum(p.numel() for p in self.model.parameters())
        index = torch.linspace(0, size - 1, self.subnetwork).long()
        yield "subnetwork", "full", {"subnetwork_indices": index}


def problems() -> Iterator[Problem]:
    """From the smallest."""
    x = torch.randn(150, 1)
    toy = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    yield Problem("151", toy, x, x.sin(), "regression")
    mlp = nn.Sequential(nn.Linear(20, 80), nn.Tanh(), nn.Linear(80, 4))
    yield Problem("2004", mlp, torch.randn(300, 20), torch.randint(4, (300,)), "classification", steps=4)
    cnn = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10)),
    )
    yield Problem(
        "cnn", cnn, torch.randn(60, 1, 16, 16), torch.randint(10, (60,)), "classification", dense=False, steps=10
    )
    wide = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    x, y = torch.randn(60, 64), torch.randint(10, (60,))
    yield Problem("50826", wide, x, y, "classification", dense=False, steps=10)


def operations(problem: Problem, subset: str, structure: str, more: dict[str, Any]) -> Iterator[tuple[str, Runs]]:
    """What is timed, in order: for each library the same call."""
    loader, x, spread = problem.loader, problem.x[:50], iter(range(1, 10**6))

    def made(library: Any) -> Any:
        la = library.Laplace(copy.deepcopy(problem.model), problem.likelihood, subset, structure, **more)
        la.fit(loader)
        return la

    def construct(library: Any) -> Any:
        library.Laplace(problem.model, problem.likelihood, subset, structure, **more).fit(loader)

    yield "construct, fit", {name: lambda library=library: construct(library) for name, library in LIBRARIES.items()}
    fits = {name: made(library) for name, library in LIBRARIES.items()}

    def each(run: Callable[[Any], Any]) -> Runs:
        return {name: lambda la=la: run(la) for name, la in fits.items()}

    yield "fit again", each(lambda la: la.fit(loader))
    yield "evidence", each(lambda la: la.log_marginal_likelihood(torch.tensor(1 + 1e-6 * next(spread))))
    yield "marglik", each(lambda la: la.optimize_prior_precision(method="marglik", n_steps=problem.steps))
    yield "glm, probit", each(lambda la: la(x))
    if problem.likelihood == "classification":
        yield "glm, mc", each(lambda la: la(x, link_approx="mc"))
    rows = torch.randn(len(x), len(problem.model(x)[0]), fits["ours"]._groups.size)
    yield "variance", each(lambda la: la.functional_variance(rows))
    yield "sample", each(lambda la: la.sample(100))
    yield "glm samples", each(lambda la: la.functional_samples(x, n_samples=100))
    yield "nn, 30", each(lambda la: la(x, pred_type="nn", link_approx="mc", n_samples=30))


def timed(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def in_turns(runs: Runs, repeats: int) -> dict[str, float]:
    """The least CPU seconds of each library, after a run that warms up; short runs are repeated more often."""
    longest = max(timed(run) for run in runs.values())
    times = 1 if longest > LONG else max(repeats, min(5 * repeats, int(0.05 / longest)))
    found = [{name: timed(run) for name, run in runs.items()} for _ in range(times)]
    return {name: min(one[name] for one in found) for name in runs}


def firsts() -> dict[str, dict[str, float]]:
    """CPU seconds of the import and of the first fit, each library in a process of its own."""
    out = {}
    for name in LIBRARIES:
        runs = [subprocess.check_output([sys.executable, "-c", FIRST, MODULES[name]], text=True) for _ in range(2)]
        found = [[float(v) for v in run.split()] for run in runs]
        out[name] = dict(zip(("import", "first fit", "second fit"), map(min, zip(*found, strict=True)), strict=True))
    return out


MODULES = {"ours": "lapwing.compat.laplace_torch", "theirs": "laplace"}
FIRST = """
import importlib, sys, time, warnings, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
warnings.simplefilter("ignore")
torch.set_num_threads(1)
clock = [time.process_time()]
Laplace = importlib.import_module(sys.argv[1]).Laplace
clock.append(time.process_time())
x = torch.randn(150, 1)
loader = DataLoader(TensorDataset(x, x.sin()), batch_size=128)
model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
for _ in range(2):
    Laplace(model, "regression", "all", "kron").fit(loader)
    clock.append(time.process_time())
print(*[b - a for a, b in zip(clock, clock[1:])])
"""


def main() -> None:
    """Time every case, print it, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", help="one problem; nothing is written")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.disable()  # its share falls on whoever runs when it comes
    rows = []
    for problem in problems():
        if args.only not in (None, problem.name):
            continue
        for subset, structure, more in problem.cases():
            for operation, runs in operations(problem, subset, structure, more):
                try:
                    seconds = in_turns(runs, args.repeats)
                except (torch.linalg.LinAlgError, ValueError) as error:  # a singular variance
                    print(f"{problem.name} {subset} {structure} {operation}: {type(error).__name__}, left out")
                    runs["ours"]()  # so it is theirs
                    continue
                gc.collect()
                row = {"weights": problem.name, "subset": subset, "structure": structure, "operation": operation}
                rows.append(row | seconds | {"ratio": seconds["ours"] / seconds["theirs"]})
                where = f"{problem.name:>5} {subset:10} {structure:5} {operation:14}"
                print(where, *(f"{1e3 * s:9.2f} ms" for s in seconds.values()), f"{rows[-1]['ratio']:6.2f}", flush=True)
    if args.only is None:
        first = firsts()
        print(first)
        worst = {op: max(r["ratio"] for r in rows if r["operation"] == op) for op in {r["operation"]: 0 for r in rows}}
        bars = [Bar(f"{op}: the worst ratio", ratio, 1.0) for op, ratio in worst.items()]
        print(*bars, sep="\n")
        print("written to", write("compat", {"repeats": args.repeats, "first": first, "rows": rows}, bars, PACKAGES))


if __name__ == "__main__":
    main()

"""The drop-in for laplace-torch beside laplace-torch 0.3: CPU seconds of both, and the ratio (below 1: ours is faster).

    .venv-peers/bin/python benchmarks/compat.py [--repeats 5] [--out FILE.json]

CPU time of the process on one thread, the least of some repeats after one that warms up; so other load hardly counts.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import laplace as peer
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lapwing.compat import laplace_torch as ours


def problems() -> Iterator[tuple[str, nn.Module, Tensor, Tensor, str, tuple[str, ...]]]:
    """Name, network, inputs, targets, likelihood, and the structures over all weights that theirs can hold."""
    x = torch.randn(150, 1)
    yield (
        "toy",
        nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)),
        x,
        x.sin(),
        "regression",
        ("full", "kron", "diag"),
    )
    mlp = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    yield "mlp", mlp, torch.randn(1000, 64), torch.randint(10, (1000,)), "classification", ("kron", "diag")
    cnn = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    yield "cnn", cnn, torch.randn(256, 1, 16, 16), torch.randint(10, (256,)), "classification", ("kron", "diag")


def steps(la: Any, x: Tensor, loader: Any) -> dict[str, Callable[[], Any]]:
    """What is timed, in order."""
    return {
        "fit": lambda: la.fit(loader),
        "marglik": lambda: la.optimize_prior_precision(method="marglik"),
        "predict": lambda: la(x[:100]),
        "nn": lambda: la(x[:100], pred_type="nn", link_approx="mc", n_samples=30),
    }


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """The least CPU time of a call."""
    run()
    found = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    """Time every case, print it, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for name, model, x, y, likelihood, structures in problems():
        loader = DataLoader(TensorDataset(x, y), batch_size=128)
        cases = [("all", s) for s in structures] + [("last_layer", s) for s in ("full", "kron", "diag")]
        for subset, structure in cases:
            fits = [lib.Laplace(copy.deepcopy(model), likelihood, subset, structure) for lib in (ours, peer)]
            for step in steps(fits[0], x, loader):
                mine, theirs = (seconds(steps(la, x, loader)[step], told.repeats) for la in fits)
                row = {"problem": name, "subset": subset, "structure": structure, "step": step}
                rows.append(row | {"ours": mine, "theirs": theirs, "ratio": mine / theirs})
                where = f"{name:4} {subset:10} {structure:5} {step:8}"
                print(f"{where} {1e3 * mine:9.2f} ms {1e3 * theirs:9.2f} ms {mine / theirs:6.2f}", flush=True)
    if told.out is not None:
        told.out.write_text(json.dumps({"torch": torch.__version__, "repeats": told.repeats, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

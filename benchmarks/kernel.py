"""The empirical tangent kernel of ResNet-20 between CIFAR-10 images, beside what its parts must cost.

    LAPWING_DATA=<folder> python benchmarks/kernel.py [--images 1000] [--memory 16e9] [--only per-output] [--peer]

Two sets of images of equal size. *Gradients* are one backward pass for each output of each image of both sets, batched
over images: the least that a Jacobian takes. *Backward passes* are as many, one at a time (timed on 64, and scaled). A
*product* is one float32 product (n c × p)(p × n c), timed on a part of the columns, and scaled.

    per output    K_c for each output c: at most 1.5 times the gradients
    all pairs     K of all pairs of outputs: at most that and 1.2 products
    one set       all pairs, where both sets are one: at most half of that

The first is also held to 1.5 times the backward passes one at a time. K_c of all c asks for a tenth (1/c) of the
product, whoever makes it: by torch's product, which is MKL's, that alone is more than the gradients from about 800
images on. *Floor* is the two together; the kernel's own products are oneDNN's.

Times are CPU seconds, and the wall's beside them. --memory is the kernel's budget: where the first set's gradients do
not fit half of it, images of the second are run again. K is held to dense autograd on four images. laplace-torch's
`FunctionalLaplace` makes no kernel alone, and none of all pairs of outputs; --peer times its fit on as many images.
Writes results/kernel.json.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _common import Bar, clocks, least, peak_memory, table, write
from scale import cifar
from torch import Tensor, nn

import lapwing as lw

PACKAGES = ("torch", "lapwing", "laplace-torch", "gpytorch")
BATCH, CHECKED, SINGLE, COLUMNS = 128, 4, 64, 8_192
ONLY = "per-output", "all-pairs"


def gradients(net: nn.Module, x: Tensor) -> float:
    """The backward passes for each output of each image, batched over images; a number that depends on them."""
    total, parameters = 0.0, list(net.parameters())
    for piece in x.split(BATCH):
        f = net(piece)
        for c in range(f.shape[1]):
            grads = torch.autograd.grad(f[:, c].sum(), parameters, retain_graph=True)
            total += float(grads[0].sum())
    return total


def backward_passes(net: nn.Module, x: Tensor, count: int) -> float:
    """The first so many, one at a time: a number that depends on them."""
    total, parameters, c = 0.0, list(net.parameters()), 0
    while c < count:
        for value in net(x[c % len(x)][None])[0]:
            total += float(torch.autograd.grad(value, parameters, retain_graph=True)[0].sum())
            c += 1
    return total


def product(rows: int, p: int) -> float:
    """Seconds' worth of one product, by blocks of columns so that p need not fit: a number that depends on it."""
    width = max(1, min(p, 2**28 // rows))
    a = torch.randn(rows, width)
    out = torch.zeros(rows, rows)
    for start in range(0, p, width):
        some = a[:, : min(width, p - start)]
        out.addmm_(some, some.mT)
    return float(out[0, 0])


def oracle(net: nn.Module, x: Tensor) -> Tensor:
    """J Jᵀ by autograd alone, (n, c, n, c)."""
    rows = [
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(net.parameters()), retain_graph=True)])
        for value in net(x).reshape(-1)
    ]
    J = torch.stack(rows).double()
    return (J @ J.mT).reshape(len(x), -1, len(x), len(J) // len(x))


def functional_laplace(net: nn.Module, x: Tensor, y: Tensor) -> Any:
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    la = Laplace(net, "classification", "all", "gp", n_subset=len(x), independent_outputs=True)
    la.fit(DataLoader(TensorDataset(x, y), BATCH))
    return la


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--memory", type=float, default=16e9)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--only", choices=ONLY, help="one of the two kinds of kernel")
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    n = options.images
    net, loader = cifar(2 * n)
    batches = list(loader)
    x, y = torch.cat([b[0] for b in batches])[: 2 * n], torch.cat([b[1] for b in batches])[: 2 * n]
    one, two, tangent = x[:n], x[n:], lw.linearize(net)
    c, p = net(x[:1]).shape[1], tangent.layout.size

    def kernel(other: Tensor | None, per_output: bool) -> Tensor:
        return lw.gp.kernel(tangent, one, other, per_output=per_output, memory_budget=options.memory)

    jobs = {
        "gradients": lambda: gradients(net, x),
        "backward passes": lambda: backward_passes(net, x, SINGLE),
        "product": lambda: product(n * c, min(p, COLUMNS)),
    }
    if options.only != "all-pairs":
        jobs |= {"per output": lambda: kernel(two, True), "one set, per output": lambda: kernel(None, True)}
    if options.only != "per-output":
        jobs |= {"all pairs": lambda: kernel(two, False), "one set, all pairs": lambda: kernel(None, False)}
    if options.peer:
        jobs["FunctionalLaplace, independent outputs"] = lambda: functional_laplace(net, one, y[:n])
    lw.gp.kernel(tangent, one[:2])  # proofs of rules, once
    times = {name: least([clocks(job)[0] for _ in range(options.repeat)]) for name, job in jobs.items()}
    scales = {"backward passes": 2 * n * c / SINGLE, "product": p / min(p, COLUMNS)}
    times = {name: {k: v * scales.get(name, 1) for k, v in t.items()} for name, t in times.items()}
    expected = oracle(net, one[:CHECKED])
    off = float((lw.gp.kernel(tangent, one[:CHECKED]) - expected).norm() / expected.norm())
    bars = [*judged(times), Bar("away from dense autograd on four images, relative", off, 1e-5)]
    shown = [(name, f"{t['cpu']:.2f}", f"{t['wall']:.2f}") for name, t in times.items()]
    print(table([("", "CPU s", "wall s"), *shown]))
    floor = times["gradients"]["cpu"] + times["product"]["cpu"] / c
    if "per output" in times:
        found = times["per output"]["cpu"]
        print(f"per output: {found / floor:.2f} floors")
    print(*bars, sep="\n")
    body = {"options": vars(options), "parameters": p, "times": times, "floor": floor, "peak memory": peak_memory()}
    print(write("kernel", body, bars, PACKAGES).name)


def judged(times: dict[str, dict[str, float]]) -> list[Bar]:
    """What was timed against its bars."""
    cpu = {name: t["cpu"] for name, t in times.items()}
    whole = 1.5 * cpu["gradients"] + 1.2 * cpu["product"]
    bars = (
        ("per output", "per output, in gradients", cpu["gradients"], 1.5),
        ("per output", "per output, in backward passes one at a time", cpu["backward passes"], 1.5),
        ("all pairs", "all pairs, of 1.5 gradients and 1.2 products", whole, 1.0),
        ("one set, all pairs", "one set, all pairs, of half of that", 0.5 * whole, 1.0),
    )
    return [Bar(what, cpu[name] / of, limit) for name, what, of, limit in bars if name in cpu]


if __name__ == "__main__":
    main()

"""The empirical tangent kernel of ResNet-20 between CIFAR-10 images, beside what its parts must cost.

    LAPWING_DATA=<folder> python benchmarks/kernel.py [--images 1000] [--memory 16e9] [--repeat 1]

Two sets of images of equal size. *Gradients* are one backward pass for each output of each image of both sets, batched
over images: the least that a Jacobian takes. A *product* is one float32 product (n c × p)(p × n c).

    per output    K_c for each output c: at most 1.5 times the gradients
    all pairs     K of all pairs of outputs: at most that and 1.2 products
    one set       all pairs, where both sets are one: at most half of that

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
BATCH, CHECKED = 128, 4


def gradients(net: nn.Module, x: Tensor) -> float:
    """The backward passes for each output of each image, batched over images; a number that depends on them."""
    total, parameters = 0.0, list(net.parameters())
    for piece in x.split(BATCH):
        f = net(piece)
        for c in range(f.shape[1]):
            grads = torch.autograd.grad(f[:, c].sum(), parameters, retain_graph=True)
            total += float(grads[0].sum())
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
        "product": lambda: product(n * c, p),
        "per output": lambda: kernel(two, True),
        "all pairs": lambda: kernel(two, False),
        "one set, per output": lambda: kernel(None, True),
        "one set, all pairs": lambda: kernel(None, False),
    }
    if options.peer:
        jobs["FunctionalLaplace, independent outputs"] = lambda: functional_laplace(net, one, y[:n])
    lw.gp.kernel(tangent, one[:2])  # proofs of rules, once
    times = {name: least([clocks(job)[0] for _ in range(options.repeat)]) for name, job in jobs.items()}
    expected = oracle(net, one[:CHECKED])
    off = float((lw.gp.kernel(tangent, one[:CHECKED]) - expected).norm() / expected.norm())
    cpu = {name: t["cpu"] for name, t in times.items()}
    whole = 1.5 * cpu["gradients"] + 1.2 * cpu["product"]
    bars = [
        Bar("per output, in gradients", cpu["per output"] / cpu["gradients"], 1.5),
        Bar("all pairs, of 1.5 gradients and 1.2 products", cpu["all pairs"] / whole, 1.0),
        Bar("one set, all pairs, of half of that", cpu["one set, all pairs"] / (0.5 * whole), 1.0),
        Bar("away from dense autograd on four images, relative", off, 1e-5),
    ]
    shown = [(name, f"{t['cpu']:.2f}", f"{t['wall']:.2f}") for name, t in times.items()]
    print(table([("", "CPU s", "wall s"), *shown]))
    print(*bars, sep="\n")
    body = {"options": vars(options), "parameters": p, "times": times, "peak memory": peak_memory()}
    print(write("kernel", body, bars, PACKAGES).name)


if __name__ == "__main__":
    main()

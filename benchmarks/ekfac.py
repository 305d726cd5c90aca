"""How far Kronecker factors, and exact second moments in their eigenbasis, are from the exact block of each layer.

    python benchmarks/ekfac.py [--examples 256] [--repeat 3]

Frobenius distances ‖H_l − M_l‖/‖H_l‖ in float64 on the networks of structured.py, with H_l = Σ_n J_nᵀ Λ_n J_n by
autograd and none of the package's sums. A linear layer is too large to be written out, and need not be: with the inputs
a_n, output gradients G_n (c, o) and B_n = G_nᵀ Λ_n G_n it is H = Σ_n B_n ⊗ a_n a_nᵀ, so that

    ‖H‖² = Σ_nm ⟨B_n, B_m⟩ (a_n·a_m)²,       ⟨H, B ⊗ A⟩ = Σ_n ⟨B_n, B⟩ a_nᵀ A a_n

Beside them, the seconds of both fits (float32, with their evidence) on 1,000 examples.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _common import Bar, best, table, write
from structured import fit, problem
from torch import Tensor, nn

import lapwing as lw
from lapwing.operators import linalg

NETWORKS = ("cnn", "mlp")
TIMED = 1000  # examples


def captured(net: nn.Sequential, x: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """f (n, c), and for each layer its input and the gradients of every output with respect to its own, (c, n, ...)."""
    inputs, outputs, h = {}, {}, x
    for name, layer in net.named_children():
        inputs[name], h = h, layer(h)
        outputs[name] = h
    names = [name for name, layer in net.named_children() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    grads = [torch.autograd.grad(column.sum(), [outputs[k] for k in names], retain_graph=True) for column in h.mT]
    stacked = (torch.stack(g) for g in zip(*grads, strict=True))
    return h.detach(), {name: (inputs[name].detach(), g) for name, g in zip(names, stacked, strict=True)}


def output_curvature(f: Tensor) -> Tensor:
    """Λ (n, c, c) of a softmax."""
    p = torch.softmax(f, -1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def conv_distance(layer: nn.Conv2d, x: Tensor, g: Tensor, middle: Tensor, op: Any) -> tuple[float, float]:
    """‖H‖ and ‖H − M‖ of a convolution, written out; inputs in the order (offsets, channels, 1)."""
    n, channels = x.shape[:2]
    patches = nn.functional.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride)
    a = patches.unflatten(1, (channels, -1)).transpose(1, 2).flatten(1, 2)  # (n, offsets channels, s)
    a = torch.cat([a, a.new_ones(n, 1, a.shape[-1])], 1)
    rows = torch.einsum("cnos,nis->ncoi", g.flatten(3), a).flatten(2)
    H = sum((j.mT @ m @ j for j, m in zip(rows, middle, strict=True)), rows.new_zeros(rows.shape[-1], rows.shape[-1]))
    return float(H.norm()), float((H - linalg.to_dense(op)).norm())


def linear_distances(x: Tensor, g: Tensor, middle: Tensor, kron: Any, ekfac: Any) -> tuple[float, float, float]:
    """‖H‖, ‖H − KFAC‖ and ‖H − EKFAC‖ of a linear layer, from inner products."""
    a = torch.cat([x, x.new_ones(len(x), 1)], 1)
    outer = torch.einsum("cno,ncd,dnp->nop", g, middle, g)
    flat = outer.flatten(1)
    own = float((flat @ flat.mT * (a @ a.mT).square()).sum())
    A, B = kron.a[0], kron.factor * kron.b[0]
    first = float(((outer * B).sum((1, 2)) * (a @ A * a).sum(1)).sum())
    ua, ub, v = ekfac.ua[0], ekfac.ub[0], ekfac.values[0]
    turned = torch.einsum("op,noq,qp->np", ub, outer, ub)  # diag(U_Bᵀ B_n U_B)
    second = float((turned.mT @ (a @ ua).square() * v).sum())
    norms = float(A.square().sum() * B.square().sum()), float(v.square().sum())
    return own**0.5, *((max(0.0, own - 2 * cross + e)) ** 0.5 for cross, e in zip((first, second), norms, strict=True))


def distances(name: str, examples: int) -> dict[str, dict[str, float]]:
    net, loader, _ = problem(name, examples)
    net, data = net.double(), [(x.double(), y) for x, y in loader]
    assert isinstance(net, nn.Sequential)
    f, layers = captured(net, torch.cat([x for x, _ in data]))
    middle, one = output_curvature(f), torch.ones(1, dtype=torch.float64)
    operators = {}
    for structure in ("kron", "ekfac"):
        state = lw.laplace(net, data, "categorical", structure=structure, factor="exact").state
        parts = zip(state.parts, state.structure.operator(state, one).parts, strict=True)
        operators[structure] = {part.name: op for part, op in parts}
    out = {}
    for layer, (x, g) in layers.items():
        module, kron, ekfac = net.get_submodule(layer), operators["kron"][layer], operators["ekfac"][layer]
        if isinstance(module, nn.Conv2d):
            (norm, far), (_, near) = (conv_distance(module, x, g, middle, op) for op in (kron, ekfac))
        else:
            norm, far, near = linear_distances(x, g, middle, kron, ekfac)
        out[layer] = {"parameters": kron.size, "norm": norm, "kron": far / norm, "ekfac": near / norm}
    return out


def seconds(name: str, structure: str, repeat: int) -> float:
    net, loader, _ = problem(name, TIMED)
    make = fit(net, loader, structure, "exact")
    return best(lambda: float(make().log_evidence()), repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    body: dict[str, Any] = {"examples": args.examples, "timed_examples": TIMED}
    bars, rows = [], [("layer", "parameters", "kron", "ekfac", "ekfac / kron")]
    for name in NETWORKS:
        found = distances(name, args.examples)
        for layer, d in found.items():
            ratio = d["ekfac"] / d["kron"]
            rows.append(
                (f"{name} {layer}", f"{d['parameters']:,}", f"{d['kron']:.4f}", f"{d['ekfac']:.4f}", f"{ratio:.4f}")
            )
            bars.append(Bar(f"{name} {layer}: distance of ekfac over that of kron", ratio, 1.0))
        body[name] = {"layers": found, "seconds": {s: seconds(name, s, args.repeat) for s in ("kron", "ekfac")}}
    print(table(rows))
    for name in NETWORKS:
        print(f"{name}: seconds of a fit", *(f"{k} {v:.3g}" for k, v in body[name]["seconds"].items()))
    print(*bars, sep="\n")
    print("\nwritten to", write("ekfac", body, bars, ("torch", "lapwing")))


if __name__ == "__main__":
    main()

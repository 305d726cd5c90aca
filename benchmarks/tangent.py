"""What tuning costs after a fit: at the trained weights, and at the tangent MAP v*, which is solved for many times.

    python benchmarks/tangent.py [--repeat 3] [--quick]

The convolutional network of structured.py, N = 4,000, exact KFAC: as it was initialized, and trained for eight epochs
on labels that it can learn; with one prior precision a layer, and with one for all. A tuning starts without any
factorization, so eigenvalues and eigenvectors are in its time. Times are told in gradient epochs (one forward and
backward pass over the same loader), taken before and after each tuning, and by CPU seconds: a tuning is long, an epoch
is short, and on a busy machine the wall would compare one with a load that the other did not see. It stands beside.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _common import Bar, clocks, least, table, write
from structured import BATCH, PACKAGES, SEED, gradient_epoch, problem
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw

EXAMPLES, EPOCHS, RATE, DECAY = 4000, 8, 1e-3, 1e-4
PRIORS: dict[str, Any] = {"layerwise": "layerwise", "scalar": 1.0}
LIMITS = {"map": 1.0, "tangent": 100.0}  # gradient epochs, for the network as initialized with a precision a layer


def initialized(n: int) -> tuple[nn.Module, DataLoader]:
    net, loader, _ = problem("cnn", n)
    return net, loader


def trained(n: int) -> tuple[nn.Module, DataLoader]:
    """On labels that are the largest of ten linear maps of an image."""
    net, _, x = problem("cnn", n)
    y = (x.flatten(1) @ torch.randn(784, 10, generator=torch.Generator().manual_seed(SEED))).argmax(-1)
    loader = DataLoader(TensorDataset(x, y), BATCH)
    optimizer = torch.optim.Adam(net.parameters(), RATE, weight_decay=DECAY)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
    return net, loader


def tuning(net: nn.Module, loader: DataLoader, la: lw.Laplace, center: str, repeat: int) -> dict[str, Any]:
    """One tuning, timed: the least of a few at the trained weights, once at the tangent MAP."""

    def epochs() -> list[dict[str, float]]:
        return [clocks(lambda: gradient_epoch(net, loader))[0] for _ in range(repeat)]

    def run() -> lw.Laplace:
        la.state.memo.clear()
        return la.tuned(center=center)

    before = epochs()
    found = [clocks(run) for _ in range(repeat if center == "map" else 1)]
    seconds, unit = least([one for one, _ in found]), least([*before, *epochs()])
    done = found[-1][1]
    assert done.tuning is not None
    return {
        "seconds": seconds,
        "gradient_epoch": unit,
        "epochs": {clock: seconds[clock] / unit[clock] for clock in unit},
        "rounds": done.tuning.iterations,
        "passes": done.tuning.passes,
        "residual": done.tuning.residual,
        "converged": done.tuning.converged,
        "precision": done.prior.precision.reshape(-1).tolist(),
        "log_evidence": done.tuning.trace[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="500 examples: to see that it runs")
    args = parser.parse_args()
    n = 500 if args.quick else EXAMPLES
    networks: dict[str, Callable[[int], tuple[nn.Module, DataLoader]]] = {
        "initialized": initialized,
        "trained": trained,
    }
    body: dict[str, Any] = {"seed": SEED, "batch": BATCH, "examples": n}
    bars: list[Bar] = []
    rows = [("", "epochs, CPU", "epochs, wall", "rounds", "passes", "epochs a pass", "residual", "log evidence")]
    for network, make in networks.items():
        net, loader = make(n)
        gradient_epoch(net, loader)
        body[network] = {}
        for name, prior in PRIORS.items():
            la = lw.laplace(net, loader, "categorical", structure="kron", factor="exact", prior=prior)
            for center, limit in LIMITS.items():
                t = tuning(net, loader, la, center, args.repeat)
                body[network][f"{name} {center}"] = t
                each = f"{t['epochs']['cpu'] / t['passes']:.2f}" if t["passes"] else ""
                told = (f"{t['epochs'][c]:.3g}" for c in ("cpu", "wall"))
                case = f"{network}, {name}, at the {center}"
                end = f"{t['residual']:.2g}" if t["passes"] else "", f"{t['log_evidence']:.1f}"
                rows.append((case, *told, str(t["rounds"]), str(t["passes"]), each, *end))
                print(rows[-1], flush=True)
                if (network, name) == ("initialized", "layerwise"):
                    bars.append(
                        Bar(
                            f"cnn: tuning with a precision a layer at the {center}, gradient epochs",
                            t["epochs"]["cpu"],
                            limit,
                        )
                    )
    print("", table(rows), *bars, sep="\n")
    print("\nwritten to", write("tangent_partial" if args.quick else "tangent", body, bars, PACKAGES))


if __name__ == "__main__":
    main()

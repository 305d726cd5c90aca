"""Why the evidence over all layers picks too small a prior precision on CIFAR-10, and what moves it.

    LAPWING_DATA=<folder> python studies/cifar10_evidence.py [--only precisions ...]

On a part of the images (600 of the test set, 300 of the training set), with the curvature of `cifar10.py`:

    precisions    test and training NLL, the expected training NLL E_q[−log p] and the two objectives, over precisions:
                  the Laplace evidence, and the lower bound that the same Gaussian gives with the likelihood itself
    views         the likelihood to the power K (K views of each image as data), prior precision by the evidence
    smoothed      curvature averaged over the posterior, E_q Λ in the place of Λ(f), as the best Gaussian would have it
    layers        some layers only
    conditional   log p(D₂ | D₁), evidence over all data less that over four fifths of them
    augmented     what images look like to the network: fit and curvature of plain, cropped and held-out ones
    curvature     views with the curvature of random views (crops and flips) in the place of that of plain images
    last_layer    prior precisions of the last layer, by plain linear algebra
    transfer      views on another network (--depth), with the curvature of a fifth of the training images

Results go under "evidence" in `results/cifar10.json`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from cifar10 import (
    RESULTS,
    SHARDS,
    VIEWS,
    Problem,
    cropped,
    difference,
    evidence_precision,
    forward,
    kron_shard,
    kron_state,
    repeated,
    views_state,
)
from cifar10_outputs import blocks, covariances, probabilities
from torch import Tensor

import lapwing as lw
from lapwing import metrics
from lapwing.outputs.points import DRAWS, psd_root, quasi_normal

TEST, TRAIN = 600, 300
GRID = [300.0, 1e3, 3e3, 1e4, 3e4, 1e5]
POWERS = [1, 3, 10, 30, 100, VIEWS, 300, 1000]
LAYERS = {
    "fc": "fc",
    "layer3.2.conv2, bn2, fc": r"layer3\.2\.(conv2|bn2)|fc",
    "layer3.2, fc": r"layer3\.2|fc",
    "layer3, fc": "layer3|fc",
    "normalization layers": r".*bn\d|.*downsample\.1",
    "layer1": "layer1",
    "layer2": "layer2",
}


def sample(problem: Problem) -> dict[str, tuple[Tensor, Tensor]]:
    order = torch.randperm(len(problem.train[1]), generator=torch.Generator().manual_seed(0))[:TRAIN]
    test = (problem.test[0][:TEST], problem.test[1][:TEST])
    return {"test": test, "train": (problem.train[0][order], problem.train[1][order])}


def eigenvalues(state: Any, names: str = "") -> Tensor:
    """Of G, all blocks."""
    out = []
    for _, op in blocks(state, names):
        if isinstance(op, lw.operators.KroneckerPlusDiagonal):
            out.append((op.factor * op.eigenvalues).flatten())
        else:
            out.append(torch.linalg.eigvalsh(lw.operators.linalg.to_dense(op)).clamp(min=0))
    return torch.cat(out)


def spread_at(problem: Problem, name: str, state: Any, precisions: list[float]) -> dict[str, tuple[Tensor, ...]]:
    """f, covariances and y of the sample of both sets."""
    out = {}
    for kind, (x, y) in sample(problem).items():
        (f, cov), _ = problem.kept(f"{name}_{kind}", lambda x=x: covariances(state, x, precisions))  # type: ignore[misc]
        out[kind] = (f, cov[:-1], y)
    return out


@lru_cache
def base(problem: Problem) -> tuple[Any, Tensor, list[float], dict[str, tuple[Tensor, ...]]]:
    """The state, the eigenvalues of G, precisions in order and what was found at them."""
    state = kron_state(problem)[0]
    weak = [evidence_precision(repeated(state, k)) / k for k in POWERS]
    precisions = sorted([*weak, *GRID])
    return state, eigenvalues(state), precisions, spread_at(problem, "study", state, precisions)


def scores(f: Tensor, cov: Tensor, y: Tensor) -> dict[str, float]:
    p = probabilities(f, cov, "monte_carlo")
    return {"nll": metrics.nll(p, y), "ece": metrics.ece(p, y)}


def expected(f: Tensor, cov: Tensor, y: Tensor) -> tuple[float, float]:
    """E_q[−log p(y|f)] and E_q tr Λ, means over images."""
    draws = f.unsqueeze(-2) + quasi_normal(DRAWS, f.shape[-1]).float() @ psd_root(cov.double()).float().mT
    log_p = draws.log_softmax(-1)
    own = log_p.gather(-1, y.reshape(-1, 1, 1).expand(-1, DRAWS, 1))
    p = log_p.exp()
    return -float(own.double().mean()), float((p * (1 - p)).sum(-1).double().mean())


def terms(values: Tensor, precision: float, theta: float) -> dict[str, float]:
    """γ, ½ log|G/δ + I| and ½ δ‖θ‖²."""
    return {
        "gamma": float((values / (values + precision)).sum()),
        "occam": 0.5 * float((values / precision).log1p().sum()),
        "quadratic": 0.5 * precision * theta,
    }


def precisions(problem: Problem) -> list[dict[str, float]]:
    state, values, grid, found = base(problem)
    theta, fit = float(state.tangent.theta.double().square().sum()), float(state.statistics["log_lik"])
    out = []
    for i, precision in enumerate(grid):
        (f, cov, y), (g, held, z) = found["train"], found["test"]
        loss, _ = expected(f, cov[i], y)
        parts = terms(values, precision, theta)
        network = metrics.nll(f.softmax(-1), y)
        excess = state.n * (loss - network)  # of the whole training set
        row = {
            "precision": precision,
            "test": scores(g, held[i], z),
            "train": scores(f, cov[i], y)["nll"],
            "train_network": network,
            "expected_train": loss,
            "expected_train_by_laplace": network + 0.5 * parts["gamma"] / state.n,
            "variance": float(held[i].diagonal(dim1=-2, dim2=-1).mean()),
            "log_evidence": fit - parts["quadratic"] - parts["occam"],
            "lower_bound": fit - excess - parts["quadratic"] - parts["occam"] + 0.5 * parts["gamma"],
        }
        out.append(row | parts)
    return out


def views(problem: Problem) -> list[dict[str, Any]]:
    state, _, grid, found = base(problem)
    out = []
    for power in POWERS:
        precision = evidence_precision(repeated(state, power))
        i = min(range(len(grid)), key=[abs(math.log(p * power / precision)) for p in grid].__getitem__)
        row = {kind: scores(f, cov[i] / power, y) for kind, (f, cov, y) in found.items()}
        variance = float(found["test"][1][i].diagonal(dim1=-2, dim2=-1).mean()) / power
        out.append({"power": power, "precision": precision, "variance": variance, **row})
    return out


def interpolated(grid: list[float], cov: Tensor, precision: float) -> Tensor:
    """Between the covariances of two precisions, by powers of their mean variance."""
    i = min(max(sum(p < precision for p in grid), 1), len(grid) - 1)
    w = math.log(precision / grid[i - 1]) / math.log(grid[i] / grid[i - 1])
    low, high = cov[i - 1], cov[i]
    a, b = (float(c.diagonal(dim1=-2, dim2=-1).mean()) for c in (low, high))
    return a ** (1 - w) * b**w * ((1 - w) * low / a + w * high / b)


def smoothed(problem: Problem) -> list[dict[str, Any]]:
    """G times r = E_q tr Λ / tr Λ(f), with q the posterior that this makes: one number for all directions."""
    state, values, grid, found = base(problem)
    (f, cov, y), (g, held, z) = found["train"], found["test"]
    theta, fit = float(state.tangent.theta.double().square().sum()), float(state.statistics["log_lik"])
    plain, network = expected(f, cov[-1] * 1e-9, y)[1], metrics.nll(f.softmax(-1), y)
    out = []
    for precision in (50.0, 100.0, 200.0, 500.0):
        r = 1.0
        for _ in range(30):
            r = math.sqrt(r * expected(f, interpolated(grid, cov, precision / r) / r, y)[1] / plain)
        loss = expected(f, interpolated(grid, cov, precision / r) / r, y)[0]
        parts = terms(r * values, precision, theta)
        bound = fit - state.n * (loss - network) - parts["quadratic"] - parts["occam"] + 0.5 * parts["gamma"]
        test = scores(g, interpolated(grid, held, precision / r) / r, z)
        out.append({"precision": precision, "ratio": r, "expected_train": loss, "lower_bound": bound, "test": test})
    return out


def layers(problem: Problem) -> dict[str, Any]:
    """Each with the prior precision that its own evidence picks, δ = γ/‖θ‖²."""
    state, out = base(problem)[0], {}
    x, y = (t[:400] for t in sample(problem)["test"])
    for label, names in LAYERS.items():
        values, params = eigenvalues(state, names), state.tangent.params
        theta = sum(
            float(params[n].double().square().sum()) for part, _ in blocks(state, names) for n in part.parameters
        )
        low, high = 1e-3, 1e6
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            more = float((values / (values + middle)).sum()) > middle * theta
            low, high = (middle, high) if more else (low, middle)
        f, cov = covariances(state, x, [low], names)
        out[label] = {"parameters": len(values), "precision": low, "test": scores(f, cov[0], y)}
    return out | {"network": {"test": scores(f, 1e-9 * cov[0], y)}}


def conditional(problem: Problem) -> list[dict[str, float]]:
    """log Z(D) − log Z(D₁) at the trained weights, without the fit, which no precision moves: ½ log|G₁ + δ|/|G + δ|."""
    shards = [lw.load(problem.path(f"kron_{i}.safetensors"), problem.net).state for i in range(5)]
    part = shards[0] + shards[1] + shards[2] + shards[3]
    values = [eigenvalues(s) for s in (part, part + shards[4])]
    grid = [1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6]
    return [
        {"precision": s, "change": 0.5 * float((values[0] + s).log().sum() - (values[1] + s).log().sum())} for s in grid
    ]


def augmented(problem: Problem) -> dict[str, dict[str, float]]:
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(problem.train[1]), generator=generator)[:2000]
    x, y = problem.train[0][order], problem.train[1][order]
    kinds = {"train": (x, y), "test": (problem.test[0][:2000], problem.test[1][:2000])}
    kinds |= {f"train, cropped by up to {k} and flipped": (cropped(x, k, generator), y) for k in (4, 6, 8)}
    out = {}
    for name, (images, labels) in kinds.items():
        p = forward(problem.net, images).softmax(-1)
        trace = float((p * (1 - p)).sum(-1).mean())
        out[name] = {"nll": metrics.nll(p, labels), "accuracy": metrics.accuracy(p, labels), "trace": trace}
    return out


def curvature(problem: Problem) -> dict[str, Any]:
    """G of one random view of each of some images, times what these are of all, times the number of views."""
    state = repeated(views_state(problem, 10_000 if problem.depth == 20 else 4_000)[0], VIEWS)
    precision = evidence_precision(state)
    found = spread_at(problem, "study_views", state, [precision])
    return {"precision": precision, **{kind: scores(f, cov[0], y) for kind, (f, cov, y) in found.items()}}


def transfer(problem: Problem) -> dict[str, Any]:
    """The network, temperature scaling by 1,000 other images, and Laplace by the evidence with and without views."""
    state = repeated(problem.fitted("kron_0", partial(kron_shard, problem, 0))[0], SHARDS)
    found = {power: evidence_precision(repeated(state, power)) for power in (1, VIEWS)}
    x, y = (t[: TEST + 1000] for t in problem.test)
    grid = [s / power for power, s in found.items()]
    (f, cov), _ = problem.kept("transfer", lambda: covariances(state, x[:TEST], grid))
    other = forward(problem.net, x[TEST:])
    scale = min((1 + 0.02 * i for i in range(60)), key=lambda t: metrics.nll((other / t).softmax(-1), y[TEST:]))
    out: dict[str, Any] = {"network": f.softmax(-1), "temperature": (f / scale).softmax(-1)}
    out |= {f"power {k}": probabilities(f, cov[i] / k, "monte_carlo") for i, k in enumerate(found)}
    each = {name: metrics.nll(p, y[:TEST], each=True) for name, p in out.items()}
    return {
        name: {
            "nll": float(each[name].mean()),
            "ece": metrics.ece(p, y[:TEST]),
            "less_than_temperature": difference(each["temperature"], each[name]),
        }
        for name, p in out.items()
    } | {"precisions": found, "temperature_scale": scale}


def last_layer(problem: Problem) -> dict[str, dict[str, float]]:
    """Prior precisions of the last layer from its features by plain linear algebra: where the evidence is stationary,
    and where 100 steps of Adam at a rate of .1 end, from 1. Kronecker factors: the bias as one more input, or apart."""
    head = problem.net.get_submodule("fc")
    body = copy.deepcopy(problem.net)
    body.fc = torch.nn.Identity()
    phi = problem.kept("features", lambda: forward(body, problem.train[0]))[0].double()
    W, b = (t.detach().double() for t in (head.weight, head.bias))
    p, z = (phi @ W.mT + b).softmax(-1), torch.cat([phi, torch.ones(len(phi), 1).double()], 1)
    B = torch.diag(p.sum(0)) - p.mT @ p
    pairs = [[z.mT @ (z * (p[:, i] * (float(i == j) - p[:, j])).unsqueeze(1)) for j in range(10)] for i in range(10)]
    exact = torch.linalg.eigvalsh(torch.cat([torch.cat(row, 1) for row in pairs]))
    m, inside, apart = (torch.linalg.eigvalsh(g) for g in (B, z.mT @ z / len(z), phi.mT @ phi / len(z)))
    spectra = {"full": exact, "kron": torch.outer(inside, m).flatten()}
    spectra["kron, bias apart"] = torch.cat([torch.outer(apart, m).flatten(), m])
    theta = float(W.square().sum() + b.square().sum())
    return {name: _precisions(values.clamp(min=0), theta) for name, values in spectra.items()}


def _precisions(values: Tensor, theta: float) -> dict[str, float]:
    stationary = 1.0
    for _ in range(500):
        stationary = float((values / (values + stationary)).sum()) / theta
    log_s = torch.zeros((), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([log_s], lr=0.1)
    for _ in range(100):
        adam.zero_grad()
        (0.5 * log_s.exp() * theta + 0.5 * torch.log1p(values / log_s.exp()).sum()).backward()
        adam.step()
    return {"stationary": stationary, "adam": float(log_s.detach().exp())}


STUDIES: dict[str, Callable[[Problem], Any]] = {
    "precisions": precisions,
    "views": views,
    "smoothed": smoothed,
    "layers": layers,
    "conditional": conditional,
    "augmented": augmented,
    "curvature": curvature,
    "transfer": transfer,
    "last_layer": last_layer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    parser.add_argument("--depth", type=int, default=20, choices=(20, 32, 44, 56))
    args = parser.parse_args()
    for name in args.only:
        found = STUDIES[name](Problem(args.depth))
        stored = json.loads(RESULTS.read_text())
        stored.setdefault("evidence", {}).setdefault(f"resnet{args.depth}", {})[name] = found
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
        print(name, json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()

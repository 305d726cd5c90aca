"""Inducing inputs, chosen among the data one by one.

    "farthest"    each the farthest, in the inputs' own distance, from those before it (Gonzalez 1985); the first the
                  farthest from their mean
    "evidence"    each the one at which r(x) = Σ_c Λ_c (k_c − ψ_c ψ_cᵀ) is largest, Λ the likelihood's curvature: the
                  pivots of a Cholesky factorization of Σ_c S_c K_c S_c (Bach and Jordan 2003; Burt et al. 2020)

With one output, ½ Σ r over the data is a bound of how far the evidence is from the exact one:
0 ≤ ½ log|I + SKS| − ½ log|I + SQS| ≤ ½ tr S(K − Q)S, Q = ψψᵀ; with several, whose kernels are added up, a guide. It is
learnt of at most `CANDIDATES` examples, spread evenly over the data. Repeated inputs are chosen once.
Shapes: n data, c outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.curvature import BUDGET
from lapwing.errors import Unsupported
from lapwing.gp.empirical import products
from lapwing.gp.features import LEAST
from lapwing.gp.gradients import Side
from lapwing.likelihoods import Likelihood
from lapwing.priors import Gaussian
from lapwing.tangent import TangentModel

CHOICES = "farthest", "evidence"
CANDIDATES = 2_000  # their kernel takes 32 MB an output


def farthest(x: Tensor, count: int) -> Tensor:
    """`count` of the inputs (or as many as differ), each the farthest from those before it."""
    flat = x.reshape(len(x), -1).to(torch.float64)
    distance = (flat - flat.mean(0)).square().sum(1)
    chosen: list[int] = []
    for _ in range(min(count, len(x))):
        at = int(distance.argmax())
        gap = (flat - flat[at]).square().sum(1)
        distance = gap if not chosen else torch.minimum(distance, gap)
        chosen.append(at)
        if not bool(distance.max() > 0):
            break
    return x[torch.tensor(chosen, device=x.device)]


@torch.no_grad()
def by_evidence(
    tangent: TangentModel, x: Tensor, y: Tensor, likelihood: Likelihood, prior: Gaussian, count: int
) -> Tensor:
    """`count` of the inputs (or fewer, if those leave nothing), each where the evidence is off by most."""
    some = torch.linspace(0, len(x) - 1, min(len(x), CANDIDATES), device=x.device).round().long()
    x, y = x[some], y[some]
    side = Side(tangent, x, BUDGET, prior.operator().dense().detach())
    if side.f.ndim != 2:
        raise Unsupported("choice='evidence' is for outputs (n, c), without positions; use choice='farthest'")
    S = roots(likelihood, side.f.double(), y)
    K = sum(s[:, None] * k * s for s, k in zip(S, products(side, None, per_output=True), strict=True))
    return x[pivots(torch.as_tensor(K), count)]


def pivots(K: Tensor, count: int) -> Tensor:
    """The first pivots of a Cholesky factorization of K (n, n), until rounding is what is left."""
    left, least, rows = K.diagonal().clone(), LEAST * len(K) * K.diagonal().max(), K.new_empty(0, len(K))
    chosen: list[int] = []
    while len(chosen) < min(count, len(K)) and bool(left.max() > least):
        at = int(left.argmax())
        row = (K[at] - rows[:, at] @ rows) / left[at].sqrt()
        rows, left = torch.cat([rows, row[None]]), left - row.square()
        left[at] = 0
        chosen.append(at)
    return torch.tensor(chosen, device=K.device)


def roots(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """√Λ_cc, (c, n), at outputs f (n, c)."""
    return likelihood.scaled_root(f, y).square().sum(-1).sqrt().mT

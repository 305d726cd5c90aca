"""Weights of a mixture that predict held-out data best (stacking; Yao, Vehtari, Simpson & Gelman 2018):

    max_w Σ_n log Σ_k w_k p_k(y_n)        w on the simplex,   p (n, k)

by EM: r_nk ∝ w_k p_k(y_n), then w_k = mean_n r_nk. The objective is concave, and g_k = mean_n p_k(y_n)/Σ_j w_j p_j(y_n)
bounds what is left of it: L* − L ≤ log max_k g_k a point, so that is when to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lapwing.data import as_batches, passes
from lapwing.errors import InvalidValue, warn

ENOUGH = 1e-6  # nats a point
MOST = 50_000  # steps


def held_out_densities(fits: Sequence[Any], data: Any) -> Tensor:
    """log p_k(y_n) of each fit at held-out points, (n, k), float64."""
    found = []
    for x, y in passes(as_batches(data), fits[0].tangent.device, label="held out"):
        found.append(torch.stack([fit.predict(x).log_prob(y).double().flatten() for fit in fits], -1))
    return torch.cat(found)


def stacked(log_p: Tensor) -> Tensor:
    """The weights (k,) that maximize the held-out log score of log-densities (n, k)."""
    top = log_p.amax(1, keepdim=True)
    if not bool(torch.isfinite(top).all()):
        raise InvalidValue("some held-out target has probability 0, or none, under every member; look at their noise")
    p = (log_p - top).exp()
    w = torch.full_like(p[0], 1 / p.shape[1])
    for _ in range(MOST):
        g = (p / (p @ w).unsqueeze(1)).mean(0)
        if float(g.max()) <= 1 + ENOUGH:
            return w / w.sum()
        w = w * g
    left = float(g.max().log())
    said = f"stacking stopped after {MOST} steps, at most {left:.1e} nats a point below the best"
    warn(said)
    return w / w.sum()

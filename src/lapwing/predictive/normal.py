"""y as a Gaussian, where it is one given f: f ~ N(μ, V), y | f ~ N(m(f), R(f)), and by the delta method

    y ~ N(m(μ), D V Dᵀ + R(μ)),   D = ∂m/∂f at μ

which is exact where m(f) = f and R does not depend on f. Shapes: c outputs, t targets, N inputs with their positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapwing.errors import NotPositiveDefinite
from lapwing.likelihoods import Likelihood


def slope(likelihood: Likelihood, f: Tensor) -> Tensor | None:
    """D at f (..., c), (..., t, c); None where it is the identity."""
    if likelihood.response == "identity":
        return None
    D = torch.func.vmap(torch.func.jacrev(likelihood.mean))(f.reshape(-1, f.shape[-1]))
    return D.reshape(*f.shape[:-1], *D.shape[1:])


def log_prob(likelihood: Likelihood, f: Tensor, cov: Tensor, joint: bool, y: Tensor) -> Tensor:
    """Of each input, or of all together, 0-dim, if joint: V is then (n, ..., c, n, ..., c)."""
    f = f.double()  # the square of a noise that float32 holds may not be one
    y, noise = (t.double() for t in likelihood.observed(f, y))
    residual = (y - likelihood.mean(f)).reshape(f.shape[:-1].numel(), -1)  # (N, t)
    total = (_joint if joint else _each)(cov.double(), noise, slope(likelihood, f), f.shape)
    if joint:
        residual = residual.reshape(1, -1)
    root, info = torch.linalg.cholesky_ex(total)
    if bool(info.any()):
        raise NotPositiveDefinite(
            f"the covariance of y is singular at {int((info > 0).sum())} of {len(total)} inputs: neither noise nor "
            "posterior has a variance that float64 can tell from 0; give a larger noise"
        )
    z = torch.linalg.solve_triangular(root, residual.unsqueeze(-1), upper=False).squeeze(-1)
    half_logdet = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    out = -0.5 * z.square().sum(-1) - half_logdet - 0.5 * residual.shape[-1] * math.log(2 * math.pi)
    return out.reshape(() if joint else f.shape[:-1])


def _each(cov: Tensor, noise: Tensor, D: Tensor | None, shape: torch.Size) -> Tensor:
    """(N, t, t)."""
    total = (cov if D is None else D.double() @ cov @ D.double().mT) + noise
    return total.reshape(-1, *total.shape[-2:])


def _joint(cov: Tensor, noise: Tensor, D: Tensor | None, shape: torch.Size) -> Tensor:
    """(1, N·t, N·t)."""
    rows, t = shape[:-1].numel(), noise.shape[-1]
    total = cov.reshape(rows, shape[-1], rows, shape[-1]).clone()
    if D is not None:
        D = D.double().reshape(rows, t, -1)
        total = torch.einsum("nta,namb,mub->ntmu", D, total, D)
    each = torch.arange(rows)
    total[each, :, each] += noise.reshape(rows, t, t)
    return total.reshape(1, rows * t, rows * t)

"""Links: from a Gaussian over the outputs f to probabilities, f ~ N(μ, V).

    probit           softmax(μ / √(1 + π/8 · diag V))            MacKay's; counts the variance of a common shift of
                                                                  all logits, to which softmax is blind
    probit_centered  the same after that shift is projected out   V ← P V P, P = I − 11ᵀ/c
    bridge           the mean of a Dirichlet matched to softmax(f) (Laplace bridge), after conditioning on Σ f = 0
    monte_carlo      the mean of softmax(f) over fixed quasi-random draws with the full covariance: the reference

For independent binary outputs: sigmoid in the place of softmax, no common shift and no bridge.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from lapwing.errors import Unsupported
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood

LINKS = ("auto", "exact", "probit", "probit_centered", "bridge", "monte_carlo")
DRAWS = 512


@functools.singledispatch
def closed_form(likelihood: Likelihood, link: str, mean: Tensor, cov: Tensor) -> Tensor | None:
    """E[y] by a link in closed form; None where the link is monte_carlo."""
    if link in ("auto", "monte_carlo"):
        return None
    raise Unsupported(f"link={link!r} has no rule for {likelihood.name}; use 'auto' or 'monte_carlo'")


@closed_form.register
def _(likelihood: Gaussian, link: str, mean: Tensor, cov: Tensor) -> Tensor | None:
    if link in ("auto", "exact"):
        return mean
    raise Unsupported(f"link={link!r} is for classes; the gaussian predictive is exact: use 'auto'")


@closed_form.register
def _(likelihood: Bernoulli, link: str, mean: Tensor, cov: Tensor) -> Tensor | None:
    if link in ("auto", "probit"):
        return torch.sigmoid(_shrunk(mean, cov))
    if link == "monte_carlo":
        return None
    raise Unsupported(f"link={link!r} is for softmax classes; bernoulli has 'probit' and 'monte_carlo'")


@closed_form.register
def _(likelihood: Categorical, link: str, mean: Tensor, cov: Tensor) -> Tensor | None:
    if link in ("auto", "probit"):
        return torch.softmax(_shrunk(mean, cov), -1)
    if link == "probit_centered":
        cov = cov - cov.mean(-1, keepdim=True) - cov.mean(-2, keepdim=True) + cov.mean((-1, -2), keepdim=True)
        return torch.softmax(_shrunk(mean, cov), -1)
    if link == "bridge":
        return _bridge(mean, cov)
    if link == "monte_carlo":
        return None
    raise Unsupported(f"link={link!r} has no rule for categorical; use one of {LINKS[2:]}")


def _shrunk(mean: Tensor, cov: Tensor) -> Tensor:
    return mean / torch.sqrt(1 + math.pi / 8 * cov.diagonal(dim1=-2, dim2=-1))


def _bridge(mean: Tensor, cov: Tensor) -> Tensor:
    """α_k = (1 − 2/c + c⁻² Σ_l exp(f_k − f_l)) / V_kk on the plane Σ f = 0; E[p] = α / Σ α."""
    c, eps = mean.shape[-1], torch.finfo(cov.dtype).eps
    var, row, total = cov.diagonal(dim1=-2, dim2=-1), cov.sum(-1), cov.sum((-1, -2)).unsqueeze(-1)
    flat = total <= 10 * c * eps * var.sum(-1, keepdim=True)  # a common shift that does not vary: only center it
    gain = torch.where(flat, 1 / c, row / torch.where(flat, 1, total))
    mean = mean - gain * mean.sum(-1, keepdim=True)
    var = torch.where(flat, var, var - gain * row)
    var = (var / var.amax(-1, keepdim=True).clamp(min=torch.finfo(cov.dtype).tiny)).clamp(min=eps)  # E[p] sees ratios
    log_sum = torch.logsumexp(-mean, -1, keepdim=True)
    alpha = (1 - 2 / c + torch.exp(mean + log_sum) / c**2) / var
    return alpha / alpha.sum(-1, keepdim=True)


@functools.lru_cache(maxsize=8)
def quasi_normal(draws: int, dims: int) -> Tensor:
    """Fixed scrambled Sobol points turned normal, (draws, dims) float64: the same for every prediction."""
    if dims > torch.quasirandom.SobolEngine.MAXDIM:
        return torch.randn(draws, dims, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = torch.quasirandom.SobolEngine(dims, scramble=True, seed=0).draw(draws, dtype=torch.float64)
    return math.sqrt(2) * torch.erfinv((2 * points - 1).clamp(-1 + 1e-12, 1 - 1e-12))


def psd_root(cov: Tensor) -> Tensor:
    """L with L Lᵀ = V for positive semidefinite V (..., c, c): Cholesky, or the eigenvector root where singular."""
    root, info = torch.linalg.cholesky_ex(cov)
    if bool((info > 0).any()):
        values, vectors = torch.linalg.eigh(cov)
        eigen = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
        root = torch.where((info > 0)[..., None, None], eigen, root)
    return root

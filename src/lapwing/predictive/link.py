"""Links: from a Gaussian over the outputs f to E[y], f ~ N(μ, V).

    exact            μ                                            where E[y|f] = f
    delta            E[y|μ], and y ~ N(E[y|μ], D V Dᵀ + noise at μ), D = ∂E[y|f]/∂f:  other Gaussian noise
    probit           softmax(μ / √(1 + π/8 · diag V))            MacKay's; counts the variance of a common shift of
                                                                  all logits, to which softmax is blind
    probit_centered  the same after that shift is projected out   V ← P V P, P = I − 11ᵀ/c
    mean_field       p_k ∝ 1 / Σ_l exp(−(μ_k − μ_l) / √(1 + π/8 · Var[f_k − f_l])): pairs of logits, with their
                     covariance, so a common shift does not count (Lu, Ie, Sha 2020)
    bridge           the mean of a Dirichlet matched to softmax(f) (Laplace bridge), after conditioning on Σ f = 0
    bridge_norm      the same for f / √s, s the mean variance by √(c/2), so that the size of the variance counts
    monte_carlo      the mean of E[y|f] over fixed quasi-random draws with the full covariance, or by quadrature where
                     outputs can be taken one by one: the reference

For independent binary outputs: sigmoid in the place of softmax, no common shift and no bridge. What a likelihood has is
told by its `response`, and a rule more is an entry of CLOSED.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lapwing.errors import Unsupported
from lapwing.likelihoods import Likelihood

LINKS = ("auto", "exact", "delta", "probit", "probit_centered", "mean_field", "bridge", "bridge_norm", "monte_carlo")


def resolve(likelihood: Likelihood, link: str) -> str:
    """The link that is meant; "auto" has all fields from one set of nodes, or from one Gaussian where y is one."""
    offered = rules(likelihood)
    if link == "auto":
        return next(name for name in offered if name in ("exact", "delta", "monte_carlo"))
    if link not in offered:
        known = ", ".join(repr(name) for name in ("auto", *offered[:-1]))
        raise Unsupported(f"link={link!r} has no rule for {likelihood.name}; it has {known} and {offered[-1]!r}")
    return link


def rules(likelihood: Likelihood) -> tuple[str, ...]:
    """The links that the likelihood has."""
    if likelihood.response == "identity":
        return ("exact",)
    drawn = ("delta", "monte_carlo") if likelihood.normal else ("monte_carlo",)
    return (*CLOSED.get(likelihood.response, {}), *drawn)


def closed_form(likelihood: Likelihood, link: str, mean: Tensor, cov: Tensor) -> Tensor:
    """E[y] by a link in closed form."""
    link = resolve(likelihood, link)
    return likelihood.mean(mean) if link in ("exact", "delta") else CLOSED[likelihood.response][link](mean, cov)


def _probit(mean: Tensor, cov: Tensor) -> Tensor:
    return torch.softmax(_shrunk(mean, cov), -1)


def _probit_centered(mean: Tensor, cov: Tensor) -> Tensor:
    cov = cov - cov.mean(-1, keepdim=True) - cov.mean(-2, keepdim=True) + cov.mean((-1, -2), keepdim=True)
    return torch.softmax(_shrunk(mean, cov), -1)


def _mean_field(mean: Tensor, cov: Tensor) -> Tensor:
    var = cov.diagonal(dim1=-2, dim2=-1)
    gap_var = (var.unsqueeze(-1) + var.unsqueeze(-2) - 2 * cov).clamp(min=0)  # Var[f_k − f_l]
    gap = (mean.unsqueeze(-1) - mean.unsqueeze(-2)) / torch.sqrt(1 + math.pi / 8 * gap_var)
    return torch.softmax(-torch.logsumexp(-gap, -1), -1)


def _shrunk(mean: Tensor, cov: Tensor) -> Tensor:
    return mean / torch.sqrt(1 + math.pi / 8 * cov.diagonal(dim1=-2, dim2=-1).clamp(min=0))


def _bridge(mean: Tensor, cov: Tensor) -> Tensor:
    """α_k = (1 − 2/c + c⁻² Σ_l exp(f_k − f_l)) / V_kk on the plane Σ f = 0; E[p] = α / Σ α."""
    mean, var, _ = _on_plane(mean, cov)
    return _dirichlet_mean(mean, var)


def _bridge_norm(mean: Tensor, cov: Tensor) -> Tensor:
    """The bridge of f / √s on that plane, s = mean_k V_kk / √(c/2): so the size of the variance counts."""
    mean, var, unit = _on_plane(mean, cov)
    size = unit * var.mean(-1, keepdim=True) / math.sqrt(mean.shape[-1] / 2)
    return _dirichlet_mean(mean * size.clamp(min=torch.finfo(cov.dtype).tiny).rsqrt(), var)


def _on_plane(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f given Σ f = 0: its mean, its variances in a unit, and that unit, the largest V_kk."""
    c, eps, tiny = mean.shape[-1], torch.finfo(cov.dtype).eps, torch.finfo(cov.dtype).tiny
    unit = cov.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True).clamp(min=tiny)
    cov = cov / unit.unsqueeze(-1)
    var, row, total = cov.diagonal(dim1=-2, dim2=-1), cov.sum(-1), cov.sum((-1, -2)).unsqueeze(-1)
    flat = total <= 10 * c * eps * var.sum(-1, keepdim=True)  # a common shift that does not vary: only center it
    gain = torch.where(flat, 1 / c, row / torch.where(flat, 1, total))
    return mean - gain * mean.sum(-1, keepdim=True), torch.where(flat, var, var - gain * row), unit


def _dirichlet_mean(mean: Tensor, var: Tensor) -> Tensor:
    """E[p] of the Dirichlet with these logits and variances, by logarithms of α; it sees ratios of variances alone."""
    c, eps, tiny = mean.shape[-1], torch.finfo(var.dtype).eps, torch.finfo(var.dtype).tiny
    var = (var / var.amax(-1, keepdim=True).clamp(min=tiny)).clamp(min=eps)
    log_sum = mean + torch.logsumexp(-mean, -1, keepdim=True) - 2 * math.log(c)
    least = torch.log(torch.full_like(log_sum, 1 - 2 / c))  # −∞ for two classes
    return torch.softmax(torch.logaddexp(least, log_sum) - var.log(), -1)


# by how E[y|f] comes from f
CLOSED: dict[str, dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "softmax": {
        "probit": _probit,
        "probit_centered": _probit_centered,
        "mean_field": _mean_field,
        "bridge": _bridge,
        "bridge_norm": _bridge_norm,
    },
    "sigmoid": {"probit": lambda mean, cov: torch.sigmoid(_shrunk(mean, cov))},
}


OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {"softmax": torch.log, "sigmoid": torch.logit}  # f with E[y|f] = p

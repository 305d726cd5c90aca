"""A scale that is not known, τ_g ~ p(τ), w_i ~ N(0, τ_g²) for the weights of group g (MacKay 1994; Neal 1996).

    log p(w_g) = log ∫ N(w_g; 0, τ²I) p(τ) dτ,        A_g = E[1/τ² | w_g]

by the trapezoidal rule in log τ about the integrand's mode, whose width is at most 1/√(2n_g): it depends on w_g through
n_g and ‖w_g‖² alone. Samplers walk in (ε, log τ), w = τ ε. per="input" is automatic relevance determination: a scale
for each input. Shapes: p weights, g groups, k nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue
from lapwing.operators import Diagonal
from lapwing.positive import HalfCauchy, Positive
from lapwing.priors.base import Lifted, Prior
from lapwing.priors.elementwise import standard_normal

REACH, NODES = 6.0, 481  # nodes at mode + width·sinh(u), |u| ≤ REACH: some 200 widths either way
HALVINGS = 100  # of log τ in [−300, 300], to find the mode
HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, eq=False)
class Hierarchical(Prior):
    """w ~ N(0, τ²), τ ~ `scale`, one τ for each group."""

    settings: ClassVar[tuple[str, ...]] = (*Prior.settings, "scale")
    scale: Any = field(default_factory=HalfCauchy)  # p(τ)
    per: Any = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.scale, Positive):
            raise InvalidValue(
                f"scale is a density of τ, such as lw.priors.HalfCauchy(1.0) or lw.priors.Gamma(2, 1), got "
                f"{self.scale!r}; for a scale that is known use lw.priors.Gaussian(1 / τ**2)"
            )

    def facts(self) -> dict[str, Tensor]:
        groups = {} if self.index is None else {"groups": self.index}
        return {**groups, **{k: given.real(v, k) for k, v in vars(self.scale).items()}}

    @property
    def kind(self) -> str:
        """With the density of its scales."""
        return f"{super().kind}, scales by {self.scale}"

    # -- the density of the weights alone -------------------------------------------------------------------------

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        return self.log_density(self.vector(weights))

    def log_density(self, v: Tensor) -> Tensor:
        return torch.logsumexp(self._nodes(v)[0], 0).sum()

    def quadratic(self, v: Tensor) -> tuple[Diagonal, Tensor]:
        """E[1/τ² | w_g] for each weight of group g, and zeros."""
        log_joint, log_tau = self._nodes(v)
        a = (log_joint.softmax(0) * (-2 * log_tau).exp()).sum(0)
        return Diagonal(a, len(v), self.index, grouping=self.grouping), torch.zeros_like(v)

    def _nodes(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """log p(w_g, τ) at nodes of log τ, with the rule's weights, and log τ there: (k, g)."""
        groups = self.groups()
        n, square = groups.counts(), groups.sums(v.square())
        mode = self._mode(n, square.detach())
        u = torch.linspace(-REACH, REACH, NODES, dtype=torch.float64, device=v.device).unsqueeze(-1)
        width = (2 * n + 1).rsqrt()
        t = mode + width * u.sinh()
        log_rule = (width * u.cosh()).log() + math.log(2 * REACH / (NODES - 1))
        normal = -n * (t + HALF_LOG_2_PI) - 0.5 * square * (-2 * t).exp()
        return normal + self.scale.log_prob(t.exp()) + t + log_rule, t

    @torch.no_grad()
    def _mode(self, n: Tensor, square: Tensor) -> Tensor:
        """Of log τ given w_g, (g,): the slope −n + ‖w_g‖²/τ² + ∂ log(p(τ)τ)/∂ log τ falls in log τ."""
        low, high = torch.full_like(square, -300.0), torch.full_like(square, 300.0)
        for _ in range(HALVINGS):
            t = 0.5 * (low + high)
            rising = -n + square * (-2 * t).exp() + self.scale.slope(t.exp()) > 0
            low, high = torch.where(rising, t, low), torch.where(rising, high, t)
        return 0.5 * (low + high)

    # -- with the scales ------------------------------------------------------------------------------------------

    @property
    def scales(self) -> int:
        """A τ for each group."""
        return len(self.names) or self._bound().size

    def lift(self, q: Tensor) -> Lifted:
        p = self._bound().size
        noise, log_tau = q[:p], q[p:]
        tau, stretch = log_tau.exp(), self.each(log_tau).sum()  # log|∂w/∂ε|
        log_prob = (-0.5 * noise.square() - HALF_LOG_2_PI).sum() - stretch + self.scale.log_prob(tau).sum()
        return Lifted(noise * self.each(tau), log_prob, stretch + log_tau.sum(), {"scale": tau})

    def lower(self, v: Tensor) -> Tensor:
        groups = self.groups()
        log_tau = self._mode(groups.counts(), groups.sums(v.square()))
        return torch.cat([v / self.each(log_tau.exp()), log_tau])

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        p = self._bound().size
        tau = self.scale.sample((n, self.scales), generator)
        tau = tau[:, self.index.to(tau.device)] if self.index is not None else tau.expand(n, p)
        return tau * standard_normal((n, p), generator, tau)

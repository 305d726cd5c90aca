"""The horseshoe, w ~ N(0, τ²λ²), λ ~ C⁺(0, 1) for each weight (Carvalho, Polson & Scott 2010). With z = w²/2τ²:

    log p(w) = z + log E₁(z) − ½ log(2π³τ²),        E[1/s | w] = (1/(z eᶻE₁(z)) − 1)/τ²

An infinite peak at 0 shrinks what is small, and tails as heavy as Cauchy's leave what is large. With a slab c, the
regularized horseshoe (Piironen & Vehtari 2017), large weights are N(0, c²):

    1/s = 1/(τ²λ²) + 1/c²,        p(w) = ∫ N(w; 0, s) 2/(π(1 + λ²)) dλ        by the trapezoidal rule in log λ²

Samplers walk in (ε, log λ), w = √s ε: the joint density is smooth there, and has no peak. A is infinite at w = 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue
from lapwing.positive import HalfCauchy
from lapwing.priors.base import Lifted, Prior
from lapwing.priors.elementwise import Elementwise, standard_normal
from lapwing.priors.exponential_integral import scaled_e1

LOG_RANGE, STEP = (-70.0, 70.0), 0.4  # of log λ²: all but 1e-15 of its density; the rule's error is 2e-11
HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, eq=False)
class Horseshoe(Elementwise):
    """w = τλε, one τ for all weights or one for each group; `slab` c bounds how large a weight may be."""

    settings: ClassVar[tuple[str, ...]] = (*Prior.settings, "slab")
    scale: Any = 1.0  # τ
    slab: float = math.inf  # c
    per: Any = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        slab = given.real(self.slab, "slab")
        if slab.ndim or not float(slab) > 0:
            raise InvalidValue(f"slab is one positive standard deviation, or inf for none, got {slab.tolist()}")
        object.__setattr__(self, "slab", float(slab))

    # -- the density of the weights alone -------------------------------------------------------------------------

    def each_log_prob(self, w: Tensor) -> Tensor:
        if self.slab < math.inf:
            return torch.logsumexp(self._nodes(w)[0], 0)
        tau = self.each(self.scale)
        return scaled_e1(0.5 * (w / tau).square()).log() - tau.log() - 0.5 * math.log(2 * math.pi**3)

    def each_precision(self, w: Tensor) -> Tensor:
        if self.slab < math.inf:
            log_joint, precision = self._nodes(w)
            return (log_joint.softmax(0) * precision).sum(0)
        tau = self.each(self.scale)
        z = 0.5 * (w / tau).square()
        return (1 / (z * scaled_e1(z)) - 1) / tau.square()

    def _nodes(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """log p(w, λ) at nodes of log λ², with the rule's weights, and 1/s there: (k, p)."""
        log_u = torch.arange(*LOG_RANGE, STEP, dtype=torch.float64, device=w.device).unsqueeze(-1)
        tau = self.each(self.scale)
        precision = torch.exp(-log_u) / tau.square() + self.slab**-2
        density = 0.5 * log_u - torch.nn.functional.softplus(log_u) - math.log(math.pi)  # p(u) u of u = λ²
        normal = 0.5 * (precision.log() - precision * w.square()) - HALF_LOG_2_PI
        return density + normal + math.log(STEP), precision

    # -- with the scales ------------------------------------------------------------------------------------------

    @property
    def scales(self) -> int:
        """A λ for each weight."""
        return self._bound().size

    def _deviation(self, local: Tensor) -> Tensor:
        """√s at λ."""
        wide = self.each(self.scale).detach() * local
        return wide if self.slab == math.inf else (wide**-2 + self.slab**-2).rsqrt()

    def lift(self, q: Tensor) -> Lifted:
        noise, log_local = q[: self.scales], q[self.scales :]
        local = log_local.exp()
        deviation = self._deviation(local)
        log_prob = (-0.5 * noise.square() - HALF_LOG_2_PI - deviation.log() + HalfCauchy(1.0).log_prob(local)).sum()
        return Lifted(noise * deviation, log_prob, (deviation.log() + log_local).sum(), {"local_scale": local})

    def lower(self, v: Tensor) -> Tensor:
        local = (1 + (v / self.each(self.scale).detach()).square()).sqrt()
        return torch.cat([v / self._deviation(local), local.log()])

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        tau = self.each(self.scale)
        local = HalfCauchy(1.0).sample((n, len(tau)), generator).to(tau.device)
        return self._deviation(local) * standard_normal((n, len(tau)), generator, tau)

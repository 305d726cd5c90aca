"""Functions drawn from the posterior, each the same function wherever it is asked:

    f_k(x) = f(x, θ*) + J(x) z_k,   z_k ~ N(0, Σ) drawn once          (and J(x)(v̄ − θ*) more, about a center v̄)

so values at any inputs, asked in any order, are those of one draw over all of them together: what Thompson sampling
needs. One jvp a function and call; the dual form draws its z_k through the rows of the data (Eq. 13), as others do
through their factorizations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing import given
from lapwing.data import check_finite, network_inputs
from lapwing.posterior import Gaussian
from lapwing.push import pushed
from lapwing.tangent import TangentModel
from lapwing.tangent.graph import graph_where_asked


@dataclass(frozen=True, eq=False)
class FunctionSamples:
    """`functions(x)` are k functions at x, (k, n, ..., c): outputs f, not yet the response y."""

    tangent: TangentModel
    away: Tensor  # v̄ + z_k − θ*, (k, p)

    @graph_where_asked
    def __call__(self, x: Any) -> Tensor:
        inputs = network_inputs(x, self.tangent.device)
        check_finite(inputs, "the inputs")
        f, moved = pushed(self.tangent, self.away, inputs)
        return f + moved

    def __len__(self) -> int:
        return len(self.away)

    def __repr__(self) -> str:
        return f"FunctionSamples({len(self)} functions; call them on inputs)"


@torch.inference_mode(False)
@torch.no_grad()
def function_samples(
    posterior: Gaussian,
    n: int = 1,
    generator: torch.Generator | None = None,
    center: Tensor | None = None,
) -> FunctionSamples:
    """n functions drawn about f(x), or about h(x, v̄) where a center v̄ is given."""
    n = given.whole(n, "the number of functions", 1)
    z, tangent = posterior.draw(n, generator) - posterior.mean, posterior.tangent
    return FunctionSamples(tangent, z if center is None else z + (center - tangent.theta.to(center)))

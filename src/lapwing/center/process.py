"""The tangent kernel as a Gaussian process with a constant prior mean:

    h(x, v) = c + J(x) v,   v ~ N(m, A⁻¹)          in the place of  f(x) + J(x)(v − θ*)

The tangent model's own prior mean, f − Jθ*, is a function that training has moved; c is one constant an output, which
fits the targets best if they do not depend on the inputs. All that searches for v* needs to know of it are the outputs
at θ*: c + Jθ*.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lapwing.center.jacobian import Jacobian
from lapwing.errors import Unsupported
from lapwing.likelihoods import Likelihood


def about_constant(jacobian: Jacobian, likelihood: Likelihood) -> Jacobian:
    """J over the data with the outputs of the process at θ*."""
    y = torch.cat(jacobian.ranks.joined([jacobian.y], "the targets"))
    c = likelihood.constant(y, jacobian.f.shape[-1])
    if c is None or not bool(torch.isfinite(c).all()):
        raise Unsupported(
            f"{likelihood.name} has no constant outputs that fit its targets, which a process needs as its prior mean; "
            "use center='tangent'"
        )
    c = c.to(jacobian.f)
    return replace(jacobian, f=c + jacobian.push(jacobian.tangent.theta.to(torch.float64)), constant=c)

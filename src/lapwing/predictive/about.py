"""Outputs about another mean than the network's: that of the tangent model at its mode, or of the process.

h(x, v*) = f(x) + J(x)(v* − θ*),   or   c + J(x) v*
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.center import Center
from lapwing.outputs import Outputs
from lapwing.tangent import TangentModel


@torch.inference_mode(False)
@torch.no_grad()
def about(made: Outputs, tangent: TangentModel, x: Any, center: Center) -> Outputs:
    """Outputs at x, which are about the network's, moved to the center's."""
    if center.constant is None:
        return made.moved(_pushed(tangent, x, center.vector - tangent.theta.to(center.vector)))
    return made.moved(center.constant.to(made.mean) + _pushed(tangent, x, center.vector) - tangent(x).to(made.mean))


def _pushed(tangent: TangentModel, x: Any, v: Tensor) -> Tensor:
    """J(x) v, (n, ..., c)."""
    return tangent.jvp(x, tangent.layout.unflatten(v.to(tangent.dtype))).detach()

"""Outputs about another mean than the network's: that of the tangent model at its mode, or of the process.

h(x, v*) = f(x) + J(x)(v* − θ*),   or   c + J(x) v*
"""

from __future__ import annotations

from typing import Any

from lapwing.center import Center
from lapwing.outputs import Outputs
from lapwing.push import pushed
from lapwing.tangent import TangentModel
from lapwing.tangent.graph import graph_where_asked


@graph_where_asked
def about(made: Outputs, tangent: TangentModel, x: Any, center: Center) -> Outputs:
    """Outputs at x, which are about the network's, moved to the center's."""
    v, c = center.vector, center.constant
    f, away = pushed(tangent, (v - tangent.theta.to(v) if c is None else v).unsqueeze(0), x)
    return made.moved(away[0] if c is None else c.to(made.mean) + away[0] - f.to(made.mean))

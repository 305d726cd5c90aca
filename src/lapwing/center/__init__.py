"""The tangent MAP: where the posterior of the tangent model h(x, v) = f(x, θ*) + J(x)(v − θ*) has its mode (Eq. 20),

    v* = argmin_v  −Σ_n log p(y_n | h(x_n, v)) + ½ ‖v − m‖²_A

convex, whatever the network. The trained weights θ* need not be near it: with normalization layers the network does not
depend on the scale of its weights, but the prior does, and θ* is no mode at all.

    read          the data, once: a `Jacobian`
    tangent_map   the search for v*: a `Center`, which is v* and how it was found
"""

from lapwing.center.jacobian import Jacobian, read
from lapwing.center.search import Center, check_gaussian, stretched, tangent_map

__all__ = ["Center", "Jacobian", "check_gaussian", "read", "stretched", "tangent_map"]

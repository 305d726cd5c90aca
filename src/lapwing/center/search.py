"""The search for v*, by directions whose images are kept.

Each step adds a direction, P⁻¹ times the gradient with P = Ĝ + A the precision of the fitted structure, to those whose
images J d are known (`Space`), and goes to the maximum over all of them: conjugate gradients where the log density is
quadratic, and for other likelihoods too a method that forgets nothing. A step takes two passes, one for J d and one for
the gradient; the maximum takes none, and directions serve again when prior or noise change. With the full structure and
a Gaussian likelihood P is the Hessian, and one step is exact; otherwise P only says how many are needed, and where they
are many and the rows of J are in memory, P becomes the Hessian. Stationarity is measured in the norm of P⁻¹: a gain of
about ½‖g‖²_{P⁻¹} nats is left, or more where P overstates the curvature.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lapwing import priors
from lapwing.center.jacobian import Jacobian
from lapwing.center.space import Space
from lapwing.center.tangent_joint import TangentJoint
from lapwing.curvature import State
from lapwing.errors import NotConverged, Unsupported
from lapwing.likelihoods import Likelihood
from lapwing.operators import linalg, plus
from lapwing.posterior import curvature

EXACT = 1e-10  # tolerance with the rows of J, or the Hessian, in memory
STREAMED = 2.5e-4  # with J by passes, or of a last layer whose Hessian is too large
SEARCH_STEPS = 500  # towards v*, at the most
PATIENCE = 20  # steps after which P becomes the Hessian


@dataclass(frozen=True, eq=False)
class Center:
    """v* and how it was found."""

    vector: Tensor  # v*, (p,), float64
    statistics: dict[str, Tensor]  # the likelihood's sums at h(x, v*)
    iterations: int  # steps, two passes each
    residual: float  # ‖gradient‖_{P⁻¹} / max(1, ‖v* − m‖_A)
    passes: int  # over the data
    outputs: Tensor | None = field(default=None, repr=False)  # h(x_n, v*), (m, c): to start the next from; not saved
    pulled: Tensor | None = field(default=None, repr=False)  # Σ_n J_nᵀ ∂ log p(y_n | h), (p,); not saved
    weights: Tensor | None = field(default=None, repr=False)  # the curvature weights that it was pulled at

    stretch: float = 1.0  # of Ĝ in P, by which it fits the curvature at v* rather than at the network's outputs
    space: Space | None = field(default=None, repr=False)  # to search again for other hyperparameters; not saved
    rounding: float = 0.0  # what rounding of the outputs leaves of the residual
    constant: Tensor | None = None  # c (c,), where h is c + J v, a process with a constant prior mean

    def alone(self) -> Center:
        """Without what belongs to one reading of the data."""
        return replace(self, outputs=None, pulled=None, weights=None, space=None)


def check_gaussian(prior: priors.Prior) -> priors.Gaussian:
    """The prior; an error for one whose A moves with v: only Gaussian log densities are quadratic in v, and concave."""
    if not prior.gaussian:
        raise Unsupported(
            f"the tangent center needs a Gaussian prior, and {type(prior).__name__} is none; use center='map', the "
            "trained weights: la.tuned(center='map')"
        )
    return cast(priors.Gaussian, prior)


@torch.no_grad()
def tangent_map(
    state: State,
    prior: priors.Gaussian,
    likelihood: Likelihood,
    jacobian: Jacobian,
    start: Center | None = None,
    *,
    tolerance: float | None = None,
    strict: bool = True,
    steps: int | None = None,
    progress: bool = False,
) -> Center:
    """v* for this prior and noise, from `start` (the trained weights unless given) to a residual of `tolerance`.

    Raises NotConverged where that is not reached in so many steps; with strict=False the residual says so. progress: a
    bar over the steps, two passes each where J is not held.
    """
    check_gaussian(prior)
    a = prior.replace(precision=prior.precision.detach()).operator()
    likelihood = likelihood.replace(**{k: value.detach() for k, value in likelihood.hyperparameters.items()})
    structure, stretch = curvature(state, likelihood), 1.0 if start is None else start.stretch
    precision = plus(stretched(structure, stretch), a)
    density = TangentJoint(jacobian, likelihood, precision, a, prior.mean_vector())
    tolerance = tolerance or (EXACT if jacobian.rows is not None or density.has_hessian else STREAMED)
    theta, passes_before = state.tangent.theta.to(torch.float64), jacobian.passes
    v = theta if start is None else start.vector
    z = _outputs(jacobian, start, v, theta)
    space = Space.empty(v, z, jacobian) if start is None or start.space is None else start.space
    move = space.maximum(density, v, z, tolerance)
    if move is not None:
        v, z, start = v + move[0], z + move[1], None
    pulled = _pulled(density, start, z)
    residual, step, steps = float("inf"), 0, SEARCH_STEPS if steps is None else steps
    bar = tqdm(range(steps + 1), "tangent map", disable=not progress, leave=False)
    for step in bar:
        g = density.gradient(v, pulled)
        direction = linalg.solve(density.precision, g)
        residual = float((g * direction).sum().clamp(min=0).sqrt()) / density.size(v)
        if not residual < float("inf"):
            raise NotConverged(f"the gradient of the tangent model became {residual}; check targets, weights and noise")
        bar.set_postfix_str(f"residual {residual:.2g}", refresh=False)
        rounding = density.rounding(v, z)
        goal = max(tolerance, rounding)
        if residual <= goal or step == steps:
            break
        move = space.plus(direction, jacobian.push(direction)).maximum(density, v, z, goal)
        if move is None:  # rounding hides what is left
            break
        space = space.plus(*move)
        v, z = v + move[0], z + move[1]
        pulled = jacobian.pull(density.score(z))
        ratio = _stretch(likelihood, z, jacobian)
        if not 0.5 < ratio / stretch < 2:  # worth a factorization
            stretch = ratio
            density = replace(density, precision=plus(stretched(structure, stretch), a))
        if step % PATIENCE == PATIENCE - 1 and density.has_hessian:
            density = replace(density, precision=plus(density.hessian(z), a))
    bar.close()
    if strict and residual > goal:
        raise NotConverged(
            f"the tangent MAP ended at a residual of {residual:.3g} after {step} steps, for a tolerance of "
            f"{tolerance:.3g}; use a structure closer to the full curvature ('kron' for 'diag', 'full' for 'kron'), a "
            "larger prior precision or noise, a network in float64, or center='map'"
        )
    statistics = jacobian.statistics(likelihood, z, state)
    passes = jacobian.passes - passes_before
    return Center(
        v, statistics, step, residual, passes, z, pulled, density.weights, stretch, space, rounding, jacobian.constant
    )


def stretched(operator: linalg.Operator, stretch: float) -> linalg.Operator:
    """Ĝ times a number: the same operator where that is 1."""
    return operator if stretch == 1 else linalg.scale(operator, torch.tensor(stretch, dtype=torch.float64))


def _stretch(likelihood: Likelihood, z: Tensor, jacobian: Jacobian) -> float:
    """tr Λ(z) / tr Λ(f), summed over data: Ĝ was taken at f, where a confident network has next to no curvature."""
    if likelihood.quadratic:
        return 1.0
    traces = [float(likelihood.curvature_trace(outputs, jacobian.y).sum()) for outputs in (z, jacobian.f)]
    here, there = jacobian.total(torch.tensor(traces, dtype=torch.float64))[0].tolist()
    return min(max(here / there, 1e-6), 1e6) if there > 0 else 1.0


def _outputs(jacobian: Jacobian, start: Center | None, v: Tensor, theta: Tensor) -> Tensor:
    if start is None:
        return jacobian.f
    return start.outputs if start.outputs is not None else jacobian.f + jacobian.push(v - theta)


def _pulled(density: TangentJoint, start: Center | None, z: Tensor) -> Tensor:
    """Jᵀ score at the start; what is known of it for another noise serves, where one weight is all that differs."""
    now, known = density.weights, None if start is None else start.weights
    if start is not None and start.pulled is not None and known is not None:
        ratio = now / known
        if bool((ratio == ratio[0]).all()):
            return start.pulled * ratio[0]
    return density.jacobian.pull(density.score(z))
